"""Linear attention: O(N) sums over keys in place of softmax's O(N²)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from multimodal.blocks.attention import Attention
from multimodal.blocks.cache import LayerCache

CHUNK = 64  # positions multiplied out at once; sums carry over between chunks


def feature(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """elu(x) + 1 > 0 (Katharopoulos et al. 2020, equation 7)."""
    return F.elu(x) + 1


class LinearAttention(Attention):
    """φ(q)·Σ φ(k)vᵀ / φ(q)·Σ φ(k) (Katharopoulos et al. 2020), over all keys or, if `linear` is "causal", over those
    up to the query. It supports masks over keys [B 1 1 S] alone, no rotation and no bias. Its cache holds keys and
    values, like other attention's."""

    def forward(
        self, x: Float[Tensor, "B T D"], source: Float[Tensor, "_ S _"] | None = None,
        mask: Tensor | None = None, rotate: Callable[[Tensor], Tensor] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B T D"]:  # fmt: skip
        if rotate is not None or (mask is not None and (mask.dtype != torch.bool or mask.shape[-2] > 1)):
            raise ValueError("linear attention supports masks over keys [B 1 1 S], no rotation and no bias")
        query, key, value = self.project(x, source, None, cache)
        query, key = feature(query.float()), feature(key.float())
        key, value = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (key, value.float()))
        if mask is not None:
            key = key * mask.transpose(-1, -2)
        mixed = causal_sums(query, key, value) if self.config.linear == "causal" else sums(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2).to(x.dtype))


def sums(
    query: Float[Tensor, "B H T E"], key: Float[Tensor, "B H S E"], value: Float[Tensor, "B H S E"]
) -> Float[Tensor, "B H T E"]:
    """Over all keys."""
    mixed = query @ (key.transpose(-1, -2) @ value)
    return mixed / (query @ key.sum(-2)[..., None]).clamp(min=1e-6)


def causal_sums(
    query: Float[Tensor, "B H T E"], key: Float[Tensor, "B H S E"], value: Float[Tensor, "B H S E"]
) -> Float[Tensor, "B H T E"]:
    """Over the keys up to each query, the last query aligned with the last key."""
    past = key.shape[2] - query.shape[2]
    state = key[:, :, :past].transpose(-1, -2) @ value[:, :, :past]  # B H E E
    total, parts = key[:, :, :past].sum(2), []
    for start in range(0, query.shape[2], CHUNK):
        own = query[:, :, start : start + CHUNK]
        here = slice(past + start, past + start + own.shape[2])
        keys, values = key[:, :, here], value[:, :, here]
        scores = (own @ keys.transpose(-1, -2)).tril()
        norm = scores.sum(-1) + (own @ total[..., None])[..., 0]
        parts.append((own @ state + scores @ values) / norm.clamp(min=1e-6)[..., None])
        state, total = state + keys.transpose(-1, -2) @ values, total + keys.sum(2)
    return torch.cat(parts, 2)
