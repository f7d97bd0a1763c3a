"""Conformers prepared for a CPU against themselves as they were trained."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from multimodal.blocks import subsample
from multimodal.inference import encoders
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.conformer import ConformerCTC
from multimodal.weights.folder import Checkpoint
from tests.helpers import tiny
from tests.helpers.spread import thin

LENGTHS = torch.tensor([601, 40, 0])  # 301 states at half of the rate: more than a block of queries
CONFIGS = {
    "relative": tiny.conformer(2),
    "rotary": tiny.conformer(8, rotary=True),
    "batch norm": tiny.conformer(4, conv_norm="batch", conv_bias=False),
    "group norm": tiny.conformer(4, conv_norm="group"),
    "chunks": tiny.conformer(2, chunk=7, conv_causal=True),
    "near": replace(tiny.conformer(2), near=(9, 5)),
    "some left": replace(tiny.conformer(2), near=(40, -1)),
}


def made(name: str) -> ConformerCTC:
    config = replace(tiny.JOINT, encoder=CONFIGS[name], decoder=None)
    model = tiny.randomized(ConformerCTC(config)).eval()
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm1d):
            part.running_var.uniform_(0.5, 2)
    return model


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", CONFIGS)
def test_prepared_encoders_equal_those_in_training(name, monkeypatch):
    monkeypatch.setattr(subsample, "CACHED", 999)  # several parts
    model = made(name)
    prepared = prepare_for_inference(Checkpoint(model), "float32").model
    x = torch.randn(3, 601, 8, generator=torch.Generator().manual_seed(0))
    whole, counts = model.encoder(x, LENGTHS)  # with gradients: neither parts nor blocks
    with torch.no_grad():
        for way in (prepared, model):
            got, same = way.encoder(x, LENGTHS)
            assert torch.equal(counts, same)
            assert_close(got, whole, atol=2e-5, rtol=1e-5)
            alone, _ = way.encoder(x[:1], LENGTHS[:1])
            assert_close(alone[0], whole[0], atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_kept_distances_do_not_depend_on_what_came_before(monkeypatch):
    monkeypatch.setattr(encoders, "CHUNK", 8)
    monkeypatch.setattr(encoders, "FURTHEST", 64)
    x = torch.randn(1, 300, 8, generator=torch.Generator().manual_seed(0))
    model = made("relative")
    used, fresh = (prepare_for_inference(Checkpoint(model), "float32").model.encoder for _ in range(2))
    first = used(x[:, :30], torch.tensor([30]))[0]
    used(x, torch.tensor([300]))  # 150 states: further than is kept
    used(x[:, :90], torch.tensor([90]))
    assert torch.equal(used(x[:, :30], torch.tensor([30]))[0], first)
    assert torch.equal(fresh(x[:, :90], torch.tensor([90]))[0], used(x[:, :90], torch.tensor([90]))[0])
