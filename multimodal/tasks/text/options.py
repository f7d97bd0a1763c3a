"""The options of generated text: their names, defaults and limits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from multimodal.decoding.options import Limits, checked, drawing, together
from multimodal.errors import UsageError

ON_LONG = ("error", "cut")


@dataclass(frozen=True)
class GenerateOptions:
    """How a text goes on. Tokens are counted without the prompt; of `max_tokens` the end is one, and there is none
    before `min_tokens`.

    `temperature` 0 takes the most probable token; above it tokens are drawn by `seed`, the same for each prompt, from
    the `top_k` (0: all) most probable, of these from those with `top_p` of the probability, of these from those with
    `min_p` of the first one's; 1 where only one of the three is given. `beam_size` above 1 searches with that many
    beams instead, ranked by log-probability / tokens^`length_penalty`, as transformers' `early_stopping=False`.
    `num_return`: that many of the beam, the best first, or that many draws.

    `repetition_penalty` 1 and `no_repeat_ngram` 0 are no such rule. `stop`: a text ends before any of these.
    `on_long`: a prompt beyond the context is an "error" (where the model cannot compute it) or is "cut" from the
    left."""

    max_tokens: int = 100
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    beam_size: int = 1
    length_penalty: float = 1.0
    num_return: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    on_long: str = "error"


_LIMITS: Limits = {
    "max_tokens": (int, 1, 10**9),  # an index of a tensor is at most 2**63
    "min_tokens": (int, 0, 10**9),
    "temperature": (float, 0, 100),
    "top_k": (int, 0, math.inf),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 0, 100),
    "no_repeat_ngram": (int, 0, math.inf),
    "beam_size": (int, 1, 1000),
    "length_penalty": (float, -10, 10),
    "num_return": (int, 1, 1000),
    "seed": (int, 0, 2**63 - 1),
}
_DRAWS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def options_for(given: Mapping[str, Any]) -> GenerateOptions:
    """Raises UsageError for an unknown name, a value that cannot be used or values that do not go together."""
    texts = {"stop", "on_long"}
    checked({name: value for name, value in given.items() if name not in texts}, _LIMITS)
    stop = given.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stop:
        if not isinstance(text, str) or not text:
            raise UsageError(f"stop: must be texts that are not empty ({text!r:.40})")
    if given.get("on_long", "error") not in ON_LONG:
        raise UsageError(f"on_long: must be one of {', '.join(ON_LONG)} ({given['on_long']!r:.40})")
    options = GenerateOptions(**{**given, "stop": stop})
    if "temperature" not in given and drawing(options, _DRAWS):
        options = replace(options, temperature=1.0)
    together(options, _DRAWS, "num_return")
    return options
