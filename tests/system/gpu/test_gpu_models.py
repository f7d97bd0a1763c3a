"""Outputs and gradients of every kind of model on a GPU are those on a CPU, as are those of a prepared one nearly."""

import copy

import pytest
import torch
from torch.testing import assert_close

from multimodal.errors import UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.weights.folder import Checkpoint
from tests.helpers import tiny
from tests.system.gpu.conftest import on_devices

PREPARED = ["clip-softmax", "vit-token", "vit-map", "text-encoder", "text-to-text", "speech-to-text", "joint",
            "captioner", "any"]  # fmt: skip
NEAR = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}


@on_devices("name", tiny.ALL, list(tiny.ALL)[::3])
def test_outputs_and_gradients_are_those_of_a_cpu(name: str, device: str):
    model = tiny.made(name)
    other = copy.deepcopy(model).to(device)
    for part in other.modules():  # cuDNN's recurrent layers have gradients in training alone
        if isinstance(part, torch.nn.RNNBase):
            part.train()
    expected, made = tiny.outputs(model), tiny.outputs(other)
    assert_close(made.cpu(), expected, atol=1e-4, rtol=1e-4)
    for output in (expected, made):
        output.square().sum().backward()
    found = dict(other.named_parameters())
    # keys that are all moved alike have a gradient of rounding alone
    rounding = 3e-8 * max(tensor.grad.norm() for tensor in model.parameters() if tensor.grad is not None)
    for weight, tensor in model.named_parameters():
        if tensor.grad is not None:
            difference = (found[weight].grad.cpu() - tensor.grad).norm()
            least = max(1e-4, rounding) if weight.endswith("key.bias") else 1e-4
            assert difference <= 1e-3 * tensor.grad.norm() + least, weight


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", PREPARED)
def test_prepared_models_are_near(name: str, kind: str, device: str):
    given = Checkpoint(tiny.made(name), source="tiny")
    if (kind, device) == ("float16", "cpu"):
        with pytest.raises(UsageError, match="needs a GPU"):
            prepare_for_inference(given, kind, device)
        return
    made = prepare_for_inference(given, kind, device).model
    with torch.inference_mode():
        expected, found = tiny.outputs(given.model), tiny.outputs(made).float().cpu()
    assert (found - expected).norm() < NEAR[kind] * expected.norm()
