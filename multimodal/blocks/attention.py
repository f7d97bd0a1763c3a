"""Attention: the one class through which every model of the suite attends."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from multimodal.blocks.cache import KeyValue, LayerCache
from multimodal.blocks.capture import attention_weights, capture, capturing
from multimodal.blocks.layers import make_norm
from multimodal.blocks.masks import LEAST_BLOCK, Causal, Local, merge, query_blocks
from multimodal.blocks.positions import BiasGate, Disentangled, GatedBias, GridTerm, RelativeTerm, ShawTerm


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes of one attention. `scale` None: 1/√head_width; T5 uses 1.0."""

    width: int
    heads: int
    kv_heads: int | None = None  # None: as many as heads; 1: multi-query
    head_width: int | None = None  # None: width / heads
    source_width: int | None = None  # width of the cross-attention source; None: width
    bias: bool = True
    key_bias: bool = True  # Whisper's key projection has none
    qkv_bias: bool = True  # some of timm's have none on all three
    scale: float | None = None
    relative: bool = False  # Transformer-XL relative term (Dai et al. 2019), as in the Conformer paper
    shaw: int = 0  # largest distance with a vector of its own in Shaw et al.'s (2018) relative term; 0: none
    grid: tuple[int, int] | None = None  # patches with a bias of each distance (BEiT)
    dropout: float = 0.0
    linear: str | None = None  # "causal" or "full": `LinearAttention` in place of softmax
    out_bias: bool = True  # Qwen2's output projection has none
    qk_norm: str | None = None  # norm of each head's queries and keys (Dehghani et al. 2023)
    qk_norm_whole: bool = False  # over all heads at once (OLMo 2)
    qk_norm_eps: float = 1e-6  # and of `inner_norm`
    softcap: float | None = None  # c: scores s become c·tanh(s/c) (Gemma 2)
    gate: bool = False  # the mask is a `GatedBias`, as in WavLM
    inner_norm: bool = False  # of the heads' outputs together (EVA-02)
    out_width: int | None = None  # None: width

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.heads


QKV = tuple[Tensor, Tensor, Tensor]


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention, to itself or to a source (Vaswani et al. 2017).

    It computes with PyTorch's scaled_dot_product_attention, whose `is_causal` is aligned top-left and thus wrong for
    a cached chunk: a causal mask is explicit here, or for whole texts `masks.Causal`."""

    def __init__(self, config: AttentionConfig):
        super().__init__()
        self.config, self.heads = config, config.heads
        self.kv_heads = config.key_heads
        self.head_width = config.head_size
        if min(sizes := (self.heads, self.kv_heads, self.head_width)) < 1:
            raise ValueError(f"heads, kv_heads and head_width must be at least 1 (got {sizes})")
        if config.head_width is None and config.width % config.heads:
            raise ValueError(f"width {config.width} is not divisible by heads {config.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        self.scale = self.head_width**-0.5 if config.scale is None else config.scale
        source_width, bias = config.source_width or config.width, config.bias and config.qkv_bias
        self.query = nn.Linear(config.width, self.heads * self.head_width, bias=bias)
        self.key = nn.Linear(source_width, self.kv_heads * self.head_width, bias=bias and config.key_bias)
        self.value = nn.Linear(source_width, self.kv_heads * self.head_width, bias=bias)
        out_width = config.out_width or config.width
        self.out = nn.Linear(self.heads * self.head_width, out_width, bias=config.bias and config.out_bias)
        self.query_norm, self.key_norm = self._norms()
        inner = self.heads * self.head_width
        self.inner_norm = nn.LayerNorm(inner, eps=config.qk_norm_eps) if config.inner_norm else None
        if config.grid is not None:
            self.relative = GridTerm(self.heads, config.grid)
        elif config.relative:
            self.relative = RelativeTerm(config.width, self.heads, self.head_width)
        else:
            self.relative = ShawTerm(self.head_width, config.shaw) if config.shaw else None
        self.gate = BiasGate(self.heads, self.head_width) if config.gate else None

    def _norms(self) -> tuple[nn.Module | None, nn.Module | None]:
        if (kind := self.config.qk_norm) is None:
            return None, None
        counts = (self.heads, self.kv_heads) if self.config.qk_norm_whole else (1, 1)
        query, key = (make_norm(kind, count * self.head_width, self.config.qk_norm_eps) for count in counts)
        return query, key

    def split(self, x: Float[Tensor, "B S _"]) -> Float[Tensor, "B _ S E"]:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def project(self, x: Tensor, source: Tensor | None, rotate: Callable | None, cache: LayerCache | None) -> QKV:
        query = self._normed(self.query(x), self.query_norm)
        query = rotate(query) if rotate else query
        if source is not None and cache is not None and cache.known:
            return query, cache.key, cache.value
        key, value = self.keys_values(x if source is None else source)
        key = rotate(key) if rotate else key
        return query, *((key, value) if cache is None else cache.append(key, value))

    def keys_values(self, source: Float[Tensor, "B S _"]) -> KeyValue:
        """The heads of keys, not rotated, and of values."""
        return self._normed(self.key(source), self.key_norm), self.split(self.value(source))

    def _normed(self, x: Float[Tensor, "B S _"], norm: nn.Module | None) -> Float[Tensor, "B _ S E"]:
        """The heads of queries or keys, normed in the norm's type."""
        if norm is None:
            return self.split(x)
        wide = x.to(norm.weight.dtype)
        return (self.split(norm(wide)) if self.config.qk_norm_whole else norm(self.split(wide))).to(x.dtype)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        source: Float[Tensor, "_ S _"] | None = None,
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | Causal | Local | GatedBias | None = None,
        rotate: Callable[[Tensor], Tensor] | Disentangled | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B T _"]:
        """`mask` broadcasts to [B H T S]: True or 0 may attend. With a `cache`, self-attention also sees the cached
        positions, and cross-attention projects its source only on the first call."""
        disentangled = rotate if isinstance(rotate, Disentangled) else None
        query, key, value = self.project(x, source, None if disentangled else rotate, cache)
        if isinstance(mask, Local):
            if not capturing():
                return self._joined(self._in_blocks(query, key, value, mask.blocks()))
            mask = mask.dense()
        if source is None and cache is None and self._gains_from_blocks(query, mask):
            return self._joined(self._in_blocks(query, key, value, query_blocks(mask, query.shape[2])))
        mask = mask if self.gate is None else self.gate(x, mask)
        if disentangled is not None:
            table = disentangled.table[None].to(x.dtype)
            queries, keys = self.split(self.query(table)), self.split(self.key(table))
            mask = merge(mask, disentangled.term(query, key, queries, keys, self.scale))
        if self.relative is not None:
            distance = None if cache is None else cache.distances()
            query, term = self.relative(query, key.shape[2], self.scale, distance)
            mask = merge(mask, term)
        if isinstance(mask, Causal):
            return self._joined(mask.attend(self.kernel, query, key, value, self.scale))
        if capturing():
            capture(self, query, key, mask, self.scale, self.config.softcap)
        # SDPA needs a float mask of the query's type, which autocast changes
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype)
        if self.config.softcap is not None:
            weights = attention_weights(query, key, mask, self.scale, self.config.softcap)
            return self._joined(self._mixed(weights, value))
        return self._joined(self._fused(query, key, value, mask))

    def kernel(self, *heads: Tensor, **options: Any) -> Float[Tensor, "B H T E"]:
        """PyTorch's attention; `prepare_for_inference` puts a quicker one in its place where there is one."""
        return F.scaled_dot_product_attention(*heads, **options)

    def _fused(
        self, query: Float[Tensor, "B H T E"], key: Float[Tensor, "B K S E"], value: Float[Tensor, "B K S E"],
        mask: Tensor | None,
    ) -> Float[Tensor, "B H T E"]:  # fmt: skip
        return self.kernel(
            query, key, value, attn_mask=mask, dropout_p=self.config.dropout if self.training else 0.0,
            scale=self.scale, enable_gqa=self.heads != self.kv_heads,
        )  # fmt: skip

    def _gains_from_blocks(self, query: Float[Tensor, "B H T E"], mask: object) -> bool:
        """Return True on a CPU where the relative term of all queries at once would come from memory."""
        plain = isinstance(self.relative, RelativeTerm) and self.gate is None and self.config.softcap is None
        dense = mask is None or isinstance(mask, Tensor)
        eager = query.is_cpu and not torch.is_grad_enabled() and not torch.compiler.is_compiling() and not capturing()
        return plain and dense and eager and query.shape[2] > LEAST_BLOCK

    def _in_blocks(
        self, query: Float[Tensor, "B H T E"], key: Float[Tensor, "B K T E"], value: Float[Tensor, "B K T E"],
        blocks: Iterable[tuple[slice, slice, Tensor | None]],
    ) -> Float[Tensor, "B H T E"]:  # fmt: skip
        """A block of queries, its keys and their mask at a time, so that memory grows with T alone."""
        made = []
        for rows, columns, mask in blocks:
            own, keys, bias = query[:, :, rows], key[:, :, columns], None
            if self.relative is not None:
                own, bias = self.relative(own, keys.shape[2], self.scale, offset=rows.stop - columns.stop)
            both = merge(mask, bias)
            both = both if both.dtype == torch.bool else both.to(query.dtype)
            made.append(self._fused(own, keys, value[:, :, columns], both))
        return torch.cat(made, 2)

    def _joined(self, mixed: Float[Tensor, "B H T E"]) -> Float[Tensor, "B T _"]:
        x = mixed.transpose(1, 2).flatten(2)
        return self.out(x if self.inner_norm is None else self.inner_norm(x))

    def _mixed(self, weights: Float[Tensor, "B H T S"], value: Float[Tensor, "B K S E"]) -> Float[Tensor, "B H T E"]:
        weights = F.dropout(weights, self.config.dropout, self.training)
        return weights @ value.repeat_interleave(self.heads // self.kv_heads, 1)
