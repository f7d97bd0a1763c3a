"""What attention maps and learned tables say in numbers: mean distances, filters, similarity of positions."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal.errors import UsageError
from multimodal.models.speech import SpeechEncoder
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import waves
from multimodal.models.vit import ViT
from multimodal.tasks.inspect.maps import Axis, Seen
from multimodal.tokens.audio.log_mel import HOP, RATE

FILTERS = 28  # as many principal components as figure 7 of the ViT paper has
MOST_POSITIONS = 512  # of a text that are compared
ENCODER_STEP = 2 * HOP / RATE  # seconds between positions of a Whisper encoder


class Chosen(NamedTuple):
    """Some layers and heads, by their numbers from 0. `label`: what a mean of several is called."""

    weights: Float[Tensor, "L H T S"]
    layers: list[int]
    heads: list[int]
    label: str | None = None


def chosen(weights: Float[Tensor, "L H T S"], layer: int | str | None, head: int | None) -> Chosen:
    """`layer` None: the last one; "all". `head` None: all. Raises UsageError with how many there are."""
    layers, heads = weights.shape[:2]
    for flag, number, count in (("layer", layer, layers), ("head", head, heads)):
        if isinstance(number, int) and not 0 <= number < count:
            raise UsageError(f"--{flag} {number}: the model has {count} {flag}s (0 to {count - 1})")
    rows = list(range(layers)) if layer == "all" else [layers - 1 if layer is None else int(layer)]
    columns = list(range(heads)) if head is None else [head]
    return Chosen(weights[rows][:, columns], rows, columns)


def over_picture(weights: Float[Tensor, "L H T S"], axis: Axis, class_token: bool) -> Float[Tensor, "L H rows columns"]:
    """What each patch gets: of the class token's attention where there is one, else of all patches' on average."""
    queries = weights[..., :1, :] if class_token else weights[..., axis.prefix :, :]
    return queries.mean(-2)[..., axis.prefix :].unflatten(-1, axis.grid)


def mean_distances(seen: Seen) -> Float[Tensor, "L H"]:
    """Mean distance between a query and what it attends to, by its attention, in the unit of the axis, pixels for a
    picture (Dosovitskiy et al. 2021, figure 7 right). Class tokens and registers, which are nowhere, are left out."""
    axis, weights = seen.keys, seen.weights[..., seen.keys.prefix :, seen.keys.prefix :]
    if axis.grid is None:
        place = torch.arange(weights.shape[-1], dtype=torch.float)[:, None]
    else:
        place = torch.cartesian_prod(*(torch.arange(edge, dtype=torch.float) for edge in axis.grid)).view(-1, 2)
    distance = torch.cdist(place, place, compute_mode="donot_use_mm_for_euclid_dist") * axis.step
    total = weights.sum(-1).clamp(min=1e-9)  # what the tokens before the patches do not get
    return ((weights * distance).sum(-1) / total).mean(-1)


def filters(tower: ViT) -> tuple[Float[Tensor, "N height width C"], Float[Tensor, "N"]]:
    """Principal components of the patch embedding's filters (figure 7 left), and each one's share of their variance."""
    weight = tower.embed.weight.detach().float().cpu()
    flat = weight.flatten(1)
    _, sizes, components = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    count = min(FILTERS, len(components))
    shares = sizes.square() / sizes.square().sum().clamp(min=1e-30)
    return components[:count].unflatten(1, weight.shape[1:]).permute(0, 2, 3, 1), shares[:count]


def position_similarity(model: nn.Module) -> tuple[Float[Tensor, "T T"], Axis]:
    """Cosines between the position embeddings (figure 7 centre), of pictures those of patches; of a long text evenly
    chosen ones. Raises UsageError for a model that adds none."""
    if isinstance(model, ViT):
        own = model.config.prefix if model.config.positions_on_prefix else 0
        table, axis = model.positions[own:], Axis("patch", (), model.config.patch, model.config.grid)
    elif isinstance(model, SpeechEncoder):
        table, axis = model.positions, Axis("second", step=ENCODER_STEP)
    elif isinstance(model, TextTransformer) and model.config.positions.kind in ("learned", "sinusoidal"):
        table, axis = _of_text(model)
    else:
        kind = model.config.positions.kind if isinstance(model, TextTransformer) else "none or relative"
        raise UsageError(f"--what positions: this model adds no position embeddings (positions: {kind})")
    vectors = F.normalize(table.detach().float().cpu(), dim=-1)
    return vectors @ vectors.T, axis


def _of_text(model: TextTransformer) -> tuple[Float[Tensor, "T D"], Axis]:
    config = model.config
    stride = -(-config.context // MOST_POSITIONS)
    index: Int[Tensor, "T"] = torch.arange(0, config.context, stride)
    if model.positions is not None:
        table = model.positions[index.to(model.positions.device)]
    else:
        table = waves(config.positions, index, config.embed_width or config.width)
    return table, Axis("token", step=float(stride))


def entropies(weights: Float[Tensor, "L H T S"]) -> Float[Tensor, "L H"]:
    """Mean entropy of the queries' attention, in nats: 0 looks at one key, ln S at all alike."""
    return -(weights * weights.clamp(min=1e-12).log()).sum(-1).mean(-1)
