"""Comparison of outputs. Each check returns a distance, 0 for equal outputs, which must not exceed a limit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def save(output: Any, path: Path) -> None:
    """Write an array or tensor as `.npy`, anything else as JSON. Calls a function first; that is not timed."""
    output = output() if callable(output) else output
    if hasattr(output, "detach"):
        output = output.detach().float().cpu().numpy() if output.is_floating_point() else output.detach().cpu().numpy()
    if isinstance(output, np.ndarray):
        np.save(path.with_suffix(".npy"), output, allow_pickle=False)
    else:
        path.with_suffix(".json").write_text(json.dumps(output))


def read(path: Path) -> Any:
    array = path.with_suffix(".npy")
    return np.load(array, allow_pickle=False) if array.exists() else json.loads(path.with_suffix(".json").read_text())


def near(own: Any, right: Any) -> float:
    """Largest absolute difference relative to the largest absolute value of the reference."""
    own, right = np.asarray(own, np.float64), np.asarray(right, np.float64)
    return float(np.abs(own - right).max() / np.abs(right).max())


def unit(own: Any, right: Any) -> float:
    """Largest absolute difference of normalized rows."""
    rows = [np.asarray(x, np.float64) for x in (own, right)]
    rows = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rows]
    return float(np.abs(rows[0] - rows[1]).max())


def cosine(own: Any, right: Any) -> float:
    """1 - cosine of the worst row."""
    own, right = (np.asarray(x, np.float64).reshape(-1, np.shape(x)[-1]) for x in (own, right))
    norms = np.linalg.norm(own, axis=-1) * np.linalg.norm(right, axis=-1)
    return float(1 - ((own * right).sum(-1) / norms).min())


def differing(own: Any, right: Any) -> float:
    """Share of different items; items missing in a shorter output differ."""
    pairs = [_flat(own), _flat(right)]
    longest = max(map(len, pairs))
    return 1 - sum(a == b for a, b in zip(*pairs, strict=False)) / longest if longest else 0.0


def _flat(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return value.ravel().tolist()
    if isinstance(value, list | tuple):
        return [item for part in value for item in _flat(part)]
    return [value]


CHECKS: dict[str, Callable[[Any, Any], float]] = {"near": near, "unit": unit, "cosine": cosine, "differing": differing}


def compare(own: Any, right: Any, name: str, limit: float) -> tuple[float, str]:
    """(distance, error or "")."""
    if name != "differing" and np.shape(own) != np.shape(right):
        return float("nan"), f"output has shape {np.shape(own)}, the reference {np.shape(right)}"
    distance = CHECKS[name](own, right)
    error = f"{name}: {distance:.2e} from the reference, at most {limit:g} allowed"
    return distance, "" if distance <= limit else error
