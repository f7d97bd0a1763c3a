"""Checks of search options: types, limits, and values that exclude each other."""

import math
from collections.abc import Mapping
from typing import Any

from multimodal.errors import UsageError

Limits = Mapping[str, tuple[type, int | float, int | float]]


LIMITS: Limits = {
    "beam_size": (int, 1, 1000),
    "max_tokens": (int, 1, math.inf),
    "min_tokens": (int, 0, math.inf),
    "length_penalty": (float, -10, 10),
    "no_repeat_ngram": (int, 0, math.inf),
    "repetition_penalty": (float, 0, 100),
    "temperature": (float, 0, 100),
    "top_k": (int, 0, math.inf),
    "top_p": (float, 0, 1),
    "seed": (int, 0, 2**63 - 1),
    "num_captions": (int, 1, 1000),
    "prompt": (str, 0, 0),
}


_ABOVE = {"repetition_penalty", "top_p"}


OFF = {"top_k": 0, "top_p": 1.0}  # options of drawing, and what means that they are off


def checked(values: Mapping[str, Any], limits: Limits = LIMITS) -> None:
    """Raises UsageError for a name or value that cannot be used."""
    for name, value in values.items():
        if name not in limits:
            raise UsageError(f"option {name!r}: unknown (known: {', '.join(limits)})")
        kind, least, most = limits[name]
        if kind is str:
            if not isinstance(value, str):
                raise UsageError(f"{name}: must be a text ({value!r})")
            continue
        number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if not number or not least <= value <= most or (name in _ABOVE and value == least):
            above = "above " if name in _ABOVE else ""
            told = f"from {above}{least:g} to {most:g}" if most < math.inf else f"of {least:g} or more"
            raise UsageError(f"{name}: must be a {'whole ' * (kind is int)}number {told} ({value!r})")


def together(options: Any, draws: Mapping[str, Any] = OFF, many: str = "num_captions") -> None:
    """Raises UsageError for values that do not go together. `draws`: options of drawing, with what means that they are
    off; `many`: the one that says how many answers there are to be."""
    o, count = options, getattr(options, many)
    if o.min_tokens > o.max_tokens:
        raise UsageError(f"min_tokens {o.min_tokens}: is above max_tokens {o.max_tokens}")
    if o.temperature == 0 and (on := drawing(o, draws)):
        raise UsageError(f"{on[0]} {getattr(o, on[0])}: is for drawing, and temperature 0 does not draw")
    if o.temperature > 0 and o.beam_size > 1:
        raise UsageError(f"beam_size {o.beam_size}: does not draw, and temperature {o.temperature:g} does; name one")
    if o.temperature == 0 and count > o.beam_size:
        ways = ", ".join(["temperature", *draws])
        raise UsageError(f"{many} {count}: needs a beam_size of at least that, or drawing ({ways})")
    if 0 < o.temperature < 0.001:
        raise UsageError(f"temperature {o.temperature:g}: is too near 0 to divide by; 0 takes the most probable token")


def drawing(options: Any, draws: Mapping[str, Any]) -> list[str]:
    """The options of drawing that are on."""
    return [name for name, off in draws.items() if getattr(options, name) != off]
