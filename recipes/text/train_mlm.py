r"""Trains an encoder of text: BERT's masked tokens, with next sentences where asked for, or ELECTRA's replaced ones.

    data=../shared/data/text
    python recipes/text/train_mlm.py --data $data/wikitext2/valid.txt.gz --val $data/wikitext2/test.txt.gz \
        --lines $data/multi30k/train.en.gz $data/sst2/train.tsv.gz --val_lines $data/multi30k/val.en.gz --steps 1500 \
        --val_windows 1500 --evaluate_every 250 --run mlm-run --out mlm --threads 1
    multimodal fill-mask --model mlm "A man is riding a [MASK]."  # bike 0.41, bicycle 0.17

Cost: 32 minutes of a core shared with other work (AMD EPYC with AVX-512 bf16), 3.8 GB. Of the masked tokens of held-out
texts 19.5 % are guessed, at a perplexity of 291: 805,000 tokens are little text for BERT.
"""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from multimodal.data.datasets.class_names import evenly
from multimodal.data.datasets.documents import plain_texts, read_documents, read_texts, windows
from multimodal.data.loader import Loader, generator
from multimodal.errors import UsageError
from multimodal.models.text import TextTransformer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.train.loop import Loop
from multimodal.train.objective import Objective
from multimodal.train.objectives.text.electra import Electra, ReplacedTokens, detection_figures, electra
from multimodal.train.objectives.text.masked import (
    CollateMasked,
    EncoderSettings,
    MaskedBatch,
    MaskedLanguage,
    MaskedTexts,
    bert,
    masked_figures,
)
from multimodal.train.objectives.text.masking import Masker, MaskSettings
from multimodal.train.optim import OptimSettings
from multimodal.train.recipe_cli import start
from multimodal.train.report import write_report
from multimodal.train.settings import LoopSettings
from multimodal.weights.folder import Checkpoint, save_folder

log = logging.getLogger(__name__)


def _loop() -> LoopSettings:
    optim = OptimSettings(rate=2e-3, optimizer="muon", warmup=100)
    return LoopSettings(Path("mlm-run"), 2000, optim, evaluate_every=250)


@dataclass(frozen=True)
class MaskedModelRun:
    data: tuple[Path, ...]  # running text: sentences, documents between empty lines
    val: tuple[Path, ...]  # running text held out
    out: Path  # folder for the checkpoint
    lines: tuple[Path, ...] = ()  # texts of a line each that stand alone; of a .tsv the first column
    val_lines: tuple[Path, ...] = ()
    objective: Literal["mlm", "electra"] = "mlm"
    nsp: bool = False  # guess next sentences too
    tokenizer: str | None = None  # a folder's; without it a WordPiece vocabulary is learned from the texts
    vocabulary: int = 8192
    budget: int = 4096  # padded tokens a micro-batch
    generator: float = 0.25  # electra: width of the generator, as a share
    detect: float = 50.0  # electra: weight of the discriminator's loss
    val_windows: int = 1000  # windows of the held-out text to evaluate on, at most
    mask: MaskSettings = field(default_factory=MaskSettings)
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    loop: LoopSettings = field(default_factory=_loop)


def masking(s: MaskedModelRun) -> MaskSettings:
    """ELECTRA's generator sees [MASK] alone. Raises UsageError for flags that do not go together."""
    if s.objective != "electra":
        return s.mask
    if s.nsp:
        raise UsageError("--nsp: ELECTRA has no next-sentence head")
    if (s.mask.masked, s.mask.random) != (MaskSettings.masked, MaskSettings.random):
        raise UsageError("--masked, --random: ELECTRA's generator sees [MASK] alone")
    return replace(s.mask, masked=1.0, random=0.0)


def vocabulary(s: MaskedModelRun, documents: list[list[str]]) -> Tokenizer:
    if s.tokenizer is not None:
        return tokenizer_from(s.tokenizer)
    return WordPieceTokenizer.train(plain_texts(documents), s.vocabulary, context=s.encoder.context)


def held_out(source: MaskedTexts, collate: CollateMasked, s: MaskedModelRun) -> list[MaskedBatch]:
    """Validation batches, masked in one fixed way, the same for every run."""
    numbers = evenly(range(len(source)), s.val_windows)
    examples = [source.prepare((0, number), generator("held out", number)) for number in numbers]
    examples.sort(key=lambda example: len(example.ids))
    return [collate(examples[i : i + 32]) for i in range(0, len(examples), 32)]


def begin(s: MaskedModelRun, size: int) -> Objective:
    if s.objective == "electra":
        return ReplacedTokens(electra(size, s.encoder, s.generator), s.detect)
    return MaskedLanguage(TextTransformer(bert(size, s.encoder, s.nsp)))


def measure(model: nn.Module, batches: list[MaskedBatch]) -> dict[str, float]:
    return (detection_figures if isinstance(model, Electra) else masked_figures)(model, batches)


def examples_of(model: nn.Module, tokenizer: Tokenizer, batches: list[MaskedBatch]) -> list[str]:
    """Texts with what the model guesses for their masks, and what was there."""
    net = model.generator if isinstance(model, Electra) else model
    batch, found = batches[len(batches) // 2], []
    with torch.inference_mode():
        for row in range(min(8, len(batch.ids))):
            ids, chosen = batch.ids[row, : batch.lengths[row]], batch.chosen[row, : batch.lengths[row]]
            guessed = net.logits(net.states(ids[None]))[0, chosen].argmax(-1).tolist()
            first = int(batch.chosen[:row].sum())
            there = batch.targets[first : first + len(guessed)].tolist()
            pairs = (f"{tokenizer.decode([g])} ({tokenizer.decode([t])})" for g, t in zip(guessed, there, strict=True))
            found.append(f"{tokenizer.decode(ids.tolist(), skip_control=False)}: {', '.join(pairs)}")
    return found


def main(s: MaskedModelRun) -> dict[str, Any]:
    mask, loop, room = masking(s), s.loop, s.encoder.context - 2 - s.nsp
    torch.manual_seed(loop.seed)
    texts, held = ([d for path in paths for d in read_documents(path)] + [d for path in lines for d in read_texts(path)]
                   for paths, lines in ((s.data, s.lines), (s.val, s.val_lines)))  # fmt: skip
    tokenizer = vocabulary(s, texts)
    masker, collate = Masker(tokenizer, mask), CollateMasked(tokenizer.pad_id, s.encoder.context)
    source, val = (
        MaskedTexts(windows(documents, tokenizer, room), masker, s.encoder.context, s.nsp, loop.seed)
        for documents in (texts, held)
    )
    log.info("%d windows of %d tokens, %d held out", len(source), sum(w.size for w in source.windows), len(val))
    batches = held_out(val, collate, s)
    objective = begin(s, tokenizer.vocab_size)
    loader = Loader(
        source, source.plan(s.budget * loop.accumulate), source.prepare, collate, seed=loop.seed, workers=loop.workers,
        micro=loop.accumulate,
    )  # fmt: skip
    trained = Loop(loop, objective, loader, lambda model, step: measure(model, batches)).fit()
    figures = measure(trained, batches)
    log.info("%s: %s", s.out, figures)
    model = trained.discriminator if isinstance(trained, Electra) else trained
    files = [str(path) for path in (*s.data, *s.lines)]
    card = {"objective": s.objective, "data": files, "figures": {" ".join(map(str, (*s.val, *s.val_lines))): figures}}
    save_folder(Checkpoint(model, tokenizer, card=card), s.out)
    write_report(loop.run, s, [*files, *s.val, *s.val_lines], examples_of(trained, tokenizer, batches))
    return figures


if __name__ == "__main__":
    start(main)
