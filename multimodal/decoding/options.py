"""Options of text decoding: those that captions and generated text share, and values that exclude each other."""

from collections.abc import Mapping
from typing import Any

from multimodal.errors import UsageError
from multimodal.system.options import OptionSet, option

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # the options of sampling, and the values that turn them off
SEEDS = 2**63 - 1


class DecodingOptions(OptionSet):
    """Options of decoding. `max_new_tokens` counts the end token and no prompt. `temperature` 0 takes the most probable
    token; above it tokens are drawn by `seed`, the same for each item. `temperature` is 1 where only `top_k`, `top_p`
    or `min_p` is given."""

    max_new_tokens: int = option(100, "end the text after N tokens", "N", low=1, high=10**9, also=("max_tokens",))
    min_tokens: int = option(0, "do not end the text before N tokens", "N", low=0, high=10**9)
    temperature: float = option(0.0, "above 0: sample, with logits / T (default: 0, or 1 with a flag of sampling)", "T",
                                low=0, high=100)  # fmt: skip
    top_k: int = option(0, "sample from the K most probable tokens (default: 0, all)", "K", low=0)
    top_p: float = option(1.0, "sample from the most probable tokens that together have this probability", "P", low=0,
                          high=1, above=True)  # fmt: skip
    repetition_penalty: float = option(1.0, "above 1: make tokens that have occurred less probable", "X", low=0,
                                       high=100, above=True)  # fmt: skip
    no_repeat_ngram: int = option(0, "never repeat a sequence of N tokens (default: 0, off)", "N", low=0)
    beam_size: int = option(1, "beams; 1 takes the most probable token each time", "N", low=1, high=1000)
    length_penalty: float = option(1.0, "rank by log-probability / tokens^A, as transformers: 1 is the mean, 0 the sum",
                                   "A", low=-10, high=10)  # fmt: skip
    seed: int = option(0, "seed of the sampling, the same for each item", "N", low=0, high=SEEDS)


def with_temperature(options: Any, given: Mapping[str, Any]) -> Any:
    """`options` with temperature 1 where `given` asks for sampling without naming a temperature."""
    sampled = sampling_options(options) and "temperature" not in given
    return options.replace(temperature=1.0) if sampled else options


def check_combination(options: Any, count: str) -> None:
    """Raises UsageError for values that contradict each other. `count`: name of the number of answers."""
    o, answers = options, getattr(options, count)
    if o.min_tokens > o.max_new_tokens:
        raise UsageError(f"{o.min_tokens} is above max_new_tokens ({o.max_new_tokens})", argument="min_tokens")
    if o.temperature == 0 and (on := sampling_options(o)):
        raise UsageError(f"{getattr(o, on[0])} is for sampling, which temperature 0 turns off", argument=on[0])
    if o.temperature > 0 and o.beam_size > 1:
        raise UsageError(
            f"{o.beam_size} searches, and temperature {o.temperature:g} samples; name one", argument="beam_size"
        )
    if o.temperature == 0 and answers > o.beam_size:
        ways = ", ".join(["temperature", *(name for name in OFF if hasattr(o, name))])
        raise UsageError(f"{answers} needs a beam_size of at least that, or sampling ({ways})", argument=count)
    if 0 < o.temperature < 0.001:
        raise UsageError(
            f"{o.temperature:g} is too near 0 to divide by; 0 takes the most probable token", argument="temperature"
        )


def sampling_options(options: Any) -> list[str]:
    """Names of the options of sampling that are on."""
    return [name for name, off in OFF.items() if getattr(options, name, off) != off]
