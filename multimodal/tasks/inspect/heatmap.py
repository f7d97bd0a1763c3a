"""Heat maps: relevance of image patches for a label, and overlays."""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from multimodal.blocks.attention import Attention
from multimodal.errors import ImageError, UsageError
from multimodal.inference.modules import Frozen
from multimodal.models.clip import CLIP
from multimodal.models.coca import CoCa
from multimodal.models.vision.tower import ConvTower
from multimodal.models.vit import ViT
from multimodal.system.outputs import Outputs, write_output
from multimodal.tasks.encode.native import native_record
from multimodal.tasks.figures import contact_sheet, overlay
from multimodal.tokens.image.preprocessing import Preprocessing, preprocess
from multimodal.tokens.image.reading import read_image

MADE = re.compile(r"-[0-9a-f]{8}\.heatmap\.png$")  # `file_name`
NAME = 60  # bytes of the image name in a file name
TILE = 480  # pixels of the longer edge of each map
ACROSS = 4  # maps per row


def relevance(
    model: nn.Module, pixels: Float[Tensor, "B 3 H W"], texts: Float[Tensor, "C D"], chosen: Sequence[int] | None = None
) -> Float[Tensor, "B K rows columns"]:
    """Relevance of each patch for each text, or for those `chosen` (indices), against the other texts: positive values
    support the text. Each image and text has its own scale.

    The score of a text t is z·(t - Σ w t'), with the image's unit vector z and the softmax w of the scores of the other
    texts t'; for a single text, z·t. A patch's relevance is Σ A∘∂score/∂A over all layers, heads and queries that
    attend to it: gradient-weighted attention (Chefer et al. 2021, equation 5), but signed and without the product over
    layers. As ∂score/∂A = G Vᵀ, with G the gradient of the attention's output and V the values, this equals
    Σ V·∂score/∂V, so attention is neither recomputed nor stored. The part that a pool takes from a patch without
    attention, x·∂score/∂x, is added. Of the methods measured, this one localises best with every pool. A convolutional
    tower has its last map alone (Selvaraju et al. 2017).

    `texts`: unit vectors (`ZeroShotClassifier.weights`). Raises UsageError for a model without heat maps."""
    tower = check_model(model)
    rows, columns = (edge // tower.config.patch for edge in pixels.shape[-2:])
    with torch.inference_mode(False), torch.enable_grad(), _values(tower) as values:
        device = next(model.parameters()).device
        pixels, texts = (x.detach().to(device).clone() for x in (pixels, texts))  # inputs may be inference tensors
        if isinstance(tower, ConvTower):
            tokens = tower.tokens(pixels).detach().requires_grad_()
            values.clear()
        else:
            stem = tower.stem(pixels).detach().requires_grad_()  # gradients for frozen weights too
            tokens = tower.stack(stem, rotate=tower.rotation((rows, columns), device))
        z = model.project_image(tower.pooled(tokens))
        sources = [*values, tokens] if tower.config.pool not in ("map", "attention") else values
        maps = []
        for text in range(len(texts)) if chosen is None else chosen:
            score = (z * _apart(model, z.detach(), texts, text)).sum()
            gradients = torch.autograd.grad(score, sources, retain_graph=True)
            each = [(x * g).sum(-1)[:, -rows * columns :] for x, g in zip(sources, gradients, strict=True)]
            maps.append(torch.stack(each).sum(0).detach().unflatten(1, (rows, columns)))
    return torch.stack(maps, 1)


def _apart(model: CLIP, z: Float[Tensor, "B D"], texts: Float[Tensor, "C D"], text: int) -> Float[Tensor, "B D"]:
    """The text minus the mean of the other texts, weighted by their scores."""
    others = torch.cat([texts[:text], texts[text + 1 :]])
    return texts[text] - model.logits(z, others).detach().softmax(-1) @ others


@contextmanager
def _values(tower: ViT) -> Iterator[list[Float[Tensor, "B N _"]]]:
    """Collect the values of every attention that runs inside, in order."""
    found: list[Tensor] = []
    hooks = [
        part.value.register_forward_hook(lambda _, inputs, value: found.append(value))
        for part in tower.modules() if isinstance(part, Attention)
    ]  # fmt: skip
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def check_model(model: nn.Module) -> ViT | ConvTower:
    """The image tower. Raises UsageError for a model without heat maps."""
    if not isinstance(model, CLIP) or isinstance(model, CoCa):
        raise UsageError(f"heat maps: expected a CLIP model, got {type(model).__name__}")
    if model.image.config.pool not in ("token", "mean", "map", "attention"):
        raise UsageError(f"heat maps: expected pooling by token, mean or map (got {model.image.config.pool!r})")
    if any(isinstance(part, Frozen) for part in model.modules()):
        raise UsageError("heat maps need gradients: expected the model as loaded, not prepared for inference")
    return model.image


class HeatMaps:
    """Writes a PNG for each image: the image, then a map for each of its best labels. `model`: a CLIP as loaded, not
    prepared for inference. `texts`, `labels`: those of the classifier. `max_tokens`: images keep their aspect ratio.

    Raises UsageError for a model without heat maps or a folder that cannot be written."""

    def __init__(
        self, model: nn.Module, record: Preprocessing, labels: Sequence[str], texts: Float[Tensor, "C D"],
        folder: str | Path, top: int = 3, max_tokens: int | None = None, outputs: Outputs | None = None,
    ):  # fmt: skip
        self.patch = check_model(model).config.patch
        self.model, self.record, self.texts, self.folder = model, record, texts.float(), Path(folder)
        self.places = {label: place for place, label in enumerate(labels)}
        self.top, self.max_tokens = top, max_tokens
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise self._refusal(error) from None
        self.outputs = outputs or Outputs()

    def write(self, file: str | Path, result: dict[str, Any]) -> Path:
        """Write the maps of one image, best label first. `result`: from `classify`. Raises ImageError, also for a
        foreign file in their place, and UsageError if the file cannot be written."""
        image, record = read_image(file), self.record
        if self.max_tokens is not None:
            record = native_record(image, record, self.patch, self.max_tokens, str(file))
        best = result["scores"][: self.top]
        chosen = [self.places[score["label"]] for score in best]
        maps = relevance(self.model, preprocess(image, record)[None], self.texts, chosen)[0].cpu()
        image.thumbnail((TILE, TILE), Image.Resampling.LANCZOS)
        titles = [Path(file).name, *(f"{score['score']:.4f}  {score['label']}" for score in best)]
        tiles = [overlay(image, one, record, self.patch, title)
                 for one, title in zip([torch.zeros_like(maps[0]), *maps], titles, strict=True)]  # fmt: skip
        path = self.folder / file_name(file)
        try:
            self.outputs.claim(path)
        except UsageError as error:
            raise ImageError(str(error)) from None
        try:
            write_output(path, contact_sheet(tiles, ACROSS))
        except OSError as error:
            raise self._refusal(error) from None
        return path

    def _refusal(self, error: OSError) -> UsageError:
        return UsageError(f"{self.folder}: cannot be written ({error.strerror})")


def without_heat_maps(files: Sequence[str], folder: str | Path) -> list[str]:
    """Files without the heat maps of an earlier run in `folder`."""
    place = os.path.abspath(folder)
    return [f for f in files if not MADE.search(f) or os.path.dirname(os.path.abspath(f)) != place]


def file_name(file: str | Path) -> str:
    """File name of one image's maps, valid on any file system and distinct for equal names in two folders."""
    path = Path(file)
    digest = hashlib.sha256(str(path.absolute()).encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{_safe(path.stem)}-{digest}.heatmap.png"


def _safe(text: str) -> str:
    """Letters and digits of any script, at most NAME bytes."""
    clean = re.sub(r"[^\w.-]+", "_", text.encode("utf-8", "replace").decode())
    return clean.encode()[:NAME].decode(errors="ignore").strip("._") or "_"
