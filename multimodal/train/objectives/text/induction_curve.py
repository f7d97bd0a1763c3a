"""The phase change of a language model in training: when induction heads form, and what context is worth then.

Olsson et al. 2022, "In-context learning and induction heads": the prefix-matching score of each head, and how much less
a token late in the window costs than an early one. `train_lm.py --induction` uses it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

from multimodal.data.datasets.text import TextCorpus
from multimodal.errors import UsageError
from multimodal.tasks.evaluate.perplexity import losses_by_place
from multimodal.tasks.figures import new_figure, save_figure
from multimodal.tasks.inspect.induction import induction, usable_ids
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.train.metrics.report import read_metrics


class InductionCurve:
    """Score the attention heads at each evaluation and append them to `run/induction.jsonl`."""

    def __init__(self, run: Path, tokenizer: Tokenizer, val: TextCorpus, context: int):
        if context < 20:
            raise UsageError(f"{context}: induction needs 20 or more", argument="context")
        self.file, self.val, self.context = run / "induction.jsonl", val, context
        self.usable, self.begin = usable_ids(tokenizer), tokenizer.bos_id
        self.length = min(50, (context - 1) // 2)  # of the repeated random sequence

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        result = induction(model, self.usable, self.length, begin=self.begin)
        nats = losses_by_place(model, self.val, self.context)
        row = {
            "step": step, "scores": result.prefix_matching.tolist(), "previous": result.previous.tolist(),
            "in_context": in_context_score(nats.tolist()), "copies": result.losses,
        }  # fmt: skip
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        best = int(result.prefix_matching.argmax())
        return {"induction": float(result.prefix_matching.flatten()[best]), "in_context": row["in_context"]}

    def plot(self, path: Path) -> list[str]:
        """Draw the curves as PNG and SVG; return a line for each of the strongest heads at the end."""
        rows = list({row["step"]: row for row in read_metrics(self.file)}.values())  # a resumed run may score again
        _drawn(rows, path, self.context)
        scores = torch.tensor(rows[-1]["scores"])
        heads = scores.shape[1]
        order = scores.flatten().argsort(descending=True)[:5].tolist()
        return [f"layer {i // heads} head {i % heads}: prefix matching {scores.flatten()[i]:.2f}" for i in order]


def in_context_score(losses: Sequence[float]) -> float:
    """Mean loss of the last tenth of the places minus that of the tenth around 10 % (Olsson et al. 2022, "in-context
    learning score")."""
    tenth = max(1, len(losses) // 10)
    return mean(losses[-tenth:]) - mean(losses[tenth // 2 : tenth // 2 + tenth])


def _drawn(rows: list[dict[str, Any]], path: Path, context: int) -> None:
    figure = new_figure((7, 8), dpi=100)
    heads, loss, copies = figure.subplots(3, 1, sharex=True)
    steps, scores = [row["step"] for row in rows], torch.tensor([row["scores"] for row in rows])
    for layer in range(scores.shape[1]):
        for head in range(scores.shape[2]):
            heads.plot(steps, scores[:, layer, head], color=f"C{layer % 10}", label=None if head else f"layer {layer}")
    heads.set(ylabel="prefix-matching score", ylim=(0, 1), title="each head")
    heads.legend()
    loss.plot(steps, [row["in_context"] for row in rows])
    loss.set(ylabel="nats", title=f"validation text: last tenth of {context} tokens minus the tenth around 10 %")
    for number, name in enumerate(("first", "second")):
        copies.plot(steps, [row["copies"][number] for row in rows], label=f"{name} copy")
    copies.set(ylabel="nats a token", xlabel="step", title="repeated random sequence")
    copies.legend()
    for axes in (heads, loss, copies):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, CAPTION)


CAPTION = (
    "Do some heads' scores rise at once (top)? At the same steps late tokens become cheaper than early ones (middle), "
    "and the second copy of a random sequence than the first (bottom)."
)
