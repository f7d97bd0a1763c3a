r"""Fit power laws of loss in size and in compute to own runs, beside LSTMs of the same sizes (Kaplan et al. 2020).

    data=data/text/tinyshakespeare/input.txt
    python recipes/text/study_scaling.py --data $data --run scaling-study --threads 1

Five sizes of the character model and of torch's LSTM, each trained on the same 614,400 characters in the same order.
The loss of held-out text by parameters without embeddings, by compute 6ND at each evaluation, and by place in the
context (figures 1, 2 and 7 of the paper). Nats per character:

| transformer | 6,592 | 14,496 | 25,472 | 56,640 | 100,096 | L(N) = (4.3e10 / N)^0.056, R² 0.986 |
|---|---|---|---|---|---|---|
|             | 2.414 | 2.274  | 2.205  | 2.121  | 2.070   | |
| LSTM        | 6,720 | 13,920 | 24,960 | 56,640 | 98,592  | L(N) = (6.4e9 / N)^0.068, R² 0.990 |
|             | 2.588 | 2.418  | 2.341  | 2.208  | 2.149   | |

Transformers are better at each size, as in the paper (exponent 0.076 there, trained to the end on words); the gap
closes with size here, and does not grow with the place in so short a context, where the paper's grows. Each size is the
best for some compute. Cost: 2 minutes of a core (53 of the clock, shared with other work), 0.8 GB; one seed.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.data.batching import stack_fields
from multimodal.data.datasets.text import PrepareTokens, TextCorpus, TokenBatch, Windows, training_texts
from multimodal.errors import demand
from multimodal.models.text import TextTransformer
from multimodal.system.options import Positive
from multimodal.system.outputs import write_output
from multimodal.tasks.figures import new_figure, save_figure
from multimodal.tasks.inspect.cost import parameters
from multimodal.tasks.inspect.scaling import Budget, PowerLaw, fit_power_law
from multimodal.tokens.text.characters import CharacterTokenizer
from multimodal.train import Loop, LoopSettings, OptimSettings, log, start
from multimodal.train.objective import Summed
from multimodal.train.objectives.text.language import LanguageModelSettings, gpt2_weights, language_config


@dataclass(frozen=True)
class ScalingRun:
    data: tuple[Path, ...]  # text files; characters are the tokens
    widths: tuple[int, ...] = (16, 24, 32, 48, 64)
    batch: Positive = 16
    judged: Positive = 20_000  # characters of the last tenth to judge on
    model: LanguageModelSettings = LanguageModelSettings(layers=2, heads=2, context=64)
    loop: LoopSettings = LoopSettings(
        Path("scaling-run"), 600, OptimSettings(3e-3, "adamw", warmup=50, weight_decay=0.1),
        evaluate_every=100, save_every=10**6, log_every=200,
    )  # fmt: skip

    def __post_init__(self):
        demand("widths", self.widths, len(set(self.widths)) > 1 and min(self.widths) > 0, "two or more sizes")


class RecurrentLanguageModel(nn.Module):
    """torch's LSTM between an embedding and a linear map to the vocabulary."""

    def __init__(self, vocabulary: int, width: int, layers: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


class CausalLanguageModel(nn.Module):
    """The text transformer as a map from ids to logits."""

    def __init__(self, s: ScalingRun, vocabulary: int, width: int):
        super().__init__()
        self.text = TextTransformer(language_config(replace(s.model, width=width), vocabulary))
        gpt2_weights(self.text)

    def forward(self, ids: Tensor) -> Tensor:
        return self.text.logits(self.text.states(ids))


class NextToken(Summed):
    """Cross-entropy of the next token, of any map from ids to logits."""

    def forward(self, batch: TokenBatch) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.model(batch.ids).flatten(0, 1), batch.targets.flatten(), reduction="sum")}

    def counts(self, batch: TokenBatch) -> dict[str, int]:
        return {"loss": batch.targets.numel()}


@torch.inference_mode()
def losses_by_place(model: nn.Module, unseen: TextCorpus, context: int) -> Tensor:
    """Mean nats of the token after each place of windows side by side."""
    rows = unseen.ids[: len(unseen.ids) - (len(unseen.ids) - 1) % context].long()
    ids, targets = rows[:-1].view(-1, context), rows[1:].view(-1, context)
    logits = torch.cat([model(part).float() for part in ids.split(64)])
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(0)


def size_of(model: nn.Module) -> int:
    """Parameters without embeddings; of an LSTM also without the output's table, which a transformer shares."""
    if isinstance(model, CausalLanguageModel):
        return parameters(model.text)["non_embedding"]
    return sum(p.numel() for p in model.lstm.parameters())


def trained(s: ScalingRun, name: str, model: nn.Module, corpus: TextCorpus, unseen: TextCorpus) -> dict[str, Any]:
    """Sizes, compute and losses of a run."""
    context, steps = s.model.context, []

    def judge(net: nn.Module, step: int) -> dict[str, float]:
        loss = float(losses_by_place(net, unseen, context).mean())
        steps.append((Budget(size_of(model), step * s.batch * context).flops, loss))
        return {"loss": loss}

    source = Windows(corpus, context)
    loader = s.loop.loader(source, source.plan(s.batch, s.loop.seed), PrepareTokens(context), stack_fields)
    made = Loop(replace(s.loop, run=s.loop.run / name), NextToken(model), loader, judge).fit()
    places = losses_by_place(made, unseen, context)
    log.info("%s: %d parameters, %.3f nats per character", name, size_of(model), float(places.mean()))
    return {"parameters": size_of(model), "loss": float(places.mean()), "steps": steps, "places": places.tolist()}


def draw(results: dict[str, dict[int, dict[str, Any]]], laws: dict[str, PowerLaw], path: Path) -> None:
    figure = new_figure((13, 4), dpi=110)
    by_size, by_compute, by_place = figure.subplots(1, 3)
    for kind, mark in (("transformer", "o"), ("LSTM", "s")):
        rows, law = list(results[kind].values()), laws[kind]
        sizes = [row["parameters"] for row in rows]
        by_size.plot(sizes, [row["loss"] for row in rows], mark, label=kind)
        by_size.plot(sizes, [law(n) for n in sizes], "--", color="grey", label=f"N^-{law.exponent:.3f}")
        by_place.plot(range(1, len(rows[-1]["places"]) + 1), rows[-1]["places"], label=f"{kind}, {sizes[-1]:,}")
    for row in results["transformer"].values():
        by_compute.plot(*zip(*row["steps"], strict=True), marker=".", label=f"{row['parameters']:,}")
    by_size.set(xscale="log", yscale="log", xlabel="parameters without embeddings", ylabel="nats per character")
    by_compute.set(xscale="log", yscale="log", xlabel="training FLOPs, 6ND", title="transformers by compute")
    by_place.set(xscale="log", xlabel="place in the context", title="the largest of each")
    for axes in (by_size, by_compute, by_place):
        axes.legend(fontsize=7)
    save_figure(figure, path, CAPTION)


CAPTION = (
    "Left: do the losses of each kind lie on its dashed line, a power law, and how far apart are the kinds? Middle: "
    "which size is the lowest curve for a given compute? Right: what does a longer context give?"
)


def main(s: ScalingRun) -> None:
    train, val = training_texts(s.data, (), 0.1)
    tokenizer = CharacterTokenizer.train([*train, *val])
    corpus, unseen = TextCorpus.of(train, tokenizer), TextCorpus.of(["".join(val)[: s.judged]], tokenizer)
    vocabulary, layers = tokenizer.vocab_size, s.model.layers
    kinds: dict[str, Callable[[int], nn.Module]] = {
        "transformer": lambda width: CausalLanguageModel(s, vocabulary, width),
        # as many parameters: 8 D² of a layer for 12 D²
        "LSTM": lambda width: RecurrentLanguageModel(vocabulary, round(1.22 * width), layers),
    }
    results: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in kinds}
    s.loop.run.mkdir(parents=True, exist_ok=True)
    for width in s.widths:
        for kind, make in kinds.items():
            torch.manual_seed(s.loop.seed)
            results[kind][width] = trained(s, f"{kind}-{width}", make(width), corpus, unseen)
    laws = {
        kind: fit_power_law(*zip(*((row["parameters"], row["loss"]) for row in rows.values()), strict=True))
        for kind, rows in results.items()
    }
    record = {"runs": results, "laws": {kind: law._asdict() for kind, law in laws.items()}}
    write_output(s.loop.run / "study.json", (json.dumps(record, indent=1) + "\n").encode())
    draw(results, laws, s.loop.run / "study")
    for kind, rows in results.items():
        print(kind, *(f"{row['parameters']:,}: {row['loss']:.3f}" for row in rows.values()), sep="  ")
        print(f"{kind}: L(N) = ({laws[kind].scale:.3g} / N)^{laws[kind].exponent:.3f}, R² {laws[kind].r2:.3f}")


if __name__ == "__main__":
    start(main)
