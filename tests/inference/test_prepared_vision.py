"""Number formats for inference of models of images: towers that compute faster give what the plain ones give."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.blocks.capture import capture_attention
from multimodal.blocks.stack import Stack
from multimodal.decoding import sampling
from multimodal.inference.bf16_attention import BlockedAttention
from multimodal.inference.int8 import Int8Linear
from multimodal.inference.packed import PackedLinear, PackedPatches, can_pack
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.captioner import VisionEncoderDecoder
from multimodal.models.clip import CLIP
from multimodal.models.vit import ViT
from multimodal.weights.folder import Checkpoint
from tests.helpers import tiny
from tests.helpers.spread import thin

TEXT = tiny.text()
VITS = {
    **tiny.VITS,
    "quick-gelu": replace(tiny.VIT, stack=tiny.stack(activation="quick_gelu"), stem_norm=True),
    "gelu-tanh": replace(tiny.VITS["map"], stack=tiny.stack(activation="gelu_tanh")),
    "post-norm": replace(tiny.VIT, stack=replace(tiny.VIT.stack, block=replace(tiny.VIT.stack.block, post_norm=True))),
    "gated": replace(tiny.VIT, stack=replace(tiny.VIT.stack, block=replace(tiny.VIT.stack.block, gated=True))),
    "odd": replace(tiny.VIT, image=(11, 14)),  # of the pixels at its edges no patch is made
}
CLIPS = {
    **tiny.CLIPS,
    "quick-gelu": replace(tiny.CLIPS["softmax"], image=replace(VITS["quick-gelu"], classes=0),
                          text=replace(TEXT, stack=tiny.stack(activation="quick_gelu"))),
}  # fmt: skip


def vit(name: str) -> ViT:
    return tiny.randomized(ViT(VITS[name]))


def clip(name: str) -> CLIP:
    return tiny.randomized(CLIP(CLIPS[name]))


def made(model: nn.Module, compute_type: str = "auto") -> nn.Module:
    return prepare_for_inference(Checkpoint(model, source="tiny"), compute_type).model


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def texts() -> tuple[Tensor, Tensor]:
    """Ids and which of them are no padding; a row ends in the middle, one at the end."""
    ids = torch.randint(1, 20, (3, 7), generator=torch.Generator().manual_seed(2))
    for row, end in enumerate((3, 6, 5)):
        ids[row, end] = tiny.VOCABULARY - 1
    return ids, torch.arange(7) <= torch.tensor([[3], [6], [5]])


def near(found: Tensor, right: Tensor, compute_type: str) -> bool:
    """Compare vectors: equal in float32, parallel in bfloat16, always returned in float32."""
    if compute_type == "bfloat16":
        return found.dtype == torch.float32 and F.cosine_similarity(found, right, dim=-1).min().item() > 0.998
    return found.dtype == torch.float32 and torch.allclose(found, right, atol=1e-5, rtol=1e-5)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("compute_type", ["float32", "bfloat16"])
@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", VITS)
@torch.inference_mode()
def test_images(name: str, compute_type: str):
    plain = vit(name)
    quick = made(plain, compute_type)
    height, width = plain.config.image
    for images in (noise(3, 3, height, width), noise(1, 3, height, width), noise(2, 3, 16, 8)):
        assert near(quick(images), plain(images), compute_type)
        assert near(quick.tokens(images), plain.tokens(images), compute_type)
    several = [noise(3, 8, 12), noise(3, 16, 8), noise(3, 8, 12)]  # each of its own size
    assert near(quick(several), plain(several), compute_type)
    kept = torch.tensor([[0, 3], [5, 2], [1, 4]])
    if name != "odd":
        assert near(quick(noise(3, 3, 8, 12), kept), plain(noise(3, 3, 8, 12), kept), compute_type)


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("compute_type", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("name", CLIPS)
@torch.inference_mode()
def test_images_and_texts(name: str, compute_type: str):
    plain, images, (ids, valid) = clip(name), noise(3, 3, 8, 12), texts()
    quick = made(plain, compute_type)
    found, right = ([m.encode_image(images), m.encode_text(ids, valid)] for m in (quick, plain))
    assert all(near(a, b, compute_type) for a, b in zip(found, right, strict=True))
    assert torch.allclose(found[0].norm(dim=-1), torch.ones(3), atol=1e-6)
    if compute_type != "bfloat16":
        assert torch.allclose(quick(images, ids, valid), plain(images, ids, valid), atol=1e-4)


@pytest.mark.parametrize("compute_type", ["float32", "bfloat16"])
@torch.inference_mode()
def test_a_row_alone_is_the_row_in_a_batch(compute_type: str):
    quick, images, (ids, valid) = made(clip("quick-gelu"), compute_type), noise(5, 3, 8, 12), texts()
    close = {"atol": 1e-6 if compute_type == "float32" else 1e-2, "rtol": 0}
    alone = torch.cat([quick.encode_image(image[None]) for image in images])
    torch.testing.assert_close(quick.encode_image(images), alone, **close)
    alone = torch.cat([quick.encode_text(ids[i : i + 1], valid[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(quick.encode_text(ids, valid), alone, **close)


def test_what_each_part_becomes():
    plain = clip("quick-gelu")
    quick = made(plain, "bfloat16")
    packed = can_pack(torch.bfloat16)
    assert isinstance(quick.image.embed, PackedPatches if packed else nn.Conv2d)
    assert isinstance(plain.image.embed, nn.Conv2d)
    for stack in (quick.image.stack, quick.text.stack):
        assert all(type(block.attention) is BlockedAttention for block in stack.blocks)
        assert {p.dtype for p in stack.blocks.parameters()} == {torch.bfloat16}
        assert stack.norm.weight.dtype == torch.float32
    assert any(type(module) is nn.Linear for module in quick.modules()) != packed
    assert quick.text.embed.weight.dtype == torch.float32
    assert not any(isinstance(module, PackedLinear) for module in plain.modules())


@pytest.mark.parametrize("compute_type", ["float32", "bfloat16"])
@torch.inference_mode()
def test_attention_can_be_captured(compute_type: str):
    plain, images, (ids, _) = clip("softmax"), noise(2, 3, 8, 12), texts()
    quick, seen = made(plain, compute_type), []
    for model in (plain, quick):
        without = model.encode_image(images)
        with capture_attention() as attended:
            torch.testing.assert_close(model.encode_image(images), without, rtol=0, atol=2e-2)
            model.encode_text(ids)
        seen.append([weights.float() for _, weights in attended])
    assert [w.shape for w in seen[0]] == [(2, 2, 7, 7)] * 2 + [(3, 2, 7, 7)] * 2  # all positions of the last block too
    for found, right in zip(*reversed(seen), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-5 if compute_type == "float32" else 2e-2)


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("compute_type", ["auto", "float32", "bfloat16", "int8"])
@torch.inference_mode()
def test_captions(compute_type: str):
    plain = tiny.randomized(VisionEncoderDecoder(tiny.CAPTIONER))
    quick, images = made(plain, compute_type), noise(2, 3, 8, 12)
    ids = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    source = plain.encode(images)
    assert near(quick.encode(images), source, "bfloat16" if compute_type == "bfloat16" else "float32")
    right, found = plain.decoder(ids, source), quick.decoder(ids, source)
    assert (found - right).norm() <= (0.05 if compute_type == "int8" else 1e-5) * right.norm()
    assert any(isinstance(m, Int8Linear) for m in quick.decoder.modules()) == (compute_type == "int8")

    def decode(model: nn.Module) -> list[list[int]]:
        step, cache = model.decoding(source)
        return sampling.greedy(step, torch.tensor([[1], [1]]), cache, eos=0, max_new=6).ids

    assert decode(quick) == decode(plain) or compute_type == "int8"


@pytest.mark.parametrize("mask", [None, "causal", "rows", "heads"])
@pytest.mark.parametrize("name", ["token", "layer-scale", "post-norm"])
def test_one_position_of_each_row_is_that_of_all(name: str, mask: str | None):
    stack, x, only = tiny.randomized(Stack(VITS[name].stack)), noise(3, 7, tiny.WIDTH), torch.tensor([0, 4, 6])
    masks = {
        None: None, "causal": torch.ones(7, 7, dtype=torch.bool).tril(),
        "rows": (torch.arange(7) < torch.tensor([[5], [7], [6]]))[:, None, None],
        "heads": noise(3, tiny.HEADS, 7, 7),
    }  # fmt: skip
    looks = []
    for block in stack.blocks:  # not by hooks, for which all positions are computed
        run = block.feed.forward
        block.feed.forward = lambda x, run=run: looks.append(x.shape[1]) or run(x)
    right = stack(x, mask=masks[mask])[torch.arange(3), only][:, None]
    with torch.no_grad():
        torch.testing.assert_close(stack(x, mask=masks[mask], only=only), right, rtol=0, atol=1e-5)
    torch.testing.assert_close(stack(x, mask=masks[mask], only=only), right)  # with gradients: all, then picked
    assert looks == [7, 7, 7, 1, 7, 7]
