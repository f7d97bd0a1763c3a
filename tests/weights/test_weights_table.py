"""Tables of foreign tensor names: total, strict, invertible."""

import pytest
import torch

from multimodal.errors import CheckpointError
from multimodal.weights.table import (
    COPY,
    FIRST,
    NO_FIRST,
    NO_LAST,
    SCALAR,
    THIRDS,
    TRANSPOSE,
    NameRow,
    all_finite,
    check,
    export_tensors,
    load_tensors,
    under,
    weight_and_bias,
)  # fmt: skip

ROWS = [
    NameRow("layer.{}.qkv", ("blocks.{}.q", "blocks.{}.k", "blocks.{}.v"), THIRDS),
    NameRow("proj", "out", TRANSPOSE),
    NameRow("ids", reason="0, 1, 2, …", rebuild=lambda made: torch.arange(len(made["proj"])), optional=True),
    NameRow("extra", "extra", optional=True),
]


def foreign() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layer.{i}.qkv": torch.randn(6, 2) for i in range(12)} | {
        "proj": torch.randn(3, 4), "ids": torch.arange(3),
    }  # fmt: skip


def test_there_and_back():
    ours = load_tensors(ROWS, foreign(), "f")
    assert len(ours) == 37
    assert torch.equal(ours["blocks.11.k"], foreign()["layer.11.qkv"][2:4])
    back = export_tensors(ROWS, ours)
    assert back.keys() == foreign().keys()
    assert all(torch.equal(back[name], tensor) and back[name].is_contiguous() for name, tensor in foreign().items())


@pytest.mark.parametrize(
    ("op", "shape"),
    [(COPY, (2, 3)), (TRANSPOSE, (2, 3)), (THIRDS, (6, 2)), (FIRST, (4,)), (NO_FIRST, (1, 4)), (NO_LAST, (4, 3, 1)),
     (SCALAR, (1,))],
)  # fmt: skip
def test_each_op_is_undone_by_its_export(op, shape):
    tensor = torch.randn(shape)
    back = op.export(op.load(tensor))
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_two_rows_that_match_one_name_are_refused():
    rows = [NameRow("layer.{}.w", "blocks.{}.w"), NameRow("layer.0.w", "first")]
    with pytest.raises(CheckpointError, match=r"f: tensor 'layer\.0\.w' matches 2 rows"):
        load_tensors(rows, {"layer.0.w": torch.zeros(1)}, "f")


def test_a_row_that_is_not_used_is_a_missing_tensor():
    tensors = foreign()
    del tensors["proj"]
    with pytest.raises(CheckpointError, match="f: tensor 'proj' is missing"):
        load_tensors(ROWS, tensors, "f")


def test_one_of_ours_set_twice_is_refused():
    rows = [NameRow("a", "same"), NameRow("b", "same")]
    with pytest.raises(CheckpointError, match="f: tensor 'b' sets 'same' a second time"):
        load_tensors(rows, {"a": torch.zeros(1), "b": torch.zeros(1)}, "f")


def test_a_name_without_a_row_is_refused_both_ways():
    with pytest.raises(CheckpointError, match="f: unexpected tensor 'other'"):
        load_tensors(ROWS, foreign() | {"other": torch.zeros(1)}, "f")
    with pytest.raises(CheckpointError, match="tensor 'other' has no row"):
        export_tensors(ROWS, load_tensors(ROWS, foreign(), "f") | {"other": torch.zeros(1)})


def test_a_tensor_that_cannot_be_split_is_refused():
    with pytest.raises(CheckpointError, match=r"tensor 'layer\.0\.qkv' of shape \[2, 2\] does not split in 3"):
        load_tensors(ROWS, foreign() | {"layer.0.qkv": torch.zeros(2, 2)}, "f")


def test_a_dot_is_no_wildcard():
    with pytest.raises(CheckpointError, match="unexpected tensor 'axb'"):
        load_tensors([NameRow("a.b", "c")], {"axb": torch.zeros(1)}, "f")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"layer.3.qkv": None}, "tensor 'layer.3.qkv' is missing"),
     ({"layer.12.qkv": torch.zeros(6, 2)}, "unexpected tensor 'layer.12.qkv'"),
     ({"proj": torch.zeros(4, 3)}, r"tensor 'proj' has shape \[4, 3\], not \[3, 4\]"),
     ({"proj": torch.full((3, 4), torch.inf)}, "tensor 'proj' holds values that are not finite")],
)  # fmt: skip
def test_check_names_the_foreign_tensor(change, message):
    model = {name: tensor.to("meta") for name, tensor in load_tensors(ROWS, foreign(), "f").items()}
    check(ROWS, model, foreign(), "f")
    tensors = {name: tensor for name, tensor in (foreign() | change).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=f"f: {message}"):
        check(ROWS, model, tensors, "f")


def test_check_names_the_class_that_lacks_a_tensor_or_has_another():
    model = {name: tensor.to("meta") for name, tensor in load_tensors(ROWS, foreign(), "f").items()}
    more = foreign() | {"score": torch.zeros(1)}
    for tensors, cause in (({}, "tensor '.*' is missing in Foreign$"), (more, "unexpected tensor 'score' of Foreign$")):
        with pytest.raises(CheckpointError, match=f"^f: {cause}"):
            check(ROWS, model, tensors, "f", "Foreign")


def test_a_row_maps_or_drops_and_not_both():
    with pytest.raises(ValueError, match="expected our names or a reason"):
        NameRow("a")
    with pytest.raises(ValueError, match="expected our names or a reason"):
        NameRow("a", "b", reason="none")


def test_rows_of_a_part_get_both_prefixes():
    made = under("theirs.", "ours.", weight_and_bias("norm", "n"))
    assert [(row.foreign, row.targets) for row in made] == [
        ("theirs.norm.weight", ("ours.n.weight",)), ("theirs.norm.bias", ("ours.n.bias",)),
    ]  # fmt: skip


def test_what_is_not_finite_is_found_though_it_cancels_and_large_sums_are_finite():
    large = torch.full((5000,), 3e38)
    fine = [large, large.to(torch.bfloat16), torch.full((99,), 6e4).half(), torch.arange(3), torch.zeros(0)]
    assert all(map(all_finite, fine))
    broken = [large.index_fill(0, torch.tensor(4321), worst) for worst in (torch.nan, torch.inf, -torch.inf)]
    assert not any(map(all_finite, [*broken, torch.tensor([torch.inf, -torch.inf])]))
