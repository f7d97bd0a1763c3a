"""Training a translator: parallel texts in several languages, pairs of them by direction, and its objective.

A source is its language's token, the text and the end; an answer begins with the model's `start_id` and the token of
its language, as in M2M100 (Fan et al. 2021, section 2.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.masks import padding
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.data.batching import bucketed, padded_length
from multimodal.data.loader import Plan, generator
from multimodal.data.manifests import read_text
from multimodal.errors import DataError
from multimodal.models.encoder_decoder import TextToText, TextToTextConfig
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.train.objective import Summed

ROWS = 256  # tokens that get logits are a multiple of it: oneDNN compiles and keeps kernels for each new shape

Direction = tuple[str, str]
Key = tuple[str, str, int]


def parallel_file(prefix: str, language: str) -> Path:
    """`PREFIX.LANGUAGE`, or else `PREFIX.LANGUAGE.gz`. Raises DataError where there is neither."""
    paths = [Path(f"{prefix}.{language}{ending}") for ending in ("", ".gz")]
    for path in paths:
        if path.is_file():
            return path
    raise DataError(f"{paths[0]}: neither it nor {paths[1].name} is there")


def read_parallel(prefix: str, languages: Sequence[str]) -> dict[str, list[str]]:
    """The lines of the file of each language. Raises DataError where one cannot be read, or has another number of lines
    than the first."""
    found: dict[str, list[str]] = {}
    for language in languages:
        path = parallel_file(prefix, language)
        lines = read_text(path).split("\n")
        lines = lines[:-1] if lines and not lines[-1] else lines
        if found and len(lines) != len(first := next(iter(found.values()))):
            raise DataError(f"{path}: {len(lines)} lines, where {next(iter(found))} has {len(first)}")
        found[language] = [line.strip() for line in lines]
    return found


class Pair(NamedTuple):
    source: list[int]
    answer: list[int]  # with the start id before it


@dataclass(frozen=True)
class PairBatch:
    source: Int[Tensor, "B S"]
    source_lengths: Int[Tensor, "B"]
    ids: Int[Tensor, "B T"]
    lengths: Int[Tensor, "B"]

    @property
    def padding(self) -> float:
        return 1 - float(self.source_lengths.sum() + self.lengths.sum()) / (self.source.numel() + self.ids.numel())


class Parallel:
    """Pairs of lines by (language, language, line): a source of the loader. Those with an empty side, or one longer
    than `longest` tokens with language and end, are left out; `left_out` counts them."""

    def __init__(self, texts: dict[str, list[str]], tokenizer: Tokenizer, directions: Sequence[Direction],
                 start_id: int, longest: int):  # fmt: skip
        self.tokenizer, self.start_id = tokenizer, start_id
        self.ids = {language: [tokenizer.encode(line) for line in lines] for language, lines in texts.items()}
        sizes = {language: [len(row) for row in rows] for language, rows in self.ids.items()}
        fits = {language: [0 < size <= longest - 2 for size in row] for language, row in sizes.items()}
        self.keys: list[Key] = [
            (a, b, i) for a, b in directions for i, (x, y) in enumerate(zip(fits[a], fits[b], strict=True)) if x and y
        ]
        self.sizes = [max(sizes[a][i], sizes[b][i]) + 2 for a, b, i in self.keys]
        self.left_out = len(directions) * len(next(iter(texts.values()))) - len(self.keys)
        if not self.keys:
            raise DataError("no pair of lines is left to train on")

    def __len__(self) -> int:
        return len(self.keys)

    def name(self, key: Key) -> str:
        return f"line {key[2] + 1}, {key[0]} to {key[1]}"

    def read(self, key: Key) -> Pair:
        a, b, line = key
        start, end = self.tokenizer.language_ids, self.tokenizer.eos_id
        source = [start[a], *self.ids[a][line], end]
        return Pair(source, [self.start_id, start[b], *self.ids[b][line], end])


def pair_plan(source: Parallel, often: dict[Direction, float], budget: int, seed: int) -> Plan:
    """Batches of pairs of like length with at most `budget` padded tokens on a side, a pure function of the epoch. In
    each epoch a direction's pairs come `often` times: a random share of them where that is below 1."""

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
        return PairBatch(*self._padded([p.source for p in pairs]), *self._padded([p.answer for p in pairs]))

    def _padded(self, rows: list[list[int]]) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B"]]:
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.full((len(rows), padded_length(int(lengths.max()))), self.pad_id)
        for own, row in zip(ids, rows, strict=True):
            own[: len(row)] = torch.tensor(row)
        return ids, lengths


class Translating(Summed):
    """Cross-entropy of each next token after the language's, with smoothed labels (Vaswani et al. 2017, section
    5.4)."""

    def __init__(self, model: TextToText, smoothing: float = 0.1):
        super().__init__(model)
        self.smoothing = smoothing

    def forward(self, batch: PairBatch) -> dict[str, Tensor]:
        valid = padding(batch.source_lengths, batch.source.shape[1])
        states = self.model.decoder.states(batch.ids[:, :-1], self.model.encode(batch.source, valid), valid)
        real = padding(batch.lengths - 1, states.shape[1])
        real[:, 0] = False  # the language is given, not predicted
        own, targets = states[real], batch.ids[:, 1:][real]
        spare = -len(own) % ROWS
        logits = self.model.decoder.logits(F.pad(own, (0, 0, 0, spare))[None])[0][: len(own)]
        return {"loss": F.cross_entropy(logits.float(), targets, reduction="sum", label_smoothing=self.smoothing)}

    def counts(self, batch: PairBatch) -> dict[str, int | Tensor]:
        return {"loss": (batch.lengths - 2).sum()}


def translator(
    tokenizer: Tokenizer, width: int, layers: tuple[int, int], heads: int, hidden: int, context: int, dropout: float
) -> TextToText:
    """Pre-norm blocks, sinusoids and one embedding for both sides and the logits, as M2M100. `layers`: of the encoder
    and of the decoder."""
    own = AttentionConfig(width, heads, dropout=dropout)
    block = BlockConfig(own, hidden, "relu", dropout=dropout)
    crossing = BlockConfig(own, hidden, "relu", dropout=dropout, cross=own)
    shared = {"positions": PositionConfig("sinusoidal"), "embed_scale": width**0.5, "stem_dropout": dropout}
    encoder = TextConfig(0, context, StackConfig(block, layers[0]), causal=False, **shared)
    decoder = TextConfig(
        tokenizer.vocab_size, context, StackConfig(crossing, layers[1]), causal=True, tied=True, **shared
    )
    model = TextToText(TextToTextConfig(encoder, decoder, start_id=tokenizer.eos_id))
    torch.nn.init.normal_(model.decoder.embed.weight, std=width**-0.5)
    return model
