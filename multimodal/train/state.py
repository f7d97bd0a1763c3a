"""Crash-safe training state: temporary file beside the target, fsync, rename; the two newest are kept."""

import os
from pathlib import Path
from typing import Any

import torch

from multimodal.errors import CheckpointError


def save_state(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Writes `state-<step>.pt` so that a kill at any moment leaves each file complete or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"state-{step:09d}.pt"
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    for old in saved_states(folder)[:-2]:
        old.unlink()


def saved_states(folder: Path) -> list[Path]:
    return sorted(folder.glob("state-*.pt"))


def newest_state(folder: Path) -> dict[str, Any] | None:
    """The newest state that can be read, or None where there is none; a damaged one is named and passed over."""
    states = saved_states(folder)
    for path in reversed(states):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            print(f"{path}: damaged, trying the one before ({type(error).__name__})")
    if states:
        raise CheckpointError(f"{folder}: none of {len(states)} saved states can be read")
    return None
