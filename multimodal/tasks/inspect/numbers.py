"""Statistics of attention maps and learned tables: distances, entropies, filters, similarity of positions."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal.errors import UsageError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import sinusoidal_positions
from multimodal.models.vision.tower import ConvTower
from multimodal.models.vit import ViT
from multimodal.models.whisper import WhisperEncoder
from multimodal.tasks.inspect.maps import AttentionMap, Axis
from multimodal.tokens.audio.log_mel import HOP, RATE

FILTERS = 28  # principal components, as in figure 7 of the ViT paper
MOST_POSITIONS = 512  # of a text
ENCODER_STEP = 2 * HOP / RATE  # seconds between positions of a Whisper encoder


class HeadSelection(NamedTuple):
    """Selected layers and heads. `label`: title of a mean of several."""

    weights: Float[Tensor, "L H T S"]
    layers: list[int]
    heads: list[int]
    label: str | None = None


def chosen(weights: Float[Tensor, "L H T S"], layer: int | str | None, head: int | None) -> HeadSelection:
    """Select maps. `layer` None: the last; or "all". `head` None: all. Raises UsageError if out of range."""
    layers, heads = weights.shape[:2]
    for flag, number, count in (("layer", layer, layers), ("head", head, heads)):
        if isinstance(number, int) and not 0 <= number < count:
            raise UsageError(f"must be in [0, {count - 1}] (got {number})", argument=flag)
    rows = list(range(layers)) if layer == "all" else [layers - 1 if layer is None else int(layer)]
    columns = list(range(heads)) if head is None else [head]
    return HeadSelection(weights[rows][:, columns], rows, columns)


def over_image(weights: Float[Tensor, "L H T S"], axis: Axis, class_token: bool) -> Float[Tensor, "L H rows columns"]:
    """Attention to each patch: from the class token if there is one, else the mean over patches."""
    queries = weights[..., :1, :] if class_token else weights[..., axis.prefix :, :]
    return queries.mean(-2)[..., axis.prefix :].unflatten(-1, axis.grid)


def mean_distances(seen: AttentionMap) -> Float[Tensor, "L H"]:
    """Mean distance between queries and keys, weighted by attention, in the unit of the axis; pixels for images
    (Dosovitskiy et al. 2021, figure 7 right). Class tokens and registers have no position and are excluded."""
    axis, weights = seen.keys, seen.weights[..., seen.keys.prefix :, seen.keys.prefix :]
    if axis.grid is None:
        place = torch.arange(weights.shape[-1], dtype=torch.float)[:, None]
    else:
        place = torch.cartesian_prod(*(torch.arange(edge, dtype=torch.float) for edge in axis.grid)).view(-1, 2)
    distance = torch.cdist(place, place, compute_mode="donot_use_mm_for_euclid_dist") * axis.step
    total = weights.sum(-1).clamp(min=1e-9)  # attention to patches only
    return ((weights * distance).sum(-1) / total).mean(-1)


def filters(tower: ViT | ConvTower) -> tuple[Float[Tensor, "N height width C"], Float[Tensor, "N"]]:
    """Principal components of the filters of patches (figure 7 left) or of a first convolution, and their shares of
    the variance."""
    weight = tower.embed.weight.detach().float().cpu()
    flat = weight.flatten(1)
    _, sizes, components = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    count = min(FILTERS, len(components))
    shares = sizes.square() / sizes.square().sum().clamp(min=1e-30)
    return components[:count].unflatten(1, weight.shape[1:]).permute(0, 2, 3, 1), shares[:count]


def position_similarity(model: nn.Module) -> tuple[Float[Tensor, "T T"], Axis]:
    """Cosines between position embeddings (figure 7 centre), for images those of patches, for long texts evenly spaced
    ones. Raises UsageError for a model without position embeddings."""
    if isinstance(model, ViT) and model.positions is not None:
        table, axis = (
            model.positions[model.config.positioned :],
            Axis("patch", (), model.config.patch, model.config.grid),
        )
    elif isinstance(model, WhisperEncoder):
        table, axis = model.positions, Axis("second", step=ENCODER_STEP)
    elif isinstance(model, TextTransformer) and model.config.positions.kind in ("learned", "sinusoidal"):
        table, axis = _of_text(model)
    else:
        kind = model.config.positions.kind if isinstance(model, TextTransformer) else "none or relative"
        raise UsageError(f"positions: the model has no position embeddings (positions: {kind})", argument="what")
    vectors = F.normalize(table.detach().float().cpu(), dim=-1)
    return vectors @ vectors.T, axis


def _of_text(model: TextTransformer) -> tuple[Float[Tensor, "T D"], Axis]:
    config = model.config
    stride = -(-config.context // MOST_POSITIONS)
    index: Int[Tensor, "T"] = torch.arange(0, config.context, stride)
    if model.positions is not None:
        table = model.positions[index.to(model.positions.device)]
    else:
        table = sinusoidal_positions(config.positions, index, config.embed_width or config.width)
    return table, Axis("token", step=float(stride))


def entropies(weights: Float[Tensor, "L H T S"]) -> Float[Tensor, "L H"]:
    """Mean entropy of attention in nats: 0 for a single key, ln S for uniform attention."""
    return -(weights * weights.clamp(min=1e-12).log()).sum(-1).mean(-1)
