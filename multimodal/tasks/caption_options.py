"""The options of captions: their names, defaults and limits, and those that a model's card has."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from multimodal.errors import CheckpointError, UsageError
from multimodal.weights.folder import Checkpoint


@dataclass(frozen=True)
class CaptionOptions:
    """How captions are searched. Tokens are counted with the end and without `prompt`.

    `beam_size` 1 is greedy. `temperature` above 0 draws instead, from the `top_k` (0: all) most probable tokens and of
    these from those with `top_p` of the probability, by `seed`, the same for each picture; 1 where only one of the two
    is given. `num_captions`: that many of the beam, the best first, or that many draws.

    `length_penalty` α ranks by log-probability / tokens^α: 1 by the mean, 0 by the sum, as transformers.
    `no_repeat_ngram` n: no n tokens twice (0: no such rule); `repetition_penalty` as transformers, 1 for none.
    `prompt`: text that each caption begins with."""

    beam_size: int = 1
    max_tokens: int = 40
    min_tokens: int = 0
    length_penalty: float = 1.0
    no_repeat_ngram: int = 0
    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    num_captions: int = 1
    prompt: str = ""


Limits = Mapping[str, tuple[type, int | float, int | float]]
# type, least, most; a number must be above the least where `_ABOVE` has it
_LIMITS: Limits = {
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
DRAWS = {"temperature", *OFF}


def options_for(checkpoint: Checkpoint, given: Mapping[str, Any]) -> CaptionOptions:
    """What was `given`, then what the model's card has under "caption", then the defaults. Who asks for a beam does
    not get the card's draws, and the other way round.

    Raises UsageError for an unknown name, a value that cannot be used or values that do not go together;
    CheckpointError for such a thing in the card."""
    own = checkpoint.card.get("caption", {})
    try:
        if not isinstance(own, Mapping):
            raise UsageError(f"is no table ({own!r:.40})")
        checked(own)
        together(_drawn(own))
    except UsageError as error:
        raise CheckpointError(f"{checkpoint.source}: card, caption: {error}") from None
    checked(given)
    if _drawn(given).temperature > 0:
        own = {name: value for name, value in own.items() if name != "beam_size"}
    elif given.get("beam_size", 1) > 1:
        own = {name: value for name, value in own.items() if name not in DRAWS}
    options = _drawn({**own, **given})
    together(options)
    return options


def checked(values: Mapping[str, Any], limits: Limits = _LIMITS) -> None:
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


def _drawn(values: Mapping[str, Any]) -> CaptionOptions:
    """With the temperature that `top_k` or `top_p` alone ask for."""
    options = CaptionOptions(**values)
    return replace(options, temperature=1.0) if drawing(options, OFF) and "temperature" not in values else options


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
