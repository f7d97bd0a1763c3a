"""Models that users change: hooks, weights that hooks compute, adapters, dropout outside of training, torch.export."""

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn.utils import prune
from torch.testing import assert_close

from multimodal.blocks.subsample import SubsampleStream
from multimodal.models.conformer import ConformerEncoder
from multimodal.models.text import TextTransformer
from tests.helpers.tiny import made, noise, outputs, tokens

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


def pruned(model: nn.Module) -> None:
    for part in [part for part in model.modules() if isinstance(part, (nn.Linear, nn.Embedding, *CONVOLUTIONS))]:
        prune.l1_unstructured(part, "weight", 0.3)


def adapted(model: nn.Module) -> None:  # peft warns of groups
    names = [name for name, part in model.named_modules() if isinstance(part, CONVOLUTIONS) and part.groups == 1]
    inject_adapter_in_model(LoraConfig(r=16, target_modules=names, init_lora_weights=False), model)


@pytest.mark.parametrize("name", ["vit-token", "clip-softmax", "conformer-relative"])
def test_hooks_see_the_same_with_and_without_gradients(name: str):
    model, seen = made(name).eval(), []
    for part in model.modules():
        part.register_forward_hook(lambda part, _, output: seen.append((part, getattr(output, "shape", None))))
    outputs(model)
    expected = seen.copy()
    seen.clear()
    with torch.no_grad():
        outputs(model)
    assert seen == expected


@pytest.mark.parametrize(
    ("name", "change"), [("conformer-relative", pruned), ("conformer-chunk", adapted), ("text-encoder", pruned)]
)
def test_changed_weights_count_with_and_without_gradients(name: str, change: Callable[[nn.Module], None]):
    model = made(name).eval()
    run = (lambda: model(tokens(2, 6))) if isinstance(model, TextTransformer) else lambda: outputs(model)
    before = run().detach()
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        run().square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        found = run()
        assert_close(found, run(), atol=0, rtol=0)
    assert_close(found, run().detach(), atol=1e-5, rtol=1e-5)
    assert (found - before).abs().max() > 1e-3
    if isinstance(model, ConformerEncoder):
        with torch.no_grad():
            x = noise(1, 21, 8)
            stream = SubsampleStream(model.stem)
            parts = torch.cat([stream.push(x[:, :9]), stream.push(x[:, 9:], last=True)], 1)
            assert_close(parts, model.stem(x, torch.tensor([21]))[0], atol=1e-5, rtol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["vit-map"])
def test_images_are_exported_for_any_number_of_them(name: str):
    model = made(name).eval()
    with torch.no_grad():
        graph = torch.export.export(model, (noise(2, 3, 8, 12),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        images = noise(5, 3, 8, 12)
        assert_close(graph.module()(images), model(images), atol=1e-5, rtol=0)
