"""File readers without a command: resumed training and the recipes' data."""

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path


def resume() -> None:
    from tests.helpers.tiny_run import loop

    loop(Path("out/run"), steps=3, resume=True).fit()


def marked(state: Path) -> None:
    """Write `complete.json` with the files' present sizes and checksums."""
    marker = state / "complete.json"
    content = json.loads(marker.read_text())
    for name in content["files"]:
        data = (state / name).read_bytes()
        content["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    marker.write_text(json.dumps(content))


def _images(bad: Path) -> None:
    """As train_vit.py and train_clip.py read them."""
    from multimodal.data.sources import open_source
    from multimodal.errors import DataError, ImageError
    from multimodal.tokens.image.reading import read_image

    source = open_source(bad)
    for key in range(min(len(source), 20)):
        with contextlib.suppress(DataError, ImageError, OSError):
            read_image(source.read(key).media)


def _texts(bad: Path) -> None:
    from multimodal.data.datasets.text import texts_in

    for split in ("none", "lines", "blank"):
        texts_in(bad, split)


def _labelled(bad: Path) -> None:
    from multimodal.data.datasets.labelled_texts import classes_of, read_labelled

    classes_of(read_labelled(bad), bad)


def _table(bad: Path) -> None:
    from multimodal.data.datasets.tables import read_table

    read_table(bad)


def _sentences(bad: Path) -> None:
    from multimodal.data.datasets.captions import sentences

    sentences([bad], ["a wall"])


def _classes(bad: Path) -> None:
    from multimodal.data.datasets.class_names import class_names

    class_names([bad])


def _arpa(bad: Path) -> None:
    from multimodal.decoding.ngram import read_arpa

    read_arpa(bad).logprob("red square")


FUNCTIONS: list[tuple[Callable[[Path], None], list[str]]] = [
    (_images, ["images.csv", "images.tsv", "images.jsonl"]), (_texts, ["prompts.txt", "audio.jsonl", "words.arpa.gz"]),
    (_table, ["images.csv", "audio.csv"]), (_labelled, ["images.tsv", "images.jsonl", "images.csv"]),
    (_sentences, ["prompts.txt", "captions.jsonl", "images.csv"]), (_classes, ["classes.jsonl", "labels.json"]),
    (_arpa, ["words.arpa", "words.arpa.gz"]),
]  # fmt: skip
