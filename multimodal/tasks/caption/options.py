"""The options of captions: their names, defaults and limits, and those that a model's card has."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from multimodal.decoding.options import OFF, checked, drawing, together
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


# type, least, most; a number must be above the least where `_ABOVE` has it
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


def _drawn(values: Mapping[str, Any]) -> CaptionOptions:
    """With the temperature that `top_k` or `top_p` alone ask for."""
    options = CaptionOptions(**values)
    return replace(options, temperature=1.0) if drawing(options, OFF) and "temperature" not in values else options
