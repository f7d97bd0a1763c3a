"""Where a captioner looked for each word: its attention over the patches, laid over the picture."""

import io
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from multimodal.blocks.capture import capture_attention
from multimodal.blocks.stack import Block
from multimodal.models.coca import CoCa
from multimodal.system.outputs import write_output
from multimodal.tasks.caption.caption import CaptionWriter, Written
from multimodal.tasks.figures import overlay
from multimodal.tokens.image.preprocessing import read_image, to_rgb
from multimodal.tokens.text.tokenizer import Tokenizer

TILE = 320  # pixels of the longer edge of each copy of the picture
ACROSS = 5  # copies in a row


def attention_maps(
    network: nn.Module, pixels: Float[Tensor, "3 H W"], ids: Sequence[int]
) -> Float[Tensor, "T rows columns"]:
    """For each of `ids` but the first, how much of the attention went to each patch at the position that chose it (at
    its own position the decoder already looks for what comes next): the mean over heads and layers."""
    return attention_by_head(network, pixels, ids).mean((0, 1))


@torch.inference_mode()
def attention_by_head(
    network: nn.Module, pixels: Float[Tensor, "3 H W"], ids: Sequence[int]
) -> Float[Tensor, "L heads T rows columns"]:
    """As `attention_maps`, of each layer and head. Through attention pooling (CoCa) by the product of both attentions,
    the pool's as its heads' mean; of a decoder that has the image in front of its text (GIT) what the text's positions
    give to the image's.

    The attention is captured in a pass of its own over the whole caption."""
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
    """The words of a caption, and which of `ids` each is made of."""
    words, owners = tokenizer.decode(ids).split(), {}
    for place in range(len(ids)):
        count = len(tokenizer.decode(ids[: place + 1]).split())
        owners.setdefault(min(max(count, 1), len(words)) - 1, []).append(place)
    return [(word, owners[number]) for number, word in enumerate(words) if number in owners]


class Regions:
    """Writes for each picture a PNG of its best caption: the picture alone, then for each word a copy with what it got
    of the attention above the mean of all words. `places`: the file of each picture."""

    def __init__(self, write: CaptionWriter, places: Mapping[str, Path]):
        self.write, self.places = write, places
        self.record, self.tokenizer = write.checkpoint.preprocessing, write.checkpoint.tokenizer

    def draw(self, file: str, written: Written) -> None:
        """Raises ImageError, OSError."""
        image = to_rgb(read_image(file))
        image.thumbnail((TILE, TILE), Image.Resampling.BICUBIC)
        network, best = self.write.network, written.captions[0]
        ids = [*self.write.prompt, *best.ids]
        patch = network.image.config.patch
        grid = [edge // patch for edge in written.pixels.shape[-2:]]
        maps = attention_maps(network, written.pixels, ids) if len(ids) > 1 else torch.zeros(0, *grid)
        words = words_of(self.tokenizer, ids[1:])
        maps = maps - maps.mean(0) if len(words) > 1 else maps  # what is looked at for every word says nothing of one
        tiles = [overlay(image, torch.zeros(*grid), self.record, patch, best.text)]
        for word, places in words:
            tiles.append(overlay(image, maps[places].mean(0), self.record, patch, word))
        data = io.BytesIO()
        _sheet(tiles).save(data, "PNG")
        write_output(self.places[file], data.getvalue())


def _sheet(tiles: list[Image.Image]) -> Image.Image:
    """Pictures in rows, on white."""
    width, height = max(tile.width for tile in tiles) + 4, max(tile.height for tile in tiles) + 4
    across = min(ACROSS, len(tiles))
    sheet = Image.new("RGB", (across * width, -(-len(tiles) // across) * height), "white")
    for number, tile in enumerate(tiles):
        sheet.paste(tile, (number % across * width, number // across * height))
    return sheet
