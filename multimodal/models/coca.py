"""CoCa: contrastive captioner (Yu et al. 2022) as built by open_clip: an image encoder and two text stacks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.blocks.cache import Cache
from multimodal.blocks.masks import causal, key_mask
from multimodal.blocks.stack import Stack, StackConfig
from multimodal.models.captioner import Decoding
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.vit import ViTConfig

Images = Float[Tensor, "B 3 height width"] | Sequence[Float[Tensor, "3 _ _"]]


@dataclass(frozen=True, kw_only=True)
class CoCaConfig(CLIPConfig):
    """`queries`: image tokens from attention pooling with `pool_heads` heads; 0: the encoder's own tokens. `image.pool`
    pools them for contrast; the decoder sees all but the first."""

    image: ViTConfig = field(kw_only=False)
    decoder: StackConfig
    pad_id: int
    queries: int
    pool_heads: int


class AttentionPool(nn.Module):
    """Learned queries that attend to normed tokens (Lee et al. 2019)."""

    def __init__(self, queries: int, width: int, source_width: int, heads: int, eps: float):
        super().__init__()
        self.query = nn.Parameter(torch.randn(queries, width))
        self.attention = Attention(AttentionConfig(width, heads, source_width=source_width))
        self.query_norm, self.source_norm = nn.LayerNorm(width), nn.LayerNorm(source_width)  # as open_clip: not `eps`
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(
        self, tokens: Float[Tensor, "B N _"], valid: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B Q D"]:
        query = self.query_norm(self.query).expand(tokens.shape[0], -1, -1)
        mask = None if valid is None else key_mask(valid)
        return self.norm(self.attention(query, self.source_norm(tokens), mask))


class CoCaCache(Cache):
    """The cache of both text stacks, with the ids so far for later masks."""

    def __init__(self, text: int, decoder: int):
        super().__init__(text + decoder)
        self.ids: Int[Tensor, "B T"] | None = None
        self.text, self.decoder = Cache(0), Cache(0)
        for part, own in ((self.text, slice(text)), (self.decoder, slice(text, None))):
            part.self_attention, part.cross_attention = self.self_attention[own], self.cross_attention[own]

    def reorder_rows(self, rows: Int[Tensor, "B"]) -> None:
        super().reorder_rows(rows)
        self.ids = None if self.ids is None else self.ids[rows]


class CoCa(CLIP):
    """CLIP with attention pooling and a text decoder."""

    def __init__(self, config: CoCaConfig):
        super().__init__(config)
        eps = config.image.stack.block.norm_eps
        sizes = config.embed, config.image.width, config.pool_heads, eps
        self.image_pool = AttentionPool(config.queries, *sizes) if config.queries else None
        if config.queries:
            self.image_project = nn.Linear(config.embed, config.embed, bias=False)
        # the class token behind a text, and its position
        self.text_class, self.text_class_position = (
            nn.Parameter(torch.empty(config.text.width).normal_(std=0.01)) for _ in range(2)
        )
        self.text_norm = nn.LayerNorm(config.text.width, eps=config.text.stack.block.norm_eps)
        self.decoder = Stack(config.decoder)
        self.words = nn.Linear(config.decoder.block.attention.width, config.text.vocabulary, bias=False)

    @property
    def caption_context(self) -> int:
        return self.config.text.context

    def encode_image(self, images: Images, keep: Tensor | None = None) -> Float[Tensor, "B D"]:
        return self.project_image(self.image.pooled(*self._image_tokens(images, keep)))

    def encode_text(self, ids: Int[Tensor, "B T"], valid: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, "B D"]:
        """Unit vectors. Padding is every `pad_id`; `valid` is not used."""
        return self._texts(ids)[0]

    def encode(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B S _"]:
        """The tokens that the decoder attends to."""
        return self._image_tokens(images)[0][:, 1:]

    def decoding(self, source: Float[Tensor, "P S _"]) -> Decoding:
        def step(ids: Int[Tensor, "B T"], cache: CoCaCache) -> Float[Tensor, "B 1 V"]:
            past = cache.length
            cache.ids = torch.cat([cache.ids[:, :past], ids], 1) if past else ids
            mask = self._mask(cache.ids, ids.shape[1])
            tokens = self.text.stack(self.text.stem(ids, past), mask=mask, cache=cache.text)
            return self.words(self._decoded(tokens, source, cache.decoder)[:, -1:])

        return step, CoCaCache(self.config.text.stack.layers, self.config.decoder.layers)

    def outputs(
        self, images: Float[Tensor, "B 3 height width"], ids: Int[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B D"], Float[Tensor, "B T V"]]:
        """Outputs for training: unit vectors of images and texts, and next-token logits."""
        tokens, _ = self._image_tokens(images)
        texts, words = self._texts(ids)
        captions = self.words(self._decoded(words[:, : ids.shape[1]], tokens[:, 1:]))
        return self.project_image(self.image.pooled(tokens)), texts, captions

    def _image_tokens(
        self, images: Images, keep: Tensor | None = None
    ) -> tuple[Float[Tensor, "B N _"], Bool[Tensor, "B N"] | None]:
        """Tokens and their validity; None: all valid."""
        one_size = isinstance(images, Tensor)
        tokens, valid = (self.image.tokens(images, keep), None) if one_size else self.image.ragged(images)
        return (tokens, valid) if self.image_pool is None else (self.image_pool(tokens, valid), None)

    def _texts(self, ids: Int[Tensor, "B T"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B S _"]]:
        """Unit vectors and tokens. The model pads texts to the whole context, with the class token behind; since that
        sees only the first padding, one is enough."""
        ids = F.pad(ids, (0, int(ids.shape[1] < self.caption_context)), value=self.config.pad_id)
        last = (self.text_class + self.text_class_position).expand(ids.shape[0], 1, -1)
        mask = self._mask(F.pad(ids, (0, 1)), ids.shape[1] + 1)
        tokens = self.text.stack(torch.cat([self.text.stem(ids), last], 1), mask=mask)
        pooled = self.text_norm(tokens[:, -1])
        return F.normalize(pooled if self.text_project is None else self.text_project(pooled), dim=-1), tokens[:, :-1]

    def _mask(self, ids: Int[Tensor, "B S"], queries: int) -> Bool[Tensor, "B 1 T S"]:
        """Causal, without the key behind each padding: open_clip's weights were trained with this off-by-one. So the
        first padding is visible, and the class token sees itself only in a full row."""
        before = F.pad(ids[:, :-1] != self.config.pad_id, (1, 0), value=True)
        return causal(queries, ids.shape[1], ids.device) & key_mask(before)

    def _decoded(
        self, tokens: Float[Tensor, "B T D"], source: Float[Tensor, "P S _"], cache: Cache | None = None
    ) -> Float[Tensor, "B T D"]:
        count = tokens.shape[1]
        mask = causal(count, count + (cache.length if cache else 0), tokens.device) if count > 1 else None
        return self.decoder(tokens, source, mask, cache=cache)
