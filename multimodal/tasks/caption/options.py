"""Options of captions, and those that a model's card sets."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from multimodal.decoding.options import OFF, DecodingOptions, check_combination, with_temperature
from multimodal.errors import CheckpointError, UsageError
from multimodal.inference.options import BatchOptions
from multimodal.system.options import option

if TYPE_CHECKING:
    from multimodal.weights.folder import Checkpoint


class CaptionBatchOptions(BatchOptions):
    batch_size: int = BatchOptions.batch_size.but(16)


class CaptionOptions(DecodingOptions):
    """`num_captions`: that many of the beam, the best first, or that many samples. `prompt`: text that each caption
    begins with; it is not among the tokens counted."""

    max_new_tokens: int = option(40, "cut a caption after N tokens and flag it as not finished", "N", low=1,
                                also=("max_tokens",))  # fmt: skip
    num_captions: int = option(1, "the N best of the beam, or N samples; equal ones become one, with their count", "N",
                               low=1, high=1000)  # fmt: skip
    prompt: str = option("", "text that every caption begins with", "TEXT")


def options_for(checkpoint: "Checkpoint", given: Mapping[str, Any]) -> CaptionOptions:
    """`given` options, else those of the model's card under "caption", else those of its generation_config.json, else
    the defaults. A given beam switches the card's sampling off, and given sampling the card's beam.

    Raises UsageError for an unknown name, a bad value or values that contradict each other; CheckpointError for such a
    card."""
    from multimodal.tasks.encode.search_defaults import search_defaults, warn_of_search

    own = checkpoint.card.get("caption") or {}
    try:
        check_combination(_options(own), "num_captions")
    except UsageError as error:
        raise CheckpointError(f"{checkpoint.source}: card, caption: {error}") from None
    if _options(given).temperature > 0:
        own = {name: value for name, value in own.items() if name != "beam_size"}
    elif given.get("beam_size", 1) > 1:
        own = {name: value for name, value in own.items() if name not in ("temperature", *OFF)}
    warn_of_search(checkpoint, given, CaptionOptions)
    options = _options(search_defaults(checkpoint, {**own, **given}, CaptionOptions))
    check_combination(options, "num_captions")
    return options


def _options(values: Mapping[str, Any]) -> CaptionOptions:
    return with_temperature(CaptionOptions(**values), values)
