"""Speech for training: manifests, cached features, batches of like length, augmentation on features."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.ctc import ctc_greedy
from multimodal.errors import UsageError
from multimodal.models.seq2seq import JointConformer
from multimodal.tokens.audio import read_audio
from multimodal.tokens.mel import BANK_FLOOR, BANK_MEAN, BANK_SCALE, filterbank, spec_augment
from multimodal.tokens.tokenizer import Tokenizer

# Padded sizes are multiples of these: oneDNN compiles a kernel for each new shape, which costs as much as a step.
FRAMES_STEP, IDS_STEP = 64, 8
FLOOR = (math.log(BANK_FLOOR) - BANK_MEAN) / BANK_SCALE  # a feature of digital silence


@dataclass(frozen=True)
class Utterance:
    path: Path
    text: str


@dataclass(frozen=True)
class SpeechBatch:
    """`ids` hold the transcripts without control tokens; past `id_lengths` they are 0."""

    features: Float[Tensor, "B F M"]
    lengths: Int[Tensor, "B"]
    ids: Int[Tensor, "B L"]
    id_lengths: Int[Tensor, "B"]


def read_manifest(path: Path) -> list[Utterance]:
    """Lines of {"audio_filepath", "text", ...}; paths are relative to the manifest. Raises UsageError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.strip()]
        found = [Utterance(path.parent / record["audio_filepath"], record["text"]) for record in records]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: not a manifest of audio_filepath and text ({error!r})") from None
    if not found:
        raise UsageError(f"{path}: no utterances (0 lines)")
    return found


def plain(text: str) -> str:
    """A transcript as the recipe learns it: lower case, letters, digits and apostrophes, single spaces."""
    kept = "".join(c if c.isalnum() or c == "'" else " " for c in text.replace("’", "'").lower())
    return " ".join(kept.split())


def transcript_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a transcript: the space before the first word makes it the same tokens as inside a sentence."""
    return tokenizer.encode(" " + text)


def load_features(manifest: Path, cache: Path, bands: int = 80) -> list[Float[Tensor, "_ M"]]:
    """`filterbank` of every utterance as float16, in the manifest's order; computed once for a `cache` folder."""
    utterances = read_manifest(manifest)
    names = "\n".join(f"{u.path.resolve()} {u.path.stat().st_size}" for u in utterances)
    key = hashlib.sha256(f"{bands}\n{names}".encode()).hexdigest()[:16]
    path = cache / f"{manifest.stem}-{key}.npz"
    if not path.exists():
        rows = [filterbank(read_audio(u.path, on_truncated="warn"), bands).half().numpy() for u in utterances]
        cache.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, frames=np.concatenate(rows), lengths=np.array([len(row) for row in rows]))
        part.rename(path)
    with np.load(path) as file:
        return list(torch.from_numpy(file["frames"]).split(file["lengths"].tolist()))


def join_some(lengths: Sequence[int], share: float, most: int, generator: torch.Generator) -> list[list[int]]:
    """Indices in groups of one; of a random `share`, groups of two of at most `most` frames together, so that
    the model meets longer sound than the single utterances, and sentences after each other."""
    order = torch.randperm(len(lengths), generator=generator).tolist()
    count = int(len(order) * share) // 2 * 2
    groups = [[i] for i in order[count:]]
    for a, b in zip(order[:count:2], order[1:count:2], strict=True):
        groups += [[a, b]] if lengths[a] + lengths[b] <= most else [[a], [b]]
    return groups


def bucketed(
    groups: list[list[int]], lengths: Sequence[int], budget: int, generator: torch.Generator
) -> list[list[list[int]]]:
    """Batches of groups of like length with at most `budget` padded frames each, in random order.

    A little noise on the lengths makes the batches differ from epoch to epoch."""
    size = [sum(lengths[i] for i in group) for group in groups]
    noise = torch.empty(len(groups)).uniform_(0.97, 1.03, generator=generator).tolist()
    batches: list[list[list[int]]] = [[]]
    longest = 0
    for at in sorted(range(len(groups)), key=lambda i: size[i] * noise[i]):
        padded = _up(size[at], FRAMES_STEP)
        longest = max(longest, padded)
        if batches[-1] and longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = padded
        batches[-1].append(groups[at])
    return [batches[i] for i in torch.randperm(len(batches), generator=generator)]


def padding_share(batches: list[list[list[int]]], lengths: Sequence[int]) -> float:
    """Share of the frames in `batches` that are padding."""
    sizes = [[sum(lengths[i] for i in group) for group in batch] for batch in batches]
    return 1 - sum(map(sum, sizes)) / sum(_up(max(size), FRAMES_STEP) * len(size) for size in sizes)


def augment(features: Float[Tensor, "_ M"], generator: torch.Generator) -> Float[Tensor, "_ M"]:
    """Pace by 0.9 to 1.1, loudness by ±10 dB, in a fifth of the cases steady noise of random level and tilt, then
    a light SpecAugment. All of it on log-mel frames, which costs a hundredth of doing it on samples."""
    pace, gain, noisy, level, tilt = torch.rand(5, generator=generator).tolist()
    frames = max(1, round(len(features) * (0.9 + 0.2 * pace)))
    x = F.interpolate(features.T[None], size=frames, mode="linear", align_corners=False)[0].T
    x = (x + (20 * gain - 10) * math.log(10) / 10 / BANK_SCALE).clamp(min=FLOOR)
    if noisy < 0.2:
        # 5 to 45 dB under the loudest tenth of the sound; power of noise in a band varies as a mean of exponentials
        top = x.mean(1).quantile(0.9) * BANK_SCALE - (5 + 40 * level) * math.log(10) / 10
        slope = torch.linspace(1, -1, x.shape[1]) * (6 * tilt - 2)
        noise = top + slope + 0.5 * torch.randn(x.shape, generator=generator)
        x = torch.logaddexp(x * BANK_SCALE, noise) / BANK_SCALE
    masks = max(1, frames // 150)
    return spec_augment(x, generator, masks, time_ratio=min(0.05, 12 / frames), freq_masks=1, freq_width=15)


def collate(rows: list[Float[Tensor, "_ M"]], ids: list[list[int]]) -> SpeechBatch:
    lengths, id_lengths = torch.tensor([len(r) for r in rows]), torch.tensor([len(i) for i in ids])
    features = torch.zeros(len(rows), _up(int(lengths.max()), FRAMES_STEP), rows[0].shape[1])
    padded = torch.zeros(len(rows), _up(int(id_lengths.max()), IDS_STEP), dtype=torch.long)
    for at, (row, own) in enumerate(zip(rows, ids, strict=True)):
        features[at, : len(row)] = row
        padded[at, : len(own)] = torch.tensor(own, dtype=torch.long)
    return SpeechBatch(features, lengths, padded, id_lengths)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def training_batches(
    features: list[Float[Tensor, "_ M"]], ids: list[list[int]], budget: int, seed: int, start: int = 0,
    easy: int = 0, short: int = 200, join: float = 0.2, most: int = 1600,
) -> Iterator[tuple[int, SpeechBatch]]:  # fmt: skip
    """Endless (epoch, batch) from batch `start` on: the same for one seed, wherever it starts.

    The first `easy` epochs hold only utterances under `short` frames, unchanged, since CTC finds its alignment
    on those soon (the curriculum of Amodei et al. 2016, section 3.2). Then that limit grows by a fifth an epoch up
    to 5 s; the epochs after that hold all, joined in part and augmented."""
    lengths, step, epoch = [len(f) for f in features], 0, 0
    while True:
        generator = torch.Generator().manual_seed(seed * 1000003 + epoch)
        limit = short * 1.2 ** max(0, epoch + 1 - easy)
        first = epoch < easy or limit < 500
        few = [[i] for i, length in enumerate(lengths) if length < limit]
        groups = few if first else join_some(lengths, join, most, generator)
        for batch in bucketed(groups, lengths, budget, generator):
            if step >= start:
                own = torch.Generator().manual_seed(seed * 7919 + step)
                rows = [torch.cat([features[i] for i in group]).float() for group in batch]
                rows = rows if first else [augment(row, own) for row in rows]
                yield epoch, collate(rows, [[id for i in group for id in ids[i]] for group in batch])
            step += 1
        epoch += 1


@torch.inference_mode()
def greedy_texts(
    model: JointConformer, tokenizer: Tokenizer, features: list[Float[Tensor, "_ M"]], budget: int = 8000
) -> list[str]:
    """Transcripts by the CTC output's best path, in the order of `features`."""
    lengths, texts = [len(f) for f in features], [""] * len(features)
    for groups in bucketed([[i] for i in range(len(lengths))], lengths, budget, torch.Generator()):
        rows = [i for (i,) in groups]
        batch = collate([features[i].float() for i in rows], [[] for _ in rows])
        frames, _, counts = model.encode(batch.features, batch.lengths)
        for i, ids in zip(rows, ctc_greedy(model.ctc_logits(frames), counts, model.config.blank), strict=True):
            texts[i] = tokenizer.decode(ids).strip()
    return texts
