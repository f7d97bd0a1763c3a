"""Number formats for inference of models of text: decoders, encoders and both."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.capture import capture_attention
from multimodal.decoding import sampling
from multimodal.errors import UsageError
from multimodal.inference.cuda_graphs import GraphDecoder, static_step
from multimodal.inference.fused_decoder import FusedBlock
from multimodal.inference.int8 import Int8Linear
from multimodal.inference.packed import PackedLinear
from multimodal.inference.prepare import prepare_for_inference
from multimodal.inference.row_table import TableLinear
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.weights.folder import Checkpoint
from tests.helpers import tiny
from tests.helpers.spread import thin

KINDS = ("bfloat16", "int8")
FAR = {"float32": 1e-5, "bfloat16": 0.05, "int8": 0.08}  # of the logits, relative
PLAIN = {"shaw", "linear"}  # kinds whose blocks have no shorter way


def block(**options) -> TextConfig:
    plain = tiny.text(tied=True)
    return replace(plain, stack=replace(plain.stack, block=replace(plain.stack.block, **options)))


DECODERS = {
    **tiny.TEXTS,
    "post": block(post_norm=True),
    "one-key": block(attention=AttentionConfig(tiny.WIDTH, 4, kv_heads=1), activation="gelu_tanh", norm="rms"),
    "quick": block(gated=True, activation="quick_gelu"),
    "qwen2": block(attention=AttentionConfig(tiny.WIDTH, 4, kv_heads=2, out_bias=False), gated=True, feed_bias=False),
    "ours": replace(tiny.text(tied=False), window=4, positions=PositionConfig("rotary")),
}
STARTS = [None, torch.tensor([0, 2, 2, 5])]


def checkpoint(config: TextConfig) -> Checkpoint:
    return Checkpoint(tiny.randomized(TextTransformer(config)), source="tiny")


def given(name: str) -> Checkpoint:
    return Checkpoint(tiny.made(name), source="tiny")


def ids(rows: int = 4, count: int = 10) -> torch.Tensor:
    return torch.randint(1, tiny.VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(0))


def stepped(
    model: TextTransformer, tokens: torch.Tensor, start: torch.Tensor | None = None, prompt: int = 6
) -> torch.Tensor:
    """Logits of the last ids, each after all before it."""
    cache, size = model.new_cache(start), tokens.shape[1]
    parts = [model(tokens[:, :prompt], cache=cache)[:, -1:]]
    return torch.cat([*parts, *(model(tokens[:, at : at + 1], cache=cache) for at in range(prompt, size))], 1)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("padded", [0, 1])
@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", DECODERS)
def test_steps_are_those_of_the_plain_decoder(name: str, padded: int):
    if padded and name == "linear":
        pytest.skip("has no rows that are padded on the left")
    plain, start, tokens = checkpoint(DECODERS[name]), STARTS[padded], ids()
    fused = prepare_for_inference(plain, "float32").model
    assert all(type(one) is FusedBlock for one in fused.stack.blocks) == (name not in PLAIN | {"post"})
    with torch.inference_mode():
        right = stepped(plain.model, tokens, start)
        assert_close(stepped(fused, tokens, start), right, atol=1e-5, rtol=0)
        assert_close(fused(tokens[:2]), plain.model(tokens[:2]), atol=1e-5, rtol=0)
        for row, first in enumerate(start.tolist() if padded else ()):
            alone = stepped(fused, tokens[row : row + 1, first:], prompt=6 - first)
            assert_close(alone, right[row : row + 1], atol=1e-5, rtol=0)


def test_what_is_seen_of_the_plain_decoder_is_seen_of_the_fused_one():
    plain, tokens = checkpoint(DECODERS["llama"]), ids()
    with torch.inference_mode(), capture_attention() as right:
        stepped(plain.model, tokens)
    with torch.inference_mode(), capture_attention() as found:
        stepped(prepare_for_inference(plain, "float32").model, tokens)
    assert len(found) == len(right) == 5 * 2
    for one, other in zip(found, right, strict=True):
        assert_close(one[1], other[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["learned", "llama"])
def test_one_position_under_a_mask_with_gaps(name: str):
    plain, tokens = checkpoint(DECODERS[name]), ids()
    mask = torch.tensor([True, True, False, True, True, False, True])
    with torch.inference_mode():
        for one in (mask[None], mask.expand(4, 1, 1, 7)):
            found = []
            for model in (plain.model, prepare_for_inference(plain, "float32").model):
                cache = model.new_cache()
                model(tokens[:, :6], cache=cache)
                found.append(model.states(tokens[:, 6:7], cache=cache, mask=one))
            assert_close(*found, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["learned", "llama"])
def test_static_step_of_a_fused_decoder(name: str):
    model, tokens = prepare_for_inference(checkpoint(DECODERS[name]), "float32").model, ids()
    with torch.inference_mode():
        right = stepped(model, tokens)
        step, cache = static_step(GraphDecoder(model), None, None, 12)
        parts = [step(tokens[:, :6], cache)[:, -1:].clone()]
        parts += [step(tokens[:, at : at + 1], cache).clone() for at in range(6, 10)]
    assert_close(torch.cat(parts, 1), right, atol=1e-5, rtol=0)


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("kind", ["float32", "auto", *KINDS])
@pytest.mark.parametrize("name", ["learned", "llama", "bucket"])
def test_a_decoder_in_another_format(name: str, kind: str):
    plain = checkpoint(DECODERS[name])
    before = {key: tensor.clone() for key, tensor in plain.model.state_dict().items()}
    made, tokens = prepare_for_inference(plain, kind).model, ids()
    assert isinstance(made.head, Int8Linear if kind == "int8" else PackedLinear | TableLinear)
    with torch.inference_mode():
        right, found = stepped(plain.model, tokens), stepped(made, tokens)
    assert found.dtype == torch.float32
    assert (found - right).norm() <= FAR.get(kind, 1e-5) * right.norm()
    assert plain.model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[key]) for key, tensor in plain.model.state_dict().items())
    assert not any(isinstance(part, Int8Linear | PackedLinear) for part in plain.model.modules())


def test_int8_writes_the_same_in_a_padded_batch_as_alone():
    model = prepare_for_inference(checkpoint(DECODERS["llama"]), "int8").model
    prompts = [[1, 2, 3], [5], [7, 8, 9, 2, 4]]

    def written(own: list[list[int]]) -> list[list[int]]:
        prompt, start = sampling.left_pad(own)
        step = lambda tokens, cache: model(tokens, cache=cache, last=1)
        return sampling.greedy(step, prompt, model.new_cache(start), eos=0, max_new=6).ids

    assert written(prompts) == [written([prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["text-encoder", "text-detector"])
def test_an_encoder_in_another_format(name: str, kind: str):
    plain, tokens = given(name), ids()
    made, valid = prepare_for_inference(plain, kind).model, torch.arange(10) < torch.tensor([[10], [4], [7], [9]])
    with torch.inference_mode():
        outputs = []
        for model in (plain.model, made):
            states = model.states(tokens, valid=valid)[valid]
            whole = model.states(tokens)
            heads = [model.detect(whole)] if model.detect else [model.logits(whole), model.classes(model.pooled(whole))]
            outputs.append([states, *heads])
    for right, found in zip(*outputs, strict=True):
        assert found.dtype == torch.float32
        assert (found - right).norm() <= FAR[kind] * right.norm()


@thin(3, pytest.mark.slow, pytest.mark.ci)
@pytest.mark.parametrize("kind", ["float32", "auto", *KINDS])
@pytest.mark.parametrize("name", ["text-to-text", "text-to-text-apart", "pre-norm"])
def test_an_encoder_decoder_in_another_format(name: str, kind: str):
    if name == "pre-norm":
        parts = replace(tiny.TEXT_TO_TEXT, encoder=tiny.text(causal=False), decoder=tiny.text(tied=True, source=True))
        plain = Checkpoint(tiny.randomized(EncoderDecoder(parts)), source="tiny")
    else:
        plain = given(name)
    made, tokens, source = prepare_for_inference(plain, kind).model, ids(), ids(4, 7)
    valid = torch.arange(7) < torch.tensor([[7], [4], [7], [2]])
    for real in (None, valid):
        with torch.inference_mode():
            outputs = []
            for model in (plain.model, made):
                states, cache = model.encode(source, real), model.decoder.new_cache()
                parts = [model.decode(tokens[:, at : at + 1], states, real, cache) for at in range(6)]
                outputs.append((states if real is None else states[real], torch.cat(parts, 1)))
        for right, found in zip(*outputs, strict=True):
            assert found.dtype == torch.float32
            assert (found - right).norm() <= FAR.get(kind, 1e-5) * right.norm()


def test_an_encoder_has_no_int8():
    with pytest.raises(UsageError, match="compute_type='int8' of a text model needs a C"):
        prepare_for_inference(given("text-encoder"), "int8")
