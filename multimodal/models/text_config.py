"""What a text transformer is made of."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxtyping import Float, Int
from torch import Tensor

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.positions import rotary, sinusoids
from multimodal.blocks.stack import StackConfig

POSITIONS = ("learned", "sinusoidal", "rotary", "bucket", "alibi", "none")


@dataclass(frozen=True)
class PositionConfig:
    """How a stack learns where its tokens are.

    - learned: a table of `context` rows is added to the tokens (GPT-2, BERT); it has `first` more before them, which
      are never read (RoBERTa, BART: 2).
    - sinusoidal: sines and cosines are added, for positions from `first` on (M2M100: 2). `theta` is the base;
      `inclusive`: the slowest wave has exactly it (tensor2tensor, M2M100), else it is one step short (Vaswani et al.
      2017). `interleaved`: sine and cosine in turn, as the paper; else all sines, then all cosines.
    - rotary: queries and keys are turned (Su et al. 2021); `theta`, `interleaved` as `positions.rotary` has them.
      `scale` below 1 interpolates positions linearly (Chen et al. 2023), `ntk` above 1 stretches the slow waves alone
      (NTK-aware interpolation: theta·ntk^(E/(E-2))).
      `turns` (low, high, positions): waves that turn fewer than `low` times in so many positions are interpolated by
      `scale`, those of more than `high` turns are not, and those between in part (Llama 3.1).
    - bucket: T5's bias, one table for all layers, with `buckets` up to the distance `furthest`.
    - alibi: a slope of distance per head (Press et al. 2022).
    - none: no positions; so with Shaw's or Transformer-XL's relative terms, which are the attention's own."""

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

    def __post_init__(self):
        if self.kind not in POSITIONS:
            raise ValueError(f"positions {self.kind!r}: none of {', '.join(POSITIONS)}")


def waves(config: PositionConfig, index: Int[Tensor, "*B T"], width: int) -> Float[Tensor, "*B T E"]:
    """The sines and cosines that are added at these positions."""
    table = sinusoids(index.flatten() + config.first, width, config.theta, int(config.inclusive))
    if config.interleaved:
        table = table.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return table.unflatten(0, index.shape)


def rotation(
    config: PositionConfig, index: Int[Tensor, "*B T"], attention: AttentionConfig
) -> Callable[[Tensor], Tensor]:
    """What turns queries and keys at these positions."""
    width = attention.head_width or attention.width // attention.heads
    theta = config.theta if config.ntk == 1 else config.theta * config.ntk ** (width / (width - 2))
    return rotary(index, width, theta, config.scale, config.interleaved, config.turns)


@dataclass(frozen=True)
class TextConfig:
    """`vocabulary` 0: no embedding of its own, the caller gives one (`table`). `context`: positions that it was made
    for; with a learned table there are no others. `tied`: logits through the embedding's transpose; None: no logits.

    `stem_norm`: a norm before the blocks; `transform`: a linear map, activation and norm before the logits;
    `head_bias`: logits have a bias (BERT has all three, Devlin et al. 2019). `window`: a token sees so many tokens,
    itself among them, and None all (Mistral).

    `embed_width`: of the embeddings, where a linear map takes them to the stack's width (ALBERT, ELECTRA).
    `embed_scale`: the tokens' embeddings are multiplied by it (M2M100: √D). `segments`: kinds of segment that are
    embedded (BERT: 2). `logit_scale`: states are multiplied by it before tied logits (T5: 1/√D).

    `pool`: an activation; the first token's state goes through a linear map and it (BERT's pooler: tanh). `classes`: of
    a linear map on that, or on the first state where nothing is pooled. `detect`: one logit a token (ELECTRA)."""

    vocabulary: int
    context: int
    stack: StackConfig
    causal: bool
    tied: bool | None = None
    stem_norm: bool = False
    transform: bool = False
    head_bias: bool = False
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

    @property
    def width(self) -> int:
        return self.stack.block.attention.width

    @property
    def limit(self) -> int | None:
        """Positions beyond which the model cannot compute; None: it can, whatever comes of it."""
        return self.context if self.positions.kind == "learned" else None
