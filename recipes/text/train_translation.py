r"""Train one model that translates between all pairs of several languages, each marked by a token, as M2M100.

    data=data/text/multi30k
    python recipes/text/train_translation.py --train $data/train --val $data/val --test $data/test_2016_flickr \
        --often en-de=3 --run translation-run --out translator --threads 1
    multimodal translate "A dog runs on the beach." --from en --to de --model translator

29,000 sentences in en, de, fr and cs make 348,000 pairs in twelve directions; 3.6 M parameters, 7.4 MB.

Cost: about 30 minutes of one core (AMD EPYC with AVX-512 bf16, shared with other work), 2 GB. BLEU (sacrebleu, 13a,
cased) of the 1,000 sentences of test_2016_flickr, beam 5, columns from and rows to:

|    | en | de | fr | cs |
|----|------|------|------|------|
| en |      | 36.4 | 44.7 | 35.3 |
| de | 35.5 |      | 32.8 | 28.3 |
| fr | 46.8 | 34.5 |      | 32.9 |
| cs | 26.8 | 23.3 | 24.6 |      |

Greedy en to de has 34.8. The run was resumed three times, twice with fewer steps (10,000, 5,000, 4,000), and the
padding of batches changed at step 640; an unbroken run of the command has not been measured. English to German comes
three times per epoch. The first translator-mini was of this command with `--precision float32` on a CPU without
bfloat16, with rates that rose again several times (its card has the flags of each leg), 8,400 steps in all, 4.2 hours
of one core, and the mean of the weights after 6,000, 7,000 and 8,400 (`average.py`): en to de 36.1, de to en 37.4, the
others in its card. That mean went on with larger batches, first on a GPU for 150 s (1,443 steps, one of three runs):

    python recipes/text/train_translation.py --train $data/train --val $data/val --often en-de=3 \
        --init translator-mini --budget 24000 --rate 3e-3 --seed 3 --warmup 100 --schedule wsd --decay 0.25 \
        --steps 1443 --device cuda --run translation-run-2 --out translator-2
    ... --init translator-2 --budget 6000 --rate 2.5e-3 --warmup 100 --schedule wsd --decay 0.35 --steps 4000 \
        --run translation-run-3 --out translator-3

The last, 69 minutes of a core beside other work, ships: en to de 38.3, de to en 40.6, en to fr 53.9, the mean of the
twelve 34.1 before and 37.5 now. Both had `--dropout 0.15`, which had no effect with `--init` then; where it has, the
loss begins at 4.7 in place of 2.0.
"""

import warnings
from collections import Counter
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import torch
from torch import nn

from multimodal.data.loader import unchanged
from multimodal.data.mixture import direction_repeats
from multimodal.errors import UsageError, demand, multiple_of
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.system.options import Natural, Positive, Rate, Temperature
from multimodal.tasks.evaluate.scores import bleu as corpus_bleu
from multimodal.tasks.text.translate import translate
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.tokenizer import TextCut
from multimodal.train import Loop, LoopSettings, OptimSettings, finish, log, start
from multimodal.train.lora import keep_sizes, with_rates
from multimodal.train.objectives.text.translation import (
    CollatePairs,
    Direction,
    ParallelTexts,
    Translating,
    language_groups,
    nats_per_token,
    pair_plan,
    parallel_file,
    read_parallel,
    translator,
)
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

JUDGED = 40  # batches of validation pairs in the logged loss


@dataclass(frozen=True)
class TranslationRun:
    train: str  # PREFIX of files PREFIX.LANGUAGE or PREFIX.LANGUAGE.gz, one sentence per line
    val: str
    out: Path  # folder for the checkpoint
    init: str | None = None  # translator of these languages to train further, which keeps its tokenizer and sizes
    test: str | None = None
    languages: tuple[str, ...] = ("en", "de", "fr", "cs")
    temperature: Temperature = 0.0  # of M2M100's sampling of directions (5 there); 0: each pair once per epoch
    often: tuple[str, ...] = ()  # directions that come more or less often than once per epoch, such as en-de=3
    vocabulary: Positive = 4000
    width: Positive = 192
    encoder_layers: Natural = 4
    decoder_layers: Positive = 3
    heads: Positive = 4
    hidden: Positive = 512
    groups: tuple[str, ...] = ()  # groups of languages, such as en,de fr cs, that have feed-forwards of their own
    grouped: tuple[int, int] = (0, 0)  # last layers of encoder and decoder that have them
    context: Positive = 128
    dropout: Rate | None = None  # by default 0, with --init as it has it
    smoothing: Rate = 0.1
    budget: Positive = 3000  # padded tokens per side of a batch
    judge: str = "en-de"  # direction to log BLEU of on validation sentences
    judged: Positive = 200
    beams: Positive = 5  # of the search that translates the test sentences
    loop: LoopSettings = LoopSettings(
        Path("translation-run"), 4000, OptimSettings(3e-3, "muon", warmup=200, average=0.998, weight_decay=0.01),
        evaluate_every=1000,
    )  # fmt: skip

    def __post_init__(self):
        multiple_of("heads", self, "width")
        if bool(self.groups) != any(self.grouped):
            raise UsageError("needs --grouped, and --grouped needs groups", argument="groups")
        if self.groups:
            language_groups(self.groups, self.languages)
        for count, side in zip(self.grouped, ("encoder_layers", "decoder_layers"), strict=True):
            demand("grouped", count, 0 <= count <= getattr(self, side), f"0 to {getattr(self, side)}, the {side}")


def directions(settings: TranslationRun) -> tuple[list[Direction], dict[Direction, float]]:
    """Return all pairs of languages, and how often some come. Raises UsageError."""
    pairs = list(permutations(settings.languages, 2))
    named = {f"{a}-{b}": (a, b) for a, b in pairs}
    often: dict[Direction, float] = {}
    for text in settings.often:
        name, _, number = text.partition("=")
        if name not in named or not number.replace(".", "", 1).isdigit():
            raise UsageError(f"--often {text}: is no DIRECTION=NUMBER (directions: {', '.join(named)})")
        often[named[name]] = float(number)
    demand("judge", settings.judge, settings.judge in named, f"one of {', '.join(named)}")
    return [pair for pair in pairs if often.get(pair, 1.0) > 0], often


def translated(made: Checkpoint, texts: dict[str, list[str]], a: str, b: str, beams: int) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TextCut)  # a model that has just started to learn does not end its answers
        return translate(texts[a], made, a, b, beam_size=beams)


def bleu(made: Checkpoint, texts: dict[str, list[str]], a: str, b: str, beams: int) -> float:
    """BLEU of the translations of `texts[a]` against `texts[b]`, as `multimodal evaluate translation` counts it."""
    return corpus_bleu(texts[b], translated(made, texts, a, b, beams), b)


class TranslationValidation:
    """Validation loss per token of some batches of all directions, and BLEU of one direction."""

    def __init__(
        self, settings: TranslationRun, tokenizer: BytePairTokenizer, val: dict[str, list[str]], source: ParallelTexts
    ):
        self.settings, self.tokenizer = settings, tokenizer
        self.direction = settings.judge.split("-")
        self.some = {language: val[language][: settings.judged] for language in self.direction}
        keys = pair_plan(source, {}, settings.budget, 0)(0)[:JUDGED]
        self.batches = [CollatePairs(tokenizer.pad_id)([source.read(key) for key in batch]) for batch in keys]

    @torch.inference_mode()
    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        score = bleu(Checkpoint(model, self.tokenizer), self.some, *self.direction, beams=1)
        return {"loss": nats_per_token(model, self.batches), "bleu": score}


def fresh(s: TranslationRun, lines: list[str]) -> tuple[EncoderDecoder, BytePairTokenizer]:
    """Build a new model, with a tokenizer trained on the lines."""
    tokenizer = BytePairTokenizer.train(lines, s.vocabulary, languages=s.languages)
    layers, groups = (s.encoder_layers, s.decoder_layers), [group.split(",") for group in s.groups]
    model = translator(tokenizer, s.width, layers, s.heads, s.hidden, s.context, s.dropout or 0.0, groups, s.grouped)
    return model, tokenizer


def trained(s: TranslationRun) -> tuple[EncoderDecoder, BytePairTokenizer]:
    """Load `--init`. Raises UsageError for a checkpoint that this recipe cannot train."""
    known = load(s.init)
    if not isinstance(known.model, EncoderDecoder) or not isinstance(known.tokenizer, BytePairTokenizer):
        raise UsageError(f"--init {s.init}: expected a model of this recipe, got {known.kind}")
    if missing := [name for name in s.languages if name not in known.tokenizer.language_ids]:
        raise UsageError(f"--init {s.init}: has no language {', '.join(missing)}")
    sides = {name: getattr(known.model.config, name) for name in ("encoder", "decoder")}
    stacks = {name: side.stack for name, side in sides.items()}
    block = stacks["decoder"].block
    own = {f"{name}_layers": stack.layers for name, stack in stacks.items()}
    own |= {"width": block.attention.width, "heads": block.attention.heads, "hidden": block.hidden}
    own |= {"context": sides["decoder"].context, "grouped": tuple(stack.grouped for stack in stacks.values())}
    keep_sizes(s.init, own, s, TranslationRun)
    places = ("stem_dropout", *(f"stack.block.{part}dropout" for part in ("", "attention.", "cross.")))
    rates = {f"{side}.{place}": s.dropout for side in sides for place in places}
    return with_rates(known.model, rates), known.tokenizer


def main(s: TranslationRun) -> None:
    loop = s.loop
    torch.manual_seed(loop.seed)
    pairs, often = directions(s)
    initial = trained(s) if s.init else None
    texts, val = (read_parallel(prefix, s.languages) for prefix in (s.train, s.val))
    model, tokenizer = initial or fresh(s, [line for part in texts.values() for line in part])
    begin, context = model.config.start_id, model.config.decoder.context
    source, held = (ParallelTexts(part, tokenizer, pairs, begin, context) for part in (texts, val))
    log.info("pairs: %d, skipped: %d", len(source), source.left_out)
    shares = []
    if s.temperature:
        counts = Counter(key[:2] for key in source.keys)
        repeats = direction_repeats(counts, s.temperature)
        often = {pair: often.get(pair, 1.0) * times for pair, times in repeats.items()}
        shares = [f"{a}-{b}: {counts[a, b]} pairs, {n:.2f} times per epoch" for (a, b), n in repeats.items()]
        for line in shares:
            log.info(line)
    plan = pair_plan(source, often, s.budget, loop.seed)
    loader = loop.loader(source, plan, unchanged, CollatePairs(tokenizer.pad_id))
    objective = Translating(model, s.smoothing)
    judge = TranslationValidation(s, tokenizer, val, held)
    made = Checkpoint(Loop(loop, objective, loader, judge, Checkpoint(model, tokenizer)).fit(), tokenizer)
    scores = {}
    if s.test:
        test = read_parallel(s.test, s.languages)
        for a, b in pairs:
            scores[f"{a}-{b}"] = round(bleu(made, test, a, b, s.beams), 1)
            log.info("%s-%s: BLEU %.1f", a, b, scores[f"{a}-{b}"])
    a, b = judge.direction
    few = {language: rows[:10] for language, rows in judge.some.items()}
    examples = [f"{text} → {answer}" for text, answer in zip(few[a], translated(made, few, a, b, s.beams), strict=True)]
    prefixes = [prefix for prefix in (s.train, s.val, s.test) if prefix]
    data = [parallel_file(prefix, language) for prefix in prefixes for language in s.languages]
    card = {"summary": f"translates between {', '.join(s.languages)}", "bleu": scores}
    finish(s, Checkpoint(made.model, tokenizer, card=card), data, [*shares, *examples], figures=scores, store="float16")


if __name__ == "__main__":
    start(main)
