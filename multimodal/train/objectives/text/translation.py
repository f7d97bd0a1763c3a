"""Translation training: parallel texts in several languages, pairs by direction, and the objective.

A source is its language token, the text and eos; an answer starts with the model's `start_id` and its language token,
as in M2M100 (Fan et al. 2021, section 2.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.masks import padding
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.data.batching import PaddedText, Pinnable, bucketed, pad_text
from multimodal.data.loader import Plan, generator
from multimodal.data.manifests import read_aligned
from multimodal.errors import DataError, UsageError
from multimodal.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.train.device import moved
from multimodal.train.losses import selected
from multimodal.train.objective import Summed

ROWS = 256  # the number of predicted tokens is padded to its multiples: oneDNN compiles kernels for each new shape

Direction = tuple[str, str]
Key = tuple[str, str, int]


def parallel_file(prefix: str, language: str) -> Path:
    """Return `PREFIX.LANGUAGE` or `PREFIX.LANGUAGE.gz`. Raises DataError if neither exists."""
    paths = [Path(f"{prefix}.{language}{ending}") for ending in ("", ".gz")]
    for path in paths:
        if path.is_file():
            return path
    raise DataError(f"{paths[0]}: no such file, nor {paths[1].name}")


def read_parallel(prefix: str, languages: Sequence[str]) -> dict[str, list[str]]:
    """Read the lines of each language's file. Raises DataError for one that cannot be read, or whose number of lines
    differs."""
    return dict(zip(languages, read_aligned([parallel_file(prefix, one) for one in languages]), strict=True))


def language_groups(groups: Sequence[str], languages: Sequence[str]) -> list[list[str]]:
    """Split groups such as `en,de` into languages. Raises UsageError unless each language is in one of them."""
    parts = [group.split(",") for group in groups]
    if sorted(name for part in parts for name in part) != sorted(languages):
        raise UsageError(f"{' '.join(groups)}: expected each of {', '.join(languages)} once", argument="groups")
    return parts


class Pair(NamedTuple):
    source: list[int]
    answer: list[int]  # with the start id before it


class AlignedPair(NamedTuple):
    first: list[int]
    second: list[int]
    line: int


@dataclass(frozen=True)
class PairBatch(Pinnable):
    source: PaddedText
    answer: PaddedText

    @property
    def padding(self) -> float:
        """Share of the ids that is padding."""
        sides = self.source, self.answer
        return 1 - float(sum(side.lengths.sum() for side in sides)) / sum(side.ids.numel() for side in sides)


class AlignedTexts:
    """The loader's source of pairs by (language, language, line), each text between bos, if there is one, and eos.
    Pairs with a side that is empty or over `longest` tokens are skipped and counted in `left_out`."""

    def __init__(
        self, texts: dict[str, list[str]], tokenizer: Tokenizer, directions: Sequence[Direction], longest: int
    ):
        self.tokenizer = tokenizer
        self.ids = {language: [tokenizer.encode(line) for line in lines] for language, lines in texts.items()}
        sizes = {language: [len(row) for row in rows] for language, rows in self.ids.items()}
        fits = {language: [0 < size <= longest - 2 for size in row] for language, row in sizes.items()}
        self.keys: list[Key] = [
            (a, b, i) for a, b in directions for i, (x, y) in enumerate(zip(fits[a], fits[b], strict=True)) if x and y
        ]
        self.sizes = [max(sizes[a][i], sizes[b][i]) + 2 for a, b, i in self.keys]
        self.left_out = len(directions) * len(next(iter(texts.values()))) - len(self.keys)
        if not self.keys:
            raise DataError("no pairs of lines to train on")

    def __len__(self) -> int:
        return len(self.keys)

    def name(self, key: Key) -> str:
        return f"line {key[2] + 1}, {key[0]} to {key[1]}"

    def read(self, key: Key) -> Any:
        a, b, line = key
        start, end = self.tokenizer.frame
        rows = ([*start, *self.ids[language][line], *end] for language in (a, b))
        return AlignedPair(*rows, line)


class ParallelTexts(AlignedTexts):
    """The same pairs to translate: after the token of their language, the second after `start_id`."""

    def __init__(self, texts: dict[str, list[str]], tokenizer: Tokenizer, directions: Sequence[Direction],
                 start_id: int, longest: int):  # fmt: skip
        super().__init__(texts, tokenizer, directions, longest)
        self.start_id = start_id

    def read(self, key: Key) -> Pair:
        a, b, line = key
        start, end = self.tokenizer.language_ids, self.tokenizer.eos_id
        source = [start[a], *self.ids[a][line], end]
        return Pair(source, [self.start_id, start[b], *self.ids[b][line], end])


def pair_plan(source: AlignedTexts, often: dict[Direction, float], budget: int, seed: int) -> Plan:
    """Return a plan of batches of similar length with at most `budget` padded tokens per side. A direction's pairs are
    repeated `often` times per epoch; below 1, a random share of them is used."""

    def plan(epoch: int) -> list[list[Key]]:
        random = generator(seed, epoch)
        chance = torch.rand(len(source), generator=random).tolist()
        copies = [often.get(key[:2], 1.0) for key in source.keys]
        drawn = [i for i, (n, c) in enumerate(zip(copies, chance, strict=True)) for _ in range(int(n) + (c < n % 1))]
        batches = bucketed([source.sizes[i] for i in drawn], budget, random)
        return [[source.keys[drawn[i]] for i in batch] for batch in batches]

    return plan


@dataclass(frozen=True)
class CollatePairs:
    pad_id: int

    def __call__(self, pairs: Sequence[Pair]) -> PairBatch:
        source, answer = zip(*pairs, strict=True)
        return PairBatch(pad_text(source, self.pad_id), pad_text(answer, self.pad_id))


def target_logits(
    model: EncoderDecoder, batch: PairBatch, skipped: int = 0
) -> tuple[Float[Tensor, "N V"], Int[Tensor, "N"]]:
    """Return the logits and targets of all answer tokens after the start and `skipped` more, row by row; on a GPU also
    of others, with IGNORED as their target."""
    source, answer = batch.source, batch.answer
    states = model.decoder.states(answer.ids[:, :-1], model.encode(source.ids, source.valid), source.valid)
    real = padding(answer.lengths - 1, states.shape[1])
    real[:, :skipped] = False
    targets, chosen = selected(real, answer.ids[:, 1:], states)
    spare = -len(chosen) % ROWS
    logits = model.decoder.logits(F.pad(chosen, (0, 0, 0, spare))[None])[0][: len(chosen)]
    return logits.float(), targets


class Translating(Summed):
    """Next-token cross-entropy after the language token, with label smoothing (Vaswani et al. 2017, section 5.4)."""

    def __init__(self, model: EncoderDecoder, smoothing: float = 0.1):
        super().__init__(model)
        self.smoothing = smoothing

    def forward(self, batch: PairBatch) -> dict[str, Tensor]:
        logits, targets = target_logits(self.model, batch, skipped=1)  # the language is not predicted
        return {"loss": F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self.smoothing)}

    def counts(self, batch: PairBatch) -> dict[str, int | Tensor]:
        return {"loss": (batch.answer.lengths - 2).sum()}


@torch.inference_mode()
def nats_per_token(model: EncoderDecoder, batches: Sequence[PairBatch]) -> float:
    """Cross-entropy of the answers, without label smoothing."""
    exact = Translating(model, smoothing=0.0)
    loss = sum(float(exact(moved(batch, model.decoder.device))["loss"]) for batch in batches)
    return loss / sum(int(exact.counts(batch)["loss"]) for batch in batches)


def translator(
    tokenizer: Tokenizer, width: int, layers: tuple[int, int], heads: int, hidden: int, context: int, dropout: float,
    groups: Sequence[Sequence[str]] = (), grouped: tuple[int, int] = (0, 0),
) -> EncoderDecoder:  # fmt: skip
    """Build an M2M100-style model: pre-norm, sinusoidal positions, one embedding for both sides and the logits.
    `layers`: of encoder and decoder, the last `grouped` of which have a feed-forward for each of the `groups` of
    languages: in the encoder the source's, in the decoder the target's (Fan et al. 2021, section 5.2)."""
    own = AttentionConfig(width, heads, dropout=dropout)
    block = BlockConfig(own, hidden, "relu", dropout=dropout)
    crossing = BlockConfig(own, hidden, "relu", dropout=dropout, cross=own)
    shared = {"positions": PositionConfig("sinusoidal"), "embed_scale": width**0.5, "stem_dropout": dropout}
    languages = tuple(tuple(tokenizer.language_ids[name] for name in group) for group in groups)
    sparse = [{"groups": len(groups), "grouped": n} if n else {} for n in grouped]
    routed = [{"languages": languages} if n else {} for n in grouped]
    encoder = TextConfig(0, context, StackConfig(block, layers[0], **sparse[0]), causal=False, **shared, **routed[0])
    decoder = TextConfig(
        tokenizer.vocab_size, context, StackConfig(crossing, layers[1], **sparse[1]), causal=True, tied=True,
        **shared, **routed[1],
    )  # fmt: skip
    model = EncoderDecoder(EncoderDecoderConfig(encoder, decoder, start_id=tokenizer.eos_id))
    torch.nn.init.normal_(model.decoder.embed.weight, std=width**-0.5)
    return model
