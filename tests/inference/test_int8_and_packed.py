"""Number formats for inference: int8 linear maps, packed ones, and models that hold them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.blocks.capture import capture_attention
from multimodal.blocks.masks import causal
from multimodal.blocks.stack import Block, BlockConfig
from multimodal.decoding import sampling
from multimodal.errors import UsageError
from multimodal.inference import packed, prepare, tune
from multimodal.inference.bf16_attention import QUERIES, BlockedAttention
from multimodal.inference.fused_decoder import FusedBlock, can_fuse
from multimodal.inference.int8 import Int8Linear, weight_levels
from multimodal.inference.one_query import OneQuery
from multimodal.inference.packed import SHORT, PackedLinear, fast_tables
from multimodal.inference.prepare import prepare_for_inference
from multimodal.inference.row_table import RowTable, TableLinear
from multimodal.models.clip import CLIP
from multimodal.models.conformer import ConformerCTC, ConformerEncoder
from multimodal.models.whisper import Whisper
from multimodal.weights.folder import Checkpoint
from tests.helpers import tiny
from tests.helpers.spread import thin

SIZES = [(384, 384), (1000, 64), (3, 5), (1, 7), (33, 257)]
INT8_SIZES = [*SIZES, (500, 1500), (2500, 500)]  # those that lie in both ways, and packed alone, too


def linear(out: int, wide: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(out)
    return nn.Linear(wide, out, bias=bias)


def speech(model_class: type[nn.Module] = Whisper, config: object = tiny.SPEECH) -> Checkpoint:
    return Checkpoint(tiny.randomized(model_class(config)).eval(), source="tiny")


@pytest.mark.parametrize(("out", "wide"), INT8_SIZES)
def test_int8_is_the_float_map_within_the_steps(out: int, wide: int):
    plain, x = linear(out, wide), torch.randn(2, 9, wide) * torch.logspace(-3, 3, 9)[:, None]
    with torch.inference_mode():
        made, right = Int8Linear(plain.weight, plain.bias)(x), plain(x)
    # half a step of each of the two factors, at the most in every product
    weight, levels = plain.weight.detach(), weight_levels()
    peak = x.abs().amax(-1, keepdim=True)
    step = x.abs().sum(-1, keepdim=True) * weight.abs().amax(1) / levels / 2 + weight.abs().sum(1) * peak / 127 / 2
    step = step + wide * peak * weight.abs().amax(1) / levels / 127 / 4
    assert made.shape == right.shape
    assert ((made - right).abs() <= step * 1.001 + 1e-5).all()
    assert (made - right).norm() <= 2.5 / levels * right.norm()


@pytest.mark.parametrize(("out", "wide"), INT8_SIZES)
def test_int8_row_alone_is_the_row_in_a_batch(out: int, wide: int):
    plain, x = linear(out, wide), torch.randn(37, wide)
    x[3], x[5] = 1e4, torch.nan  # a neighbour that is loud, one that is broken
    made = Int8Linear(plain.weight, plain.bias)
    for count in (1, 2, 8, 17):
        parts = torch.cat([made(part) for part in x.split(count)])
        assert torch.equal(parts.nan_to_num(7), made(x).nan_to_num(7))


def test_int8_keeps_zeros_and_does_not_hide_what_is_not_finite():
    made = Int8Linear(linear(6, 8).weight)
    assert torch.equal(made(torch.zeros(2, 8)), torch.zeros(2, 6))
    rows = torch.ones(3, 8)
    rows[0, 2], rows[1, 3] = torch.nan, torch.inf
    assert (~made(rows)[:2].isfinite()).all()
    assert made(rows)[2].isfinite().all()
    assert torch.equal(Int8Linear(torch.zeros(4, 8))(rows[2:]), torch.zeros(1, 4))


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_int8_sums_are_exact_at_the_largest_values(rows: int):
    signs = torch.where(torch.arange(1536) % 3 == 0, -1.0, 1.0)
    for copies in (1, 800):  # small, and packed
        exact = Int8Linear(torch.stack([signs, -signs] * copies))(signs.repeat(rows, 1))
        assert torch.allclose(exact, torch.tensor([1536.0, -1536.0] * copies).expand(rows, -1), rtol=1e-6)


def test_int8_takes_weights_in_any_layout():
    weight, x = linear(96, 32).weight, torch.randn(3, 32)
    assert torch.equal(Int8Linear(weight.T.contiguous().T)(x), Int8Linear(weight)(x))


@pytest.mark.parametrize(("out", "wide"), SIZES)
def test_packed_is_the_float_map(out: int, wide: int):
    for bias in (True, False):
        plain, x = linear(out, wide, bias), torch.randn(2, 3, wide)
        with torch.inference_mode():
            packed = PackedLinear(plain.weight, plain.bias)
            assert torch.allclose(packed(x), plain(x), atol=1e-5)
            assert torch.allclose(packed(x[:1, :1].transpose(0, 1)), plain(x[:1, :1]), atol=1e-5)
            gelu = PackedLinear(plain.weight, plain.bias, ("gelu", "none"))
            assert torch.allclose(gelu(x), nn.functional.gelu(plain(x)), atol=1e-5)


def test_one_query_without_keys_and_values_is_attention():
    torch.manual_seed(0)
    plain = Attention(AttentionConfig(16, 2))
    x, source = torch.randn(3, 1, 16), torch.randn(3, 7, 16)
    with torch.inference_mode():
        for rows in (1, 3):
            alone = OneQuery(plain, plain, torch.float32)(x[:rows], source[:rows])
            assert torch.allclose(alone, plain(x[:rows], source[:rows]), atol=1e-6)


def test_blocked_attention_is_attention():
    torch.manual_seed(0)
    plain = Attention(AttentionConfig(16, 2))
    blocked = BlockedAttention(plain)
    x = torch.randn(2, QUERIES + 7, 16)
    with torch.inference_mode():
        assert torch.allclose(blocked(x), plain(x), atol=1e-6)
        assert torch.equal(blocked(x[:1]), blocked(x)[:1])
        for mask in (causal(QUERIES + 7, QUERIES + 7), torch.rand(2, 1, 1, QUERIES + 7) < 0.5):
            assert torch.allclose(blocked(x, mask=mask), plain(x, mask=mask), atol=1e-6)
        assert torch.allclose(blocked(x[:, :9], x), plain(x[:, :9], x), atol=1e-6)


def _stepped(decoder: nn.Module, ids: torch.Tensor, source: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
    """Logits of the last ids, each after all before it."""
    cache = decoder.new_cache(start, capacity=ids.shape[1])
    first = decoder(ids[:, :3], source, cache=cache)
    return torch.cat([first, *(decoder(ids[:, at : at + 1], source, cache=cache) for at in range(3, ids.shape[1]))], 1)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("start", [None, torch.tensor([0, 2, 1, 0])])
@pytest.mark.parametrize("sources", [1, 2, 4])
def test_steps_of_a_fused_decoder_are_those_of_the_plain_one(sources: int, start: torch.Tensor | None):
    given = speech()
    fused, plain = prepare_for_inference(given, "float32").model.decoder, given.model.decoder
    assert all(type(block) is FusedBlock for block in fused.stack.blocks)
    torch.manual_seed(0)
    ids, source = torch.randint(0, 9, (4, 7)), torch.randn(sources, 10, tiny.WIDTH)
    with torch.inference_mode():
        right, found = _stepped(plain, ids, source, start), _stepped(fused, ids, source, start)
        assert torch.allclose(found[:, 2:], right[:, 2:], atol=1e-5)
        with capture_attention() as attended:  # nothing that is seen of the plain model is hidden by the fused one
            assert torch.allclose(_stepped(fused, ids, source, start)[:, 2:], right[:, 2:], atol=1e-5)
    assert len(attended) == 5 * 2 * len(fused.stack.blocks)


def test_blocks_that_have_no_short_way_stay_as_they_are():
    config = BlockConfig(AttentionConfig(8, 2), 16, cross=AttentionConfig(8, 2))
    for other in ({}, {"norm": "rms"}, {"cross": None}, {"attention": AttentionConfig(8, 2, kv_heads=1)}):
        assert can_fuse(Block(replace(config, **other)))
    for other in ({"post_norm": True}, {"layer_scale": True}, {"cross": AttentionConfig(8, 2, kv_heads=1)},
                  {"attention": AttentionConfig(8, 2, shaw=3)}, {"cross_block": True}):  # fmt: skip
        assert not can_fuse(Block(replace(config, **other)))


@pytest.mark.parametrize("compute_type", ["auto", "float32", "bfloat16", "int8"])
def test_speech_model_in_another_format(compute_type: str):
    given = speech()
    before = {name: tensor.clone() for name, tensor in given.model.state_dict().items()}
    made = prepare_for_inference(given, compute_type).model
    mel, ids = torch.randn(2, 8, 20), torch.tensor([[1, 2, 3], [4, 5, 6]])
    with torch.inference_mode():
        frames = given.model.encoder(mel)
        found = made.encoder(mel)
        assert found.dtype == (torch.bfloat16 if compute_type == "bfloat16" else torch.float32)
        assert (found - frames).norm() <= (1e-5 if compute_type == "float32" else 0.03) * frames.norm()
        right, logits = given.model.decoder(ids, frames), made.decoder(ids, found).float()
    assert (logits - right).norm() <= (1e-5 if compute_type == "float32" else 0.08) * right.norm()
    assert given.model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.model.state_dict().items())
    assert not any(isinstance(module, Int8Linear | PackedLinear) for module in given.model.modules())
    assert made.config == given.model.config
    assert made.encoder.positions.device.type == "cpu"


def test_int8_decodes_the_same_tokens_in_a_batch_as_alone():
    model = prepare_for_inference(speech(), "int8").model
    torch.manual_seed(1)
    source, prompt = torch.randn(3, 10, tiny.WIDTH), torch.tensor([[1, 2]] * 3)

    def decode(rows: slice) -> sampling.SampledTokens:
        step = sampling.cross_attention_step(model.decoder, source[rows])
        return sampling.greedy(step, prompt[rows], model.decoder.new_cache(), eos=0, max_new=8)

    assert decode(slice(0, 3)).ids == [decode(slice(i, i + 1)).ids[0] for i in range(3)]


@pytest.mark.parametrize("compute_type", ["auto", "float32", "int8"])
def test_joint_model(compute_type: str):
    given = speech(ConformerCTC, tiny.JOINT)
    made = prepare_for_inference(given, compute_type).model
    inputs = torch.randn(2, 24, 8), torch.tensor([24, 17]), torch.tensor([[1, 2], [3, 4]])
    with torch.inference_mode():
        right, found = given.model(*inputs), made(*inputs)
    assert torch.allclose(found[0], right[0], atol=1e-5)
    assert torch.equal(found[1], right[1])
    assert (found[2] - right[2]).norm() <= (0.05 if compute_type == "int8" else 1e-5) * right[2].norm()


def test_without_bfloat16_the_encoder_stays_in_float32(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare, "fast_bfloat16", lambda: False)
    given, mel = speech(), torch.randn(1, 8, 20)
    made = prepare_for_inference(given, "auto")
    assert made.model.encoder.positions.dtype == torch.float32
    torch.testing.assert_close(made.model.encoder(mel), given.model.encoder(mel), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("compute_type", "device", "message"),
    [
        ("fp8", "cpu", r"compute_type must be one of auto, float32, bfloat16, float16, int8 \(got 'fp8'\)"),
        ("int8", "cuda", r"compute_type='int8' needs a CPU \(got device cuda\)"),
        ("float16", "cpu", r"compute_type='float16' needs a GPU \(got device cpu\)"),
    ],
)
def test_refusals(compute_type: str, device: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare, "usable_device", torch.device)  # as if there were a GPU
    with pytest.raises(UsageError, match=message):
        prepare_for_inference(speech(), compute_type, device)


def test_a_device_that_is_not_here_is_refused():
    with pytest.raises(UsageError, match="device 'nothing': cannot be used"):
        prepare_for_inference(speech(), device="nothing")


def test_other_models_are_refused():
    with pytest.raises(UsageError, match="needs a model for images, text or transcription, got conformer"):
        prepare_for_inference(speech(ConformerEncoder, tiny.conformer()))
    with pytest.raises(UsageError, match="model tiny: compute_type='int8' of a clip model needs a C"):
        prepare_for_inference(speech(CLIP, tiny.CLIPS["softmax"]), "int8")


@pytest.mark.parametrize("width", [384, 1536, 2048])
def test_a_packed_row_has_the_same_bits_alone_and_in_a_batch(width):
    torch.manual_seed(0)
    linear, rows = PackedLinear(torch.randn(96, width), single_rows=True), torch.randn(5, 1, width)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            together, alone = linear(rows), [linear(row[None])[0] for row in rows]
    finally:
        torch.set_num_threads(threads)
    if torch.backends.cpu.get_cpu_capability() == "AVX2":  # oneDNN rounds a row by the number of rows beside it
        assert torch.allclose(together, torch.stack(alone), atol=1e-4)
    else:
        assert torch.equal(together, torch.stack(alone))
    assert (linear.table is not None) == (width <= SHORT and fast_tables())


@pytest.mark.parametrize(("out", "wide"), [*SIZES, (70, 800), (513, 2048)])
def test_a_table_is_the_float_map_with_the_same_bits_alone_and_in_a_batch(out: int, wide: int):
    plain, x = linear(out, wide), torch.randn(9, 1, wide)
    with torch.inference_mode():
        made = TableLinear(plain.weight, plain.bias)
        found = made(x)
        assert found.is_contiguous()
        assert torch.allclose(found, plain(x), atol=1e-5)
        if tune.is_intel() and torch.get_num_threads() == 1:  # elsewhere it is used only if measured to be exact
            for count in (1, 2, 4):
                assert torch.equal(torch.cat([made(part) for part in x.split(count)]), found)


def test_tables_for_single_rows_are_chosen_at_preparation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed, "fast_tables", lambda: True)
    plain, x = linear(300, 64), torch.randn(1, 64)
    made = PackedLinear(plain.weight, plain.bias, single_rows=True)
    with torch.inference_mode():
        assert torch.allclose(made(x), plain(x), atol=1e-5)
    table = RowTable(plain.weight)
    assert torch.allclose(table(x[0]), x[0] @ plain.weight.T, atol=1e-5)
    assert PackedLinear(plain.weight, plain.bias).table is None
    monkeypatch.setattr(packed, "LARGE", 1000)
    assert PackedLinear(plain.weight, plain.bias, single_rows=True).table is None
