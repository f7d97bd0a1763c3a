"""Large tensors of batches are made where they are needed: in shared memory in a worker, with the same values."""

import torch

from multimodal.data.batching import stacked_batch, zeros_of_batch
from multimodal.data.loader import Loader, shuffled


class Numbers:
    def __len__(self) -> int:
        return 4

    def name(self, key: int) -> str:
        return str(key)

    def read(self, key: int) -> int:
        return key


def rows(number: int, random: torch.Generator) -> torch.Tensor:
    return torch.full((2, 3), number, dtype=torch.uint8)


def collate(items: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    padded = zeros_of_batch(len(items), 2, 4)
    empty = zeros_of_batch(0, 2, 4)
    shared = torch.tensor([padded.is_shared(), stacked_batch(items).is_shared()])
    padded[:, :, :3] = stacked_batch(items)
    return stacked_batch(items), padded, empty, shared


def test_a_worker_makes_the_same_batch_in_shared_memory():
    found = []
    for workers in (0, 1):
        steps = Loader(Numbers(), shuffled(4, 4, 0), rows, collate, workers=workers).start(0)
        found.append(next(steps).batches[0])
        steps.close()
    for own, other in zip(*[batch[:3] for batch in found], strict=True):
        assert own.dtype == other.dtype
        assert torch.equal(own, other)
    assert [batch[3].tolist() for batch in found] == [[False, False], [True, True]]
