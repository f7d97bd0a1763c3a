"""Options of views of a model, and of its costs."""

from typing import Any

from multimodal.errors import UsageError
from multimodal.system.options import OptionSet, option


def _layer(value: Any) -> int | str:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if value != "all" and (type(value) is not int or value < 0):
        raise UsageError(f"must be a layer's number, from 0, or all (got {value!r:.40})")
    return value


class ViewOptions(OptionSet):
    """`layer`: a number, "all", or None for the last. `head` None: all. `length`: tokens repeated for induction (None:
    50, or as many as fit)."""

    layer: int | str | None = option(None, "number of the layer, from 0, or all (default: the last; for an alignment "
                                     "the mean of all, or of the heads known to align with speech)", "N",
                                     read=_layer)  # fmt: skip
    head: int | None = option(None, "number of the head, from 0 (default: all)", "N", low=0)
    length: int | None = option(None, "length of the random sequence that induction repeats (default: 50)", "N", low=2)
    size: int | None = option(None, "side that images are resized to, for more patches (default: the model's)",
                              "PIXELS", low=1)  # fmt: skip
    interpolation: str = option("antialias", "how to resize position embeddings; dino: as DINO does, not antialiased "
                                "and with an offset of 0.1", choices=("antialias", "dino"))  # fmt: skip


class CostOptions(OptionSet):
    length: int | None = option(None, "tokens of a text (default: the model's context)", "N", low=1)
    batch: int = option(1, "batch size, for the memory of the cache and of training", "B", low=1)
    training_tokens: float | None = option(None, "tokens to train a language model on, for its compute budget "
                                           "(default: 20 per parameter, compute-optimal)", "N", low=1)  # fmt: skip
    seconds: float = option(10.0, "length of audio, for models that take any length", "S", low=0, above=True,
                            high=86_400)  # fmt: skip
