"""Stored number types: 8-bit groups with a scale each, 16-bit floats, and what is refused."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from multimodal.errors import CheckpointError, UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.weights.files.stored import GROUP, LEAST_GROUP, SCALE, from_stored, quantized, to_stored
from multimodal.weights.folder import Checkpoint, load_folder, save_folder
from tests.helpers.commands import one_line, run
from tests.helpers.folders import sealed
from tests.helpers.spread import thin
from tests.helpers.tiny import ALL, made

WEIGHTS = "model.safetensors"
ONE = {kind: name for name, (kind, _) in ALL.items()}.values()  # of each kind of model
SOME = list(ONE)[::2]


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.ci if name in SOME else pytest.mark.slow) for name in ALL
])  # fmt: skip
def test_a_weight_is_off_by_half_of_its_groups_scale_at_most_and_stored_again_equal(name, tmp_path):
    model = made(name)
    save_folder(Checkpoint(model), tmp_path / "int8", "int8")
    stored, loaded = load_file(tmp_path / "int8" / WEIGHTS), load_folder(tmp_path / "int8")
    weights, rows = loaded.model.state_dict(), 0
    for key, tensor in model.state_dict().items():
        if stored[key].dtype == torch.int8:
            rows += len(tensor)
            scale = stored[key + SCALE].float()
            error = (weights[key] - tensor).abs().view(*scale.shape, -1)
            assert error.shape[2] <= GROUP or scale.shape[1] == 1, key
            assert (error.amax(2) <= 0.50001 * scale).all(), key
        elif tensor.is_floating_point():
            assert tensor.ndim < 2 or tensor[0].numel() < LEAST_GROUP, key
            assert torch.equal(weights[key], tensor.half().float()), key
        else:
            assert torch.equal(weights[key], tensor), key
    assert rows > 20
    save_folder(loaded, tmp_path / "again", "int8")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "int8" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("size", [1e-30, 3e-5, 1.0, 1e30])
def test_rows_of_any_size_keep_their_precision_and_zeros_stay_zero(size):
    tensor = torch.randn(50, 2, 9) * size
    tensor[7] = 0
    tensors = to_stored({"convolution": tensor}, "int8", "model")
    weights = from_stored(tensors, "model")["convolution"]
    assert ((weights - tensor).abs().flatten(1).amax(1) <= tensor.abs().flatten(1).amax(1) / 190).all()
    assert torch.equal(weights[7], torch.zeros(2, 9))
    assert all(torch.equal(a, b) for a, b in zip(quantized(weights), quantized(tensor), strict=True))


def test_a_transposed_tensor_is_stored_as_its_copy():
    """As those of GPT-2, whose files hold them transposed."""
    tensor = torch.randn(32, 48).T
    stored = [to_stored({"w": one}, "int8", "model") for one in (tensor, tensor.contiguous())]
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in ("w", "w" + SCALE))


def test_groups_and_the_best_of_their_scales_have_less_error_than_rows():
    tensor = torch.randn(64, 192, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3, 192)
    scale = (tensor.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    rows = {"w": (tensor / scale.float()).round().to(torch.int8), "w_scale": scale[:, 0]}  # one group, as [rows]
    groups = to_stored({"w": tensor}, "int8", "model")
    assert groups["w_scale"].shape == (64, 6)
    errors = [(from_stored(stored, "model")["w"] - tensor).square().mean().sqrt() for stored in (rows, groups)]
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize(("numbers", "groups"), [(8, 1), (37, 1), (34, 2), (48, 2), (64, 2), (144, 6), (1030, 103)])
def test_rows_are_cut_into_equal_groups(numbers, groups):
    levels, scale = quantized(torch.randn(3, numbers))
    assert (levels.shape, scale.shape) == ((3, numbers), (3, groups))


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(
    ("scale", "named"),
    [
        (torch.full((16,), math.nan, dtype=torch.bfloat16), "not positive and finite"),
        (torch.zeros(16, dtype=torch.bfloat16), "not positive and finite"),
        (-torch.ones(16, dtype=torch.bfloat16), "not positive and finite"),
        (torch.ones(15, dtype=torch.bfloat16), r"expected \[16, groups\] of torch.bfloat16 .* got \[15\]"),
        (torch.ones(16, 3, dtype=torch.bfloat16), r"groups that divide 16, got \[16, 3\]"),
        (torch.ones(16, 0, dtype=torch.bfloat16), r"groups that divide 16, got \[16, 0\]"),
        (torch.ones(16, 1, 1, dtype=torch.bfloat16), r"got \[16, 1, 1\]"),
        (torch.ones(16), "got .* of torch.float32"), (None, "is missing"),
    ],
)  # fmt: skip
def test_an_impossible_scale_is_refused(tmp_path, scale, named):
    save_folder(Checkpoint(made("vit-mean")), tmp_path / "int8", "int8")
    key = "stack.blocks.0.attention.query.weight" + SCALE
    tensors = load_file(tmp_path / "int8" / WEIGHTS)
    del tensors[key]
    save_file(tensors | ({} if scale is None else {key: scale}), tmp_path / "int8" / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: tensor .*query.weight_scale.* {named}"):
        load_folder(sealed(tmp_path / "int8"))


def test_integers_are_weights_only_where_the_configuration_says_so(tmp_path):
    save_folder(Checkpoint(made("vit-mean")), tmp_path / "int8", "int8")
    config = tmp_path / "int8" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"store": "float16"}))
    with pytest.raises(CheckpointError, match="unexpected tensor"):
        load_folder(sealed(tmp_path / "int8"))


def test_weights_that_cannot_be_stored_are_refused_and_nothing_is_left(tmp_path):
    model = made("vit-mean")
    with pytest.raises(UsageError, match="got one prepared for inference"):
        save_folder(prepare_for_inference(Checkpoint(model, source="vit"), "bfloat16"), tmp_path / "out", "int8")
    with torch.no_grad():
        model.norm.bias[0] = 70_000
    for store in ("float16", "int8"):
        line = r"'norm.bias' holds 70000, beyond the range of torch.float16; the store float32 keeps it"
        with pytest.raises(CheckpointError, match=line):
            save_folder(Checkpoint(model), tmp_path / "out", store)
    save_folder(Checkpoint(model), tmp_path / "bfloat16", "bfloat16")
    assert load_folder(tmp_path / "bfloat16").model.norm.bias[0] == 70_144
    with torch.no_grad():
        model.stack.blocks[0].feed.up.weight[0, 0] = math.nan
    with pytest.raises(CheckpointError, match=r"'stack.blocks.0.feed.up.weight' holds values that are not finite"):
        save_folder(Checkpoint(model), tmp_path / "out", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["bfloat16"]


@pytest.mark.ci
def test_convert_stores_and_info_says_how(capsys, models, tmp_path):
    source, sizes = models / "clip", {}
    for store in ("float32", "float16", "bfloat16", "int8"):
        assert run(capsys, "convert", source, tmp_path / store, "--store", store)[0] == 0
        sizes[store] = (tmp_path / store / WEIGHTS).stat().st_size
    assert sizes["float32"] > 1.9 * sizes["float16"] > 3.1 * sizes["int8"]
    assert abs(sizes["float16"] - sizes["bfloat16"]) < 999
    code, out, err = run(capsys, "info", tmp_path / "int8")
    assert (code, err) == (0, "")
    assert "\nstored: i8 " in out
    code, _, err = run(capsys, "convert", source, tmp_path / "out", "--store", "int4")
    assert (code, "--store: must be one of float32, float16, bfloat16, int8 (got 'int4')" in err) == (2, True)
    code, _, err = run(capsys, "convert", source, tmp_path / "x.safetensors", "--format", "openclip", "--store", "int8")
    assert code == 1
    assert "--store int8 is for a checkpoint folder, not for openclip" in one_line(err)
