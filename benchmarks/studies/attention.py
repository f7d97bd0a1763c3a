"""Cost of attention variants as texts grow: cache, decoding, and whole texts.

    python benchmarks/studies/attention.py

A language model of 8 layers of width 512 with 8 heads and random weights, one thread. Decoding: one token after so many
others, with 8, 2 and 1 key heads (multi-head, grouped-query, multi-query attention; Ainslie et al. 2023); the cache's
bytes are counted in its tensors. A whole text: one attention of that width, exact, in a window, and linear. The kinds
take turns within a round; times are the least over the rounds. Printed, and kept in `attention.json` beside this file.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from multimodal.blocks import masks
from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.blocks.cache import Cache
from multimodal.blocks.linear_attention import LinearAttention
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig, TextConfig

WIDTH, HEADS, LAYERS, ROWS = 512, 8, 8, 8
KINDS = {"multi-head (8)": 8, "grouped-query (2)": 2, "multi-query (1)": 1}
LENGTHS = (512, 2048, 8192)
STEPS = 4
WINDOW = 256


def model(kv_heads: int) -> TextTransformer:
    block = BlockConfig(AttentionConfig(WIDTH, HEADS, kv_heads, bias=False), 2 * WIDTH, "silu", gated=True, norm="rms")
    config = TextConfig(4096, max(LENGTHS) + STEPS, StackConfig(block, LAYERS), causal=True, tied=True,
                        positions=PositionConfig("rotary"))  # fmt: skip
    torch.manual_seed(0)
    return TextTransformer(config).eval()


def filled(lm: TextTransformer, length: int) -> Cache:
    """A cache of random keys and values of this length."""
    cache = lm.new_cache(capacity=length + STEPS)
    kv_heads, width = lm.config.stack.block.attention.kv_heads, WIDTH // HEADS
    for layer in cache.self_attention:
        layer.append(*torch.randn(2, ROWS, kv_heads, length, width).unbind(0))
    return cache


def size(cache: Cache) -> int:
    return sum(
        part.numel() * part.element_size() for layer in cache.self_attention for part in (layer.key, layer.value)
    )


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def least(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    found = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            took = seconds(run)
            found[name] += [took] if number else []  # the first round warms up
    return {name: min(times) for name, times in found.items()}


@torch.inference_mode()
def decoding(rounds: int) -> list[dict]:
    rows, models = [], {name: model(kv_heads) for name, kv_heads in KINDS.items()}
    for length in LENGTHS:
        caches = {name: filled(lm, length) for name, lm in models.items()}

        def steps(name: str, length: int = length, caches: dict[str, Cache] = caches) -> None:
            caches[name].cut(length)
            for _ in range(STEPS):
                models[name](torch.ones(ROWS, 1, dtype=torch.long), cache=caches[name], last=1)

        took = least({name: lambda name=name: steps(name) for name in models}, rounds)
        for name, lm in models.items():
            rows.append({
                "kind": name, "length": length, "cache_mb": round(size(filled(lm, length)) / 2**20, 1),
                "tokens_per_second": round(ROWS * STEPS / took[name], 1),
            })  # fmt: skip
    return rows


@torch.inference_mode()
def whole(rounds: int) -> list[dict]:
    rows, config = [], AttentionConfig(WIDTH, HEADS, bias=False)
    exact, linear = (
        Attention(config).eval(),
        LinearAttention(AttentionConfig(WIDTH, HEADS, bias=False, linear="causal")),
    )
    for length in LENGTHS:
        x = torch.randn(1, length, WIDTH)
        seen = {"exact": masks.causal(length, length), "window": masks.window(length, length, WINDOW - 1)}
        runs = {name: lambda mask=mask, x=x: exact(x, mask=mask) for name, mask in seen.items()}
        took = least(runs | {"linear": lambda x=x: linear(x)}, rounds)
        rows += [{"kind": name, "length": length, "ms": round(1000 * value, 1)} for name, value in took.items()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "machine": platform.machine(), "torch": torch.__version__, "batch": ROWS,
        "decoding": decoding(options.rounds), "whole": whole(options.rounds),
    }  # fmt: skip
    for part in ("decoding", "whole"):
        print("  ".join(f"{name:>18}" for name in found[part][0]))
        for row in found[part]:
            print("  ".join(f"{value:>18}" for value in row.values()))
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
