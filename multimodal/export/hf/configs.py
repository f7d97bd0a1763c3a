"""Choice of the family that says all of a model: its config.json, read again, gives the same model."""

import re
from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from multimodal.errors import CheckpointError, UsageError
from multimodal.export.hf.architectures import architecture
from multimodal.export.hf.decoders import DECODERS
from multimodal.export.hf.towers import TOWERS
from multimodal.export.refusals import check_kind, differences
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViTConfig
from multimodal.weights.family import Family
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import families
from multimodal.weights.table import Tensors, export_tensors

WRITERS = DECODERS | TOWERS
SEGMENTED = ("bert", "roberta", "xlm-roberta", "camembert", "albert", "electra")  # a model without gets two of zeros
SHOWN = 2
UNLABELLED = ("-choice", "-next-sentence")  # ends of families whose classes have no names
TRAINING = ("dropout", "drop_path", "stem_dropout", "checkpointing")


def described(checkpoint: Checkpoint, kinds: Collection[str] = WRITERS) -> tuple[dict[str, Any], Tensors]:
    """The configuration, without ids of tokens, and the tensors of a family that says all of the model. `kinds`: values
    of `model_type`. Raises UsageError if none does."""
    check_kind(checkpoint, "hf" if kinds is WRITERS else "gguf")
    own = families().get(checkpoint.card.get("format", ""))
    if kinds is WRITERS and own is not None and own.types and not WRITERS.keys() & own.types:
        raise UsageError(f"model {checkpoint.source}: a {own.name} is exported from the folder of transformers that it "
                         "came from alone; export that one")  # fmt: skip
    model, labelled = checkpoint.original(), bool(checkpoint.card.get("labels"))
    unfit = ("-old", *UNLABELLED) if labelled else "-old"
    known = [one for one in families().values() if one.model is type(model) and not one.name.endswith(unfit)]
    pairs = [(family, kind) for kind in WRITERS for family in known if kind in family.types and kind in kinds]
    pairs.sort(key=lambda pair: pair[0].name != checkpoint.card.get("format"))
    near, lost = "", []
    for family, kind in pairs:
        if (found := _written(family, kind, model, labelled)) is None:
            continue
        written, tensors, apart = found
        if not apart:
            return written, tensors
        if not near or len(apart) < len(lost):
            near, lost = kind, apart
    among = "no family of transformers" if kinds is WRITERS else f"none of {', '.join(kinds)}"
    cause = f"; the nearest, {near}, lacks {', '.join(lost)}" if near and len(lost) <= SHOWN else ""
    raise UsageError(f"model {checkpoint.source}: {among} has all of its options{cause}")


def halved(config: Any, state: Tensors) -> tuple[Any, Tensors]:
    """A decoder whose heads turn in neighbouring pairs, as Meta's, with the rows of queries and keys in transformers'
    order, where halves turn."""
    if not isinstance(config, TextConfig) or not config.positions.interleaved or config.positions.kind != "rotary":
        return config, state
    own = config.stack.block.attention
    counts = {"query": own.heads, "key": own.key_heads}
    made = dict(state)
    for name, tensor in state.items():
        if found := re.search(r"\.attention\.(query|key)\.", name):
            pairs = tensor.unflatten(0, (counts[found[1]], -1, 2))
            made[name] = pairs.transpose(1, 2).flatten(0, 2)
    return replace(config, positions=replace(config.positions, interleaved=False)), made


def _written(
    family: Family, kind: str, model: nn.Module, labelled: bool
) -> tuple[dict[str, Any], Tensors, list[str]] | None:
    """Configuration and tensors of a family, and which options of the model they lack; None if it has no place for
    some tensor."""
    own, state = halved(model.config, model.state_dict())
    if kind in SEGMENTED and isinstance(own, TextConfig) and not own.segments:
        own, state = replace(own, segments=2), state | {"segments.weight": torch.zeros(2, own.embed_width or own.width)}
    try:
        tensors = export_tensors(family.rows(own), state)
        name = architecture(kind, model, family.name, labelled)
        written = WRITERS[kind](own, kind) | {"model_type": kind, "architectures": [name]}
        made = family.config_from(family.completed(written, tensors), tensors)
        if family.one_size and isinstance(own, ViTConfig):  # positions are interpolated only if asked
            own = replace(own, position_offset=made.position_offset)
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError,
            RuntimeError):  # fmt: skip
        return None
    return written, tensors, differences(plain(made), plain(own))


def plain(config: Any) -> Any:
    """A configuration without what training alone reads, and with one spelling of what has two."""
    if not is_dataclass(config):
        return tuple(map(plain, config)) if isinstance(config, tuple) else config
    values = {one.name: plain(getattr(config, one.name)) for one in fields(config)}
    values |= {name: 0 for name in TRAINING if name in values}
    if "head_bias" in values:
        values["head_bias"] = bool(values["head_bias"])  # trained or not
    if "kv_heads" in values:
        values |= {"kv_heads": config.key_heads, "head_width": config.head_size}
        values["source_width"] = values["source_width"] or values["width"]
    if "feed_bias" in values and config.feed_bias is None:
        values["feed_bias"] = config.attention.bias
    if values.get("pool", "map") != "map":
        values["map_prefix"] = True  # read by map pooling alone
    if "positions" in values and "causal" in values:
        values["positions"] = _used(values["positions"])
        if config.pattern is not None:
            values["pattern"] = plain(replace(config.pattern, layers=tuple(config.pattern.layers)))
    return values


def _used(positions: dict[str, Any]) -> dict[str, Any]:
    """The fields that positions of this kind read."""
    unread = {"bucket": ("theta",), "rotary": ("buckets", "furthest")}.get(positions["kind"], ())
    return {name: value for name, value in positions.items() if name not in unread}
