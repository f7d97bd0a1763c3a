"""Vectors of images and texts, of a contrastive model or a vision transformer."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.errors import TextError
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.tokens.text.tokenizer import Tokenizer, texts_of

TOKENS = 640  # per batch on a CPU: activations stay in its cache


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the block: without dropout, and batch norms keep their statistics. Then each part has its own
    mode again, since a caller that trains may hold some in eval mode."""
    training = [part for part in model.modules() if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


@torch.inference_mode()
def text_features(
    model: CLIP, tokenizer: Tokenizer, texts: Iterable[str], batch_size: int = 256, cut: list[int] | None = None
) -> Float[Tensor, "N D"]:
    """Unit vectors of texts, in order, on the model's device. Repeated texts are encoded once.

    Texts are batched by length and padded to the longest only, if padding does not change the vectors. Raises
    TextError; warns once with TextCut of truncated texts, or adds to `cut` how many tokens each distinct text lost."""
    if not (texts := texts_of(texts, "texts")):
        raise TextError("texts: expected at least one")
    rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    context = model.config.text.context
    longest = tokenizer.length_in(context)
    free = padding_is_free(model.config)
    ids, mask, lost = tokenizer.batch(list(rows), longest, pad_to_length=not free, warn=cut is None)
    if cut is not None:
        cut += lost
    lengths = mask.sum(1) if free else torch.full((len(ids),), ids.shape[1], device=ids.device)
    order, device, vectors, done = lengths.argsort(descending=True), model.logit_scale.device, None, 0
    while done < len(order):
        width = int(lengths[order[done]])
        part = order[done : done + min(batch_size, max(1, TOKENS // width) if device.type == "cpu" else batch_size)]
        with evaluating(model), torch.autocast(device.type, enabled=False):  # a caller's
            found = model.encode_text(ids[part, :width].to(device), mask[part, :width].to(device))
        if vectors is None:  # one tensor: many small ones would fragment the heap
            vectors = found.new_empty(len(rows), found.shape[1])
        vectors[part.to(device)] = found
        done += len(part)
    return vectors if len(rows) == len(texts) else vectors[[rows[text] for text in texts]]


@torch.inference_mode()
def image_features(
    model: nn.Module, pixels: Float[Tensor, "B 3 H W"] | Sequence[Float[Tensor, "3 _ _"]]
) -> Float[Tensor, "B D"]:
    """CLIP's unit vectors, or a ViT's pooled output, on the model's device and in its number type. Images of several
    sizes are a sequence."""
    encode = model.encode_image if isinstance(model, CLIP) else model.features
    like = next(model.parameters())
    with evaluating(model), torch.autocast(like.device.type, enabled=False):  # a caller's
        return encode(pixels.to(like) if isinstance(pixels, Tensor) else [one.to(like) for one in pixels])


def vector_width(model: nn.Module) -> int:
    """Width of `image_features`."""
    return model.config.embed if isinstance(model, CLIP) else model.config.pooled_width


def padding_is_free(config: CLIPConfig) -> bool:
    """True if padding does not change a text's vector. SigLIP pools the last position, which attends to all padding;
    CoCa places its class token itself."""
    if config.text_pool == "eos":
        return config.text.causal or config.text_valid
    return config.text_pool == "class" or (config.text_pool == "first" and config.text_valid)
