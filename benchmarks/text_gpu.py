"""GPT-2's 124 M on a GPU, beside transformers in the same run: training steps, and decoding with CUDA graphs.

    python benchmarks/text_gpu.py --out FOLDER
    python benchmarks/text_gpu.py --out FOLDER --device cpu --tiny     the same steps at a tiny size, without graphs

Training: texts of 1,024 random tokens, autocast to bfloat16, AdamW (fused), gradients clipped at 1, the vocabulary
filled up to 50,304 as nanoGPT does. Ours: compiled blocks; attention by a written mask, by FlexAttention or by
PyTorch's own causal one, logits and loss in chunks (`heads.vocabulary_loss`) or compiled in one, both of which keep no
float32 logits of all tokens. Transformers' GPT2LMHeadModel: SDPA, compiled whole and as it comes. The losses of the
first step are compared before anything is timed; each batch size is tried, and the best of each then take turns. MFU is
(6 parameters + 12 layers x width x tokens) a token, without the table of positions, of 989 TFLOP/s (H100, H200).

Decoding: greedy, 128 tokens after a prompt of 16, with and without CUDA graphs, beside transformers' default
`generate`. In float32 the tokens are the same, else the program ends.

Kept in FOLDER/text_gpu.json as each figure comes. `--seconds` ends it in time.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import text_peers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal import search
from multimodal.blocks.masks import Causal, causal, sparse
from multimodal.graphs import static_step
from multimodal.heads import vocabulary_loss
from multimodal.models.text import TextTransformer
from multimodal.train.device import compile_blocks
from multimodal.weights import compute

PEAK = 989e12  # of an H100 or H200 in bfloat16, without sparsity
TINY = {"n_layer": 2, "n_embd": 64, "n_head": 2}
SIZES = {"vocab_size": 50304, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OURS = [("causal", "compiled"), ("causal", "chunks"), ("flex", "compiled"), ("mask", "compiled")]
Loss = Callable[[Tensor, Tensor], Tensor]


def our_loss(model: TextTransformer, attention: str, loss: str, tokens: int) -> Loss:
    """Mean cross-entropy of (ids, targets)."""
    made = {"mask": lambda: causal(tokens, tokens, model.device), "causal": Causal,
            "flex": lambda: sparse(lambda q, k: q >= k, tokens, tokens, model.device)}[attention]()  # fmt: skip
    whole = torch.compile(lambda states, weight, targets: F.cross_entropy(F.linear(states, weight), targets))

    def run(ids: Tensor, targets: Tensor) -> Tensor:
        states, wanted = model.states(ids, mask=made).flatten(0, 1), targets.flatten()
        if loss == "compiled":
            return whole(states, model.embed.weight, wanted)
        return vocabulary_loss(states, model.embed.weight, None, wanted) / len(wanted)

    return run


def their_loss(model: nn.Module) -> Loss:
    return lambda ids, targets: F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())


def stepper(model: nn.Module, loss: Loss, ids: Tensor) -> Callable[[], Tensor]:
    """A training step on texts of one token more than is read."""
    model.train().requires_grad_(True)
    device = ids.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            value = loss(ids[:, :-1], ids[:, 1:])
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return step


def candidates(tokens: int, device: torch.device, tiny: bool) -> Iterator[tuple[str, nn.Module, Loss]]:
    """Each is made once the one before has been tried."""
    sizes = SIZES | {"n_positions": tokens} | (TINY if tiny else {})
    for attention, loss in OURS[: 2 if device.type == "cpu" else None]:  # FlexAttention has no gradient on a CPU
        model = text_peers.gpt2_small(**sizes)[1].model.to(device)
        compile_blocks(model)
        yield f"ours, {attention}, loss {loss}", model, our_loss(model, attention, loss, tokens)
    for name in ("transformers, compiled", "transformers"):
        theirs = text_peers.gpt2_small(**sizes)[0].to(device)
        theirs.config.use_cache = False
        loss = their_loss(theirs)
        yield name, theirs, torch.compile(loss) if "compiled" in name else loss


def per_second(step: Callable[[], Tensor], count: int, tokens: int, wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return count * tokens / (time.perf_counter() - start)


def training(device: torch.device, options: argparse.Namespace, keep: Callable[..., None]) -> None:
    tokens, wait = 64 if options.tiny else 1024, torch.cuda.synchronize if device.type == "cuda" else lambda: None
    batches = options.batch_size or ([2] if options.tiny else [32, 64, 16])
    best: dict[str, tuple[float, Callable[[], Tensor], int]] = {}
    first, flops = None, 0.0
    for name, model, loss in candidates(tokens, device, options.tiny):
        width = getattr(model.config, "n_embd", None) or model.config.width
        layers = getattr(model.config, "n_layer", None) or model.config.stack.layers
        count = sum(p.numel() for p in model.parameters()) - tokens * width
        flops = 6 * count + 12 * layers * width * tokens
        for batch in batches:
            if time.monotonic() > options.end - 60:
                break
            torch.compiler.reset()
            ids = torch.randint(50257, (batch, tokens + 1), generator=torch.Generator().manual_seed(2)).to(device)
            step = stepper(model, loss, ids)
            try:
                value = step().item()
                if batch == batches[0] and name not in best:
                    first = value if first is None else first
                    if not abs(value - first) <= 0.02 * first:
                        raise SystemExit(f"{name}: the first loss is {value}, another's {first}")
                for _ in range(4):
                    step()
                speed = per_second(step, options.steps, batch * tokens, wait)
            except torch.cuda.OutOfMemoryError:
                keep(name, {f"batch {batch}": "out of memory"})
                continue
            if name not in best or speed > best[name][0]:
                best[name] = speed, step, batch
            keep(name, {f"batch {batch}": {"tokens/s": round(speed), "MFU": round(speed * flops / PEAK, 6)}})
    keep("in turns", in_turns(best, tokens, flops, options, wait))


def in_turns(
    best: dict[str, tuple[float, Callable[[], Tensor], int]], tokens: int, flops: float, options: argparse.Namespace,
    wait: Callable[[], None],
) -> dict[str, Any]:  # fmt: skip
    """The fastest of each library, again and again one after the other."""
    if not best:
        return {}
    sides = [{name: own for name, own in best.items() if name.startswith(side)} for side in ("ours", "transformers")]
    chosen = [max(side, key=lambda name: side[name][0]) for side in sides if side]
    speeds: dict[str, list[float]] = {name: [] for name in chosen}
    for name in chosen * 3:  # what was compiled has been thrown away
        best[name][1]()
    for _ in range(options.rounds):
        for name in chosen:
            _, step, batch = best[name]
            speeds[name].append(per_second(step, options.steps, batch * tokens, wait))
    middle = {name: statistics.median(found) for name, found in speeds.items()}
    ratios = [a / b for a, b in zip(*speeds.values(), strict=True)] if len(speeds) == 2 else []
    return {
        "tokens/s": {name: round(speed) for name, speed in middle.items()},
        "MFU": {name: round(speed * flops / PEAK, 6) for name, speed in middle.items()},
        "times faster": round(statistics.median(ratios), 3) if ratios else None,
    }


@torch.inference_mode()
def decoding(device: torch.device, options: argparse.Namespace, keep: Callable[..., None]) -> None:
    sizes, count = (TINY, 8) if options.tiny else ({}, 128)
    theirs, plain = text_peers.gpt2_small(**sizes)
    theirs.to(device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for kind, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model = compute.for_inference(plain, kind, device).model
        theirs.to(dtype)
        for batch in (1, 8):
            ids = torch.randint(50257, (batch, 16), generator=torch.Generator().manual_seed(1)).to(device)

            def graphed(model: TextTransformer = model, ids: Tensor = ids) -> list[list[int]]:
                step, cache = static_step(model, None, None, 16 + count, last=1)
                return search.greedy(step, ids, cache, eos=-1, max_new=count).ids

            def eager(model: TextTransformer = model, ids: Tensor = ids) -> list[list[int]]:
                step = lambda new, cache: model(new, cache=cache, last=1)
                return search.greedy(step, ids, model.new_cache(room=16 + count), eos=-1, max_new=count).ids

            runs = {"ours, CUDA graphs": graphed, "ours": eager,
                    "transformers": partial(text_peers.generated, theirs, ids, count)}  # fmt: skip
            written = {name: run() for name, run in runs.items()}
            right, share = written["transformers"], {}
            for name, rows in written.items():
                pairs = [pair for own, other in zip(rows, right, strict=True) for pair in zip(own, other, strict=True)]
                share[name] = round(sum(a == b for a, b in pairs) / len(pairs), 4)
                if kind == "float32" and share[name] != 1:
                    raise SystemExit(f"{name}, float32: {share[name]:.0%} of the tokens are transformers'")
            speeds: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(options.rounds):
                for name, run in runs.items():
                    wait()
                    start = time.perf_counter()
                    run()
                    wait()
                    speeds[name].append(batch * count / (time.perf_counter() - start))
            theirs_s = speeds["transformers"]
            keep(f"decoding, {kind}, batch {batch}", {
                "tokens/s": {name: round(statistics.median(found), 1) for name, found in speeds.items()},
                "times faster": {
                    name: round(statistics.median(a / b for a, b in zip(speeds[name], theirs_s, strict=True)), 3)
                    for name in runs if name != "transformers"},
                "share of tokens as transformers'": share, "different tokens": len({i for row in right for i in row}),
            })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=["training", "decoding"], nargs="+", default=["decoding", "training"])
    parser.add_argument("--batch_size", type=int, nargs="+", help="texts of a training step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=560, help="after which no further one is begun")
    parser.add_argument("--tiny", action="store_true", help="two layers, to see that it runs")
    options = parser.parse_args()
    options.end, device = time.monotonic() + options.seconds, torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU: nothing was measured")
    torch.set_float32_matmul_precision("high" if "training" in options.only and len(options.only) == 1 else "highest")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "text_gpu.json"
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    if device.type == "cpu":  # packed maps lie on a CPU alone, and are no part of this
        compute.can_pack = lambda: False

    def keep(name: str, figures: dict[str, Any]) -> None:
        title = f"{machine}, GPT-2 small{' tiny' * options.tiny}"
        kept = json.loads(path.read_text()) if path.exists() else {}
        kept.setdefault(title, {"PyTorch": torch.__version__}).setdefault(name, {}).update(figures)
        path.write_text(json.dumps(kept, indent=1) + "\n")
        print(json.dumps({name: figures}), flush=True)

    for part in options.only:
        {"training": training, "decoding": decoding}[part](device, options, keep)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    main()
