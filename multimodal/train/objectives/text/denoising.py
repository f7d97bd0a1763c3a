"""Training an encoder-decoder to restore damaged texts: what it is made of, its items, its objective and figures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.blocks.masks import padding
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.data.batching import bucketed
from multimodal.data.datasets.documents import Window
from multimodal.data.loader import Plan, generator
from multimodal.errors import DataError, UsageError, demand
from multimodal.models.encoder_decoder import TextToText, TextToTextConfig
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.train.device import moved
from multimodal.train.objective import Summed
from multimodal.train.objectives.text.denoise import OBJECTIVES, Vocabulary
from multimodal.train.objectives.text.translation import Pair, PairBatch


@dataclass(frozen=True)
class NoiseSettings:
    """`share` of the tokens that are damaged, in spans of `span` tokens on average. Raises UsageError."""

    share: float = 0.15
    span: float = 3.0

    def __post_init__(self):
        demand("share", self.share, 0 < self.share < 1, "over 0 and under 1")
        demand("span", self.span, 0.1 <= self.span < 100, "0.1 or more and under 100")


def sentinels(tokenizer: Tokenizer, count: int) -> list[int]:
    """T5's: the last ids of the vocabulary, from the last one down. Raises UsageError where those are text."""
    found = [tokenizer.vocab_size - 1 - i for i in range(count)]
    if not set(found) <= tokenizer.control:
        raise UsageError(f"--tokenizer: its last {count} ids are not all control tokens, and could not be sentinels")
    return found


class Denoise:
    """Windows as pairs of a damaged text and its target: the loader's source, and what prepares its items."""

    def __init__(self, windows: Sequence[Window], tokenizer: Tokenizer, marks: Sequence[int], start_id: int,
                 objective: str, noise: NoiseSettings):  # fmt: skip
        if not windows:
            raise DataError("--data: no text in 0 windows")
        if tokenizer.eos_id is None or tokenizer.mask_id is None:
            raise UsageError("--tokenizer: has no eos_id or no mask_id, without which texts cannot be damaged")
        ordinary = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.control]
        self.vocabulary = Vocabulary(tokenizer.mask_id, marks, torch.tensor(ordinary))
        self.windows, self.eos_id, self.start_id = windows, tokenizer.eos_id, start_id
        self.make, self.noise = OBJECTIVES[objective], noise

    def __len__(self) -> int:
        return len(self.windows)

    def name(self, key: int) -> str:
        return f"window {key}, document {self.windows[key].document}"

    def read(self, key: int) -> Window:
        return self.windows[key]

    def prepare(self, window: Window, random: torch.Generator) -> Pair:
        found = self.make(window.sentences, self.vocabulary, random, self.noise.share, self.noise.span)
        return Pair([*found.source.tolist(), self.eos_id], [self.start_id, *found.target.tolist(), self.eos_id])

    def plan(self, budget: int, seed: int) -> Plan:
        """Batches of like length with at most `budget` padded tokens of the encoder, a pure function of the epoch."""
        sizes = [window.size + 1 for window in self.windows]
        return lambda epoch: bucketed(sizes, budget, generator(seed, epoch))


def target_logits(model: TextToText, batch: PairBatch) -> tuple[Float[Tensor, "N V"], Int[Tensor, "N"]]:
    """Of all tokens that are to be written, row by row."""
    valid = padding(batch.source_lengths, batch.source.shape[1])
    states = model.decoder.states(batch.ids[:, :-1], model.encode(batch.source, valid), valid)
    real = padding(batch.lengths - 1, states.shape[1])
    return model.decoder.logits(states[real][None])[0].float(), batch.ids[:, 1:][real]


class Denoising(Summed):
    """Cross-entropy of each next token of the target."""

    def forward(self, batch: PairBatch) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(*target_logits(self.model, batch), reduction="sum")}

    def counts(self, batch: PairBatch) -> dict[str, int | Tensor]:
        return {"loss": (batch.lengths - 1).sum()}


@torch.inference_mode()
def denoising_figures(model: TextToText, batches: Sequence[PairBatch], ordinary: Int[Tensor, "V"]) -> dict[str, float]:
    """Cross-entropy (nats) of a token of the target, and of those that are text alone (`text`, with the share that is
    guessed right), given all before it: sentinels and the end are easy to guess."""
    text = torch.zeros(model.config.decoder.vocabulary, dtype=torch.bool)
    text[ordinary] = True
    losses: list[Tensor] = []
    right: list[Bool[Tensor, "N"]] = []
    kept: list[Bool[Tensor, "N"]] = []
    for batch in moved(list(batches), next(model.parameters()).device):
        logits, targets = target_logits(model, batch)
        losses.append(F.cross_entropy(logits, targets, reduction="none").cpu())
        right.append((logits.argmax(-1) == targets).cpu())
        kept.append(text[targets.cpu()])
    loss, known, words = torch.cat(losses).double(), torch.cat(right).double(), torch.cat(kept)
    return {"loss": float(loss.mean()), "text": float(loss[words].mean()), "accuracy": float(known[words].mean())}


@dataclass(frozen=True)
class SizeSettings:
    """Of a new encoder-decoder. `style`: t5 has RMS norms before each part, no biases, a bias of distance and ReLU;
    bart has layer norms after each sum, learned positions and GELU."""

    width: int = 256
    encoder_layers: int = 3
    decoder_layers: int = 3
    heads: int = 4
    context: int = 128
    dropout: float = 0.0


def encoder_decoder(vocabulary: int, style: str, start_id: int, s: SizeSettings) -> TextToText:
    """T5's (Raffel et al. 2020) or BART's (Lewis et al. 2020) architecture. T5's queries begin small, as it does not
    scale their products; its embeddings begin smaller than its own, of which a decoder first repeats what it reads."""
    t5 = style == "t5"
    attention = AttentionConfig(s.width, s.heads, bias=not t5, scale=1.0 if t5 else None, dropout=s.dropout)
    block = BlockConfig(
        attention, 4 * s.width, "relu" if t5 else "gelu", norm="rms" if t5 else "layer", norm_eps=1e-6 if t5 else 1e-5,
        post_norm=not t5, dropout=s.dropout,
    )  # fmt: skip
    encoder = TextConfig(
        0, s.context, StackConfig(block, s.encoder_layers, final_norm=t5), causal=False, stem_norm=not t5,
        positions=PositionConfig("bucket" if t5 else "learned"), stem_dropout=s.dropout,
    )  # fmt: skip
    crossing = StackConfig(replace(block, cross=attention), s.decoder_layers, final_norm=t5)
    decoder = replace(
        encoder, vocabulary=vocabulary, stack=crossing, causal=True, tied=True, logit_scale=s.width**-0.5 if t5 else 1.0
    )
    model = TextToText(TextToTextConfig(encoder, decoder, start_id))
    if t5:
        nn.init.normal_(model.decoder.embed.weight, std=s.width**-0.5)
        for module in model.modules():
            if isinstance(module, Attention):
                nn.init.normal_(module.query.weight, std=(s.width * module.head_width) ** -0.5)
    return model
