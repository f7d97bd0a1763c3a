"""Linear maps for decoding, with weights laid out for sums of their columns."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from multimodal.inference.modules import Frozen

BESIDE = 384  # outputs whose sums stay in the processor's registers
BLOCK = 384  # inputs that MKL sums one after the other


class RowTable:
    """x Wᵀ of one row, as a sum of Wᵀ's rows weighted by x (`embedding_bag`).

    That prefetches memory and has less overhead than a product. `block`: inputs that are summed one after the other;
    then the sums of the blocks are added. None: all of them."""

    def __init__(self, weight: Float[Tensor, "N K"], block: int | None = None):
        self.outputs, inputs = weight.shape
        # each thread has a part of the outputs
        least = max(-(-self.outputs // BESIDE), min(torch.get_num_threads(), -(-self.outputs // 64)))
        even = (parts for parts in range(least, least * 5 // 4 + 1) if self.outputs % (16 * parts) == 0)
        self.parts = next(even, least)
        beside = -(-self.outputs // self.parts // 16) * 16  # a register's width
        missing = self.parts * beside - self.outputs
        padded = F.pad(weight, (0, 0, 0, missing)) if missing else weight  # `pad` copies
        self.table = padded.reshape(self.parts, beside, inputs).transpose(1, 2).contiguous()  # [parts K beside]
        self.starts = list(range(0, inputs, block or inputs))
        self.rows = torch.arange(self.parts * inputs, dtype=torch.int32, device="cpu")
        firsts = [part * inputs + start for part in range(self.parts) for start in self.starts]
        self.firsts, self.flat = torch.tensor(firsts, dtype=torch.int32, device="cpu"), self.table.view(-1, beside)

    def __call__(self, x: Float[Tensor, "K"]) -> Float[Tensor, "N"]:
        weights = x if self.parts == 1 else torch.cat([x] * self.parts)  # `repeat` takes five times as long
        sums = torch.embedding_bag(self.flat, self.rows, self.firsts, False, 0, False, weights)[0]
        if len(self.starts) > 1:  # `sum` adds in another order
            first, second, *others = sums.view(self.parts, len(self.starts), -1).unbind(1)
            sums = first + second
            for other in others:
                sums.add_(other)
        return sums.view(-1)[: self.outputs]


class TableLinear(Frozen):
    """x Wᵀ + b through a `RowTable`, and several rows through MKL from the same layout, with the same bits."""

    def __init__(self, weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"] | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        blocks = -(-self.in_features // BLOCK)
        block = BLOCK if self.in_features % BLOCK == 0 else -(-self.in_features // blocks // 16) * 16
        self.table = RowTable(weight.detach(), block)
        # MKL takes these blocks itself; other numbers of inputs it divides by the number of rows
        whole = blocks <= 2 or self.in_features % BLOCK == 0
        starts = [0] if whole else self.table.starts
        self.spans = [slice(start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
        self.tensors = (None if bias is None else bias.detach().clone(),)

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        """A row has the same bits alone and in a batch (one thread)."""
        if x.numel() == self.in_features:
            y = self.table(x.reshape(-1))
        else:
            y = self._rows(x.reshape(-1, self.in_features).contiguous())
        bias = self.tensors[0]
        return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], self.out_features)

    def _rows(self, x: Float[Tensor, "B K"]) -> Float[Tensor, "B N"]:
        beside = self.table.table.shape[2]
        y = x.new_empty(len(x), self.table.parts * beside)
        for number, part in enumerate(self.table.table):
            own = y[:, number * beside : (number + 1) * beside]
            torch.mm(x[:, self.spans[0]], part[self.spans[0]], out=own)
            for span in self.spans[1:]:
                torch.addmm(own, x[:, span], part[span], out=own)
        return y if y.shape[1] == self.out_features else y[:, : self.out_features].contiguous()

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.tensors[0] is not None}"
