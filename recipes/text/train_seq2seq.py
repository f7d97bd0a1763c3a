r"""Trains an encoder-decoder to restore damaged texts: T5's span corruption, or another objective of T5 or BART.

    data=../shared/data/text
    python recipes/text/train_seq2seq.py --data $data/wikitext2/valid.txt.gz --val $data/wikitext2/test.txt.gz \
        --lines $data/multi30k/train.en.gz $data/sst2/train.tsv.gz --steps 500 --val_windows 500 --evaluate_every 250 \
        --run seq2seq-run --out seq2seq --threads 1

Cost: 10 minutes of a core that did other work first, 2.9 GB. Cross-entropy of the held-out texts' spans 5.03 nats a
token (6.80 without the sentinels), 8.3 % of their tokens right: a beginning, and no more.

`--objective` (Raffel et al. 2020, table 3; Lewis et al. 2020, section 2.2):
spans        random spans, each a sentinel; the target is the spans (T5)
replace      as spans, of tokens drawn one by one
drop         tokens are left out; the target is those
bert, mass   tokens are masked (bert: a tenth of those is another token); the target is the text
deshuffle    tokens in any order; the target is the text
prefix       the target is the rest of the text
bart         sentences in any order, Poisson spans of 30 % under one mask each (`--share 0.3`); the target is the text
infill, delete, permute, rotate: BART's other kinds of noise alone
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from multimodal.blocks.masks import padding
from multimodal.data.datasets.class_names import evenly
from multimodal.data.datasets.documents import plain_texts, read_documents, read_texts, windows
from multimodal.data.loader import Loader, generator
from multimodal.decoding import sampling
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.train.loop import Loop
from multimodal.train.objectives.text.denoising import (
    DenoisedTexts,
    Denoising,
    NoiseSettings,
    SizeSettings,
    denoising_figures,
    encoder_decoder,
    sentinels,
)
from multimodal.train.objectives.text.translation import CollatePairs, PairBatch
from multimodal.train.optim import OptimSettings
from multimodal.train.recipe_cli import start
from multimodal.train.report import write_report
from multimodal.train.settings import LoopSettings
from multimodal.weights.folder import Checkpoint, save_folder

log = logging.getLogger(__name__)


def _loop() -> LoopSettings:
    optim = OptimSettings(rate=2e-3, optimizer="muon", warmup=100)
    return LoopSettings(Path("seq2seq-run"), 1500, optim, evaluate_every=250)


Objective = Literal[
    "spans", "replace", "drop", "bert", "mass", "deshuffle", "prefix", "bart", "infill", "delete", "permute", "rotate"
]


@dataclass(frozen=True)
class EncoderDecoderRun:
    data: tuple[Path, ...]  # running text: sentences, documents between empty lines
    val: tuple[Path, ...]  # running text held out
    out: Path  # folder for the checkpoint
    lines: tuple[Path, ...] = ()  # texts of a line each that stand alone; of a .tsv the first column
    objective: Objective = "spans"
    style: Literal["t5", "bart"] = "t5"
    tokenizer: str | None = None  # a folder's; without it a WordPiece vocabulary is learned from the texts
    vocabulary: int = 8192
    sentinels: int = 32
    budget: int = 4096  # padded tokens of the encoder in a micro-batch
    val_windows: int = 1000  # windows of the held-out text to evaluate on, at most
    noise: NoiseSettings = field(default_factory=NoiseSettings)
    size: SizeSettings = field(default_factory=SizeSettings)
    loop: LoopSettings = field(default_factory=_loop)


def held_out(source: DenoisedTexts, collate: CollatePairs, count: int) -> list[PairBatch]:
    """Validation batches, damaged in one fixed way, the same for every run."""
    numbers = evenly(range(len(source)), count)
    pairs = [source.prepare(source.read(number), generator("held out", number)) for number in numbers]
    pairs.sort(key=lambda pair: len(pair.source))
    return [collate(pairs[i : i + 32]) for i in range(0, len(pairs), 32)]


@torch.inference_mode()
def examples_of(model: EncoderDecoder, tokenizer: Tokenizer, batch: PairBatch, count: int = 6) -> list[str]:
    """Damaged texts, and what the model writes (greedy)."""
    rows, lengths = batch.source.ids[:count], batch.source.lengths[:count]
    valid = padding(lengths, rows.shape[1])
    step = sampling.cross_attention_step(model.decode, model.encode(rows, valid), valid)
    prompt = torch.full((len(rows), 1), model.config.start_id)
    room = int(batch.answer.lengths.max())
    made = sampling.greedy(step, prompt, model.decoder.new_cache(), eos=tokenizer.eos_id, max_new=room)
    shown = (tokenizer.decode(row[:size].tolist(), skip_control=False) for row, size in zip(rows, lengths, strict=True))
    wanted = (tokenizer.decode(row.tolist(), skip_control=True) for row in batch.answer.ids[:count])
    answers = (tokenizer.decode(ids, skip_control=False) for ids in made.ids)
    return [f"{text} → {answer} (was: {was})" for text, answer, was in zip(shown, answers, wanted, strict=True)]


def main(s: EncoderDecoderRun) -> dict[str, float]:
    loop, marks = s.loop, s.sentinels
    torch.manual_seed(loop.seed)
    texts = [d for path in s.data for d in read_documents(path)] + [d for path in s.lines for d in read_texts(path)]
    held = [d for path in s.val for d in read_documents(path)]
    tokenizer = tokenizer_from(s.tokenizer) if s.tokenizer is not None else (
        WordPieceTokenizer.train(plain_texts(texts), s.vocabulary, marks, context=s.size.context)
    )  # fmt: skip
    begin = tokenizer.pad_id if s.style == "t5" else tokenizer.eos_id
    made = encoder_decoder(tokenizer.vocab_size, s.style, begin, s.size)
    source, val = (
        DenoisedTexts(windows(part, tokenizer, s.size.context - 8), tokenizer, sentinels(tokenizer, marks), begin,
                s.objective, s.noise)
        for part in (texts, held)
    )  # fmt: skip
    log.info(
        "%d windows of %d tokens, %d held out; %d parameters", len(source), sum(w.size for w in source.windows),
        len(val), sum(p.numel() for p in made.parameters()),
    )  # fmt: skip
    collate = CollatePairs(tokenizer.pad_id)
    batches = held_out(val, collate, s.val_windows)

    def measure(model: nn.Module, step: int) -> dict[str, float]:
        return denoising_figures(model, batches, val.vocabulary.ordinary)

    loader = Loader(
        source, source.plan(s.budget * loop.accumulate, loop.seed), source.prepare, collate, seed=loop.seed,
        workers=loop.workers, micro=loop.accumulate,
    )  # fmt: skip
    trained = Loop(loop, Denoising(made), loader, measure).fit()
    figures = measure(trained, loop.steps)
    log.info("%s: %s", s.out, figures)
    files = [str(path) for path in (*s.data, *s.lines)]
    card = {"objective": s.objective, "data": files, "figures": {" ".join(map(str, s.val)): figures}}
    save_folder(Checkpoint(trained, tokenizer, card=card), s.out)
    write_report(loop.run, s, [*files, *s.val], examples_of(trained, tokenizer, batches[len(batches) // 2]))
    return figures


if __name__ == "__main__":
    start(main)
