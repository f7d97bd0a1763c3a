"""Where in a picture a label was seen: relevance of each patch, and the picture with that laid over it."""

import hashlib
import io
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from PIL import Image
from torch import Tensor, nn

from multimodal.blocks.attention import Attention
from multimodal.blocks.frozen import Frozen
from multimodal.errors import ImageError, UsageError
from multimodal.models.clip import CLIP
from multimodal.models.coca import CoCa
from multimodal.models.vit import ViT
from multimodal.tasks.native import native_record
from multimodal.tokens.image import Preprocessing, placement, preprocess, read_image, to_rgb
from multimodal.tokens.outputs import Outputs, write_output

STRONGEST = 0.65  # opacity of the hottest place
REDDEST = 0.9  # of the colours, whose end is nearly black
SMALLEST, LARGEST = 320, 1600  # pixels of the longer edge of what is drawn
LETTER = 7  # pixels of width of a letter of the caption, about
LINES = 3  # of the caption
MADE = re.compile(r"-[0-9a-f]{8}\.[1-9][0-9]*-[^/]+\.jpg$")  # `file_name`
NAME = 60  # bytes of a label, and of a picture's name, in a file's name


def relevance(
    model: nn.Module, pixels: Float[Tensor, "B 3 H W"], texts: Float[Tensor, "C D"], chosen: Sequence[int] | None = None
) -> Float[Tensor, "B K rows columns"]:
    """What each patch says for each text, or for those `chosen` (indices), against the other ones: above zero for it,
    below against it, in a scale of its own for each picture and text.

    For a text t the score is z·(t - Σ w t'), with the picture's unit vector z and the softmax w of the scores of the
    other texts t'; of a single text, z·t. A patch's relevance is Σ A∘∂score/∂A over all layers, heads and queries
    that attend to it: gradient-weighted attention (Chefer et al. 2021, equation 5), but with its sign, and without the
    product over layers. As ∂score/∂A = G Vᵀ, with G the gradient of the attention's output and V the values, that is
    Σ V·∂score/∂V, and no attention need be made anew or kept. What the pool takes from a patch without attention,
    x·∂score/∂x, is added. Of the methods that were measured this points best with every pool.

    `texts`: unit vectors (`ZeroShotClassifier.weights`). Raises UsageError for a model without maps."""
    tower = check_model(model)
    rows, columns = (edge // tower.config.patch for edge in pixels.shape[-2:])
    with torch.inference_mode(False), torch.enable_grad(), _values(tower) as values:
        device = next(model.parameters()).device
        pixels, texts = (x.detach().to(device).clone() for x in (pixels, texts))  # may be inference tensors
        stem = tower.stem(pixels).detach().requires_grad_()  # so that frozen weights have a gradient too
        tokens = tower.stack(stem)
        z = model.project_image(tower.pooled(tokens))
        sources = [*values, tokens] if tower.config.pool != "map" else values
        maps = []
        for text in range(len(texts)) if chosen is None else chosen:
            score = (z * _apart(model, z.detach(), texts, text)).sum()
            gradients = torch.autograd.grad(score, sources, retain_graph=True)
            each = [(x * g).sum(-1)[:, -rows * columns :] for x, g in zip(sources, gradients, strict=True)]
            maps.append(torch.stack(each).sum(0).detach().unflatten(1, (rows, columns)))
    return torch.stack(maps, 1)


def _apart(model: CLIP, z: Float[Tensor, "B D"], texts: Float[Tensor, "C D"], text: int) -> Float[Tensor, "B D"]:
    """The text less what the others that fit the picture have in common with it."""
    others = torch.cat([texts[:text], texts[text + 1 :]])
    return texts[text] - model.logits(z, others).detach().softmax(-1) @ others


@contextmanager
def _values(tower: ViT) -> Iterator[list[Float[Tensor, "B N _"]]]:
    """The values of every attention that runs inside, in their order."""
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


def check_model(model: nn.Module) -> ViT:
    """The part that sees. Raises UsageError for a model that has no heat maps."""
    if not isinstance(model, CLIP) or isinstance(model, CoCa):
        raise UsageError(f"{type(model).__name__}: heat maps need a clip, whose image and text towers end in one space")
    if model.image.config.pool not in ("token", "mean", "map"):
        raise UsageError(f"heat maps need pooling by token, mean or map (this model: {model.image.config.pool!r})")
    if any(isinstance(part, Frozen) for part in model.modules()):
        raise UsageError("heat maps need gradients, thus the model as it was loaded, not one prepared for inference")
    return model.image


def heat(
    relevances: Float[Tensor, "rows columns"], size: tuple[int, int], drawn: tuple[int, int], record: Preprocessing,
    patch: int,
) -> Float32[np.ndarray, "height width"]:  # fmt: skip
    """0..1 for each pixel of a picture of `size` (width, height) drawn at another, by what speaks for the label in
    the patch there (bilinear between the centres of patches), the highest 1; NaN where the model did not look."""
    seen_w, seen_h, left, top = placement(*size, record)
    rows, columns = relevances.shape
    across = _between(drawn[0], seen_w, left, patch, columns)
    down = _between(drawn[1], seen_h, top, patch, rows)
    positive = relevances.clamp(min=0).double().numpy()
    return (down @ (positive / max(positive.max(), 1e-30)) @ across.T).astype(np.float32)


def _between(drawn: int, seen: int, start: int, patch: int, count: int) -> Float[np.ndarray, "drawn count"]:
    """Shares of `count` patches in each pixel of an edge, which the model saw `seen` pixels long, from `start` on."""
    place = ((np.arange(drawn) + 0.5) * seen / drawn + start) / patch  # in patches
    inside = np.clip(place - 0.5, 0, count - 1)
    shares = np.clip(1 - np.abs(inside[:, None] - np.arange(count)), 0, 1)
    shares[(place < 0) | (place > count)] = np.nan
    return shares


def overlay(
    picture: Image.Image, relevances: Float[Tensor, "rows columns"], record: Preprocessing, patch: int,
    caption: str | None = None,
) -> Image.Image:  # fmt: skip
    """The picture with heat from clear to red where it speaks for the label, dark grey where the model did not look,
    and a caption below. `record`: what the pixels of these relevances were made with."""
    from matplotlib import colormaps

    picture = to_rgb(picture)
    factor = min(LARGEST, max(SMALLEST, *picture.size)) / max(picture.size)
    drawn = tuple(max(1, round(edge * factor)) for edge in picture.size)
    shown = np.asarray(picture.resize(drawn, Image.Resampling.BICUBIC), np.float32)
    hot = heat(relevances, picture.size, drawn, record, patch)
    unseen = np.isnan(hot)[..., None]
    hot = np.nan_to_num(hot)
    opacity = (STRONGEST * np.sqrt(hot))[..., None]  # so that half the heat is seen too
    mixed = shown * (1 - opacity) + 255 * colormaps["turbo"](REDDEST * hot)[..., :3].astype(np.float32) * opacity
    mixed = np.where(unseen, 0.35 * shown.mean(-1, keepdims=True) + 40, mixed)
    pixels = np.clip(mixed + 0.5, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels if caption is None else np.concatenate([pixels, _written(caption, drawn[0])]))


def _written(text: str, width: int) -> UInt8[np.ndarray, "height width 3"]:
    """Lines of text in black on white, in the fonts that have its letters."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from multimodal.tasks.plot import fonts, shown

    wide = sum(ord(sign) > 0x2E7F for sign in text) / max(1, len(text))  # share of letters of double width
    fit = max(8, int(width / (LETTER * (1 + wide))) - 1)
    lines = textwrap.wrap(shown(text), fit, max_lines=LINES, placeholder=" …") or [""]
    figure = Figure(figsize=(width / 100, (8 + 16 * len(lines)) / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    figure.text(4 / width, 0.5, "\n".join(lines), va="center", fontsize=8.5, parse_math=False, fontfamily=fonts(text))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


class HeatMaps:
    """Writes a picture for each of the best labels. `model`: a CLIP as it was loaded, not one prepared for
    inference on a CPU; `texts`, `labels`: those that were compared; `max_tokens`: pictures were taken at their own
    aspect.

    Raises UsageError for a model without maps or a folder that cannot be written."""

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

    def write(self, picture: str | Path, result: dict[str, Any]) -> list[Path]:
        """JPEG files of one image, best label first. `result`: as `classify` returns it. Raises ImageError, also for a
        file in their place that is not ours, and UsageError where a file cannot be written."""
        image, record = read_image(picture), self.record
        if self.max_tokens is not None:
            record = native_record(image, record, self.patch, self.max_tokens, str(picture))
        best = result["scores"][: self.top]
        chosen = [self.places[score["label"]] for score in best]
        maps = relevance(self.model, preprocess(image, record)[None], self.texts, chosen)[0].cpu()
        paths = []
        for number, (score, one) in enumerate(zip(best, maps, strict=True), 1):
            made = overlay(image, one, record, self.patch, f"{score['score']:.4f}  {score['label']}")
            paths.append(self.folder / file_name(picture, number, score["label"]))
            try:
                self.outputs.claim(paths[-1])
            except UsageError as error:
                raise ImageError(str(error)) from None
            file = io.BytesIO()
            made.save(file, "JPEG", quality=92)
            try:
                write_output(paths[-1], file.getvalue())
            except OSError as error:
                raise self._refusal(error) from None
        return paths

    def _refusal(self, error: OSError) -> UsageError:
        return UsageError(f"--heatmap {self.folder}: cannot be written ({error.strerror})")


def without_maps(files: Sequence[str], folder: str | Path) -> list[str]:
    """Less the heat maps that an earlier call left in `folder`."""
    place = os.path.abspath(folder)
    return [f for f in files if not MADE.search(f) or os.path.dirname(os.path.abspath(f)) != place]


def file_name(picture: str | Path, number: int, label: str) -> str:
    """Of one picture and label, in any file system: pictures of one name in two folders get two names."""
    path = Path(picture)
    digest = hashlib.sha256(str(path.absolute()).encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{_safe(path.stem)}-{digest}.{number}-{_safe(label)}.jpg"


def _safe(text: str) -> str:
    """Letters and digits of any script, at most NAME bytes of them."""
    clean = re.sub(r"[^\w.-]+", "_", text.encode("utf-8", "replace").decode())
    return clean.encode()[:NAME].decode(errors="ignore").strip("._") or "_"
