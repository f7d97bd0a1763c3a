"""The view `answer`: its record, lines for a terminal, and a figure with a panel for each medium."""

from pathlib import Path
from typing import Any

from multimodal.tasks.inspect.answer import AnswerMap, AnswerRequest, answer_map
from multimodal.tasks.inspect.answer_places import Seen
from multimodal.tasks.inspect.options import ViewOptions
from multimodal.tasks.inspect.plots import plot_answer
from multimodal.tasks.inspect.views import View, rounded
from multimodal.weights.folder import Checkpoint

STRONGEST = 3  # tokens of the text that are listed


def answer_view(checkpoint: Checkpoint, request: AnswerRequest, options: ViewOptions) -> View:
    """Raises the errors of `answer_map`."""
    found = answer_map(checkpoint, request, options)
    record = {
        "what": "answer", "question": request.question, "layers": found.heads.layers, "heads": found.heads.heads,
        "tokens": list(found.queries.names), "seen": [_record(one) for one in found.seen],
    }  # fmt: skip
    title = f"{Path(checkpoint.source).name or 'model'}: {request.question}"
    return View(record, _lines(found), lambda: plot_answer(found.seen, found.queries, title))


def _record(one: Seen) -> dict[str, Any]:
    facts: dict[str, Any] = {"input": one.name, "unit": one.keys.unit, "share": rounded(one.share)}
    if one.keys.grid is not None:
        return facts | {"grid": one.keys.grid, "maps": rounded(one.maps.unflatten(1, one.keys.grid))}
    if one.keys.unit == "second":
        facts |= {"start": one.start, "step": one.keys.step}
    else:
        facts |= {"tokens": list(one.keys.names)}
    return facts | {"maps": rounded(one.maps)}


def _lines(found: AnswerMap) -> list[str]:
    """The share of each medium, and where in it most of the attention lies, over the whole answer; the shares of each
    token."""
    lines = [f"attention of {len(found.queries.names)} tokens, {found.heads.label}"]
    lines += [f"{float(one.share.mean()):6.1%}  {one.name}: {_where(one)}" for one in found.seen]
    lines.append("token: share of each, in this order")
    for row, name in enumerate(found.queries.names):
        lines.append(f"{name}: " + " ".join(f"{float(one.share[row]):.3f}" for one in found.seen))
    return lines


def _where(one: Seen) -> str:
    mean = one.weights.mean(0)
    if one.keys.grid is not None:
        row, column = divmod(int(mean.argmax()), one.keys.grid[1])
        return f"most at row {row} of {one.keys.grid[0]}, column {column} of {one.keys.grid[1]}"
    if one.keys.unit == "second":
        return f"most at {one.start + int(mean.argmax()) * one.keys.step:.2f} s"
    best = mean.topk(min(STRONGEST, len(mean))).indices.tolist()
    return "most to " + ", ".join(one.keys.names[i] for i in best)
