"""Layouts of released models, on the meta device."""

from typing import Any

import torch
from torch import nn

from multimodal.weights.family import Family
from multimodal.weights.folder import build
from multimodal.weights.table import export_tensors


def check_layout(family: Family, config: dict[str, Any], theirs: nn.Module) -> None:
    """A released configuration, on the meta device: the same names and shapes as the reference model's."""
    expected = theirs.state_dict()
    made = family.config_from(family.completed(config, {}), {})
    rows = family.rows(made)
    exported = export_tensors(rows, build(family.model, made).state_dict())
    dropped = {row.foreign for row in rows if row.reason}
    assert exported.keys() - dropped == expected.keys() - dropped
    assert all(exported[name].shape == expected[name].shape for name in exported.keys() & expected.keys())


def on_meta(model: type[nn.Module], config: Any) -> nn.Module:
    with torch.device("meta"):
        return model(config)
