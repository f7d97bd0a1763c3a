"""Trains one model that translates between all pairs of several languages, each told by a token, as M2M100.

    data=../shared/data/text/multi30k
    python recipes/train_translation.py --train $data/train --val $data/val --test $data/test_2016_flickr \
        --languages en de fr cs --often en-de=2 --run translation-run --out translator
"""

import logging
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path

import torch
from torch import nn

from multimodal import search
from multimodal.errors import UsageError
from multimodal.models.text_to_text import TextToText
from multimodal.tokens.text import BytePairTokenizer
from multimodal.train.loader import Loader
from multimodal.train.loop import Loop
from multimodal.train.optim import OptimSettings
from multimodal.train.report import write_report
from multimodal.train.settings import LoopSettings
from multimodal.train.start import start
from multimodal.train.translation import (
    CollatePairs,
    Direction,
    Parallel,
    Translating,
    answer_states,
    pair_plan,
    read_parallel,
    translator,
)
from multimodal.weights.folder import Checkpoint, save_folder

log = logging.getLogger(__name__)


def _loop() -> LoopSettings:
    optim = OptimSettings(rate=4e-3, optimizer="muon", warmup=200, average=0.998, weight_decay=0.01)
    return LoopSettings(Path("translation-run"), 6000, optim, evaluate_every=500, save_every=500)


@dataclass(frozen=True)
class Settings:
    train: str  # PREFIX of files PREFIX.LANGUAGE or PREFIX.LANGUAGE.gz, a sentence a line
    val: str
    out: Path  # folder for the checkpoint
    test: str | None = None
    languages: tuple[str, ...] = ("en", "de", "fr", "cs")
    often: tuple[str, ...] = ()  # directions that come more or less often than once an epoch, such as en-de=3
    vocabulary: int = 8000
    width: int = 192
    encoder_layers: int = 4
    decoder_layers: int = 3
    heads: int = 4
    hidden: int = 512
    context: int = 128
    dropout: float = 0.1
    smoothing: float = 0.1
    budget: int = 3000  # padded tokens of a side in a batch
    judge: str = "en-de"  # direction whose BLEU on validation sentences is logged
    judged: int = 200
    loop: LoopSettings = field(default_factory=_loop)


def directions(settings: Settings) -> tuple[list[Direction], dict[Direction, float]]:
    """All pairs of languages, and those of `often`. Raises UsageError."""
    pairs = list(permutations(settings.languages, 2))
    named = {f"{a}-{b}": (a, b) for a, b in pairs}
    often: dict[Direction, float] = {}
    for text in settings.often:
        name, _, number = text.partition("=")
        if name not in named or not number.replace(".", "", 1).isdigit():
            raise UsageError(f"--often {text}: is no DIRECTION=NUMBER (directions: {', '.join(named)})")
        often[named[name]] = float(number)
    if settings.judge not in named:
        raise UsageError(f"--judge {settings.judge}: is none of {', '.join(named)}")
    return [pair for pair in pairs if often.get(pair, 1.0) > 0], often


@torch.inference_mode()
def answers(model: TextToText, tokenizer: BytePairTokenizer, texts: list[str], a: str, b: str) -> list[str]:
    found: dict[int, str] = {}
    ids = [[tokenizer.language_ids[a], *tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for part in (order[i : i + 64] for i in range(0, len(order), 64)):
        rows, mask = nn.utils.rnn.pad_sequence([torch.tensor(ids[i]) for i in part], batch_first=True), None
        mask = torch.arange(rows.shape[1]) < torch.tensor([len(ids[i]) for i in part])[:, None]
        source = model.encode(rows, mask)
        prompt = torch.tensor([[model.config.start_id, tokenizer.language_ids[b]]] * len(part))
        made = search.greedy(search.over_source(model.decode, source, mask), prompt, model.decoder.new_cache(),
                             eos=tokenizer.eos_id, max_new=60)  # fmt: skip
        found |= dict(zip(part, map(tokenizer.decode, made.ids), strict=True))
    return [found[i] for i in range(len(texts))]


class Judge:
    def __init__(self, settings: Settings, tokenizer: BytePairTokenizer, val: dict[str, list[str]], source: Parallel):
        self.settings, self.tokenizer, self.val = settings, tokenizer, val
        budget = settings.budget
        keys = pair_plan(source, {}, budget, 0)(0)[:40]
        self.batches = [CollatePairs(tokenizer.pad_id)([source.read(key) for key in batch]) for batch in keys]

    @torch.inference_mode()
    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        import sacrebleu

        total = count = 0.0
        for batch in self.batches:
            states, real = answer_states(model, batch)
            logits = model.decoder.logits(states[real][None])[0]
            total += float(nn.functional.cross_entropy(logits, batch.ids[:, 1:][real], reduction="sum"))
            count += int(real.sum())
        a, b = self.settings.judge.split("-")
        some = {language: self.val[language][: self.settings.judged] for language in (a, b)}
        made = answers(model, self.tokenizer, some[a], a, b)
        return {"loss": total / count, "bleu": sacrebleu.corpus_bleu(made, [some[b]]).score}


def main(settings: Settings) -> None:
    import sacrebleu

    loop = settings.loop
    torch.manual_seed(loop.seed)
    pairs, often = directions(settings)
    texts, val = (read_parallel(prefix, settings.languages) for prefix in (settings.train, settings.val))
    lines = [line for part in texts.values() for line in part]
    tokenizer = BytePairTokenizer.train(lines, settings.vocabulary, languages=settings.languages)
    s = settings
    model = translator(
        tokenizer, s.width, (s.encoder_layers, s.decoder_layers), s.heads, s.hidden, s.context, s.dropout
    )
    begin = model.config.start_id
    source, held = (Parallel(part, tokenizer, pairs, begin, s.context) for part in (texts, val))
    log.info("pairs: %d, left out: %d; parameters: %d", len(source), source.left_out,
             sum(p.numel() for p in model.parameters()))  # fmt: skip
    loader = Loader(
        source, pair_plan(source, often, s.budget, loop.seed), lambda pair, _: pair, CollatePairs(tokenizer.pad_id),
        seed=loop.seed, workers=loop.workers, micro=loop.accumulate,
    )  # fmt: skip
    objective = Translating(model, s.smoothing)
    made = Loop(loop, objective, loader, Judge(settings, tokenizer, val, held)).fit()
    save_folder(Checkpoint(made, tokenizer), s.out, torch.float16)
    if s.test:
        test = read_parallel(s.test, s.languages)
        for a, b in pairs:
            said = answers(made, tokenizer, test[a], a, b)
            log.info("%s-%s: BLEU %.2f", a, b, sacrebleu.corpus_bleu(said, [test[b]]).score)
    write_report(loop.run, settings, [], [])


if __name__ == "__main__":
    start(main, Settings)
