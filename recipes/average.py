r"""Average the weights of models that began from the same weights: a model soup (Wortsman et al. 2022).

    python recipes/average.py --models asr-2 asr-3 --out asr-conformer-en
    multimodal evaluate asr $data/speech/speechocean762/valid.jsonl --model asr-conformer-en --whole_recordings

Two runs, of which the second went on from the first on other data, often have a mean that is better than both: of the
second and third runs of asr-conformer-en it has 36.8 % word errors on validation, they 38.0 and 37.8 %; of this mean
and the fourth 36.1 %, its halves 37.2 and 36.2 % (5 beams). Runs from different random weights have a useless mean.
`--weights 0.7 0.3` counts them unequally. Models whose labels, table columns, tokenizer or preprocessing differ are
refused. All else (the card but for facts of one checkpoint) comes from the first model.
"""

import math
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from multimodal.errors import UsageError
from multimodal.train import log, start
from multimodal.train.checkpoint.best import save_checkpoint
from multimodal.train.checkpoint.meaning import check_meaning, meaning_of
from multimodal.weights.card import inherited
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

RATES = ("dropout", "stem_dropout", "drop_path")  # in which a model and one trained further may differ


@dataclass(frozen=True)
class AverageRun:
    models: tuple[str, ...]  # folders or names, two or more
    out: Path  # folder for the mean
    weights: tuple[float, ...] = ()  # share of each model, in proportion to each other
    store: Literal["float32", "float16", "bfloat16", "int8"] = "float16"  # number type of the stored weights

    def __post_init__(self):
        if len(self.models) < 2:
            raise UsageError(f"expected two models or more (got {len(self.models)})", argument="models")
        good = all(0 <= weight < math.inf for weight in self.weights) and any(self.weights)
        if self.weights and (len(self.weights) != len(self.models) or not good):
            expected = f"expected {len(self.models)} numbers of 0 or more, not all 0"
            raise UsageError(f"{expected} (got {' '.join(map(str, self.weights))})", argument="weights")


def in_use(config: Any) -> Any:
    """A configuration as nested tables, without what it says of training."""
    if is_dataclass(config):
        config = {"": type(config).__name__} | asdict(config)
    if not isinstance(config, dict):
        return config
    return {name: in_use(value) for name, value in config.items() if name not in RATES}


def check_alike(first: Checkpoint, other: Checkpoint) -> None:
    """Raise UsageError for models whose inputs or outputs mean different things."""
    one, two = meaning_of(first), meaning_of(other)
    try:
        check_meaning(dict.fromkeys(two, ()) | one, dict.fromkeys(one, ()) | two)
    except ValueError as difference:
        raise UsageError(f"{other.source}: differs from {first.source}: {difference}", argument="models") from None
    if other.preprocessing != first.preprocessing:
        raise UsageError(f"{other.source}: its preprocessing differs from that of {first.source}", argument="models")


def main(s: AverageRun) -> None:
    first, *others = (load(name) for name in s.models)
    shares = [weight / sum(s.weights) for weight in s.weights] or [1 / len(s.models)] * len(s.models)
    mean = {name: shares[0] * own if own.is_floating_point() else own for name, own in first.model.state_dict().items()}
    for name, other, share in zip(s.models[1:], others, shares[1:], strict=True):
        if in_use(other.model.config) != in_use(first.model.config):
            raise UsageError(f"{name}: its configuration differs from that of {s.models[0]}", argument="models")
        check_alike(first, other)
        for key, own in other.model.state_dict().items():
            if own.is_floating_point():
                mean[key] += share * own
    shared = tuple(one for one in first.shared if all(one in other.shared for other in others))
    equal = tuple(f"{one.part}." for one in shared)  # to the bit, which a mean of three is not
    mean |= {key: own for key, own in first.model.state_dict().items() if key.startswith(equal)}
    first.model.load_state_dict(mean)
    card = inherited(first.card) | {"mean_of": dict(zip(s.models, shares, strict=True))}
    save_checkpoint(replace(first, card=card, shared=shared), s.out, s.store)
    log.info("%s: the mean of %d models", s.out, len(s.models))


if __name__ == "__main__":
    start(main)
