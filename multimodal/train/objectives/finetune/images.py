"""Fine-tuning on images: classification, and matching with captions."""

from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.data.datasets.captions import warn_of_long
from multimodal.data.datasets.class_names import CaptionSampler, class_labels, class_names, names_of
from multimodal.data.datasets.images import LabelledImageSource
from multimodal.data.loader import shuffled
from multimodal.data.sources import open_source
from multimodal.errors import CheckpointError
from multimodal.models.clip import CLIP
from multimodal.models.vit import ViT
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.evaluate.classification import ImageAccuracy
from multimodal.tasks.evaluate.zero_shot import accuracy, read_named
from multimodal.train.objectives import contrastive_model
from multimodal.train.objectives.augment_images import ImageAugment
from multimodal.train.objectives.classify import MixImages, SoftTargets, classifier
from multimodal.train.objectives.contrastive import Contrastive
from multimodal.train.objectives.finetune.job import FinetuningData, FinetuningJob
from multimodal.weights.folder import Checkpoint


def classify(initial: Checkpoint, d: FinetuningData, cache: Path, seed: int) -> FinetuningJob:
    """Classify images with a ViT, or with the image tower of a CLIP and a new head; the result is a ViT."""
    source, record = open_source(d.data, columns=d.columns, trust=d.trust), initial.preprocessing
    labels = class_labels(source, " ".join(d.data))
    model = classifier(initial, labels)
    names = names_of(labels, d.classes, d.data)
    if isinstance(initial.model, CLIP) and initial.tokenizer is not None and d.head == "names":
        some = ImageAccuracy(source, labels, record, " ".join(d.data), 16)
        named_head(initial, model, names, torch.stack([pixels for pixels, _ in some.read(some.keys)]))
    val = open_source(d.val, columns=d.columns, trust=d.trust) if d.val else None
    if val:
        ImageAccuracy(val, labels, record, d.val)  # reports unfit data before training

    def finish(trained: nn.Module) -> Checkpoint:
        card = initial.card | {"labels": list(labels), "names": names, "scores": "softmax"}
        return replace(initial, model=trained, tokenizer=None, card=card)

    measure = lambda model, count: ImageAccuracy(val, labels, record, d.val, count)(model)
    return FinetuningJob(
        SoftTargets(model), model, ("head",), source, shuffled(len(source), d.batch, seed),
        ImageAugment(labels, record, d.augment), MixImages(len(labels), record, d.augment),
        measure if val else None, finish,
    )  # fmt: skip


@torch.no_grad()
def named_head(initial: Checkpoint, model: ViT, names: list[str], pixels: Float[Tensor, "B 3 H W"]) -> None:
    """Fill the head with the text vectors of the names, mapped back through the image projection, so that it ranks the
    classes as the CLIP does zero-shot (Wortsman et al. 2022). The mean length of some images' vectors scales the logits
    to about the CLIP's."""
    clip, pooled, project = initial.model, initial.model.image(pixels), initial.model.image_project
    vectors = ZeroShotClassifier(initial, names).weights
    pooled = pooled if project is None else project(pooled)
    scale = clip.logit_scale.exp() / pooled.norm(dim=-1).mean()
    model.head.weight.copy_(scale * (vectors if project is None else vectors @ project.weight))
    if project is not None and project.bias is not None:
        model.head.bias.copy_(scale * vectors @ project.bias)


def match(initial: Checkpoint, d: FinetuningData, cache: Path, seed: int) -> FinetuningJob:
    """Match images with captions or with templated class names, by a whole CLIP."""
    model, record = initial.model, initial.preprocessing
    if initial.tokenizer is None or record is None:
        raise CheckpointError(f"{initial.source}: checkpoint has no tokenizer or no preprocessing")
    image, context = model.config.image, model.config.text.context
    images = LabelledImageSource(
        d.data, class_names(d.classes, d.data), record.size[0], cache=1000, columns=d.columns, trust=d.trust
    )
    captions = CaptionSampler(images.concepts, contrastive_model.TEMPLATES)
    warn_of_long(captions.texts(), initial.tokenizer, context - sum(map(len, initial.tokenizer.frame)))
    held = read_named(d.val, d.classes, None, d.columns, d.trust) if d.val else None
    few = read_named(d.val, d.classes, d.count, d.columns, d.trust) if d.val else None
    templates = {"templates": initial.card.get("templates", contrastive_model.ZERO_SHOT)}
    finish = lambda trained: replace(initial, model=trained, card=initial.card | templates)

    def measure(model: nn.Module, count: int | None) -> dict[str, float]:
        return accuracy(finish(model), few if count else held)

    return FinetuningJob(
        Contrastive(model, captions.fits()), model, (), images, shuffled(len(images), d.batch, seed),
        contrastive_model.PrepareContrastive(
            captions, (record.size[0] // image.patch) * (record.size[1] // image.patch)),
        contrastive_model.CollateContrastive(initial.tokenizer, context, record, d.augment.smallest_crop, 0.5),
        measure if held else None, finish,
    )  # fmt: skip
