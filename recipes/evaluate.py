r"""Figures of a checkpoint on labelled data, by the kind of its model: one JSON object on stdout.

    python recipes/evaluate.py --model assets/clip-vit-16 \
        --data $data/vision/tiny-imagenet/val-0000.tar $data/vision/caltech101/val $data/vision/cifar10-test
    python recipes/evaluate.py --model assets/asr-conformer-en --data an4=$data/speech/an4/test.jsonl \
        speechocean762=$data/speech/speechocean762/test.jsonl --count 200

`data=../shared/data`. A set is a path or NAME=PATH: pictures in folders of classes or WebDataset tars, or a JSONL
manifest of recordings. `--write` puts the figures, with the facts of `--card`, into the folder's card. All error rates
and accuracies are shares of 1; those of speech are at corpus level (jiwer), after Whisper's English normaliser.
"""

import json
import logging
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from evaluate_captions import CaptionOptions, captions
from evaluate_pictures import PictureOptions, classes, zero_shot
from evaluate_speech import SpeechOptions, recognise
from evaluate_whisper import WhisperOptions, multitask

from multimodal.data.remote.trust import Trust
from multimodal.errors import UsageError
from multimodal.system.files import versions
from multimodal.system.outputs import Outputs, write_output
from multimodal.train.recipe_cli import start
from multimodal.weights.folder import save_card
from multimodal.weights.load import load

log = logging.getLogger(__name__)


class Evaluator(NamedTuple):
    """`score(checkpoint, path, options, count, trust)`: figures of one set; `options`: field of the settings."""

    score: Callable[..., dict[str, Any]]
    options: str


# kind of checkpoint → how it is scored. A new kind adds its line here, and its options to the settings.
EVALUATORS = {
    "joint_conformer": Evaluator(recognise, "speech"),
    "clip": Evaluator(zero_shot, "pictures"),
    "vit": Evaluator(classes, "pictures"),
    "captioner": Evaluator(captions, "captions"),
    "coca": Evaluator(captions, "captions"),
    "speech_to_text": Evaluator(multitask, "whisper"),
}


@dataclass(frozen=True)
class Settings:
    """Options of kinds other than the model's have no effect."""

    model: str
    """a folder, a shipped name, or anything else that `multimodal.load` takes"""
    data: tuple[str, ...]
    """sets, each PATH or NAME=PATH"""
    count: int | None = None
    """at most so many items of each set, evenly spread"""
    write: bool = False
    """put the figures into the folder's card"""
    card: Path | None = None
    """JSON file of facts that `--write` adds"""
    report: Path | None = None
    """Markdown file to write"""
    overwrite: bool = False
    """replace a --report that multimodal did not write, or that was changed since"""
    device: str = "cpu"
    threads: int = 0
    """of the processor; 0: torch's own choice"""
    trust: Trust = field(default_factory=Trust)
    speech: SpeechOptions = field(default_factory=SpeechOptions)
    pictures: PictureOptions = field(default_factory=PictureOptions)
    captions: CaptionOptions = field(default_factory=CaptionOptions)
    whisper: WhisperOptions = field(default_factory=WhisperOptions)


def sets(specs: tuple[str, ...]) -> dict[str, str]:
    """Name to path; a path without a name is known by its last two parts."""
    found: dict[str, str] = {}
    for spec in specs:
        given = re.fullmatch(r"([^/=:]+)=(.+)", spec)
        path = given[2] if given else spec
        name = given[1] if given else "/".join(Path(path).parts[-2:])
        if name in found:
            raise UsageError(f"--data {spec}: a second set of the name {name!r}")
        found[name] = path
    return found


def rows(figures: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Nested figures as flat names and values."""
    found = []
    for name, value in figures.items():
        found += rows(value, f"{before}{name} ") if isinstance(value, Mapping) else [(before + name, value)]
    return found


def markdown(model: str, figures: dict[str, Any], examples: dict[str, list[str]]) -> str:
    text = [f"# Evaluation of {model}", "", "```sh", shlex.join(["python", *sys.argv]), "```"]
    for name, own in figures.items():
        text += ["", f"## {name}", "", "| figure | value |", "|---|---:|"]
        text += [f"| {figure} | {value} |" for figure, value in rows(own)]
        text += ["", *(f"- {example}" for example in examples[name])] if examples[name] else []
    text += ["", "## Versions", "", *(f"- {library} {version}" for library, version in versions().items()), ""]
    return "\n".join(text)


def main(settings: Settings) -> dict[str, Any]:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.report:
        inputs = [settings.model, *settings.data, *(one.partition("=")[2] or one for one in settings.data)]
        Outputs([*inputs, *([settings.card] if settings.card else [])], settings.overwrite).claim(settings.report)
    checkpoint = load(settings.model)
    if checkpoint.kind not in EVALUATORS:
        raise UsageError(f"{settings.model}: is of kind {checkpoint.kind}, known are {', '.join(EVALUATORS)}")
    score, options = EVALUATORS[checkpoint.kind]
    checkpoint.model.to(settings.device)
    figures, examples = {}, {}
    for name, path in sets(settings.data).items():
        figures[name] = score(checkpoint, path, getattr(settings, options), settings.count, settings.trust)
        examples[name] = figures[name].pop("examples", [])
        log.info("%s: %s", name, json.dumps(figures[name]))
    if settings.report:
        write_output(settings.report, markdown(settings.model, figures, examples).encode(errors="backslashreplace"))
    if settings.write:
        facts = json.loads(settings.card.read_text(encoding="utf-8")) if settings.card else {}
        save_card(Path(checkpoint.source), checkpoint.card | facts | {"figures": figures})
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    start(main, Settings)
