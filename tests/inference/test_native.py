"""Compiled steps of decoders, and their library."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from multimodal.blocks.capture import capture_attention
from multimodal.blocks.conformer import ConformerBlock
from multimodal.blocks.layers import gelu_tanh, quick_gelu
from multimodal.blocks.stack import Block
from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam_search
from multimodal.inference import prepare
from multimodal.inference.native.decoder import NativeDecoder, best
from multimodal.inference.native.linear import NativeLinear, NativeNorm
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.models.whisper import Whisper
from multimodal.weights.folder import Checkpoint
from tests.helpers import tiny
from tests.helpers.spread import thin
from tests.inference.test_prepared_text import DECODERS, STARTS, checkpoint, given, ids, stepped

WITHOUT = {"shaw", "linear", "window", "post", "ours"}  # kinds that take their blocks' way
KINDS = {"float32": 1e-5, "int8": 0.08}  # relative difference of logits
SIZES = [(384, 384), (1000, 64), (3, 5), (1, 7), (33, 257)]


def in_integers(weight: Tensor, x: Tensor) -> Tensor:
    """x Wᵀ with 127 levels of each weight and activation to each side of 0."""
    steps, own = (one.abs().amax(1, keepdim=True) * torch.tensor(1 / 127) for one in (weight, x))
    levels = weight.mul(127 / weight.abs().amax(1, keepdim=True)).round()
    return (x / own).round().double().matmul(levels.double().t()).float() * steps.t() * own


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("out", "wide"), SIZES)
def test_maps(out: int, wide: int):
    weight, bias, x = torch.randn(out, wide), torch.randn(out), torch.randn(37, wide)
    assert_close(NativeLinear(weight, bias)(x), F.linear(x, weight, bias), atol=1e-5 * wide**0.5, rtol=0)
    assert_close(NativeLinear(weight)(x[None, :2]), F.linear(x[None, :2], weight), atol=1e-5 * wide**0.5, rtol=0)
    assert_close(NativeLinear(weight, bias, int8=True)(x), in_integers(weight, x) + bias, atol=1e-5, rtol=1e-5)
    assert NativeLinear(weight)(x[:0]).shape == (0, out)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_products_of_integers_do_not_saturate(sign: float):
    for rows in (1, 7):
        y = NativeLinear(torch.full((40, 64), sign), int8=True)(torch.ones(rows, 64))
        assert_close(y, torch.full((rows, 40), 64 * sign), atol=0, rtol=1e-6)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("activation", [F.gelu, gelu_tanh, quick_gelu, F.silu, F.relu])
def test_a_map_with_an_activation(activation: Callable):
    weight, bias, x = torch.randn(33, 48), torch.randn(33), torch.randn(70, 48)
    assert_close(NativeLinear(weight, bias, activation=activation)(x), activation(F.linear(x, weight, bias)), atol=2e-5,
                 rtol=1e-5)  # fmt: skip


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 64), (300, 500)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_norm(rows: int, width: int, bias: bool):
    norm, x = nn.LayerNorm(width, eps=1e-3, bias=bias), 3 * torch.randn(rows, width) + 2
    nn.init.normal_(norm.weight)
    made = NativeNorm(norm)(x)
    assert_close(made, norm(x).detach(), atol=1e-5, rtol=1e-5)
    assert torch.equal(made[-1:], NativeNorm(norm)(x[-1:]))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", ["speech-to-text", "joint", "transducer", "moonshine"])
def test_an_encoder_in_int8(name: str, monkeypatch):
    """Maps of integers everywhere in its blocks, close to the encoder in float32."""
    monkeypatch.setattr(prepare, "prefers_int8", lambda dtype: True)
    model = tiny.made(name)
    encoder = prepare_for_inference(Checkpoint(model, source="tiny"), "int8").model.encoder
    whisper = isinstance(model, Whisper)
    sound = {"speech-to-text": (3, 8, 20), "moonshine": (3, 6400)}.get(name, (3, 40, 8))
    features = torch.randn(sound), *(() if whisper else (torch.full((3,), sound[1]),))

    def frames(module: nn.Module, rows: slice = slice(None)) -> Tensor:
        with torch.inference_mode():
            made = module(*(part[rows] for part in features))
        return made if whisper else made[0]

    kinds = {type(part) for block in encoder.modules() if isinstance(block, Block | ConformerBlock)
             for part in block.modules() if isinstance(part, nn.Linear | NativeLinear)}  # fmt: skip
    assert NativeLinear in kinds
    assert (frames(encoder) - frames(model.encoder)).norm() < 0.08 * frames(model.encoder).norm()
    # sums of floats beside the maps take another order, which may change what is rounded
    alone = frames(encoder, slice(1, 2))[0]
    assert (alone - frames(encoder)[1]).norm() < 0.01 * alone.norm()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", ["speech-to-text", "vit-token"])
def test_an_encoder_in_floats(name: str, native: bool, monkeypatch: pytest.MonkeyPatch):
    """In compiled maps where packed ones are no quicker."""
    monkeypatch.setattr(prepare, "prefers_native", lambda: native)
    model = tiny.made(name)
    made = prepare_for_inference(Checkpoint(model, source="tiny"), "float32").model
    plain, made, given = (
        (model, made, torch.randn(2, 3, 8, 12))
        if name == "vit-token"
        else (model.encoder, made.encoder, torch.randn(3, 8, 20))
    )
    assert any(isinstance(part, NativeLinear) for part in made.modules()) == native
    with torch.inference_mode():
        assert_close(made(given), plain(given), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", ["clip-softmax", "vit-token", "text-encoder"])
def test_images_and_texts_in_int8(name: str, monkeypatch):
    monkeypatch.setattr(prepare, "prefers_int8", lambda dtype: True)
    model = tiny.made(name)
    quick = prepare_for_inference(Checkpoint(model, source="tiny"), "int8").model
    assert any(isinstance(part, NativeLinear) for part in quick.modules())
    texts = torch.randint(3, tiny.VOCABULARY - 1, (2, 12))
    texts[:, -1] = tiny.VOCABULARY - 1
    given = (torch.randn(2, 3, 8, 12),) if name == "vit-token" else (texts,)
    call = {"clip-softmax": "encode_text", "text-encoder": "states"}.get(name, "forward")
    with torch.inference_mode():
        right, found = getattr(model, call)(*given), getattr(quick, call)(*given)
    assert (found - right).norm() < 0.08 * right.norm()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("int8", [False, True])
def test_a_row_has_the_same_bits_in_more_rows_than_a_cache_holds(int8: bool):
    made, x = NativeLinear(torch.randn(40, 2000), torch.randn(40), int8), torch.randn(700, 2000)
    whole = made(x)
    assert_close(whole, made(x.flip(0)).flip(0), atol=0, rtol=0)
    for row in (0, 95, 96, 97, 383, 384, 699):
        assert torch.equal(made(x[row : row + 1])[0], whole[row])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("out", "wide"), SIZES)
def test_a_row_has_the_same_bits_in_company_and_on_two_threads(out: int, wide: int, int8: bool):
    made, x = NativeLinear(torch.randn(out, wide), torch.randn(out), int8), torch.randn(29, wide)
    x[3], x[5], x[7] = 1e4, torch.nan, torch.inf
    whole = made(x)
    assert (~whole[5].isfinite()).all()
    assert (~whole[7].isfinite()).all()
    torch.set_num_threads(2)
    try:
        for count in (1, 2, 8, 17):
            assert torch.equal(torch.cat([made(part) for part in x.split(count)]).nan_to_num(7), whole.nan_to_num(7))
    finally:
        torch.set_num_threads(1)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("between", "wide"), [(1024, 1024), (1024, 1500), (60, 60), (60, 90)])
def test_two_threads_share_rows_where_there_are_more_of_them_than_outputs(between: int, wide: int, int8: bool):
    """Rows of 4 KiB, after which addresses share their place in a cache, and others; some overlap."""
    weight, bias = torch.randn(70, wide), torch.randn(70)
    made, x = NativeLinear(weight, bias, int8), torch.randn(350 * 1024 + 2000).as_strided((350, wide), (between, 1))
    whole, right = torch.cat([made(row) for row in x.split(1)]), F.linear(x, weight, bias)
    assert (whole - right).norm() <= (0.02 if int8 else 1e-5) * right.norm()
    torch.set_num_threads(2)
    try:
        assert torch.equal(made(x), whole)
    finally:
        torch.set_num_threads(1)


@pytest.mark.usefixtures("compiled")
@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [0, 1])
@pytest.mark.parametrize("name", DECODERS)
def test_steps_are_those_of_the_plain_decoder(name: str, padded: int, kind: str):
    if padded and name == "linear":
        pytest.skip("has no rows that are padded on the left")
    plain, start, tokens = checkpoint(DECODERS[name]), STARTS[padded], ids()
    made = prepare_for_inference(plain, kind).model
    assert type(made) is (TextTransformer if name in WITHOUT else NativeDecoder)
    with torch.inference_mode():
        right, found = stepped(plain.model, tokens, start), stepped(made, tokens, start)
    assert (found - right).norm() <= KINDS[kind] * right.norm()


@pytest.mark.usefixtures("compiled")
@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(DECODERS.keys() - WITHOUT))
def test_a_step_has_the_same_bits_alone_and_in_a_padded_batch(name: str, kind: str):
    model, tokens, starts = prepare_for_inference(checkpoint(DECODERS[name]), kind).model, ids(), STARTS[1]
    with torch.inference_mode():
        caches = [model.new_cache() for _ in tokens]
        for row, first, cache in zip(tokens, starts.tolist(), caches, strict=True):
            model(row[None, first:6], cache=cache)
        joint = model.new_cache(starts)
        padded = lambda sides: torch.cat([F.pad(x, (0, 0, 6 - x.shape[2], 0)) for x in sides])
        for at, layer in enumerate(joint.self_attention):
            own = [cache.self_attention[at] for cache in caches]
            layer.append(padded([one.key for one in own]), padded([one.value for one in own]))
        for at in range(6, 10):
            alone = [model(row[None, at : at + 1], cache=own) for row, own in zip(tokens, caches, strict=True)]
            assert torch.equal(model(tokens[:, at : at + 1], cache=joint), torch.cat(alone))


@pytest.mark.usefixtures("compiled")
@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["text-to-text", "text-to-text-apart"])
def test_an_encoder_decoder_with_padded_sources(name: str, kind: str):
    plain = given(name)
    made, tokens, source = prepare_for_inference(plain, kind).model, ids(), ids(4, 7)
    assert isinstance(made, EncoderDecoder)
    assert isinstance(made.decoder, NativeDecoder)
    valid = torch.arange(7) < torch.tensor([[7], [4], [7], [2]])
    for real in (None, valid):
        with torch.inference_mode():
            found = []
            for model in (plain.model, made):
                states, cache = model.encode(source, real), model.decoder.new_cache()
                found.append(torch.cat([model.decode(tokens[:, at : at + 1], states, real, cache) for at in range(6)]))
        assert (found[1] - found[0]).norm() <= KINDS[kind] * found[0].norm()


@pytest.mark.usefixtures("compiled")
def test_beams_over_sources_of_which_some_end_early():
    plain = Checkpoint(tiny.randomized(Whisper(tiny.SPEECH)).eval(), source="tiny")
    source = torch.randn(3, 6, tiny.SPEECH.decoder.width)

    def written(model: Whisper) -> sampling.SampledTokens:
        step = sampling.cross_attention_step(model.decoder, source)
        prompt = torch.ones(3, 1, dtype=torch.long)
        return beam_search(step, prompt, model.decoder.new_cache(), eos=0, max_new=[3, 6, 2], beams=3)

    right, found = written(plain.model), written(prepare_for_inference(plain, "float32").model)
    assert found.ids == right.ids
    assert found.logprobs == pytest.approx(right.logprobs, abs=1e-5)


@pytest.mark.usefixtures("compiled")
def test_attention_is_captured_and_one_cache_serves_both_ways():
    plain, tokens = checkpoint(DECODERS["llama"]), ids()
    made = prepare_for_inference(plain, "float32").model
    with torch.inference_mode():
        cache, parts = made.new_cache(), []
        for first, last in ((0, 5), (5, 6), (6, 8), (8, 9)):
            parts.append(made(tokens[:, first:last], cache=cache))
        with capture_attention() as seen:
            parts.append(made(tokens[:, 9:], cache=cache))
        assert_close(torch.cat(parts, 1), plain.model(tokens), atol=1e-5, rtol=0)
    assert len(seen) == 2


@pytest.mark.usefixtures("compiled")
def test_threads_of_the_caller_step_at_once():
    made, tokens = prepare_for_inference(checkpoint(DECODERS["learned"]), "float32").model, ids(1)
    right, found = stepped(made, tokens), [None] * 4

    def write(at: int) -> None:
        found[at] = stepped(made, tokens)

    torch.set_num_threads(2)
    try:
        threads = [threading.Thread(target=write, args=(at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(one, right) for one in found)


HELPERS = """
import os, torch
from multimodal.inference.prepare import prepare_for_inference
from tests.inference.test_prepared_text import DECODERS, checkpoint, ids, stepped

torch.set_num_threads(3)
made = prepare_for_inference(checkpoint(DECODERS["learned"]), "float32").model
torch.randn(600, 600) @ torch.randn(600, 600)  # torch's own threads
before = len(os.listdir("/proc/self/task"))
with torch.inference_mode():
    stepped(made, ids(2))
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux lists a process's threads there")
def test_the_helpers_of_a_step_are_pytorchs(built: Path):
    """Others, and most of all helpers of each kind of part, took each other's processors."""
    environment = os.environ | {"MULTIMODAL_CACHE": str(built), "MULTIMODAL_NATIVE": "1"}
    command = [sys.executable, "-c", HELPERS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) == 0


@pytest.mark.parametrize("size", [5, 256, 700])
def test_the_compiled_choice_is_pytorchs(compiled, size):
    logits = torch.randint(-3, 3, (40, size)).float()  # with many ties
    logits[0], logits[1, size // 2], logits[2, -1], logits[3, 1:] = -torch.inf, torch.nan, 9.0, -torch.inf
    tokens, logprobs = best(logits)
    assert torch.equal(tokens, logits.argmax(-1))
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert_close(logprobs, expected, atol=1e-6, rtol=1e-6, equal_nan=True)
    assert torch.equal(best(logits[7:8])[1], logprobs[7:8])
