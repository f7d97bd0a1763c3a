"""Plot of a confusion matrix, legible with ten classes and with hundreds."""

from typing import Any

from multimodal.tasks.evaluate.class_scores import ClassScores
from multimodal.tasks.figures import fonts, new_figure, png, shown

COUNTED = 30  # classes up to which the cells hold their counts
NAMED = 320  # classes up to which each has its name; of more, every second one, or third, and so on
LETTERS = 28  # of a name
LARGEST = 36.0  # inches a side
DPI = 130


def plot_confusion(scores: ClassScores, title: str) -> bytes:
    """A PNG. Rows are the classes of the images, columns what they were taken for; the colour is the share of the
    row, and a class without images is grey."""
    table = scores.confusion()
    count, totals = len(table), table.sum(1, keepdim=True)
    cell = 0.5 if count <= COUNTED else 0.11  # inches: of a number, or of a line of small letters
    side = max(3.0, min(LARGEST, cell * count))
    figure = new_figure((side + 3.2, side + 2.6), title, DPI)
    axes = figure.subplots()
    axes.set_facecolor("0.85")
    shares = (table / totals).masked_fill(totals == 0, float("nan")).numpy()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    step = -(-count // NAMED)
    ticks, size = range(0, count, step), 9.0 if count <= COUNTED else 5.5
    _name(axes, ticks, [scores.names[i] for i in ticks], size)
    if count <= COUNTED:
        for row in range(count):
            for column in table[row].nonzero().flatten().tolist():
                colour = "white" if shares[row, column] > 0.6 else "black"
                axes.text(column, row, str(int(table[row, column])), ha="center", va="center", color=colour, fontsize=8)
    axes.set(xlabel="taken for", ylabel="class")
    figure.colorbar(image, ax=axes, label="share of the class's images", shrink=min(1.0, 6 / side), pad=0.01)
    return png(figure)


def _name(axes: Any, ticks: range, names: list[str], size: float) -> None:
    """A name may hold any letter, and a dollar sign is no formula."""
    short = [shown(name if len(name) <= LETTERS else name[: LETTERS - 1] + "…") for name in names]
    axes.set_xticks(list(ticks), short, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(list(ticks), short, fontsize=size, parse_math=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_tick_params(length=2)
        for text in axis.get_ticklabels():
            text.set_fontfamily(fonts(text.get_text()))
