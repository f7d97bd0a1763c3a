"""CLIP_benchmark's zero-shot evaluation: from a folder of images and the names of classes to accuracies."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers.vision.openclip import loaded, prepare

NAMES = ("tench", "goldfish", "great white shark", "hammerhead", "stingray", "rooster", "ostrich", "brambling", "robin",
         "jay", "magpie", "chickadee", "kite", "bald eagle", "vulture", "bullfrog", "tree frog", "box turtle", "gecko",
         "iguana")  # fmt: skip
TEMPLATES = ("a photo of a {c}.", "a drawing of a {c}.", "a {c} in the snow.", "the small {c}.")
METRICS = ("acc1", "acc5", "mean_per_class_recall")
BATCH = 32


def prepare_folder(folder: Path, device: str, name: str, each: int, tiny: bool = False) -> None:
    """`open_clip.safetensors`, and `val/CLASS/NUMBER.png`: blocks of random colours and sizes, `each` per class; half
    of them move to the class that the random model predicts, so that accuracies are not at chance."""
    prepare(folder, device, name, tiny=tiny)
    from open_clip import build_zero_shot_classifier, get_tokenizer
    from PIL import Image

    draw, images = np.random.default_rng(0), []
    for _ in range(each * len(NAMES)):
        side = 2 ** int(draw.integers(0, 6))
        blocks = draw.integers(0, 256, (side, side, 3), dtype=np.uint8)
        images.append(Image.fromarray(blocks).resize((256, 256), Image.Resampling.NEAREST))
    model, templates = loaded(folder, name, tiny), [lambda c: TEMPLATES[0].format(c=c)]
    weights = build_zero_shot_classifier(model, get_tokenizer(name), NAMES, templates)
    with torch.inference_mode():
        logits = model.encode_image(torch.stack([transform()(image) for image in images])) @ weights
    for number, (image, found) in enumerate(zip(images, logits.argmax(1).tolist(), strict=True)):
        place = folder / "val" / NAMES[found if number >= len(images) / 2 else number % len(NAMES)]
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{number}.png")


def transform() -> Callable[..., torch.Tensor]:
    from open_clip.transform import PreprocessCfg, image_transform_v2

    return image_transform_v2(PreprocessCfg(size=(224, 224)), is_train=False)


def accuracy(logits: torch.Tensor, labels: torch.Tensor, topk: tuple[int, ...]) -> list[float]:
    """Replaces CLIP_benchmark's, which converts an array of one to a number: NumPy 2.4 refuses that."""
    found = logits.topk(max(topk)).indices == labels[:, None]
    return [found[:, :k].any(1).float().mean().item() for k in topk]


def evaluate(folder: Path, device: str, name: str, each: int, tiny: bool = False) -> Callable[[], list[float]]:
    """In float32. Images are read in the main process."""
    from clip_benchmark.metrics import zeroshot_classification
    from open_clip import get_tokenizer
    from torchvision.datasets import ImageFolder

    model, tokenizer = loaded(folder, name, tiny).to(device), get_tokenizer(name)
    dataset = ImageFolder(folder / "val", transform())
    zeroshot_classification.accuracy = accuracy
    loader = torch.utils.data.DataLoader(dataset, BATCH)

    def run() -> list[float]:
        found = zeroshot_classification.evaluate(
            model, loader, tokenizer, dataset.classes, list(TEMPLATES), device, amp=False
        )
        return [float(found[metric]) for metric in METRICS]

    return run
