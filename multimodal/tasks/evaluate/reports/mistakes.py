"""The worst mistakes of a classifier: those it was most certain of."""

from collections.abc import Sequence

from multimodal.data.sources import Source
from multimodal.tasks.evaluate.class_scores import ClassScores, Mistake
from multimodal.tasks.report.media import figure, grid, name_line, thumbnails
from multimodal.tasks.report.page import Section, escaped

SHOWN = 36


def image_mistakes(scores: ClassScores, source: Source, keys: Sequence[int]) -> list[Section]:
    """Images taken for another class. `keys`: of each image in the source."""
    mistakes = scores.mistakes(SHOWN)
    names = {one.item: source.row(keys[one.item]).name for one in mistakes}

    def html() -> str:
        found = thumbnails(names, lambda item: source.read(keys[item]).media)
        return grid(figure(found.get(one.item), f"{_caption(one)}{name_line(names[one.item])}") for one in mistakes)

    title = _title(scores, len(mistakes))
    return [Section(title, lines=[f"{names[one.item]}: {_line(one)}" for one in mistakes], html=html)] * bool(mistakes)


def text_mistakes(scores: ClassScores, texts: Sequence[str]) -> list[Section]:
    """Texts taken for another class."""
    mistakes = scores.mistakes(SHOWN)
    rows = [(texts[one.item], one.label, one.label_score, one.found, one.found_score) for one in mistakes]
    table = [("text", "class", "score", "taken for", "score"), *rows]
    return [Section(_title(scores, len(mistakes)), table)] * bool(mistakes)


def _title(scores: ClassScores, shown: int) -> str:
    return f"Most confident mistakes ({shown} of {int((scores.ranks > 0).sum()):,})"


def _line(one: Mistake) -> str:
    return f"{one.label} ({one.label_score:.3f}) taken for {one.found} ({one.found_score:.3f})"


def _caption(one: Mistake) -> str:
    return (f"<b class=wrong>✗ {escaped(one.found, 200)}</b> {one.found_score:.3f}<br>"
            f"<b class=right>✓ {escaped(one.label, 200)}</b> {one.label_score:.3f}<br>")  # fmt: skip
