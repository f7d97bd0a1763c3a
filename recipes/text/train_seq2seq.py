r"""Train an encoder-decoder to restore corrupted texts: T5's span corruption, or another objective of T5 or BART.

    data=data/text
    python recipes/text/train_seq2seq.py --data $data/wikitext2/valid.txt.gz --val $data/wikitext2/test.txt.gz \
        --lines $data/multi30k/train.en.gz $data/sst2/train.tsv.gz --steps 500 --val_windows 500 --evaluate_every 250 \
        --run seq2seq-run --out seq2seq --threads 1

Cost: 10 minutes of a core that did other work first, 2.9 GB. Cross-entropy of the held-out texts' spans 5.03 nats per
token (6.80 without the sentinels), 8.3 % of their tokens right: the start of a training.

`--objective` (Raffel et al. 2020, table 3; Lewis et al. 2020, section 2.2):
spans        replace random spans by sentinels; the target is the spans (T5)
replace      the same with single tokens
drop         drop tokens; they are the target
bert, mass   mask tokens (bert: a tenth of them becomes another token); the target is the text
deshuffle    shuffle the tokens; the target is the text
prefix       keep a first part; the target is the rest
bart         shuffle the sentences, mask Poisson spans of 30 % (`--share 0.3`); the target is the text
infill, delete, permute, rotate: BART's other kinds of noise alone
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from multimodal.blocks.masks import padding
from multimodal.data.batching import fixed_batches
from multimodal.data.datasets.class_names import evenly
from multimodal.data.datasets.documents import documents_in, plain_texts, windows
from multimodal.decoding import sampling
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.system.options import Natural, Positive
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.train import Loop, LoopSettings, OptimSettings, finish, log, start
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
from multimodal.weights.folder import Checkpoint

Objective = Literal[
    "spans", "replace", "drop", "bert", "mass", "deshuffle", "prefix", "bart", "infill", "delete", "permute", "rotate"
]


@dataclass(frozen=True)
class EncoderDecoderRun:
    data: tuple[Path, ...]  # running text, documents between empty lines; or manifests, whose texts are documents
    val: tuple[Path, ...]  # held-out running text
    out: Path  # folder for the checkpoint
    lines: tuple[Path, ...] = ()  # texts, one per line; of a .tsv the first column, of a .jsonl or .csv its texts
    objective: Objective = "spans"
    style: Literal["t5", "bart"] = "t5"
    tokenizer: str | None = None  # a folder's or shipped model's; by default a WordPiece learned from the texts
    vocabulary: Positive = 8192
    sentinels: Natural = 32
    budget: Positive = 4096  # padded tokens of the encoder per micro-batch
    val_windows: Positive = 1000  # windows of held-out text to evaluate on, at most
    noise: NoiseSettings = NoiseSettings()
    size: SizeSettings = SizeSettings()
    loop: LoopSettings = LoopSettings(
        Path("seq2seq-run"), 1500, OptimSettings(2e-3, "muon", warmup=100), evaluate_every=250
    )


@torch.inference_mode()
def examples_of(model: EncoderDecoder, tokenizer: Tokenizer, batch: PairBatch, count: int = 6) -> list[str]:
    """Corrupted texts with the greedy output of the model and the target."""
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
    texts, held = documents_in(s.data, s.lines), documents_in(s.val)
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
    log.info("%d windows of %d tokens, %d held out", len(source), sum(w.size for w in source.examples), len(val))
    collate = CollatePairs(tokenizer.pad_id)
    numbers = evenly(range(len(val)), s.val_windows)
    batches = fixed_batches(lambda number, random: val.prepare(val.read(number), random), collate, numbers)

    def measure(model: nn.Module, step: int) -> dict[str, float]:
        return denoising_figures(model, batches, val.vocabulary.ordinary)

    loader = loop.loader(source, source.plan(s.budget * loop.accumulate, loop.seed), source.prepare, collate)
    trained = Loop(loop, Denoising(made), loader, measure, Checkpoint(made, tokenizer)).fit()
    figures = measure(trained, loop.steps)
    files = [str(path) for path in (*s.data, *s.lines)]
    card = {"objective": s.objective, "data": files, "figures": {" ".join(map(str, s.val)): figures}}
    shown = examples_of(trained, tokenizer, batches[len(batches) // 2])
    finish(s, Checkpoint(trained, tokenizer, card=card), [*files, *s.val], shown, figures=figures)
    return figures


if __name__ == "__main__":
    start(main)
