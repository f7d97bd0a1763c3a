"""The checks of types that every test runs with: a pair of arguments and result that passed lets no other one pass."""

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from tests.helpers.typed import checked


def made(result=None):
    @checked
    def product(
        a: Float[Tensor, "B T"], b: Float[Tensor, "T K"], names: list[str] | None = None, size: int = 0
    ) -> Float[Tensor, "B K"]:
        return a @ b if not result else result.pop()

    return product


A, B = torch.zeros(2, 3), torch.zeros(3, 4)


@pytest.mark.parametrize("wrong", [
    (A, torch.zeros(4, 4)), (A, B.long()), (A[0], B), (A, B.numpy()), (A, B, [3]), (A, B, ("a",)), (A, B, None, 0.5),
], ids=["size of an axis", "dtype", "axes", "array", "item of a list", "tuple", "float"])  # fmt: skip
def test_other_arguments_are_checked_after_some_that_passed(wrong):
    product = made()
    for _ in range(3):
        product(A, B, ["a"])
        product(A, b=B, size=3)
    for _ in range(2):
        with pytest.raises(TypeError):
            product(*wrong)


@pytest.mark.parametrize("wrong", [torch.zeros(2, 3), torch.zeros(2, 4).long(), None, [torch.zeros(2, 4)], np.zeros(2)],
                         ids=["size", "dtype", "None", "list", "array"])  # fmt: skip
def test_another_result_is_checked_after_one_that_passed(wrong):
    good = torch.zeros(2, 4)
    product = made([good, wrong, wrong, good, good])
    for _ in range(2):
        assert product(A, B) is good
    for _ in range(2):
        with pytest.raises(TypeError):
            product(A, B)
    assert product(A, B) is good


def test_a_tuple_is_checked_by_its_items():
    @checked
    def first(pair: tuple[Float[Tensor, "B T"], Float[Tensor, "B"]]) -> Tensor:
        return pair[0]

    first((A, torch.zeros(2)))
    first((A, torch.zeros(2)))
    with pytest.raises(TypeError):
        first((A, torch.zeros(3)))
