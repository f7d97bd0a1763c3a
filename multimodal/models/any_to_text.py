"""Any input to text: images and sound as rows among the tokens of one decoder (LLaVA, Liu et al. 2023; Qwen2-Audio, Chu
et al. 2024), or as the source of its cross-attention (Reka, Ormazabal et al. 2024)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.connector import Connector, ConnectorConfig
from multimodal.blocks.masks import padding
from multimodal.blocks.positions import sinusoids
from multimodal.models.conformer import ConformerEncoder, ConformerEncoderConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViT, ViTConfig
from multimodal.models.whisper import WhisperEncoder, WhisperEncoderConfig
from multimodal.tokens.image.tiles import kept_patches


@dataclass(frozen=True)
class AnyToTextConfig:
    """`placeholders`: ids of `decoder` that stand for one row of an image or of sound each; with a decoder that has
    cross-attention they are not replaced, and the rows are its source.

    `image_layers`: number of the ViT's blocks that run, without its final norm (LLaVA); None: all, with it.
    `image_prefix`: the connector takes the class token and registers too. `image_newline`: a learned row ends each row
    of patches of an image in tiles (LLaVA-NeXT). `audio_masked`: sound does not attend to the padding of its window
    (Qwen2-Audio)."""

    decoder: TextConfig
    placeholders: tuple[int, ...]
    image: ViTConfig | None = None
    image_connector: ConnectorConfig | None = None
    image_layers: int | None = None
    image_prefix: bool = False
    image_newline: bool = False
    audio: WhisperEncoderConfig | ConformerEncoderConfig | None = None
    audio_connector: ConnectorConfig | None = None
    audio_masked: bool = False

    def __post_init__(self) -> None:
        for kind in ("image", "audio"):
            if (getattr(self, kind) is None) != (getattr(self, f"{kind}_connector") is None):
                raise ValueError(f"{kind}: expected an encoder and its connector, or neither")
        if wrong := [i for i in self.placeholders if not 0 <= i < self.decoder.vocabulary]:
            raise ValueError(f"placeholder {wrong[0]} is outside the vocabulary of {self.decoder.vocabulary}")
        if self.image_layers is not None and not 0 < self.image_layers <= self.image.stack.layers:
            raise ValueError(f"image_layers must be in 1..{self.image.stack.layers} (got {self.image_layers})")

    @property
    def crosses(self) -> bool:
        """True if media are the source of cross-attention."""
        return self.decoder.stack.block.cross is not None


class AnyToText(nn.Module):
    """Image and audio encoders, a connector each, and a causal text decoder."""

    def __init__(self, config: AnyToTextConfig):
        super().__init__()
        self.config = config
        self.image = ViT(config.image) if config.image else None
        self.image_connector = Connector(config.image_connector) if config.image_connector else None
        self.newline = (
            nn.Parameter(torch.empty(config.decoder.width).normal_(std=0.02)) if config.image_newline else None
        )
        whisper = isinstance(config.audio, WhisperEncoderConfig)
        self.audio = (WhisperEncoder if whisper else ConformerEncoder)(config.audio) if config.audio else None
        self.audio_connector = Connector(config.audio_connector) if config.audio_connector else None
        self.decoder = TextTransformer(config.decoder)

    def encode_images(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B M D"]:
        """Rows of each image. Raises ValueError without an image encoder."""
        return self.image_connector(*self.image_states(images))

    def image_states(
        self, images: Float[Tensor, "B 3 height width"]
    ) -> tuple[Float[Tensor, "B N S"], tuple[int, int]]:  # fmt: skip
        """States that the connector takes, and the grid of patches."""
        if self.image is None:
            raise ValueError("the model has no image encoder")
        x = self.image.tokens(images, layers=self.config.image_layers)
        x = x if self.config.image_prefix else x[:, self.config.image.prefix :]
        patch = self.config.image.patch
        return x, (images.shape[-2] // patch, images.shape[-1] // patch)

    def assemble(
        self, rows: Float[Tensor, "N M D"], grid: tuple[int, int], size: tuple[int, int], most: int = 9
    ) -> Float[Tensor, "R D"]:
        """Rows of one image from those of its overview and tiles (see `Tiled`), in their order. With a newline the
        padding goes, and more than `most` tiles' patches become fewer (LLaVA-OneVision, Li et al. 2024)."""
        if self.newline is None:
            return rows.flatten(0, 1)
        overview, end = rows[0], self.newline.to(rows.dtype)[None]
        if grid == (0, 0):
            return torch.cat([overview, end])
        side = math.isqrt(rows.shape[1])
        (down, across), kept = kept_patches(size, grid, side, most)
        tiles = rows[1:].unflatten(1, (side, side)).unflatten(0, grid)  # tile rows, columns, patch rows, columns, D
        x = tiles.permute(4, 0, 2, 1, 3).flatten(3).flatten(1, 2)
        x = x[:, down : x.shape[1] - down, across : x.shape[2] - across]
        if x.shape[1:] != kept:
            x = F.interpolate(x[None], kept, mode="bilinear")[0]
        lines = torch.cat([x.permute(1, 2, 0), end.expand(kept[0], 1, -1)], 1)
        return torch.cat([overview, lines.flatten(0, 1)])

    def assemble_frames(self, rows: Float[Tensor, "N M D"]) -> Float[Tensor, "R D"]:
        """Rows of one video from those of its frames. With a newline they are halved down and across, and one newline
        ends them (LLaVA-OneVision)."""
        if self.newline is None:
            return rows.flatten(0, 1)
        side = math.isqrt(rows.shape[1])
        x = rows.mT.unflatten(2, (side, side))
        x = F.interpolate(x, (-(-side // 2), -(-side // 2)), mode="bilinear")
        return torch.cat([x.flatten(2).mT.flatten(0, 1), self.newline.to(rows.dtype)[None]])

    def encode_audio(self, features: Float[Tensor, "B _ _"], lengths: Int[Tensor, "B"]) -> list[Float[Tensor, "_ D"]]:
        """Rows of each recording. `features`: log-mel [B bands F] for Whisper's encoder, filterbank [B F bands] for a
        Conformer; `lengths`: frames that are not padding. Raises ValueError without an audio encoder."""
        return self.connect_audio(*self.audio_states(features, lengths))

    def audio_states(
        self, features: Float[Tensor, "B _ _"], lengths: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B T S"], Int[Tensor, "B"]]:  # fmt: skip
        """States of the encoder and their number in each recording."""
        if self.audio is None:
            raise ValueError("the model has no audio encoder")
        if isinstance(self.audio, ConformerEncoder):
            return self.audio(features, lengths)
        counts = (lengths + 1) // 2
        masked = self.config.audio_masked and bool((lengths < features.shape[-1]).any())
        valid = padding(counts, (features.shape[-1] + 1) // 2) if masked else None
        return self.audio(features, valid=valid), counts

    def connect_audio(self, x: Float[Tensor, "B T S"], counts: Int[Tensor, "B"]) -> list[Float[Tensor, "_ D"]]:
        """Rows of each recording from its states: neighbours merge, so each ends where it ends alone."""
        return [self.audio_connector(row[None, :n])[0] for row, n in zip(x, counts.tolist(), strict=True)]

    def embed(self, ids: Int[Tensor, "B T"], media: Sequence[Float[Tensor, "_ D"]]) -> Float[Tensor, "B T D"]:
        """Token embeddings, with each row's `media` (its rows in order) in the places of its placeholders. Raises
        ValueError if their numbers differ; in training on a GPU, where the check would wait for the device, such a row
        becomes NaN."""
        x = self.decoder.embed(ids)
        places = self.places(ids)
        if ids.device.type != "cpu" and self.training:
            counts = torch.tensor([len(rows) for rows in media]).to(ids.device, non_blocking=True)
            x = x.masked_fill((places.sum(1) != counts)[:, None, None], torch.nan)
            return x.masked_scatter(places[..., None], torch.cat(list(media)).to(x.dtype))
        for row, (count, rows) in enumerate(zip(places.sum(1).tolist(), media, strict=True)):
            if count != len(rows):
                raise ValueError(f"row {row} has {count} placeholders for {len(rows)} rows of media")
        if not any(map(len, media)):
            return x
        return x.masked_scatter(places[..., None], torch.cat(list(media)).to(x.dtype))

    def places(self, ids: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """True where an id is a placeholder."""
        return reduce(or_, (ids == one for one in self.config.placeholders), torch.zeros_like(ids, dtype=torch.bool))

    def source(self, media: Sequence[Float[Tensor, "_ D"]]) -> tuple[Float[Tensor, "B S D"], Bool[Tensor, "B S"]]:
        """The source of cross-attention: each row's media with sinusoidal positions, padded, and what is not padding. A
        row without media attends to one vector of zeros."""
        lengths = torch.tensor([max(len(rows), 1) for rows in media], device=media[0].device)
        x = nn.utils.rnn.pad_sequence([r if len(r) else r.new_zeros(1, r.shape[1]) for r in media], batch_first=True)
        added = sinusoids(torch.arange(x.shape[1], device=x.device), x.shape[2]).to(x.dtype)
        filled = torch.tensor([len(rows) > 0 for rows in media], device=x.device)
        return torch.where(filled[:, None, None], x + added, x), padding(lengths, x.shape[1])

    def forward(
        self, ids: Int[Tensor, "B T"], media: Sequence[Float[Tensor, "_ D"]], valid: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T V"]:
        """Next-token logits. `valid` marks real tokens of right-padded rows."""
        if self.config.crosses:
            return self.decoder(ids, *self.source(media), valid)
        return self.decoder(ids, valid=valid, embedded=self.embed(ids, media))
