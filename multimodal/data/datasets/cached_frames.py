"""Cache of log-mel frames: computed once, stored as float16, mapped into memory."""

import hashlib
import io
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.data.loader import BROKEN
from multimodal.errors import DataError, one_line
from multimodal.system.files import shown, write_whole
from multimodal.system.outputs import naming
from multimodal.system.signals import at_stop

log = logging.getLogger(__name__)


def cached_frames(
    cache: Path, items: Sequence[str], read: Callable[[int], Float[Tensor, "F M"]], name: Callable[[int], str],
    bands: int, where: str, most_broken: float, kind: str = "",
) -> list[Float[Tensor, "_ M"]]:  # fmt: skip
    """Return `read(i)` of each of `items` as float16 [F M], from the folder `cache` if it is there. Items are by their
    `Source.identity`, so a changed file is read again, as with another `kind`. A broken item is logged by name and has
    no frames; each call tries it again, as permissions or a network may have been the cause.

    Raises DataError for a damaged cache, or as soon as more than `most_broken` of all items are broken; OSError that
    names the file if the cache cannot be written."""
    known = "\n".join(items)
    key = hashlib.sha256(f"{bands} {kind}\n{known}".encode()).hexdigest()[:16]
    path, sizes = cache / f"frames-{key}.f16", cache / f"frames-{key}.npy"
    frames_of = partial(_frames, read, name, bands)
    if not path.exists() or any(len(frames_of(number)) for number in _without_frames(sizes, len(items))):
        with naming(path):
            cache.mkdir(parents=True, exist_ok=True)
            _compute(path, sizes, len(items), frames_of, where, most_broken)
    file = path
    try:
        if not (path.is_file() and sizes.is_file()):
            raise ValueError(f"expected two regular files, this and {sizes.name}")
        file = sizes
        lengths = np.load(sizes).tolist()
        if len(lengths) != len(items) or min(lengths, default=0) < 0:
            raise ValueError(f"expected {len(items)} lengths, none below 0 (got {shown(lengths)})")
        file = path
        frames = np.memmap(path, np.float16, mode="c", shape=(sum(lengths), bands))
        if path.stat().st_size != frames.nbytes:
            raise ValueError(f"{path.stat().st_size} bytes, not {frames.nbytes}")
    except Exception as error:  # numpy raises almost anything for a damaged file
        cause = (str(error).splitlines() or [type(error).__name__])[0][:80]
        raise DataError(f"{file}: damaged cache ({cause}); delete it to recompute it") from None
    return list(torch.from_numpy(frames).split(lengths))


def _without_frames(sizes: Path, count: int) -> list[int]:
    """Numbers of the items that were broken when the cache was made; none of a damaged one."""
    if not sizes.is_file():  # a pipe would wait
        return []
    try:
        return [number for number, length in enumerate(np.load(sizes).tolist()[:count]) if length == 0]
    except Exception:  # numpy raises almost anything; the caller tells
        return []


def _frames(read: Callable, name: Callable, bands: int, number: int) -> Float[Tensor, "F M"]:
    try:
        return read(number).half()
    except BROKEN as error:
        cause = one_line(error).removeprefix(f"{name(number)}: ")
        log.warning("broken recording skipped: %s: %s", name(number), cause)
        return torch.zeros(0, bands, dtype=torch.half)


def _compute(
    path: Path, sizes: Path, count: int, frames_of: Callable[[int], Tensor], where: str, most_broken: float
) -> None:
    part, lengths, broken = path.with_suffix(f".{os.getpid()}.part"), [], 0  # several processes may compute it
    remove = partial(part.unlink, missing_ok=True)
    try:
        with at_stop(remove), part.open("wb") as file:
            for number in range(count):
                frames = frames_of(number)
                lengths.append(len(frames))
                file.write(frames.contiguous().numpy().tobytes())
                broken += not len(frames)
                if broken > most_broken * count:
                    many = f"{broken} of the first {number + 1} recordings are broken"
                    raise DataError(f"{where}: {many}, more than {most_broken:.1%} of its {count}")
        table = io.BytesIO()
        np.save(table, np.array(lengths))
        write_whole(sizes, table.getvalue())
        part.rename(path)
    finally:
        remove()
