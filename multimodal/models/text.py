"""Text transformer: encoders, decoders and CLIP's text towers."""

from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.cache import Cache, WindowCache
from multimodal.blocks.capture import capturing
from multimodal.blocks.layers import ACTIVATIONS, make_norm
from multimodal.blocks.masks import Causal, causal, key_mask, merge
from multimodal.blocks.positions import BucketBias, Disentangled, Rotation, alibi, relative_distances
from multimodal.blocks.sdpa import preferred_kernels
from multimodal.blocks.stack import Stack, select_positions
from multimodal.models.text_config import (
    MEAN,
    LayerPattern,
    ProjectionConfig,
    TextConfig,
    rotary_positions,
    sinusoidal_positions,
)

UNMASKED = ("cuda",)  # device types on which causal attention is faster without a mask tensor
FEW = 256  # positions up to which it is not faster on others


class Transform(nn.Module):
    """norm(act(linear x)): BERT's transform before the logits."""

    def __init__(self, width: int, out: int, activation: str, norm: str, norm_eps: float, bias: bool = True):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, out, bias=bias), make_norm(norm, out, norm_eps)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T E"]:
        return self.norm(self.activation(self.linear(x)))


class Pool(nn.Module):
    """act(linear x) of the first of the states, normed if there is a norm."""

    def __init__(self, width: int, activation: str, bias: bool = True, norm: nn.Module | None = None):
        super().__init__()
        self.linear, self.activation = nn.Linear(width, width, bias=bias), ACTIVATIONS[activation]
        self.norm = norm

    def forward(self, states: Float[Tensor, "B T D"]) -> Float[Tensor, "B D"]:
        made = self.activation(self.linear(states[:, 0]))
        return made if self.norm is None else self.norm(made)


class Projection(nn.Module):
    """Linear maps and activations of pooled vectors, one after the other."""

    def __init__(self, width: int, configs: tuple[ProjectionConfig, ...]):
        super().__init__()
        widths = [width, *(one.width for one in configs)]
        self.maps = nn.ModuleList(
            nn.Linear(before, one.width, bias=one.bias) for before, one in zip(widths, configs, strict=False)
        )
        self.activations = [one.activation for one in configs]

    @property
    def dtype(self) -> torch.dtype:
        return next((own.weight.dtype for own in self.maps if isinstance(own, nn.Linear)), torch.float32)

    def forward(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "N E"]:
        for own, activation in zip(self.maps, self.activations, strict=True):
            x = own(x) if activation is None else ACTIVATIONS[activation](own(x))
        return x


class ReplacedTokenHead(nn.Module):
    """One logit per token: was it replaced (Clark et al. 2020, section 2)."""

    def __init__(self, width: int, activation: str):
        super().__init__()
        self.linear, self.out, self.activation = nn.Linear(width, width), nn.Linear(width, 1), ACTIVATIONS[activation]

    def forward(self, states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
        return self.out(self.activation(self.linear(states)))[..., 0]


class TextTransformer(nn.Module):
    """Token and position embeddings, a stack and the configured heads."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.config = config
        width, block, positions = config.width, config.stack.block, config.positions
        inner = config.embed_width or width
        outer = width if config.narrow else inner
        self.embed = nn.Embedding(config.vocabulary, inner) if config.vocabulary else None
        learned = positions.kind == "learned"
        rows = positions.first + config.context
        self.positions = nn.Parameter(torch.empty(rows, outer).normal_(std=0.01)) if learned else None
        self.segments = nn.Embedding(config.segments, inner) if config.segments else None
        for table in (self.embed, self.segments):
            if table is not None:
                nn.init.normal_(table.weight, std=0.02)
        self.norm = make_norm(block.norm, inner, block.norm_eps) if config.stem_norm else None
        self.widen = nn.Linear(inner, width, bias=not config.narrow) if config.embed_width else None
        self.narrow = nn.Linear(width, inner, bias=False) if config.narrow else None
        self.dropout = nn.Dropout(config.stem_dropout)
        heads = block.attention.heads
        far = positions if positions.kind == "bucket" else config.distances
        table = partial(BucketBias, heads, far.buckets, far.furthest, not config.causal) if far else None
        layered = far is not None and far.layered
        self.bias = table() if table and not layered else None
        self.layer_biases = nn.ModuleList(table() for _ in range(config.stack.layers)) if layered else None
        apart = positions.kind == "disentangled"
        self.relative = nn.Embedding(2 * positions.buckets, width) if apart else None
        norm = apart and positions.table_norm
        self.relative_norm = make_norm(block.norm, width, block.norm_eps) if norm else None
        self.stack = Stack(config.stack)
        self._heads(inner)

    def _heads(self, inner: int) -> None:
        config, block = self.config, self.config.stack.block
        kinds = inner, block.activation, block.norm, block.norm_eps
        biased = config.head_linear_bias
        self.transform = Transform(config.width, *kinds, bias=biased) if config.transform else None
        states = inner if config.transform or config.tied else config.width
        # any module from states to logits; a tied decoder has none and takes the embedding's transpose
        self.head = nn.Linear(states, config.vocabulary, bias=bool(config.head_bias)) if config.tied is False else None
        self.tied_bias = nn.Parameter(torch.zeros(config.vocabulary)) if config.tied and config.head_bias else None
        owner, name = (self, "tied_bias") if self.head is None else (self.head, "bias")
        if config.head_bias == "fixed" and (bias := owner._parameters.pop(name, None)) is not None:
            owner.register_buffer(name, bias.detach())
        norm = make_norm(block.norm, config.width, block.norm_eps) if config.pool_norm else None
        self.pool = Pool(config.width, config.pool.removeprefix(MEAN), biased, norm) if config.pool else None
        self.project = Projection(config.width, config.projections) if config.projections else None
        self.classes = nn.Linear(config.width, config.classes) if config.classes else None
        self.tags = nn.Linear(config.width, config.tags) if config.tags else None
        self.spans = nn.Linear(config.width, 2) if config.spans else None
        self.detect = ReplacedTokenHead(config.width, block.activation) if config.detect else None

    def stem(
        self, ids: Int[Tensor, "B T"], past: int = 0, cache: Cache | None = None,
        positions: Int[Tensor, "*B T"] | None = None, segments: Int[Tensor, "B T"] | None = None,
        table: nn.Embedding | None = None, embedded: Float[Tensor, "B T E"] | None = None,
    ) -> Float[Tensor, "B T D"]:  # fmt: skip
        """Input of the stack: embedded tokens with positions from `past` on. Raises ValueError for a text longer than
        the table of positions."""
        x = (table if self.embed is None else self.embed)(ids) if embedded is None else embedded
        x = x if self.config.embed_scale == 1 else x * self.config.embed_scale
        x = x if self.narrow is None else self.widen(x)
        added = self._added(past, ids.shape[1], self._index(past, ids.shape[1], cache, positions))
        x = x if added is None else x + added.to(x.dtype)
        if self.segments is not None:
            x = x + self.segments(ids.new_zeros(1) if segments is None else segments)
        x = x if self.norm is None else self.norm(x)
        x = self.dropout(x) if self.dropout.training else x
        return x if self.widen is None or self.narrow is not None else self.widen(x)

    def states(
        self,
        ids: Int[Tensor, "B T"],
        source: Float[Tensor, "P S _"] | None = None,
        source_valid: Bool[Tensor, "P S"] | None = None,
        valid: Bool[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
        only: Int[Tensor, "B"] | None = None,
        mask: Bool[Tensor, "..."] | Causal | None = None,
        positions: Int[Tensor, "*B T"] | None = None,
        segments: Int[Tensor, "B T"] | None = None,
        table: nn.Embedding | None = None,
        states: list[Tensor] | None = None,
        embedded: Float[Tensor, "B T E"] | None = None,
    ) -> Float[Tensor, "B _ D"]:
        """`valid` marks real tokens of padded rows; cached calls use left padding instead (see `new_cache`). With a
        cache, `source` and `source_valid` are read on the first call only. B may be a multiple of P: then B/P
        consecutive rows attend to each source. `only`: return this position of each row.

        `mask` [T S] or [B 1 T S] replaces the configuration's (prefix LM, packed documents, any of `masks`).
        `positions`: the position of each id, where that is not 0, 1, 2, … in each row: packed documents need it, and
        left-padded rows without a cache. `segments`: segment ids, default 0. `table`: the embedding, for a tower
        without one. `embedded`: vectors in place of the embeddings of `ids`. `states`: see `Stack`."""
        past, count = cache.length if cache else 0, ids.shape[1]
        group = self._group(ids, cache) if self.config.languages else None
        x = self.stem(ids, past, cache, positions, segments, table, embedded)
        # with gradients the stack attends from all positions, even with `only`
        fresh = cache is None or (cache.length == 0 and cache.start is None)
        whole = fresh and valid is None and (only is None or torch.is_grad_enabled())
        bias, pattern, given = self._bias(past, count, cache), self.config.pattern, mask
        mask = self._masked(self._mask(past, count, cache, mask, whole), valid, bias)
        source_mask = None
        if cache is not None and cache.has_source:
            source_mask = cache.source_mask
        elif source is not None and source_valid is not None:
            source, source_mask = torch.where(source_valid[..., None], source, 0), key_mask(source_valid)
            if cache is not None:
                cache.source_mask = source_mask
        (rotate, *turns), others = self._rotations(past, count, cache, positions), None
        if pattern is not None:
            near = self._mask(past, count, cache, given, whole, pattern)
            others = frozenset(pattern.layers), self._masked(near, valid, bias), *turns
        # training rows are packed, or padded to few lengths
        steady = isinstance(mask, Causal) and torch.is_grad_enabled() and count % 8 == 0
        with preferred_kernels(x, steady):
            return self.stack(
                x, source, mask, source_mask, valid, rotate, cache, states, only, group=group, pattern=others,
                biases=self._biases(past, count, cache),
            )  # fmt: skip

    def _biases(self, past: int, count: int, cache: Cache | None) -> list[Float[Tensor, "H T S"]] | None:
        if self.layer_biases is None:
            return None
        distances = self._distances(past, count, cache)
        return [bias(distances) for bias in self.layer_biases]

    def _rotations(
        self, past: int, count: int, cache: Cache | None, positions: Int[Tensor, "*B T"] | None
    ) -> list[Rotation | Disentangled | None]:
        """Rotation of most layers, and that of the pattern's."""
        own = self.config.positions
        if past and own.switch and past <= own.switch < past + count:
            raise ValueError(f"text of {past} tokens cannot grow beyond {own.switch}, where its positions change")
        if self.relative is not None:
            table = self.relative.weight if self.relative_norm is None else self.relative_norm(self.relative.weight)
            return [Disentangled(table, own.furthest)]
        kinds = [own, *([] if self.config.pattern is None else [self.config.pattern.positions])]
        if all(kind.kind != "rotary" for kind in kinds):
            return [None] * len(kinds)
        index, attention = self._index(past, count, cache, positions), self.config.stack.block.attention
        index = self._numbers(past, count, index)
        return [rotary_positions(kind, index, attention) if kind.kind == "rotary" else None for kind in kinds]

    def _masked(
        self, mask: Bool[Tensor, "..."] | Causal | None, valid: Bool[Tensor, "B T"] | None, bias: Tensor | None
    ) -> Bool[Tensor, "..."] | Float[Tensor, "..."] | Causal | None:
        if valid is not None:
            mask = key_mask(valid) if mask is None else mask & key_mask(valid)
        return merge(mask, bias)

    def _group(self, ids: Int[Tensor, "B T"], cache: Cache | None) -> Int[Tensor, "B"]:
        """The group of each row's first language token, which a cache keeps. Raises ValueError for a row without."""
        if cache is not None and cache.length:
            return cache.group
        groups = self.config.languages
        table = torch.tensor([number for number, own in enumerate(groups) for _ in own], device=ids.device)
        found = ids[..., None] == torch.tensor([one for own in groups for one in own], device=ids.device)
        if not found.flatten(1).any(1).all():
            raise ValueError("a row has no language token")
        group = table[found.flatten(1).int().argmax(1) % len(table)]
        if cache is not None:
            cache.group = group
        return group

    def _index(
        self, past: int, count: int, cache: Cache | None, positions: Int[Tensor, "*B T"] | None
    ) -> Int[Tensor, "*B T"] | None:
        """The position of each id in its text; None: from `past` on in all rows."""
        if positions is not None:
            return positions.clamp(min=0)
        if cache is None or (index := cache.text_positions(count)) is None:
            return None
        if self.config.limit and past + count > self.config.limit and not past:
            raise ValueError(f"text of {past + count} tokens is longer than the context {self.config.limit}")
        # padding, and rows that have ended while others continue, may have any position
        return index.clamp(0, None if self.config.limit is None else self.config.limit - 1)

    def _added(self, past: int, count: int, index: Int[Tensor, "*B T"] | None) -> Float[Tensor, "*B T E"] | None:
        """Position embeddings to add."""
        config = self.config.positions
        if config.kind == "learned":
            if index is None and past + count > self.config.context:
                raise ValueError(f"text of {past + count} tokens is longer than the context {self.config.context}")
            known = self.positions[config.first :]
            return known[past : past + count] if index is None else known[index]
        if config.kind != "sinusoidal":
            return None
        return sinusoidal_positions(
            config, self._numbers(past, count, index), self.config.embed_width or self.config.width
        )

    def _numbers(self, past: int, count: int, index: Int[Tensor, "*B T"] | None) -> Int[Tensor, "*B T"]:
        return torch.arange(past, past + count, device=self.device) if index is None else index

    def _distances(self, past: int, count: int, cache: Cache | None) -> Int[Tensor, "T S"]:
        """Key minus query."""
        return cache.distances(count, self.device) if cache else relative_distances(count, past + count, self.device)

    def _bias(self, past: int, count: int, cache: Cache | None) -> Float[Tensor, "H T S"] | None:
        kind = self.config.positions.kind
        if self.bias is not None:
            return self.bias(self._distances(past, count, cache))
        if kind != "alibi":
            return None
        heads = self.config.stack.block.attention.heads
        return self.config.positions.gain * alibi(heads, self._distances(past, count, cache))

    def _mask(
        self, past: int, count: int, cache: Cache | None, mask: Bool[Tensor, "..."] | Causal | None,
        whole: bool, pattern: LayerPattern | None = None,
    ) -> Bool[Tensor, "..."] | Causal | None:  # fmt: skip
        """`pattern`: of the layers that have one; its window also narrows a given `mask`."""
        width, keys = (pattern or self.config).window, (cache.cached if cache else past) + count
        if pattern and width and (mask is not None or (keys > width and not self.config.causal)):
            near = self._distances(past, count, cache).abs() < width
            mask = near if mask is None else mask & near
        elif mask is None and self.config.causal and not self.config.stack.block.attention.linear:
            if width and keys > width:
                distance = self._distances(past, count, cache)
                mask = (distance <= 0) & (distance > -width)
            elif count > 1:
                mask = Causal() if whole and self._unmasked(count) else causal(count, keys, self.device)
        real = cache.real(count) if cache else None
        if real is None:
            return mask
        return key_mask(real) if mask is None else mask & key_mask(real)

    def _unmasked(self, count: int) -> bool:
        """Return True if the causal order is all that masks whole texts, and weights are not captured."""
        own, kind = self.config.stack.block.attention, self.config.positions.kind
        biased = (
            self.bias is not None
            or self.layer_biases is not None
            or kind == "alibi"
            or own.relative
            or own.shaw
            or own.softcap
        )
        dropping = self.training and own.dropout
        return not (biased or dropping or capturing()) and (self.device.type in UNMASKED or count > FEW)

    @property
    def device(self) -> torch.device:
        # compiled maps and norms have no parameters, and a tower may have nothing else; they are for a CPU
        return next((own.device for own in self.parameters()), torch.device("cpu"))

    def logits(self, states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        states, cap = self.before_logits(states), self.config.logit_cap
        tied = self.head is None
        logits = nn.functional.linear(states, self.embed.weight, self.tied_bias) if tied else self.head(states)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def before_logits(self, states: Float[Tensor, "*B D"]) -> Float[Tensor, "*B E"]:
        """Input of the last linear map: of `head`, or of the embedding's transpose."""
        states = states if self.transform is None else self.transform(states)
        states = states if self.narrow is None else self.narrow(states)
        return states if self.head is not None or self.config.logit_scale == 1 else states * self.config.logit_scale

    def pooled(self, states: Float[Tensor, "B T D"], valid: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, "B D"]:
        """The first token's state, the mean of the `valid` ones, or a causal model's last one, through the pooler if
        there is one."""
        if self.config.pools_mean:
            kept = torch.ones_like(states[..., :1], dtype=torch.bool) if valid is None else valid[..., None]
            states = torch.where(kept, states, 0).sum(1, keepdim=True) / kept.sum(1, keepdim=True)
        if self.config.causal and valid is not None:
            states = select_positions(states, states.shape[1] - 1 - valid.flip(1).int().argmax(1))
        elif self.config.causal:
            states = states[:, -1:]
        return states[:, 0] if self.pool is None else self.pool(states)

    def forward(
        self, ids: Int[Tensor, "B T"], source: Float[Tensor, "P S _"] | None = None,
        source_valid: Bool[Tensor, "P S"] | None = None, valid: Bool[Tensor, "B T"] | None = None,
        cache: Cache | None = None, last: int | None = None, embedded: Float[Tensor, "B T E"] | None = None,
    ) -> Float[Tensor, "B N V"]:  # fmt: skip
        """Logits of the next token (of the token itself if not causal) at all positions, or at the `last` ones.
        `embedded`: see `states`."""
        states = self.states(ids, source, source_valid, valid, cache, embedded=embedded)
        return self.logits(states if last is None else states[:, -last:])

    def new_cache(self, start: Int[Tensor, "B"] | None = None, capacity: int = 0) -> Cache:
        """`start`: number of left-padded ids of each row. `capacity`: positions to allocate at once. With a `window`
        the cache keeps no more than that."""
        layers, window = self.config.stack.layers, self.config.window if self.config.causal else None
        cache = WindowCache(layers, window, start) if window else Cache(layers, start, capacity)
        cache.context = self.config.limit
        return cache
