r"""Train a text encoder: BERT's masked tokens, ALBERT with the order of sentences, or ELECTRA's replaced tokens.

    data=data/text
    python recipes/text/train_mlm.py --data $data/wikitext2/valid.txt.gz --val $data/wikitext2/test.txt.gz \
        --lines $data/multi30k/train.en.gz $data/sst2/train.tsv.gz --val_lines $data/multi30k/val.en.gz --steps 1500 \
        --val_windows 1500 --evaluate_every 250 --run mlm-run --out mlm --threads 1
    multimodal fill-mask --model mlm "A man is riding a [MASK]."  # bike 0.41, bicycle 0.17

`--pairs next` adds BERT's next sentences, `--pairs order` ALBERT's; ALBERT is `--embed_width 64 --shared_layers --pairs
order`. `--unit` masks tokens, whole words, spans (SpanBERT, with `--boundary` its second objective) or collocations
(PMI masking): docs/text.md compares them.

Cost: 32 minutes of a core shared with other work (AMD EPYC with AVX-512 bf16), 3.8 GB. On held-out texts 19.5 %
of the masked tokens are predicted right, at a perplexity of 291: 805,000 tokens are little text for BERT. The
shipped bert-mini is smaller and trained longer (`--width 192 --layers 3 --steps 6000 --val_windows 400`, 96 minutes of
a core of a shared Intel Xeon with AVX-512 bf16): 34.0 %, at a perplexity of 59.6.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from multimodal.data.batching import fixed_batches
from multimodal.data.datasets.class_names import evenly
from multimodal.data.datasets.documents import documents_in, plain_texts, windows
from multimodal.errors import UsageError, demand
from multimodal.models.text import TextTransformer
from multimodal.system.options import NonNegativeFloat, Positive, PositiveShare
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.train import Loop, LoopSettings, OptimSettings, finish, log, start
from multimodal.train.objective import Objective
from multimodal.train.objectives.text.electra import Electra, ReplacedTokens, detection_figures, electra
from multimodal.train.objectives.text.masked import (
    CollateMasked,
    EncoderSettings,
    MaskedBatch,
    MaskedLanguage,
    MaskedTexts,
    Pairs,
    bert,
    masked_figures,
)
from multimodal.train.objectives.text.masking import Masker, MaskSettings
from multimodal.train.objectives.text.span_boundary import SpanBoundary, SpanEncoder
from multimodal.weights.folder import Checkpoint


@dataclass(frozen=True)
class MaskedModelRun:
    data: tuple[Path, ...]  # running text, documents between empty lines; or manifests, whose texts are documents
    val: tuple[Path, ...]  # held-out running text
    out: Path  # folder for the checkpoint
    lines: tuple[Path, ...] = ()  # texts, one per line; of a .tsv the first column, of a .jsonl or .csv its texts
    val_lines: tuple[Path, ...] = ()
    objective: Literal["mlm", "electra"] = "mlm"
    pairs: Pairs | None = None  # also predict next sentences (BERT), or the order of two parts (ALBERT)
    boundary: bool = False  # also predict masked tokens from their span's neighbours (SpanBERT)
    embed_width: int | None = None  # width of the embeddings, narrower than the model (ALBERT: 128)
    shared_layers: bool = False  # all layers are one block (ALBERT)
    tokenizer: str | None = None  # a folder's or shipped model's; by default a WordPiece learned from the texts
    vocabulary: Positive = 8192
    budget: Positive = 4096  # padded tokens per micro-batch
    generator: PositiveShare = 0.25  # electra: width of the generator, as a share
    detect: NonNegativeFloat = 50.0  # electra: weight of the discriminator's loss
    val_windows: Positive = 1000  # windows of held-out text to evaluate on, at most
    mask: MaskSettings = MaskSettings()
    encoder: EncoderSettings = EncoderSettings()
    loop: LoopSettings = LoopSettings(
        Path("mlm-run"), 2000, OptimSettings(2e-3, "muon", warmup=100), evaluate_every=250
    )

    def __post_init__(self):
        demand("boundary", self.boundary, not (self.boundary and self.pairs), "off with --pairs")
        width, own = self.encoder.width, self.embed_width
        demand("embed_width", own, own is None or 1 <= own <= width, f"1 to {width}, the model's width")


def masking(s: MaskedModelRun) -> MaskSettings:
    """Masking of the objective; ELECTRA's generator sees [MASK] alone. Raises UsageError for contradicting flags."""
    if s.objective != "electra":
        return s.mask
    if given := [name for name in ("pairs", "boundary", "embed_width", "shared_layers") if getattr(s, name)]:
        raise UsageError(f"--{given[0]}: has no part in ELECTRA's objective")
    if (s.mask.masked, s.mask.random) != (MaskSettings.masked, MaskSettings.random):
        raise UsageError("--masked, --random: ELECTRA's generator sees [MASK] alone")
    return replace(s.mask, masked=1.0, random=0.0)


def vocabulary(s: MaskedModelRun, documents: list[list[str]]) -> Tokenizer:
    if s.tokenizer is not None:
        return tokenizer_from(s.tokenizer)
    return WordPieceTokenizer.train(plain_texts(documents), s.vocabulary, context=s.encoder.context)


def begin(s: MaskedModelRun, size: int) -> Objective:
    if s.objective == "electra":
        return ReplacedTokens(electra(size, s.encoder, s.generator), s.detect)
    config = bert(size, s.encoder, s.pairs is not None, s.embed_width, s.shared_layers)
    if s.boundary:
        return SpanBoundary(SpanEncoder(config))
    return MaskedLanguage(TextTransformer(config), s.pairs or "next")


def measure(s: MaskedModelRun, model: nn.Module, batches: list[MaskedBatch]) -> dict[str, float]:
    if isinstance(model, Electra):
        return detection_figures(model, batches)
    return masked_figures(encoder_of(model), batches, s.pairs or "next")


def encoder_of(model: nn.Module) -> TextTransformer:
    """The part to keep."""
    return getattr(model, "discriminator", getattr(model, "encoder", model))


def examples_of(model: nn.Module, tokenizer: Tokenizer, batches: list[MaskedBatch]) -> list[str]:
    """Masked texts with the model's predictions and the original tokens."""
    net = model.generator if isinstance(model, Electra) else encoder_of(model)
    batch, lines = batches[len(batches) // 2], []
    with torch.inference_mode():
        for row in range(min(8, len(batch.ids))):
            ids, chosen = batch.ids[row, : batch.lengths[row]], batch.chosen[row, : batch.lengths[row]]
            guessed = net.logits(net.states(ids[None]))[0, chosen].argmax(-1).tolist()
            first = int(batch.chosen[:row].sum())
            there = batch.targets[first : first + len(guessed)].tolist()
            pairs = (f"{tokenizer.decode([g])} ({tokenizer.decode([t])})" for g, t in zip(guessed, there, strict=True))
            lines.append(f"{tokenizer.decode(ids.tolist(), skip_control=False)}: {', '.join(pairs)}")
    return lines


def main(s: MaskedModelRun) -> dict[str, Any]:
    mask, loop, room = masking(s), s.loop, s.encoder.context - 2 - bool(s.pairs)
    torch.manual_seed(loop.seed)
    texts, held = documents_in(s.data, s.lines), documents_in(s.val, s.val_lines)
    tokenizer = vocabulary(s, texts)
    masker, collate = Masker(tokenizer, mask), CollateMasked(tokenizer.pad_id, s.encoder.context)
    parts = [windows(documents, tokenizer, room) for documents in (texts, held)]
    masker.learn(window.ids for window in parts[0])
    source, val = (MaskedTexts(part, masker, s.encoder.context, s.pairs, loop.seed) for part in parts)
    log.info("%d windows of %d tokens, %d held out", len(source), sum(w.size for w in source.windows), len(val))
    numbers = evenly(range(len(val)), s.val_windows)
    batches = fixed_batches(lambda number, random: val.prepare((0, number), random), collate, numbers)
    objective = begin(s, tokenizer.vocab_size)
    loader = loop.loader(source, source.plan(s.budget * loop.accumulate), source.prepare, collate)
    begun = Checkpoint(objective.model, tokenizer)
    trained = Loop(loop, objective, loader, lambda model, step: measure(s, model, batches), begun).fit()
    figures = measure(s, trained, batches)
    files = [str(path) for path in (*s.data, *s.lines)]
    card = {"objective": s.objective, "data": files, "figures": {" ".join(map(str, (*s.val, *s.val_lines))): figures}}
    shown = examples_of(trained, tokenizer, batches)
    made = Checkpoint(encoder_of(trained), tokenizer, card=card)
    finish(s, made, [*files, *s.val, *s.val_lines], shown, figures=figures)
    return figures


if __name__ == "__main__":
    start(main)
