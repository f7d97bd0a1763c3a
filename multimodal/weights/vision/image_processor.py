"""transformers' image processors: preprocessor_config.json over the defaults of the class that it names.

Traps: a size of one number is both edges or the shortest, by class; null is no default; keys that a class does not read
change nothing."""

import re
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.system.files import read_json, shown
from multimodal.tokens.image.preprocessing import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    OPENAI_MEAN,
    OPENAI_STD,
    Interpolation,
    Preprocessing,
)

RESAMPLE: dict[int, Interpolation] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
EXPECTED = {"size": 'a positive number, {"shortest_edge": number} or {"height": number, "width": number}',
            "crop_size": 'a positive number or {"height": number, "width": number}'}  # fmt: skip

HALF = [0.5, 0.5, 0.5]
COMMON = {
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_center_crop": False, "do_pad": False,
    "pad_size": None, "crop_size": None, "default_to_square": True, "rescale_factor": 1 / 255, "resample": 3,
    "image_mean": HALF, "image_std": HALF,
}  # fmt: skip
OPENAI = {"image_mean": [*OPENAI_MEAN], "image_std": [*OPENAI_STD]}
CLIP = OPENAI | {"size": 224, "default_to_square": False, "crop_size": 224, "do_center_crop": True}
# defaults of the classes whose steps are resizing, cropping and normalizing alone
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {"size": 224, "resample": 2},
    "DeiT": {"size": 256, "crop_size": 224, "do_center_crop": True},
    "Beit": {"size": 224, "crop_size": 224},
    "Blip": OPENAI | {"size": 384},
    "Siglip": {"size": {"height": 224, "width": 224}, "default_to_square": False},
    "DINOv3ViT": {"size": 224, "resample": 2, "image_mean": [*IMAGENET_MEAN], "image_std": [*IMAGENET_STD]},
    **dict.fromkeys(("CLIP", "ChineseCLIP", "Bit", "Llava"), CLIP),
    "LlavaOnevision": OPENAI | {"size": {"height": 384, "width": 384}, "default_to_square": False},
}


def image_record(folder: Path | None) -> tuple[Path, dict[str, Any]] | None:
    """File and record of the image processor; transformers 5 writes one file for images and texts, which goes first."""
    return _record(folder, ("processor_config.json", "image_processor"), ("preprocessor_config.json", None))


def video_record(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """File and record of the video processor; None: videos have the image processor's."""
    return _record(folder, ("processor_config.json", "video_processor"), ("video_preprocessor_config.json", None))


def _record(folder: Path | None, *places: tuple[str, str | None]) -> tuple[Path, dict[str, Any]] | None:
    for name, part in places if folder else ():
        if (path := folder / name).exists():
            record = read_json(path)
            record = record if part is None else record.get(part)
            if isinstance(record, dict):
                return path, record
    return None


def class_of(record: dict[str, Any], default: str) -> str:
    """Name of the class without its ending; `default`: that of a record that names none."""
    name = record.get("image_processor_type") or record.get("feature_extractor_type") or default
    return re.sub("(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", str(name))


def preprocessing(folder: Path | None, config: dict[str, Any], processor: str = "CLIP") -> Preprocessing | None:
    """Preprocessing of the folder. `processor`: class of a record that names none, without "ImageProcessor". Raises
    CheckpointError for an unknown class and for steps that are not supported."""
    found = image_record(folder)
    return None if found is None else preprocessing_of(*found, processor)


def preprocessing_of(path: Path, record: dict[str, Any], processor: str) -> Preprocessing:
    """`preprocessing` from a record. Raises CheckpointError that names `path`."""
    name = class_of(record, processor)
    if name not in PROCESSORS:
        raise CheckpointError(f"{path}: image processor {shown(name)} is not supported")
    steps = COMMON | PROCESSORS[name] | record
    check_steps(path, steps)
    size = _sides(path, "size", steps)
    edge = size.get("shortest_edge")
    before = (size["height"], size["width"]) if edge is None else (edge, edge)
    after = before
    if steps["do_center_crop"]:
        crop = _sides(path, "crop_size", steps)
        after = crop["height"], crop["width"]
    elif edge is not None:
        raise CheckpointError(f"{path}: size {steps['size']} without do_center_crop is not supported")
    if after[0] > before[0] or after[0] * before[1] != after[1] * before[0]:
        raise CheckpointError(f"{path}: crop_size {after} after size {before} is not supported")
    mean, std = (tuple(map(float, steps[f"image_{part}"])) for part in ("mean", "std"))
    ratio = after[0] / before[0]
    exact = all(int(one / ratio) == other for one, other in zip(after, before, strict=True))
    ratio = ratio if exact else after[0] / (before[0] + 0.5)  # so that it rounds down to the edge
    resize = "square" if name == "Llava" and steps["do_pad"] else "squash" if edge is None else "shortest"
    return Preprocessing(after, resize, RESAMPLE[steps["resample"]], mean, std, 0, ratio, "floor")


def check_steps(path: Path, steps: dict[str, Any]) -> None:
    """Raise CheckpointError that names `path`, the key and its value."""
    for key in ("image_mean", "image_std"):
        value = steps[key]
        if not isinstance(value, list) or len(value) != 3 or not all(isinstance(n, int | float) for n in value):
            raise CheckpointError(f"{path}: {key}: expected three numbers (got {shown(value)})")
    if not isinstance(factor := steps["rescale_factor"], int | float):
        raise CheckpointError(f"{path}: rescale_factor: expected a number (got {shown(factor)})")
    good = {
        **{key: bool(steps[key]) for key in ("do_resize", "do_rescale", "do_normalize")},
        "rescale_factor": abs(factor * 255 - 1) < 1e-5,
        "resample": type(steps["resample"]) is int and steps["resample"] in RESAMPLE,
        "pad_size": not (steps["do_pad"] and steps["pad_size"]),  # without it images are padded to their batch
    }
    for key, supported in good.items():
        if not supported:
            raise CheckpointError(f"{path}: {key} {shown(steps[key])} is not supported")


def per_channel(value: Any, key: str) -> tuple[float, float, float]:
    """Three numbers; one stands for all channels. Raises CheckpointError that names `key`."""
    numbers = value if isinstance(value, list | tuple) else [value]
    numbers = [*numbers] * 3 if len(numbers) == 1 else numbers
    if len(numbers) != 3 or not all(type(number) in (int, float) for number in numbers):
        raise CheckpointError(f"{key}: expected three numbers (got {shown(value)})")
    red, green, blue = map(float, numbers)
    return red, green, blue


def _sides(path: Path, key: str, steps: dict[str, Any]) -> dict[str, int]:
    """{"shortest_edge"} or {"height", "width"}; of a crop the latter alone."""
    value, edge = steps[key], key == "size"
    sides = value
    if type(value) is int:
        both = steps["default_to_square"] or not edge
        sides = {"height": value, "width": value} if both else {"shortest_edge": value}
    known = [{"height", "width"}, *([{"shortest_edge"}] if edge else [])]
    whole = isinstance(sides, dict) and all(type(side) is int and side > 0 for side in sides.values())
    if not whole or sides.keys() not in known:
        raise CheckpointError(f"{path}: {key}: expected {EXPECTED[key]} (got {shown(value)})")
    return sides
