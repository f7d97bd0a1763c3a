"""Attention of a captioner over the image, for each word."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from multimodal.blocks.capture import capture_attention
from multimodal.blocks.stack import Block
from multimodal.inference.modules import inference_mode
from multimodal.models.coca import CoCa
from multimodal.system.outputs import write_output
from multimodal.tasks.caption.caption import CaptionWriter, GeneratedCaptions
from multimodal.tasks.figures import contact_sheet, overlay
from multimodal.tokens.image.reading import read_image, to_rgb
from multimodal.tokens.text.tokenizer import Tokenizer

TILE = 320  # pixels of the longer edge of each copy
ACROSS = 5  # copies per row


@inference_mode()
def attention_by_head(
    network: nn.Module, pixels: Float[Tensor, "3 H W"], ids: Sequence[int]
) -> Float[Tensor, "L heads T rows columns"]:
    """Attention of each layer and head to each patch when predicting each of `ids` but the first, at the position
    before the token, captured in a pass over the whole caption.

    CoCa's pool is included as the product of both attentions, with the mean over the pool's heads; in GIT it is the
    attention of text positions to image positions."""
    device = next(network.parameters()).device
    patch = network.image.config.patch
    rows, columns = (edge // patch for edge in pixels.shape[-2:])
    pool = network.image_pool if isinstance(network, CoCa) else None
    with capture_attention() if pool is not None else nullcontext([]) as seen:
        source = network.encode(pixels[None].to(device))
    pooled = [weights for module, weights in seen if module is pool.attention]
    step, cache = network.decoding(source)
    with capture_attention() as seen:
        step(torch.tensor([ids[:-1]], device=device), cache)
    crossing = {id(block.cross) for block in network.modules() if isinstance(block, Block) and block.cross is not None}
    crossed = [weights for module, weights in seen if id(module) in crossing]
    if not crossed:
        crossed = [weights[:, :, source.shape[1] :, : source.shape[1]] for _, weights in seen]
    maps = torch.stack([weights.float()[0] for weights in crossed])  # L H T S
    if pooled:
        maps = maps @ pooled[0].float().mean(1)[0, -maps.shape[-1] :]
    return maps[..., -rows * columns :].unflatten(-1, (rows, columns)).cpu()


def words_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Words of a caption, with the indices of their tokens."""
    words, owners = tokenizer.decode(ids).split(), {}
    for place in range(len(ids)):
        count = len(tokenizer.decode(ids[: place + 1]).split())
        owners.setdefault(min(max(count, 1), len(words)) - 1, []).append(place)
    return [(word, owners[number]) for number, word in enumerate(words) if number in owners]


class RegionPlots:
    """Writes a PNG for the best caption of each image: the image, then for each word a copy with its attention above
    the mean of all words. `paths`: output file of each image."""

    def __init__(self, write: CaptionWriter, paths: Mapping[str, Path]):
        self.write, self.paths = write, paths
        self.record, self.tokenizer = write.checkpoint.preprocessing, write.checkpoint.tokenizer

    def draw(self, file: str, written: GeneratedCaptions) -> None:
        """Raises ImageError, OSError."""
        image = to_rgb(read_image(file))
        image.thumbnail((TILE, TILE), Image.Resampling.BICUBIC)
        network, best = self.write.network, written.captions[0]
        ids = [*self.write.prompt, *best.ids]
        patch = network.image.config.patch
        grid = [edge // patch for edge in written.pixels.shape[-2:]]
        maps = torch.zeros(0, *grid)
        if len(ids) > 1:
            maps = attention_by_head(network, written.pixels, ids).mean((0, 1))
        words = words_of(self.tokenizer, ids[1:])
        maps = maps - maps.mean(0) if len(words) > 1 else maps  # attention shared by all words says nothing about one
        tiles = [overlay(image, torch.zeros(*grid), self.record, patch, best.text)]
        for word, tokens in words:
            tiles.append(overlay(image, maps[tokens].mean(0), self.record, patch, word))
        write_output(self.paths[file], contact_sheet(tiles, ACROSS))
