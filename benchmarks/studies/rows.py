"""Ways to multiply rows by a weight on this processor: microseconds of processor time, and whether a row keeps its bits
in company. `python -m benchmarks.studies.rows` prints a Markdown table; one thread."""

import time
import warnings
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from multimodal.inference.int8 import Int8Linear
from multimodal.inference.native.library import library
from multimodal.inference.native.linear import NativeLinear
from multimodal.inference.packed import PackedLinear
from multimodal.inference.row_table import TableLinear

SHAPES = ((384, 384), (1152, 384), (1536, 384), (384, 1536), (51865, 384), (2048, 512), (512, 2048))
ROWS, COMPANY = (1, 8, 256), (2, 5, 8, 64)
BYTES = 100e6  # of weights, so that they do not stay in the processor's cache
ROUNDS, TURN = 9, 0.01  # of all ways in turn; seconds each
Product = Callable[[Tensor], Tensor]


def plain(weight: Tensor) -> Product:
    return lambda x: F.linear(x, weight)


def transposed(weight: Tensor) -> Product:
    columns = weight.t().contiguous()
    return lambda x: x @ columns


def dynamic(weight: Tensor) -> Product:
    steps, zeros = weight.abs().amax(1) / 127, torch.zeros(len(weight), dtype=torch.int64)
    packed = torch.ops.quantized.linear_prepack(torch.quantize_per_channel(weight, steps, zeros, 0, torch.qint8), None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, False)


WAYS: Mapping[str, Callable[[Tensor], Product]] = {
    "F.linear": plain, "x @ Wᵀ as [K, N]": transposed, "packed": lambda w: PackedLinear(w, single_rows=True),
    "table": TableLinear, "int8": Int8Linear, "dynamic int8": dynamic,
}  # fmt: skip
COMPILED: Mapping[str, Callable[[Tensor], Product]] = {
    "native": NativeLinear, "native int8": lambda w: NativeLinear(w, int8=True),
}  # fmt: skip


def exact(way: Callable[[Tensor], Product], inputs: int) -> bool:
    product, rows = way(torch.randn(400, inputs)), torch.randn(64, inputs)
    alone = torch.cat([product(row[None].clone()) for row in rows])
    return all(torch.equal(product(rows[:count].clone()), alone[:count]) for count in COMPANY)


def least(products: Mapping[str, list[Product]], x: Tensor) -> dict[str, float]:
    """Seconds of one product, in its quickest turn."""
    taken = dict.fromkeys(products, float("inf"))
    for _ in range(ROUNDS):
        for name, copies in products.items():
            count, start = 0, time.thread_time()
            while time.thread_time() - start < TURN:
                for product in copies:
                    product(x)
                count += len(copies)
            taken[name] = min(taken[name], (time.thread_time() - start) / count)
    return taken


@torch.inference_mode()
def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ways = {**WAYS, **(COMPILED if library() else {})}
    print(f"µs of {', '.join(map(str, ROWS))} rows; * a row's bits depend on the others\n")
    print("| outputs × inputs | " + " | ".join(ways) + " |\n" + "|---" * (len(ways) + 1) + "|")
    for outputs, inputs in SHAPES:
        copies = max(1, int(BYTES / (4 * outputs * inputs)))
        products = {name: [way(torch.randn(outputs, inputs)) for _ in range(copies)] for name, way in ways.items()}
        times = [least(products, torch.randn(count, inputs)) for count in ROWS]
        cells = [", ".join(f"{1e6 * one[name]:,.0f}" for one in times) + "*" * (not exact(way, inputs))
                 for name, way in ways.items()]  # fmt: skip
        print(f"| {outputs:,} × {inputs:,} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
