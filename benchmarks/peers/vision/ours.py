"""Our CLIP with open_clip's weights: images, texts, tokenizing, reading, zero-shot evaluation."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.peers.cuda.common import ready
from benchmarks.peers.vision.calls import LABELS, inputs
from benchmarks.peers.vision.clip_benchmark import METRICS, TEMPLATES
from benchmarks.peers.vision.clip_captions import Ids, captions
from benchmarks.peers.vision.clip_jpegs import BATCH, files
from benchmarks.peers.vision.openclip import pixels, sizes
from multimodal import Classifier
from multimodal.data.datasets.image_sets import listed_classes, open_images
from multimodal.inference.prepare import prepare_for_inference
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.encode.features import image_features
from multimodal.tasks.encode.images import batches
from multimodal.tasks.evaluate.zero_shot import zero_shot_scores
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text.clip import CLIPTokenizer
from multimodal.weights.encode import text_features
from multimodal.weights.folder import Checkpoint
from multimodal.weights.vision import clip_openai
from multimodal.weights.vision.open_clip import open_clip_architecture

RECORD = Preprocessing((224, 224), "shortest", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)


def checkpoint(folder: Path, name: str, tiny: bool = False) -> Checkpoint:
    config = open_clip_architecture(name) | sizes(tiny)
    made = clip_openai.FAMILY.load(load_file(folder / "open_clip.safetensors"), config, f"random {name}")
    return replace(made, preprocessing=RECORD)


def encoder(
    folder: Path, device: str, name: str, kind: str, compiled: bool = False, graph: bool = False, tiny: bool = False,
    **other: Any,
) -> Callable[[], Tensor]:  # fmt: skip
    model = prepare_for_inference(checkpoint(folder, name, tiny), kind, torch.device(device)).model
    images = pixels(folder, device)
    if compiled:
        from multimodal.train.device import compile_blocks

        compile_blocks(model.image)
    return ready(torch.inference_mode()(lambda: model.encode_image(images)), device, graph)


def texts(folder: Path, device: str, name: str, count: int, kind: str, tiny: bool = False) -> Callable[[], Tensor]:
    made = prepare_for_inference(checkpoint(folder, name, tiny), kind, torch.device(device))
    prompts = json.loads((folder / "prompts.json").read_text())
    return lambda: text_features(made.model, made.tokenizer, prompts)


def tokenizing(folder: Path, device: str) -> Callable[[], Callable[[], Ids]]:
    tokenizer, texts = CLIPTokenizer(), captions(folder)

    def run() -> Callable[[], Ids]:
        batch = tokenizer.batch(texts)
        return lambda: [row[mask].tolist() for row, mask in zip(batch.ids, batch.mask, strict=True)]

    return run


def reading(folder: Path, device: str) -> Callable[[], Tensor]:
    threads, paths = int(os.environ["OMP_NUM_THREADS"]), files(folder)
    return lambda: torch.cat([part.pixels for part in batches(paths, RECORD, BATCH, threads)])


def zeroshot(
    folder: Path, device: str, name: str, each: int, kind: str, tiny: bool = False
) -> Callable[[], list[float]]:
    """From files and class names to accuracies, as the command `evaluate zeroshot`."""
    made = prepare_for_inference(checkpoint(folder, name, tiny), kind, torch.device(device))
    templates = [template.replace("{c}", "{}") for template in TEMPLATES]

    def run() -> list[float]:
        images = open_images(folder / "val")
        classes = listed_classes(images, {}, sorted(images.ids), "names")
        classifier = ZeroShotClassifier(made, classes.names, templates)
        found = image_features(made, images, workers=int(os.environ["OMP_NUM_THREADS"]))
        figures = zero_shot_scores(classifier, images, found, classes.numbers).figures()
        return [figures[metric] for metric in METRICS]

    return run


def calls(
    folder: Path, device: str, name: str, form: str, kind: str, tiny: bool = False
) -> Callable[[], list[list[float]]]:  # fmt: skip
    """`Classifier` called with a list of images."""
    made = checkpoint(folder, name, tiny)
    classifier = Classifier(made, LABELS, templates="none", device=device, compute_type=kind)
    images = inputs(folder, form)

    def run() -> list[list[float]]:
        scores = [{one["label"]: one["score"] for one in result["scores"]} for result in classifier(images)]
        return [[row[label] for label in LABELS] for row in scores]

    return run
