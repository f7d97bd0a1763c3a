r"""Study learning in context: induction heads and their phase change, few-shot tasks by size, functions by examples.

    data=data/text/tinyshakespeare/input.txt
    python recipes/text/study_in_context.py --data $data --run in-context-study --threads 1

Cells are kept as they finish; `--resume` continues a stopped or killed study, and adds cells of more `--seeds` and
`--widths`. Cost: 4 minutes of a core, 0.8 GB. Tables, figures and what came out: docs/studies.md.
"""

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.data.batching import stack_fields
from multimodal.data.datasets.in_context import (
    FUNCTIONS,
    TASKS,
    VOCABULARY,
    Episodes,
    MadeBatches,
    episodes,
    least_squares,
    points,
)
from multimodal.data.datasets.text import PrepareTokens, TextCorpus, TokenBatch, Windows, training_texts
from multimodal.data.loader import generator
from multimodal.errors import demand
from multimodal.models.text import TextTransformer
from multimodal.system.options import Limits, Positive, PositiveFloat, Share
from multimodal.tasks.figures import new_figure, save_figure
from multimodal.tasks.inspect.cost import parameters
from multimodal.tasks.inspect.induction import ablated, copying, induction, usable_ids
from multimodal.tasks.report.study import Study, spread, table
from multimodal.tokens.text.characters import CharacterTokenizer
from multimodal.train import Loop, LoopSettings, OptimSettings, log, start
from multimodal.train.metrics.report import read_metrics
from multimodal.train.objective import Summed
from multimodal.train.objectives.text.induction_curve import in_context_score
from multimodal.train.objectives.text.language import Language, LanguageModelSettings, gpt2_weights, language_config

DRAWS = 10  # sets of random heads to ablate


@dataclass(frozen=True)
class InContextRun:
    data: tuple[Path, ...]  # text for the phase change; characters are the tokens
    seeds: Positive = 2
    repeat: Share = 0.5  # share of the rows that repeat their start
    evaluations: Positive = 20  # during the training on text
    ablate: Positive = 2  # induction heads
    widths: tuple[int, ...] = (16, 32, 64)  # models of the few-shot tasks
    shots: Positive = 6
    task_steps: Positive = 700
    dims: Annotated[int, Limits(2)] = 3  # inputs of a function
    points: int = 8  # examples of a function
    function_steps: Positive = 800
    function_layers: Positive = 3
    function_rate: PositiveFloat = 5e-3
    batch: Positive = 32  # rows of a step; episodes and functions too
    judged: Positive = 256  # rows to evaluate on
    model: LanguageModelSettings = LanguageModelSettings(width=64, layers=2, heads=4, context=64)
    loop: LoopSettings = LoopSettings(
        Path("in-context-study"), 500, OptimSettings(1e-2, "muon", warmup=30), precision="float32",
        evaluate_every=10**6, save_every=10**6, log_every=200,
    )  # fmt: skip

    def __post_init__(self):
        demand("widths", self.widths, all(w >= 1 and w % self.model.heads == 0 for w in self.widths),
               f"multiples of heads ({self.model.heads})")  # fmt: skip
        heads = self.model.layers * self.model.heads
        demand("ablate", self.ablate, 2 * self.ablate <= heads, f"at most half of the {heads} heads")
        demand("context", self.model.context, self.model.context >= 20, "20 or more")
        demand("points", self.points, self.points > self.dims, "more than dims")


def fitted(
    s: InContextRun, folder: Path, objective: Summed, loader: Callable, steps: int, seed: int, **more: Any
) -> Any:
    """Train; `loader(loop)` makes the batches, `more` are further arguments of the loop and its settings."""
    evaluate = more.pop("evaluate", None)
    loop = replace(s.loop, run=folder, steps=steps, seed=seed, resume=folder.exists(), **more)
    return Loop(loop, objective, loader(loop), evaluate).fit()


def of_made(steps: int, make: Callable[[torch.Generator], Any]) -> Callable:
    """Loader of batches by `make`, one for each step."""
    source = MadeBatches(steps, make)
    return lambda loop: loop.loader(source, source.plan, source.prepare, source.collate)


# the phase change


class Corpora(NamedTuple):
    tokenizer: CharacterTokenizer
    train: TextCorpus
    val: TextCorpus


def rows_of(s: InContextRun, corpus: TextCorpus, repeat: float) -> TokenBatch:
    """Fixed rows of held-out text, made as in training."""
    source, prepare = Windows(corpus, s.model.context), PrepareTokens(s.model.context, repeat=repeat)
    step = max(1, len(source) // s.judged)
    return stack_fields(
        [prepare(source.read(i), generator("rows", i)) for i in range(0, len(source), step)][: s.judged]
    )


@torch.inference_mode()
def losses_by_place(model: TextTransformer, batch: TokenBatch) -> Tensor:
    losses = [F.cross_entropy(model.logits(model.states(ids)).transpose(1, 2), targets, reduction="none")
              for ids, targets in zip(batch.ids.split(64), batch.targets.split(64), strict=True)]  # fmt: skip
    return torch.cat(losses).mean(0)


def phase(s: InContextRun, texts: Corpora, seed: int, folder: Path) -> dict[str, Any]:
    """Train on text; return the curves by step, the heads' scores, and what ablating heads costs."""
    torch.manual_seed(seed)
    model = TextTransformer(language_config(s.model, texts.tokenizer.vocab_size))
    gpt2_weights(model)
    usable, held = usable_ids(texts.tokenizer), rows_of(s, texts.val, s.repeat)
    length = min(25, s.model.context // 2, len(usable))
    folder.mkdir(exist_ok=True)
    curves = folder / "curves.jsonl"  # survives a stop

    def measure(net: nn.Module, step: int) -> dict[str, float]:
        found, losses = induction(net, usable, length), losses_by_place(net, held).tolist()
        row = {"step": step, "losses": losses, "prefix": found.prefix_matching.tolist(), "copies": found.losses}
        with curves.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return {"in_context": in_context_score(losses), "prefix": float(found.prefix_matching.max())}

    source = Windows(texts.train, s.model.context)
    every = max(1, s.loop.steps // s.evaluations)
    make = lambda loop: loop.loader(
        source, source.plan(s.batch, seed), PrepareTokens(s.model.context, repeat=s.repeat), stack_fields
    )
    if not curves.exists():
        measure(model.eval(), 0)
    trained = fitted(s, folder, Language(model), make, s.loop.steps, seed, evaluate=measure, evaluate_every=every)
    rows = {row["step"]: row for row in read_metrics(curves)}  # a resumed run may measure a step again
    return {
        "rows": list(rows.values()),
        "copying": copying(trained, usable, length).tolist(),
        **ablations(s, texts, trained, seed),
    }


def ablations(s: InContextRun, texts: Corpora, model: TextTransformer, seed: int) -> dict[str, Any]:
    """Costs of zeroing the heads with the highest prefix-matching scores, and as many random ones of the others."""
    usable = usable_ids(texts.tokenizer)
    length = min(25, s.model.context // 2, len(usable))
    plain, held = (rows_of(s, texts.val, repeat) for repeat in (0.0, s.repeat))

    def cost(heads: Sequence[tuple[int, int]]) -> dict[str, float]:
        with ablated(model, heads):
            losses = losses_by_place(model, held).tolist()
            return {"second copy": induction(model, usable, length).losses[1], "in context": in_context_score(losses),
                    "text": float(losses_by_place(model, plain).mean())}  # fmt: skip

    scores = induction(model, usable, length).prefix_matching
    order = [divmod(i, s.model.heads) for i in scores.flatten().argsort(descending=True).tolist()]
    draw = random.Random(seed)
    others = [cost(draw.sample(order[s.ablate :], s.ablate)) for _ in range(DRAWS)]
    return {"ablated": {"none": cost([]), "induction": cost(order[: s.ablate]), "random": others},
            "induction heads": order[: s.ablate]}  # fmt: skip


def change_of(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """The two evaluations between which the in-context score falls most: the phase change."""
    scores = [in_context_score(row["losses"]) for row in rows]
    at = min(range(1, len(rows)), key=lambda i: scores[i] - scores[i - 1])
    return rows[at - 1]["step"], rows[at]["step"]


# few-shot tasks and functions


class EpisodeOutputs(Language):
    """Cross-entropy of the outputs of episodes."""

    def forward(self, batch: Episodes) -> dict[str, Tensor]:
        return super().forward(batch.batch)

    def counts(self, batch: Episodes) -> dict[str, int | Tensor]:
        return super().counts(batch.batch)


def shots(s: InContextRun, width: int, seed: int, folder: Path) -> dict[str, Any]:
    """Train on episodes of all tasks; return the accuracy of each by number of examples."""
    torch.manual_seed(seed)
    model = TextTransformer(language_config(replace(s.model, width=width), VOCABULARY))
    gpt2_weights(model)
    make = of_made(s.task_steps, lambda own: episodes(list(TASKS), s.batch, s.shots, own))
    model = fitted(s, folder, EpisodeOutputs(model), make, s.task_steps, seed)
    accuracy = {task: accuracies(s, model, task) for task in TASKS}
    return {"parameters": parameters(model)["non_embedding"], "accuracy": accuracy}


@torch.inference_mode()
def accuracies(s: InContextRun, model: TextTransformer, task: str) -> list[float]:
    """Share of outputs whose tokens are all right, after 0, 1, 2 … examples."""
    batch, before = episodes([task], s.judged, s.shots, generator("judged", task))
    right = model.logits(model.states(batch.ids)).argmax(-1) == batch.targets
    return [float((right | (before != k)).all(1).float().mean()) for k in range(s.shots + 1)]


class Regressor(nn.Module):
    """A transformer over x₁, y₁, x₂, y₂ … that predicts each y from what is before it (Garg et al. 2022, section 3)."""

    def __init__(self, s: InContextRun):
        super().__init__()
        config = language_config(replace(s.model, layers=s.function_layers, context=2 * s.points), 1)
        self.text = TextTransformer(replace(config, vocabulary=0, tied=None))
        self.enter, self.leave = nn.Linear(s.dims + 1, config.width), nn.Linear(config.width, 1)
        gpt2_weights(self.text)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tokens = torch.stack([F.pad(x, (0, 1)), F.pad(y[..., None], (x.shape[-1], 0))], 2).flatten(1, 2)
        states = self.text.states(torch.zeros(tokens.shape[:2], dtype=torch.long), embedded=self.enter(tokens))
        return self.leave(states[:, ::2])[..., 0]


class SquaredError(Summed):
    """Mean squared error of all predictions of a row."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": (self.model(*batch) - batch[1]).square().sum()}

    def counts(self, batch: tuple[Tensor, Tensor]) -> dict[str, int]:
        return {"loss": batch[1].numel()}


def functions(s: InContextRun, kind: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train on functions of one kind; return the squared errors by number of examples, least squares' too."""
    torch.manual_seed(seed)
    make = of_made(s.function_steps, lambda own: points(kind, s.batch, s.points, s.dims, own))
    model = fitted(s, folder, SquaredError(Regressor(s)), make, s.function_steps, seed,
                   optim=replace(s.loop.optim, rate=s.function_rate))  # fmt: skip
    x, y = points(kind, 4 * s.judged, s.points, s.dims, generator("judged", kind))
    with torch.inference_mode():
        guesses = {"transformer": model(x, y), "least squares": least_squares(x, y)}
    return {name: (own - y).square().mean(0).tolist() for name, own in guesses.items()}


# the study


def computed(s: InContextRun, study: Study, texts: Corpora) -> dict[str, dict[Any, list[dict[str, Any]]]]:
    """All cells by part and by size or kind, one result of each seed."""
    parts: dict[str, tuple[Callable, Sequence]] = {
        "phase": (lambda _, seed, folder: phase(s, texts, seed, folder), ("text",)),
        "functions": (lambda kind, seed, folder: functions(s, kind, seed, folder), FUNCTIONS),
        "shots": (lambda width, seed, folder: shots(s, width, seed, folder), s.widths),
    }
    found: dict[str, dict[Any, list[dict[str, Any]]]] = {part: {} for part in parts}
    for seed in range(s.seeds):
        for part, (run, kinds) in parts.items():
            for kind in kinds:
                name, began = f"{part}-{kind}-{seed}", time.process_time()
                result = study.cell(name, lambda folder: run(kind, seed, folder))  # noqa: B023
                log.info("%s: %.0f s", name, time.process_time() - began)
                found[part].setdefault(kind, []).append(result)
    return found


def tables(s: InContextRun, found: Mapping[str, Any]) -> list[list[str]]:
    runs = found["phase"]["text"]
    of = lambda name: lambda result: result["ablated"][name]
    rows = [["none", *_costs(runs, of("none"))], [f"{s.ablate} induction heads", *_costs(runs, of("induction"))]]
    averaged = lambda result: {key: mean(one[key] for one in result["ablated"]["random"]) for key in COSTS}
    rows += [[f"{s.ablate} random heads, mean of {DRAWS} draws", *_costs(runs, averaged)]]
    changes = ", ".join("{} to {}".format(*change_of(run["rows"])) for run in runs)
    made = [[f"Phase change between steps {changes} (of each seed)."],
            table(["ablated", *(f"{key}, nats" for key in COSTS)], rows)]  # fmt: skip
    both = lambda run, i, j: f"{run['rows'][-1]['prefix'][i][j]:.2f} · {run['copying'][i][j]:.2f}"
    heads = [[f"{i}.{j}", *(both(run, i, j) for run in runs)]
             for i in range(s.model.layers) for j in range(s.model.heads)]  # fmt: skip
    made.append(table(["layer.head", *(f"prefix · copying, seed {i}" for i in range(len(runs)))], heads))
    percent = lambda results, task, k: spread([100 * result["accuracy"][task][k] for result in results], 0)
    rows = [[task, f"{results[0]['parameters']:,}", *(percent(results, task, k) for k in range(s.shots + 1))]
            for task in TASKS for results in found["shots"].values()]  # fmt: skip
    made.append(table(["task", "parameters", *(f"k = {k}, %" for k in range(s.shots + 1))], rows))
    rows = [[kind, name, *(spread([result[name][k] for result in results]) for k in range(s.points))]
            for kind, results in found["functions"].items() for name in results[0]]  # fmt: skip
    made.append(table(["functions", "predicted by", *(f"k = {k}" for k in range(s.points))], rows))
    return made


COSTS = ("second copy", "in context", "text")


def _costs(runs: Sequence[Mapping[str, Any]], of: Callable[[Mapping[str, Any]], Mapping[str, float]]) -> list[str]:
    return [spread([of(run)[key] for run in runs]) for key in COSTS]


def draw_phase(s: InContextRun, run: Mapping[str, Any], path: Path) -> None:
    from matplotlib import colormaps

    rows, change = run["rows"], change_of(run["rows"])
    steps, losses = [row["step"] for row in rows], torch.tensor([row["losses"] for row in rows])
    figure = new_figure((12, 3.6), dpi=80)
    curves, slopes, heads, kinds = figure.subplots(1, 4)
    for i in range(0, len(rows), max(1, len(rows) // 5)):
        curves.plot(range(1, losses.shape[1] + 1), losses[i], color=colormaps["viridis"](i / len(rows)), label=steps[i])
    curves.set(xscale="log", xlabel="place in the context (log)", ylabel="nats per token", title="loss by step")
    curves.legend(fontsize=6)
    ends = [2**i - 1 for i in range(1, 20) if 2**i <= losses.shape[1]]
    for first, last in itertools.pairwise(ends):
        change_by = (losses[:, last] - losses[:, first]) / math.log((last + 1) / (first + 1))
        slopes.plot(steps, change_by, label=f"{first + 1} to {last + 1}")
    slopes.set(xlabel="step", title="d loss / d ln place")
    slopes.legend(fontsize=6)
    scores, copy = torch.tensor([row["prefix"] for row in rows]), torch.tensor(run["copying"])
    for layer in range(scores.shape[1]):
        for head in range(scores.shape[2]):
            heads.plot(steps, scores[:, layer, head], color=f"C{layer}", label=None if head else f"layer {layer}")
        kinds.plot(scores[-1, layer], copy[layer], "o", color=f"C{layer}", label=f"layer {layer}")
    heads.set(xlabel="step", ylim=(0, None), title="prefix matching of each head")
    kinds.set(xlabel="prefix matching", ylabel="copying", title="heads at the end")
    for axes in (heads, kinds):
        axes.legend(fontsize=6)
    for axes in (slopes, heads):
        axes.axvspan(*change, color="orange", alpha=0.3)
    save_figure(figure, path, PHASE)


def draw_shots(s: InContextRun, found: Mapping[str, Any], path: Path) -> None:
    figure = new_figure((12, 3.4), dpi=80)
    panels = figure.subplots(1, len(TASKS) + len(FUNCTIONS))
    for axes, task in zip(panels, TASKS, strict=False):
        for results in found["shots"].values():
            rows = torch.tensor([result["accuracy"][task] for result in results])
            (line,) = axes.plot(rows.mean(0), label=f"{results[0]['parameters']:,}")
            axes.fill_between(range(rows.shape[1]), rows.amin(0), rows.amax(0), color=line.get_color(), alpha=0.2)
        axes.set(xlabel="examples", ylim=(0, 1.02), title=task)
    panels[0].set_ylabel("accuracy")
    panels[0].legend(fontsize=6, title="parameters", title_fontsize=6)
    for axes, (kind, results) in zip(panels[len(TASKS) :], found["functions"].items(), strict=True):
        for name, style in (("transformer", "-"), ("least squares", "--")):
            rows = torch.tensor([result[name] for result in results])
            (line,) = axes.plot(rows.mean(0).clamp(max=2), style, label=name)
            axes.fill_between(range(rows.shape[1]), rows.amin(0).clamp(max=2), rows.amax(0).clamp(max=2),
                              color=line.get_color(), alpha=0.2)  # fmt: skip
        axes.axvline(s.dims, color="grey", linestyle=":")
        axes.set(xlabel="examples", ylim=(0, 2), title=f"{kind} functions")
    panels[len(TASKS)].set_ylabel("squared error")
    panels[len(TASKS)].legend(fontsize=6)
    save_figure(figure, path, SHOTS)


PHASE = (
    "Induction heads form in the orange steps: the loss late in the context falls below the loss early in it (left), "
    "its slope over the log of the place drops (second), and heads of one layer begin to attend to what followed last "
    "time (third). Heads with a high prefix-matching score copy what they attend to (right)."
)
SHOTS = (
    "Accuracy after k examples by size of the model (bands: seeds), and squared error after k examples beside least "
    "squares (dashed; error 1 is no better than the mean; the dotted line is the number of unknown weights)."
)


def main(s: InContextRun) -> None:
    if s.loop.threads:
        torch.set_num_threads(s.loop.threads)
    train, val = training_texts(s.data, (), 0.1)
    tokenizer = CharacterTokenizer.train([*train, *val])
    texts = Corpora(tokenizer, TextCorpus.of(train, tokenizer), TextCorpus.of(val, tokenizer))
    settings = {name: value for name, value in asdict(s).items() if name not in ("seeds", "widths", "loop")}
    study = Study(s.loop.run, settings | s.loop.flat(), s.loop.resume)
    found = computed(s, study, texts)
    lines = tables(s, found)
    study.write(found, lines)
    draw_phase(s, found["phase"]["text"][0], s.loop.run / "phase")
    draw_shots(s, found, s.loop.run / "shots")
    print("\n\n".join("\n".join(rows) for rows in lines))


if __name__ == "__main__":
    start(main)
