r"""Trains a language model: causal, or with a prefix that all tokens see (Raffel et al. 2020, figure 4).

    data=../shared/data/text
    python recipes/text/train_lm.py --data $data/tinyshakespeare/input.txt --layers 4 --dropout 0.15 --steps 1300 \
        --warmup 100 --average 0.995 --evaluate_every 600 --run lm-run --out lm --threads 1
    multimodal generate --model lm --prompt "ROMEO:" --temperature 0.8

Text is one stream by default, read in windows; with `--documents lines` or `blank` each line or paragraph is a text of
its own, several of which share a row without seeing each other. `--objective prefix` gives a random first part of each.

Cost of the command: about 18 minutes of one core (AMD EPYC with AVX-512 bf16, shared with other work), 1.4 GB; 3.18 M
parameters. Result on the last 10 % of the characters, nanoGPT's split, in windows of 256 characters side by side: 1.512
nats a character (nanoGPT's README: 1.88 with its settings for a CPU, 1.47 with those for a GPU). That run began with
`--steps 2700` and went on after step 611 with `--resume --steps 1300`; one unbroken run has not been measured.

`--induction` scores the heads at each evaluation and plots when induction heads come (Olsson et al. 2022):

    python recipes/text/train_lm.py --data $data/tinyshakespeare/input.txt --hold 0.01 --tokenizer bpe \
        --vocabulary 512 --layers 2 --width 64 --context 64 --repeat 0.5 --induction --batch 32 --steps 1600 \
        --rate 5e-3 --schedule wsd --evaluate_every 100 --run induction-run --out induction --threads 1

Cost: under 7 minutes of a core shared with other work, 0.9 GB. Two heads of the second layer go from prefix-matching
scores of 0.04 and 0.03 at step 500 to 0.48 and 0.44 at step 900 (`report/induction.png`). Meanwhile the second copy
of a random sequence gets cheaper than the first by 0.4, then by 3.9 nats a token.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from multimodal.blocks.cache import Cache
from multimodal.data.batching import stack_fields
from multimodal.data.datasets.text import (
    Packed,
    PrepareTokens,
    TextCorpus,
    Windows,
    ends_of,
    held_out,
    texts_in,
)
from multimodal.data.loader import Loader
from multimodal.decoding.sampling import sample
from multimodal.errors import UsageError, demand
from multimodal.models.text import TextTransformer
from multimodal.tasks.evaluate.perplexity import text_scores
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.characters import CharacterTokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.train.loop import Loop
from multimodal.train.objectives.text.induction_curve import InductionCurve
from multimodal.train.objectives.text.language import Language, gpt2_weights
from multimodal.train.objectives.text.language_model import LanguageModelSettings, language_config
from multimodal.train.optim import OptimSettings
from multimodal.train.recipe_cli import start
from multimodal.train.report import write_report
from multimodal.train.settings import LoopSettings
from multimodal.weights.folder import Checkpoint, load_folder, save_folder

log = logging.getLogger(__name__)


def _loop() -> LoopSettings:
    optim = OptimSettings(rate=3e-3, optimizer="muon", warmup=50, weight_decay=0.1, average=0.99)
    return LoopSettings(Path("lm-run"), 2000, optim, evaluate_every=500)


@dataclass(frozen=True)
class LanguageModelRun:
    data: tuple[Path, ...]  # text files, plain or gzip
    out: Path  # folder for the checkpoint with the least validation loss
    val: tuple[Path, ...] = ()  # validation text; without it the last `hold` of the training text is held out
    hold: float = 0.1
    documents: Literal["none", "lines", "blank"] = "none"  # each line, or what blank lines part, is a text of its own
    tokenizer: str = "characters"  # characters, bytes, bpe (learned here), gpt2, or a checkpoint folder
    vocabulary: int = 2048  # of bpe
    objective: Literal["causal", "prefix"] = "causal"
    repeat: float = 0.0  # share of the rows that say their begin again and again
    induction: bool = False  # look for induction heads at each evaluation, and plot when they come
    batch: int = 16  # rows of `context` tokens
    stride: int = 0  # tokens by which a window of validation text moves on (0: the context; prefix: half of it)
    prompt: str = "\n"  # of the samples in the report
    samples: int = 3
    sample_tokens: int = 200  # of each at most
    model: LanguageModelSettings = field(default_factory=LanguageModelSettings)
    loop: LoopSettings = field(default_factory=_loop)

    def __post_init__(self):
        demand("hold", self.hold, 0 < self.hold < 1, "over 0, under 1")
        demand("samples", self.samples, self.samples >= 1, "1 or more")
        demand("sample_tokens", self.sample_tokens, self.sample_tokens >= 1, "1 or more")
        demand("repeat", self.repeat, 0 <= self.repeat <= 1, "0 to 1")
        demand("induction", self.induction, not self.induction or self.objective == "causal", "off with a prefix")
        demand("batch", self.batch, self.batch >= 1, "1 or more")
        demand("stride", self.stride, 0 <= self.stride <= self.model.context, "0 up to the context")


def texts_of(s: LanguageModelRun) -> tuple[list[str], list[str]]:
    """To train on, and to validate with."""
    texts = [text for path in s.data for text in texts_in(path, s.documents)]
    if s.val:
        return texts, [text for path in s.val for text in texts_in(path, s.documents)]
    return held_out(texts, s.hold)


def tokenizer_of(s: LanguageModelRun, train: list[str], val: list[str]) -> Tokenizer:
    if s.tokenizer == "characters":  # those of validation too, since text with others has no probability
        return CharacterTokenizer.train([*train, *val])
    if s.tokenizer == "bpe":
        return BytePairTokenizer.train(train, s.vocabulary)
    return tokenizer_from(s.tokenizer)


class TextValidation:
    """Scores the whole validation text, and keeps in `run/best` the checkpoint with the least loss."""

    def __init__(self, s: LanguageModelRun, tokenizer: Tokenizer, val: TextCorpus):
        self.settings, self.tokenizer, self.val = s, tokenizer, val
        self.best, self.least = s.loop.run / "best", float("inf")
        self.heads = InductionCurve(s.loop.run, tokenizer, val, s.model.context) if s.induction else None
        if s.loop.resume and self.best.exists():
            self.least = load_folder(self.best).card["validation"]["loss"]

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        s, prefix = self.settings, self.settings.objective == "prefix"
        context = s.model.context
        stride = s.stride or (context // 2 if prefix else context)
        figures = text_scores(model, self.val, context=context, stride=stride, prefix=prefix)
        if figures["loss"] < self.least:
            self.least = figures["loss"]
            card = {"objective": s.objective, "validation": figures | {"step": step, "stride": stride}}
            save_folder(Checkpoint(model, self.tokenizer, card=card), self.best)
        return figures | (self.heads(model, step) if self.heads else {})


def prompt_ids(s: LanguageModelRun, tokenizer: Tokenizer) -> list[int]:
    """Raises UsageError where the context leaves no room after it, TextError for text the vocabulary cannot hold."""
    ids = [ends_of(tokenizer)[0], *tokenizer.encode(s.prompt)]
    if len(ids) >= s.model.context:
        raise UsageError(f"--prompt: has {len(ids)} tokens, which leave no room in a --context {s.model.context}")
    return ids


@torch.inference_mode()
def samples(s: LanguageModelRun, model: TextTransformer, tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Continue the prompt up to the end of the context."""
    prefix, room = s.objective == "prefix", s.model.context - len(ids)

    def step(new: torch.Tensor, cache: Cache) -> torch.Tensor:
        count = new.shape[1]
        seen = torch.ones(count, count, dtype=torch.bool) if prefix and count > 1 else None  # the prompt is the prefix
        return model.logits(model.states(new, cache=cache, mask=seen)[:, -1:])

    drawn = sample(step, torch.tensor([ids]), model.new_cache(), eos=ends_of(tokenizer)[1], temperature=0.8,
                   max_new=min(s.sample_tokens, room), generators=[torch.Generator().manual_seed(0)],
                   copies=s.samples)  # fmt: skip
    return [f"temperature 0.8: {s.prompt}{tokenizer.decode(row)}" for row in drawn.ids]


def main(s: LanguageModelRun) -> None:
    loop = s.loop
    torch.manual_seed(loop.seed)
    train, val = texts_of(s)
    tokenizer = tokenizer_of(s, train, val)
    prompt = prompt_ids(s, tokenizer)
    corpus, unseen = TextCorpus.of(train, tokenizer), TextCorpus.of(val, tokenizer)
    model = TextTransformer(language_config(s.model, tokenizer.vocab_size))
    gpt2_weights(model)
    log.info(
        "%d texts, %d tokens of %d kinds, %d to validate with; %.2f M parameters", len(corpus), len(corpus.ids),
        tokenizer.vocab_size, len(unseen.ids), sum(p.numel() for p in model.parameters()) / 1e6,
    )  # fmt: skip
    packed = s.documents != "none"
    source = (Packed if packed else Windows)(corpus, s.model.context)
    prepare = PrepareTokens(s.model.context, s.objective == "prefix", packed, s.repeat)
    loader = Loader(source, source.plan(s.batch, loop.seed), prepare, stack_fields, seed=loop.seed,
                    workers=loop.workers, micro=loop.accumulate)  # fmt: skip
    judge = TextValidation(s, tokenizer, unseen)
    Loop(loop, Language(model), loader, judge).fit()
    best = load_folder(judge.best)
    save_folder(best, s.out)
    found = judge.heads.plot(loop.run / "report" / "induction.png") if judge.heads else []
    write_report(loop.run, s, [*s.data, *s.val], [*samples(s, best.model, tokenizer, prompt), *found])


if __name__ == "__main__":
    start(main)
