r"""Compare a dense translator with one whose last decoder layers are of the target's language (Fan et al. 2021, 5.2).

    data=data/text/multi30k
    python recipes/text/study_translation.py --train $data/train --test $data/test_2016_flickr --run translation-study \
        --threads 1

Three models of all twelve directions between English, German, French and Czech, on the same batches: dense; with a
feed-forward for each group of languages in the last layers of the decoder, which takes as much compute; and dense with
as many parameters as that one. Cells are kept as they finish; `--resume` continues a stopped or killed study, and adds
cells of more `--seeds`. Cost: 14 minutes of a core, 1.2 GB. Table, figure and what came out: docs/studies.md.
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from multimodal.data.loader import unchanged
from multimodal.errors import demand, multiple_of
from multimodal.system.options import Natural, Positive
from multimodal.tasks.evaluate.scores import bleu
from multimodal.tasks.figures import new_figure, save_figure
from multimodal.tasks.report.study import Study, spread, table
from multimodal.tasks.text.translate import translate
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.tokenizer import TextCut
from multimodal.train import Loop, LoopSettings, OptimSettings, log, start
from multimodal.train.objectives.text.translation import (
    CollatePairs,
    ParallelTexts,
    Translating,
    language_groups,
    nats_per_token,
    pair_plan,
    read_parallel,
    translator,
)
from multimodal.weights.folder import Checkpoint

DENSE, GROUPED, WIDER = "dense", "grouped", "dense, as large"
LANGUAGES = ("en", "de", "fr", "cs")
DIRECTIONS = list(permutations(LANGUAGES, 2))


@dataclass(frozen=True)
class TranslationStudy:
    train: str  # PREFIX of files PREFIX.LANGUAGE or PREFIX.LANGUAGE.gz of en, de, fr and cs, one sentence per line
    test: str
    groups: tuple[str, ...] = ("en,de", "fr", "cs")  # of languages that share feed-forwards
    grouped: Positive = 2  # last layers of the decoder that have one for each group
    seeds: Positive = 2
    vocabulary: Positive = 2000
    width: Positive = 128
    encoder_layers: Natural = 2
    decoder_layers: Positive = 2
    heads: Positive = 4
    hidden: Positive = 256
    context: Positive = 96
    budget: Positive = 2000  # padded tokens per side of a batch
    judged: Positive = 200  # sentences of `test` to translate, greedily, in each direction
    loop: LoopSettings = LoopSettings(
        Path("translation-study"), 500, OptimSettings(5e-3, "muon", warmup=50, average=0.99, weight_decay=0.01),
        precision="float32", evaluate_every=10**6, save_every=10**6, log_every=100,
    )  # fmt: skip

    def __post_init__(self):
        multiple_of("heads", self, "width")
        layers = self.decoder_layers
        demand("grouped", self.grouped, self.grouped <= layers, f"at most decoder_layers ({layers})")
        language_groups(self.groups, LANGUAGES)

    def hidden_as_large(self) -> int:
        """Width of the feed-forwards with which a dense model has as many parameters as the grouped one."""
        more = (len(self.groups) - 1) * self.grouped * (2 * self.width * self.hidden + self.hidden + self.width)
        return self.hidden + round(more / (self.encoder_layers + self.decoder_layers) / (2 * self.width + 1))


class TranslationTexts:
    """Tokenizer, pairs to train on and sentences to judge on, which all cells share."""

    def __init__(self, s: TranslationStudy):
        texts = read_parallel(s.train, LANGUAGES)
        self.test = {name: rows[: s.judged] for name, rows in read_parallel(s.test, LANGUAGES).items()}
        lines = [line for part in texts.values() for line in part]
        self.tokenizer = BytePairTokenizer.train(lines, s.vocabulary, languages=LANGUAGES)
        self.pairs, held = (
            ParallelTexts(part, self.tokenizer, DIRECTIONS, self.tokenizer.eos_id, s.context)
            for part in (texts, self.test)
        )
        collate = CollatePairs(self.tokenizer.pad_id)
        self.held = [collate([held.read(key) for key in batch]) for batch in pair_plan(held, {}, s.budget, 0)(0)]


def trained(s: TranslationStudy, kind: str, texts: TranslationTexts, seed: int, folder: Path) -> dict[str, Any]:
    """BLEU of each direction and nats per token of all after training."""
    torch.manual_seed(seed)
    began = time.process_time()
    groups = [group.split(",") for group in s.groups] if kind == GROUPED else []
    model = translator(
        texts.tokenizer, s.width, (s.encoder_layers, s.decoder_layers), s.heads,
        s.hidden_as_large() if kind == WIDER else s.hidden, s.context, 0.0, groups,
        (0, s.grouped if groups else 0),
    )  # fmt: skip
    loop = replace(s.loop, run=folder, seed=seed, resume=folder.exists())
    plan, collate = pair_plan(texts.pairs, {}, s.budget, seed), CollatePairs(texts.tokenizer.pad_id)
    model = Loop(loop, Translating(model), loop.loader(texts.pairs, plan, unchanged, collate)).fit()
    made, scores = Checkpoint(model, texts.tokenizer), {}
    for a, b in DIRECTIONS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TextCut)  # after so short a training some answers do not end
            written = translate(texts.test[a], made, a, b, beam_size=1, max_new_tokens=min(60, s.context - 2))
        scores[f"{a}-{b}"] = bleu(texts.test[b], written)
    log.info("%s, seed %d: BLEU %.1f", kind, seed, mean(scores.values()))
    return {"kind": kind, "seed": seed, "seconds": time.process_time() - began,
            "parameters": sum(p.numel() for p in model.parameters()), "bleu": scores,
            "nats": nats_per_token(model, texts.held)}  # fmt: skip


Results = Mapping[str, Sequence[Mapping[str, Any]]]  # by kind, of each seed


def bleus(results: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """BLEU by direction and their mean, of each seed."""
    scores = [row["bleu"] | {"mean": mean(row["bleu"].values())} for row in results]
    return {name: [row[name] for row in scores] for name in scores[0]}


def tables(found: Results) -> list[list[str]]:
    """Markdown table: mean ± half of the seeds' range."""
    scores = {kind: bleus(results) for kind, results in found.items()}
    rows = [[f"BLEU, {name.replace('-', ' → ')}", *(spread(own[name], 1) for own in scores.values())]
            for name in next(iter(scores.values()))]  # fmt: skip
    return [table(["", *found], [
        ["parameters", *(f"{results[0]['parameters']:,}" for results in found.values())],
        ["nats per token", *(spread([row["nats"] for row in results], 3) for results in found.values())], *rows,
    ])]  # fmt: skip


def draw(found: Results, path: Path) -> None:
    figure = new_figure((9, 3.5), dpi=80)
    axes = figure.subplots()
    for number, (kind, results) in enumerate(found.items()):
        scores = bleus(results)
        names = list(scores)
        places = [at + 0.27 * (number - 1) for at in range(len(names))]
        axes.bar(places, [mean(scores[name]) for name in names], 0.25, label=kind, alpha=0.7)
        for place, name in zip(places, names, strict=True):
            axes.plot([place] * len(scores[name]), scores[name], "k_", markersize=5)
    axes.set_xticks(range(len(names)), [name.replace("-", " → ") for name in names], rotation=30, fontsize=8)
    axes.set(ylabel="BLEU")
    axes.legend(fontsize=8)
    save_figure(figure, path, CAPTION)


CAPTION = (
    "BLEU by direction; marks are seeds. Feed-forwards of the target's language help where the second bar is above the "
    "first, which takes as much compute, and above the third, which has as many parameters."
)


def main(s: TranslationStudy) -> None:
    settings = asdict(s)
    for name in ("seeds", "loop"):  # those that choose cells
        del settings[name]
    study = Study(s.loop.run, settings | s.loop.flat(), s.loop.resume)
    if s.loop.threads:
        torch.set_num_threads(s.loop.threads)
    texts = TranslationTexts(s)
    found: dict[str, list[dict[str, Any]]] = {}  # by kind
    for seed in range(s.seeds):
        for kind in (DENSE, GROUPED, WIDER):
            name = f"{kind.replace(', ', '-').replace(' ', '-')}-{seed}"
            result = study.cell(name, lambda folder: trained(s, kind, texts, seed, folder))  # noqa: B023
            found.setdefault(kind, []).append(result)
        study.write({"cells": [row for rows in found.values() for row in rows]}, lines := tables(found))
    draw(found, s.loop.run / "study")
    print("\n\n".join("\n".join(rows) for rows in lines))


if __name__ == "__main__":
    start(main)
