"""Configuration of text transformers."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.positions import Rotation, rotary, sinusoids, stretched_theta, yarn_rates
from multimodal.blocks.stack import StackConfig

MEAN = "mean "
POSITIONS = ("learned", "sinusoidal", "rotary", "bucket", "alibi", "disentangled", "none")


@dataclass(frozen=True)
class PositionConfig:
    """Position encoding.

    - learned: a table of `context` rows (GPT-2, BERT) after `first` unused ones (RoBERTa, BART: 2).
    - sinusoidal: sines and cosines of positions from `first` on (M2M100: 2) with base `theta`. `inclusive`: the slowest
      wave has exactly this base (tensor2tensor, M2M100), else it is one step short (Vaswani et al. 2017).
      `interleaved`: sine and cosine alternate, as in the paper; else all sines, then all cosines. `gain`: their factor.
    - rotary: RoPE (Su et al. 2021); `theta`, `interleaved`, `scale` and `turns`: see `positions.rotary`. `ntk` above 1
      stretches the slow waves alone (NTK-aware interpolation: theta·ntk^(E/(E-2))).
      `share`: numbers of a head that turn, from its first; None: all. `gain`: factor of turned queries and keys.
      `yarn` (fast, slow, positions, whole): see `positions.yarn_rates`. `dynamic` (factor, positions): see
      `positions.stretched_theta`. `factors`: divisors of the rates in texts of up to `trained` positions, and
      `long_factors` in longer ones (LongRoPE, Ding et al. 2024).
    - bucket: T5's bias, one table for all layers, or one for each if `layered` (UMT5), with `buckets` up to the
      distance `furthest`.
    - alibi: a slope of distance per head (Press et al. 2022), times `gain`.
    - disentangled: DeBERTa's table of 2 · `buckets` distances, up to `furthest`, normed if `table_norm`.
    - none: for attention with Shaw's or Transformer-XL's relative terms, or without positions."""

    kind: str = "learned"
    first: int = 0
    theta: float = 10000.0
    inclusive: bool = False
    interleaved: bool = False
    scale: float = 1.0
    ntk: float = 1.0
    buckets: int = 32
    furthest: int = 128
    turns: tuple[float, float, int] | None = None
    share: int | None = None
    gain: float = 1.0
    yarn: tuple[float, float, int, bool] | None = None
    dynamic: tuple[float, int] | None = None
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    trained: int = 0
    table_norm: bool = True
    layered: bool = False

    @property
    def switch(self) -> int | None:
        """Number of positions beyond which the rates change."""
        return self.dynamic[1] if self.dynamic else self.trained if self.factors else None

    def __post_init__(self):
        if self.kind not in POSITIONS:
            raise ValueError(f"kind must be one of {', '.join(POSITIONS)} (got {self.kind!r})")


def sinusoidal_positions(config: PositionConfig, index: Int[Tensor, "*B T"], width: int) -> Float[Tensor, "*B T E"]:
    """Sinusoids of these positions."""
    table = sinusoids(index.flatten() + config.first, width, config.theta, int(config.inclusive))
    if config.interleaved:
        table = table.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return table.unflatten(0, index.shape) * config.gain


def rotary_positions(config: PositionConfig, index: Int[Tensor, "*B T"], attention: AttentionConfig) -> Rotation:
    """RoPE for these positions. The last one of each row says how long its text is."""
    width = config.share or attention.head_size
    if config.yarn or config.switch:
        return Rotation(index.float()[..., None] * _rates(config, index, width), config.interleaved, config.gain)
    theta = config.theta if config.ntk == 1 else config.theta * config.ntk ** (width / (width - 2))
    return rotary(index, width, theta, config.scale, config.interleaved, config.turns)


def _rates(config: PositionConfig, index: Int[Tensor, "*B T"], width: int) -> Float[Tensor, "..."]:
    """Rates [R], or [1 R] for each row."""
    steps = torch.arange(0, width, 2, device=index.device).float() / width
    length = index.amax(-1)[..., None, None] + 1
    if config.dynamic:
        return 1 / stretched_theta(config.theta, width, *config.dynamic, length) ** steps
    rates = 1 / config.theta**steps
    if config.yarn:
        fast, slow, trained, whole = config.yarn
        return yarn_rates(rates, config.theta, 1 / config.scale, fast, slow, trained, whole)
    factors = (config.factors, config.long_factors)
    short, long = (rates / torch.tensor(own, dtype=torch.float32, device=index.device) for own in factors)
    return torch.where(length > config.trained, long, short)


@dataclass(frozen=True)
class LayerPattern:
    """`layers`: numbers of those that see `window` tokens, themselves included (None: all; in both directions if the
    model is not causal), and have these positions, rotary or none (Gemma 2 and 3, SmolLM3, ModernBERT)."""

    layers: tuple[int, ...]
    window: int | None
    positions: PositionConfig


@dataclass(frozen=True)
class ProjectionConfig:
    """act(linear x) to `width` numbers."""

    width: int
    activation: str | None
    bias: bool = True


@dataclass(frozen=True)
class TextConfig:
    """`vocabulary` 0: no embedding; the caller passes `table`. `context`: positions, the limit of a learned table.
    `tied`: logits through the embedding's transpose; None: no logits.

    `stem_norm`: a norm before the blocks; `transform`: a linear map, activation and norm before the logits;
    `head_bias`: logits have a bias (BERT has all three, Devlin et al. 2019); "fixed": one that is not trained (BART).
    `window`: number of tokens that a token sees, with itself (Mistral); None: all.

    `embed_width`: of embeddings that a linear map widens (ALBERT, ELECTRA). `embed_scale`: factor of token embeddings
    (M2M100: √D). `segments`: number of segment embeddings (BERT: 2). `logit_scale`: factor of states before tied logits
    (T5: 1/√D).

    `languages`: ids of language tokens by group. A row uses its group's feed-forwards in the stack's grouped blocks;
    its group is that of its first language token (M2M-100).

    `narrow`: embeddings are widened before positions are added, and states narrowed before tied logits, both without
    biases (OPT 350M).

    `pattern`: layers that attend in another way than the rest. `logit_cap` c: logits l become c·tanh(l/c) (Gemma 2).

    `distances`: a further encoding of positions, by buckets (MPNet). `projections`: maps of a pooled vector (Dense of
    sentence-transformers). `head_linear_bias`: of the linear maps in `transform` and `pool`; `pool_norm`: a norm after
    the pooler's activation (ModernBERT).

    `pool`: activation of a pooler on the first token's state (BERT: tanh), or behind `MEAN` on the mean of all states
    (ModernBERT: "mean gelu"). `classes`: outputs of a linear classifier on
    the pooled state; one output scores a choice. `tags`: outputs of a linear classifier of each token. `spans`: logits
    of each token to begin and to end an answer. `detect`: a head with one logit per token (ELECTRA)."""

    vocabulary: int
    context: int
    stack: StackConfig
    causal: bool
    tied: bool | None = None
    stem_norm: bool = False
    transform: bool = False
    head_bias: bool | Literal["fixed"] = False
    positions: PositionConfig = field(default_factory=PositionConfig)
    window: int | None = None
    embed_width: int | None = None
    embed_scale: float = 1.0
    stem_dropout: float = 0.0
    segments: int = 0
    logit_scale: float = 1.0
    pool: str | None = None
    classes: int = 0
    detect: bool = False
    tags: int = 0
    spans: bool = False
    languages: tuple[tuple[int, ...], ...] = ()
    pattern: LayerPattern | None = None
    logit_cap: float | None = None
    distances: PositionConfig | None = None
    projections: tuple[ProjectionConfig, ...] = ()
    head_linear_bias: bool = True
    pool_norm: bool = False
    narrow: bool = False

    def __post_init__(self) -> None:
        if len(self.languages) != self.stack.groups:
            raise ValueError(f"languages: has {len(self.languages)} groups, the stack's blocks {self.stack.groups}")
        if self.narrow and (not self.embed_width or self.tied is False or self.stem_norm):
            raise ValueError("narrow needs an embed_width, tied logits and no stem_norm")
        if self.pattern is not None and self.window not in (None, self.pattern.window):
            raise ValueError(f"pattern: its window {self.pattern.window} narrows that of the rest, {self.window}")

    @property
    def width(self) -> int:
        return self.stack.block.attention.width

    @property
    def pools_mean(self) -> bool:
        return self.pool is not None and self.pool.startswith(MEAN)

    @property
    def limit(self) -> int | None:
        """Most positions that the model can compute; None: any number."""
        return self.context if self.positions.kind == "learned" else None

    def limit_from(self, length: int) -> int | None:
        """Most positions that a text of `length` tokens can grow to. Where the rates of the rotation change, cached
        keys would not fit."""
        switch = self.positions.switch
        return self.limit if switch is None or length > switch else switch
