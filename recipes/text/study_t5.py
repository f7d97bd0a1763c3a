r"""Compare what T5's paper compares (Raffel et al. 2020, section 3), each choice by a small model of its own.

    data=data/text
    python recipes/text/study_t5.py --lines $data/multi30k/train.en.gz $data/multi30k/train.de.gz \
        $data/sst2/train.tsv.gz --labelled $data/sst2/train.tsv.gz --labelled_val $data/sst2/dev.tsv.gz \
        --pairs $data/multi30k/train --pairs_val $data/multi30k/val --run t5-study --threads 1

Each cell pretrains a model on captions and film reviews, then fine-tunes it to translate and to classify. Cells are
kept as they finish; `--resume` continues a stopped or killed study, and adds cells of more `--seeds`, `--crossed`,
`--shares`, `--spans` and `--repeats`. Cost: 17 s a cell, 23 minutes of a core in all, 1.1 GB. Tables, figure and which
of the paper's orderings came out: docs/studies.md.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.blocks.masks import padding
from multimodal.data.datasets.documents import SentenceWindow, documents_in, plain_texts, windows
from multimodal.data.datasets.labelled_texts import classes_of, read_labelled
from multimodal.data.examples import SizedExamples
from multimodal.data.loader import generator, unchanged
from multimodal.decoding import sampling
from multimodal.errors import UsageError, demand
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.system.options import Positive, PositiveFloat
from multimodal.tasks.evaluate.scores import bleu
from multimodal.tasks.figures import new_figure, save_figure
from multimodal.tasks.report.study import Study, spread, table
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.train import Loop, LoopSettings, OptimSettings, log, start
from multimodal.train.objective import Summed
from multimodal.train.objectives.text.decoder_only import JoinPairs, decoder_only, joined_logits, share_parameters
from multimodal.train.objectives.text.denoising import (
    DenoisedTexts,
    NoiseSettings,
    SizeSettings,
    encoder_decoder,
    sentinels,
)
from multimodal.train.objectives.text.translation import CollatePairs, Pair, read_parallel, target_logits

ARCHITECTURES = {
    "encdec": "encoder-decoder", "shared": "encoder-decoder, shared", "half": "encoder-decoder, half the layers",
    "causal": "causal LM", "prefix": "prefix LM",
}  # fmt: skip
OBJECTIVES = {
    "spans": "span corruption", "mass": "i.i.d., masks", "drop": "dropped tokens", "bert": "BERT-style",
    "prefix": "prefix LM", "deshuffle": "deshuffling",
}  # fmt: skip
Objective = Literal["spans", "mass", "drop", "bert", "prefix", "deshuffle"]
MARKS = 32  # sentinels
LABELS = ("bad", "good")  # answers for the labels in order
TASKS = ("sentiment : ", "german : ")  # before a source


class Cell(NamedTuple):
    """One training. `objective` none: from random weights."""

    architecture: str = "encdec"
    objective: str = "spans"
    share: float = 0.15
    span: float = 3.0
    repeats: int = 1  # times that each text is seen

    @property
    def name(self) -> str:
        return f"{self.architecture}-{self.objective}-{self.share:g}-{self.span:g}-{self.repeats}"


@dataclass(frozen=True)
class T5Run:
    lines: tuple[Path, ...]  # texts to pretrain on, one per line; of a .tsv the first column
    labelled: Path  # table of texts with two labels
    labelled_val: Path
    pairs: str  # parallel files without .en and .de
    pairs_val: str
    shares: tuple[float, ...] = (0.1, 0.15, 0.25, 0.5)  # of the tokens that are corrupted
    spans: tuple[float, ...] = (2, 3, 5, 10)  # mean tokens of a span
    repeats: tuple[int, ...] = (1, 4, 16, 64)
    # objectives of all architectures; the others are the encoder-decoder's alone
    crossed: tuple[Objective, ...] = ("spans", "mass", "drop", "bert", "prefix", "deshuffle")
    seeds: Positive = 2
    vocabulary: Positive = 1024
    budget: Positive = 512  # padded tokens of the sources of a step
    tune: Positive = 100  # steps of fine-tuning to translate
    tune_labelled: Positive = 120  # steps of fine-tuning to classify
    rate_labelled: PositiveFloat = 3e-3  # learning rate for those
    judged: Positive = 200  # pairs to evaluate on; of the labelled texts all
    size: SizeSettings = SizeSettings(width=64, encoder_layers=2, decoder_layers=2, heads=4, context=48)
    loop: LoopSettings = LoopSettings(
        Path("t5-study"), 250, OptimSettings(1.5e-2, "muon", warmup=20), precision="float32", evaluate_every=10**6,
        save_every=10**6, log_every=100,
    )  # fmt: skip

    def __post_init__(self):
        demand("repeats", self.repeats, all(n >= 1 for n in self.repeats), "1 or more each")
        for share in self.shares:
            for span in self.spans:
                NoiseSettings(share, span)
        even = self.size.encoder_layers == self.size.decoder_layers >= 2
        demand("decoder_layers", self.size.decoder_layers, even, "as many as encoder_layers, 2 or more")


class Texts:
    """Tokenizer, windows to pretrain on and both tasks as pairs, which all cells share."""

    def __init__(self, s: T5Run):
        documents = documents_in((), s.lines)
        labelled = {path: read_labelled(path) for path in (s.labelled, s.labelled_val)}
        self.classes = classes_of(labelled[s.labelled], s.labelled)
        if len(self.classes) != len(LABELS):
            raise UsageError(f"{s.labelled}: expected 2 labels, got {len(self.classes)}", argument="labelled")
        self.tokenizer = WordPieceTokenizer.train(
            [*plain_texts(documents), *(TASKS + LABELS) * 10_000], s.vocabulary, MARKS, context=s.size.context
        )
        self.windows = windows(documents, self.tokenizer, s.size.context - 8)
        order = torch.randperm(len(self.windows), generator=generator("windows")).tolist()
        self.windows = [self.windows[i] for i in order]
        self.start, self.end = self.tokenizer.pad_id, self.tokenizer.eos_id
        self.train = self._tasks(s, labelled[s.labelled], s.pairs, None)
        self.val = self._tasks(s, labelled[s.labelled_val], s.pairs_val, s.judged)
        self.references = read_parallel(s.pairs_val, ("de",))["de"][: s.judged]

    def _tasks(self, s: T5Run, labelled: Sequence, pairs: str, most: int | None) -> tuple[list, list]:
        sides = read_parallel(pairs, ("en", "de"))
        answers = dict(zip(self.classes, LABELS, strict=True))
        texts = [(TASKS[0] + row.text, answers[row.label]) for row in labelled]
        texts = texts, [(TASKS[1] + a, b) for a, b in zip(sides["en"], sides["de"], strict=True)][:most]
        return tuple([self._pair(*text, s.size.context) for text in part] for part in texts)

    def _pair(self, source: str, answer: str, context: int) -> Pair:
        ids, out = (self.tokenizer.encode(text)[: context - 1] for text in (source, answer))
        return Pair([*ids, self.end], [self.start, *out, self.end])

    def unlabelled(self, s: T5Run, repeats: int) -> list[SentenceWindow]:
        """The first windows, as many as are seen `repeats` times. Raises UsageError for too few."""
        left, found = s.loop.steps * s.budget / repeats, []
        for window in self.windows:
            if left <= 0:
                return found
            found.append(window)
            left -= window.size + 1
        raise UsageError(f"the texts are too few for {s.loop.steps} steps without repeats", argument="lines")


def answer_logits(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return (target_logits if isinstance(model, EncoderDecoder) else joined_logits)(model, batch)


class AnswerTokens(Summed):
    """Cross-entropy of the answers' tokens, of any architecture."""

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(*answer_logits(self.model, batch), reduction="sum")}

    def counts(self, batch: Any) -> dict[str, int | Tensor]:
        whole = isinstance(self.model, EncoderDecoder)
        return {"loss": (batch.answer.lengths - 1).sum() if whole else (batch.targets >= 0).sum()}


def cells(s: T5Run) -> dict[str, list[Cell]]:
    """Cells of each table; tables share some."""
    best = Cell()
    return {
        "none": [Cell(objective="none")],
        "architectures": [
            Cell(a, o) for o in OBJECTIVES for a in ARCHITECTURES if o in s.crossed or a == best.architecture
        ],
        "rates": [best._replace(share=share) for share in s.shares],
        "spans": [Cell(objective="replace"), *(best._replace(span=span) for span in s.spans)],
        "repeats": [best._replace(repeats=times) for times in s.repeats],
    }


def built(s: T5Run, cell: Cell, vocabulary: int, start_id: int) -> nn.Module:
    if cell.architecture in ("causal", "prefix"):
        return decoder_only(vocabulary, start_id, s.size)
    layers = s.size.encoder_layers // 2 if cell.architecture == "half" else s.size.encoder_layers
    model = encoder_decoder(vocabulary, "t5", start_id, replace(s.size, encoder_layers=layers, decoder_layers=layers))
    return share_parameters(model) if cell.architecture == "shared" else model


def collator(cell: Cell, texts: Texts, pretraining: bool) -> Callable:
    """A causal LM pretrained as a language model predicts the whole text (section 3.2.2)."""
    pad = texts.tokenizer.pad_id
    if cell.architecture not in ("causal", "prefix"):
        return CollatePairs(pad)
    whole = pretraining and cell.architecture == "causal" and cell.objective == "prefix"
    return JoinPairs(pad, cell.architecture == "prefix", whole)


def trained(s: T5Run, cell: Cell, texts: Texts, seed: int, folder: Path) -> dict[str, Any]:
    """Pretrain and fine-tune; return the scores."""
    torch.manual_seed(seed)
    rate, began = s.loop.optim.rate, time.process_time()
    model = built(s, cell, texts.tokenizer.vocab_size, texts.start)

    def fit(model: nn.Module, part: str, source: Any, prepare: Callable, steps: int, rate: float) -> nn.Module:
        loop = replace(s.loop, run=folder / part, seed=seed, steps=steps, optim=replace(s.loop.optim, rate=rate),
                       resume=(folder / part).exists())  # fmt: skip
        collate = collator(cell, texts, part == "pretrained")
        return Loop(loop, AnswerTokens(model), loop.loader(source, source.plan(s.budget, seed), prepare, collate)).fit()

    if cell.objective != "none":
        marks = sentinels(texts.tokenizer, MARKS)
        rows = texts.unlabelled(s, cell.repeats)
        source = DenoisedTexts(rows, texts.tokenizer, marks, texts.start, cell.objective,
                               NoiseSettings(cell.share, cell.span))  # fmt: skip
        model = fit(model, "pretrained", source, source.prepare, s.loop.steps, rate)
    labelled, pairs = (SizedExamples(part, [len(pair.source) for pair in part], "pair") for part in texts.train)
    sentiment = fit(copy.deepcopy(model), "sentiment", labelled, unchanged, s.tune_labelled, s.rate_labelled)
    german = fit(model, "german", pairs, unchanged, s.tune, rate)
    scores = judged(cell, texts, sentiment, german)
    log.info("%s, seed %d: %s", cell.name, seed, " ".join(f"{name} {value:.2f}" for name, value in scores.items()))
    cost = {"seconds": time.process_time() - began}
    return {**cell._asdict(), "seed": seed, **cost, "parameters": sum(p.numel() for p in german.parameters()), **scores}


@torch.inference_mode()
def judged(cell: Cell, texts: Texts, sentiment: nn.Module, german: nn.Module) -> dict[str, float]:
    """Accuracy by the likelier of the two labels, nats per token of the translations, and their BLEU."""
    collate = collator(cell, texts, False)
    first = [texts.tokenizer.encode(label)[0] for label in LABELS]
    right, losses = [], []
    for at in range(0, len(texts.val[0]), 64):
        part = texts.val[0][at : at + 64]
        logits, targets = answer_logits(sentiment, collate(part))
        starts = torch.tensor([len(pair.answer) - 1 for pair in part]).cumsum(0)
        starts = torch.cat([torch.zeros(1, dtype=torch.long), starts[:-1]])
        best = logits[starts][:, first].argmax(-1)
        right.append(torch.tensor(first)[best] == targets[starts])
    for at in range(0, len(texts.val[1]), 64):
        losses.append(F.cross_entropy(*answer_logits(german, collate(texts.val[1][at : at + 64])), reduction="none"))
    made = [texts.tokenizer.decode(row) for row in translations(cell, texts, german)]
    return {
        "sst2": 100 * float(torch.cat(right).float().mean()), "nats": float(torch.cat(losses).mean()),
        "bleu": bleu([text.lower() for text in texts.references], made),
    }  # fmt: skip


def translations(cell: Cell, texts: Texts, model: nn.Module) -> list[list[int]]:
    """Greedy answers to the held-out sentences."""
    sources, most = [pair.source for pair in texts.val[1]], 40
    if isinstance(model, EncoderDecoder):
        batch = CollatePairs(texts.tokenizer.pad_id)(texts.val[1]).source
        valid = padding(batch.lengths, batch.ids.shape[1])
        step = sampling.cross_attention_step(model.decode, model.encode(batch.ids, valid), valid)
        prompt = torch.full((len(sources), 1), texts.start)
        return sampling.greedy(step, prompt, model.decoder.new_cache(), eos=texts.end, max_new=most).ids
    prompt, padded = sampling.left_pad([[*source, texts.start] for source in sources])

    def step(ids: Tensor, cache: Any) -> Tensor:
        count = ids.shape[1]
        seen = None
        if cell.architecture == "prefix" and count > 1:  # the start id is not part of the prefix
            seen = torch.ones(count, count, dtype=torch.bool)
            seen[:-1, -1] = False
        return model.logits(model.states(ids, cache=cache, mask=seen)[:, -1:])

    return sampling.greedy(step, prompt, model.new_cache(start=padded), eos=texts.end, max_new=most).ids


Scores = Mapping[Cell, Mapping[str, Sequence[float]]]  # of each seed
FIGURES = {"sst2": ("SST-2, %", 1), "nats": ("German, nats per token", 2), "bleu": ("BLEU", 1)}


def tables(s: T5Run, found: Scores) -> list[list[str]]:
    """Markdown tables of the cells that are finished: mean ± half of the seeds' range."""
    score = lambda cell, name: spread(found[cell][name], FIGURES[name][1]) if cell in found else ""
    made = []
    for name, (title, _) in FIGURES.items():
        rows = [[label, *(score(Cell(a, o), name) for o in OBJECTIVES)] for a, label in ARCHITECTURES.items()]
        made.append(table([title, *OBJECTIVES.values()], rows))
    groups = cells(s)
    lists = {
        "no pretraining": [("encoder-decoder", groups["none"][0])],
        "corrupted": [(f"{cell.share:.0%}", cell) for cell in groups["rates"]],
        "span": [("i.i.d." if cell.objective == "replace" else f"{cell.span:g}", cell) for cell in groups["spans"]],
        "repeats": [(f"{cell.repeats}", cell) for cell in groups["repeats"]],
    }
    for title, rows in lists.items():
        head = [title, *(label for label, _ in FIGURES.values())]
        made.append(table(head, [[label, *(score(cell, name) for name in FIGURES)] for label, cell in rows]))
    return made


def draw(s: T5Run, found: Scores, path: Path) -> None:
    figure = new_figure((11, 4), dpi=80)
    grid, *axes = figure.subplots(1, 4, width_ratios=(2.4, 1, 1, 1))
    value = lambda cell: mean(found[cell]["nats"]) if cell in found else math.nan
    rows = [[value(Cell(a, o)) for o in OBJECTIVES] for a in ARCHITECTURES]
    grid.imshow(rows, cmap="Oranges", aspect="auto", alpha=0.7)
    grid.set_xticks(range(len(OBJECTIVES)), OBJECTIVES.values(), rotation=35, ha="right", fontsize=8)
    grid.set_yticks(range(len(ARCHITECTURES)), ARCHITECTURES.values(), fontsize=8)
    grid.set_title("nats per German token", fontsize=9)
    for at, row in enumerate(rows):
        for column, nats in enumerate(row):
            grid.text(column, at, "" if math.isnan(nats) else f"{nats:.2f}", ha="center", va="center", fontsize=8)
    groups, base = cells(s), value(Cell(objective="none"))
    sides = ("rates", "share", "share corrupted"), ("spans", "span", "mean span"), ("repeats", "repeats", "repeats")
    for own, (name, field, label) in zip(axes, sides, strict=True):
        chosen = [cell for cell in groups[name] if cell in found and cell.objective == "spans"]
        places = [getattr(cell, field) for cell in chosen]
        own.plot(places, [value(cell) for cell in chosen], color="C0")
        for place, cell in zip(places, chosen, strict=True):
            own.plot([place] * len(found[cell]["nats"]), found[cell]["nats"], "o", color="C0", alpha=0.4)
        own.axhline(base, color="grey", linestyle=":")
        own.sharey(axes[0])
        own.set(xscale="log", xlabel=label)
        own.set_xticks(places, [f"{place:g}" for place in places], fontsize=8)
        own.minorticks_off()
    save_figure(figure, path, CAPTION)


CAPTION = (
    "Loss of held-out translations after pretraining and fine-tuning; lower is better. Left: compare architectures "
    "down a column, objectives along a row. Right, of span corruption by an encoder-decoder: the line is the mean of "
    "the seeds (dots), the dotted line an encoder-decoder without pretraining."
)


def main(s: T5Run) -> None:
    settings = asdict(s)
    for name in ("seeds", "crossed", "shares", "spans", "repeats", "loop"):  # those that choose cells
        del settings[name]
    study = Study(s.loop.run, settings | s.loop.flat(), s.loop.resume)
    if s.loop.threads:
        torch.set_num_threads(s.loop.threads)
    texts = Texts(s)
    chosen = list(dict.fromkeys(cell for group in cells(s).values() for cell in group))
    found: dict[Cell, dict[str, list[float]]] = {}
    results: list[dict[str, Any]] = []
    for seed in range(s.seeds):
        for cell in chosen:
            result = study.cell(f"{cell.name}-{seed}", lambda folder: trained(s, cell, texts, seed, folder))  # noqa: B023
            results.append(result)
            own = found.setdefault(cell, {name: [] for name in FIGURES})
            for name in FIGURES:
                own[name].append(result[name])
        study.write({"cells": results}, lines := tables(s, found))
    draw(s, found, s.loop.run / "study")
    print("\n\n".join("\n".join(rows) for rows in lines))


if __name__ == "__main__":
    start(main)
