"""Models of text beside transformers in one run: decoding, prompts, ragged batches, tokenizing.

    python benchmarks/text.py                        CPU, one and two threads
    python benchmarks/text.py --only decode encode   some of the parts
    python benchmarks/text_gpu.py --out FOLDER       what a GPU does

GPT-2 small (124 M), BERT base and T5 small with random weights, the same in both libraries; transformers' are as it
makes them, in float32, with their own cache and attention. Each thread count is a process of its own, with both held to
it. Tokens and states are compared before anything is timed: in float32 the tokens are the same and states ≤ 1e-4 apart.
The candidates take turns within a round, so that drift of the machine's speed falls on all alike; times are the least
over the rounds, ratios medians of the rounds' ratios (above 1: ours is faster), and beside them the ratios of the least
times. Printed, and kept in `text.json` beside this file.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transcribe import compare, show

HERE = Path(__file__).resolve().parent
KINDS = ("float32", "bfloat16", "int8")
BATCHES = (1, 8)
PROMPT, TOKENS, LONG, SENTENCES = 16, 64, 512, 64
NEAR = 1e-4

Written = list[list[int]]


def bandwidth() -> float:
    """Bytes a second that a sum reads from memory, at the best of a few."""
    import torch

    held, taken = torch.ones(1 << 27), []
    for _ in range(7):
        start = time.perf_counter()
        held.sum()
        taken.append(time.perf_counter() - start)
    return held.nbytes / min(taken)


def same(runs: dict[str, Callable[[], Written]], right: Written) -> dict[str, float]:
    """Shares of tokens that are the reference's. Ends the program where float32 has another."""
    found = {}
    for name, run in runs.items():
        pairs = [(a, b) for row, other in zip(run(), right, strict=True) for a, b in zip(row, other, strict=True)]
        found[name] = round(sum(a == b for a, b in pairs) / len(pairs), 4)
        if "float32" in name and found[name] != 1:
            raise SystemExit(f"{name}: only {found[name]:.0%} of the tokens are transformers'")
    return found


def near(name: str, found: Any, right: Any) -> float:
    far = (found - right).abs().max().item()
    if "float32" in name and not far <= NEAR:
        raise SystemExit(f"{name}: {far:.1e} from transformers' states")
    return float(f"{far:.1e}")


def decode(rounds: int) -> dict[str, Any]:
    """`TOKENS` tokens after a prompt of `PROMPT`."""
    import text_peers
    import torch

    from multimodal import search
    from multimodal.weights.compute import for_inference

    theirs, plain = text_peers.gpt2_small()
    models, found, speed = {kind: for_inference(plain, kind).model for kind in KINDS}, {}, bandwidth()

    def written(model: Any, ids: Any) -> Written:
        step = lambda new, cache: model(new, cache=cache, last=1)
        cache = model.new_cache(room=PROMPT + TOKENS)
        return search.greedy(step, ids, cache, eos=-1, max_new=TOKENS).ids

    for batch in BATCHES:
        ids = torch.randint(plain.model.config.vocabulary, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
        runs = {f"ours {kind}": partial(written, model, ids) for kind, model in models.items()}
        peers = {"transformers float32": partial(text_peers.generated, theirs, ids, TOKENS)}
        right = peers["transformers float32"]()
        shares, whole = same(runs, right), torch.cat([ids, torch.tensor(right)], 1)
        next_ids = {kind: model(whole)[:, PROMPT - 1 : -1].argmax(-1) for kind, model in models.items()}
        found[title := f"GPT-2 small, {TOKENS} tokens, batch {batch}"] = compare(runs, peers, rounds, warm=False) | {
            "share of tokens as transformers'": shares, "different tokens": len({i for row in right for i in row}),
            "share of next tokens as transformers', after its own": {
                f"ours {kind}": round((own == whole[:, PROMPT:]).float().mean().item(), 4)
                for kind, own in next_ids.items()},
        }  # fmt: skip
        each = {name: value / TOKENS for name, value in found[title]["milliseconds"].items()}
        found[title]["milliseconds a token"] = {name: round(value, 3) for name, value in each.items()}
        if batch == 1:  # the tables of positions are not read
            count = sum(p.numel() for p in plain.model.parameters()) - plain.model.positions.numel()
            found[title]["share of the memory's speed"] = {
                name: round((1 if "int8" in name else 4) * count / (value / 1000) / speed, 3)
                for name, value in each.items() if "bfloat16" not in name
            } | {"GB/s": round(speed / 1e9, 1)}  # fmt: skip
    return found


def prefill(rounds: int) -> dict[str, Any]:
    """The logits after a prompt of `LONG` tokens, whose keys and values are kept."""
    import text_peers
    import torch

    from multimodal.weights.compute import for_inference

    theirs, plain = text_peers.gpt2_small()
    ids = torch.randint(plain.model.config.vocabulary, (1, LONG), generator=torch.Generator().manual_seed(1))

    def logits(model: Any) -> Any:
        return model(ids, cache=model.new_cache(room=LONG), last=1)

    runs = {f"ours {kind}": partial(logits, for_inference(plain, kind).model) for kind in KINDS}
    peers = {"transformers float32": lambda: theirs(ids, use_cache=True, logits_to_keep=1).logits}
    right = peers["transformers float32"]()
    far = {name: near(name, run(), right) for name, run in runs.items()}
    return {f"GPT-2 small, prompt of {LONG}": compare(runs, peers, rounds, warm=False) | {"far from transformers": far}}


def encode(rounds: int) -> dict[str, Any]:
    """The states of sentences of different length."""
    import text_peers
    import torch

    from multimodal.tasks.ragged import encode_ragged
    from multimodal.weights.compute import for_inference

    theirs, plain = text_peers.bert_base()
    lengths, source = text_peers.sentence_lengths(SENTENCES)
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(1000, 30000, (length,), generator=draw).tolist() for length in lengths]

    def padded(count: int, ordered: bool) -> list[Any]:
        order = sorted(range(len(rows)), key=lambda i: -lengths[i]) if ordered else list(range(len(rows)))
        found = [None] * len(rows)
        for first in range(0, len(rows), count):
            part = order[first : first + count]
            width = max(lengths[i] for i in part)
            ids = torch.tensor([rows[i] + [0] * (width - lengths[i]) for i in part])
            real = torch.arange(width) < torch.tensor([lengths[i] for i in part])[:, None]
            states = theirs(ids, attention_mask=real.long()).last_hidden_state
            for i, own in zip(part, states, strict=True):
                found[i] = own[: lengths[i]]
        return found

    kinds = {kind: for_inference(plain, kind).model for kind in ("float32", "bfloat16")}
    runs = {f"ours {kind}": partial(encode_ragged, model, rows) for kind, model in kinds.items()}
    peers = {
        "transformers float32": partial(padded, SENTENCES, False),
        "transformers float32, like lengths together": partial(padded, 8, True),
    }
    right = torch.cat(peers["transformers float32"]())
    far = {name: near(name, torch.cat(run()), right) for name, run in runs.items()}
    return {f"BERT base, {SENTENCES} sentences": compare(runs, peers, rounds, warm=False) | {
        "far from transformers": far, "lengths": source, "tokens": sum(lengths), "longest": max(lengths),
    }}  # fmt: skip


def seq2seq(rounds: int) -> dict[str, Any]:
    """`TOKENS` tokens over a source of as many, from its ids."""
    import text_peers
    import torch

    from multimodal import search
    from multimodal.weights.compute import for_inference

    theirs, plain = text_peers.t5_small()
    ids = torch.randint(3, 32000, (1, TOKENS), generator=torch.Generator().manual_seed(1))

    def written(model: Any) -> Written:
        step = search.over_source(partial(model.decode, last=1), model.encode(ids))
        start, cache = torch.tensor([[model.config.start_id]]), model.decoder.new_cache(room=TOKENS + 1)
        return search.greedy(step, start, cache, eos=-1, max_new=TOKENS).ids

    runs = {f"ours {kind}": partial(written, for_inference(plain, kind).model) for kind in KINDS}
    peers = {"transformers float32": partial(text_peers.generated, theirs, ids, TOKENS)}
    right = peers["transformers float32"]()
    shares = same(runs, right)
    return {f"T5 small, {TOKENS} tokens": compare(runs, peers, rounds, warm=False) | {
        "share of tokens as transformers'": shares, "different tokens": len(set(right[0])),
    }}  # fmt: skip


def tokenizing(rounds: int) -> dict[str, Any]:
    """A million characters as one text."""
    import text_peers

    text, source = text_peers.megabyte()
    found = {}
    for name, (ours, library) in text_peers.tokenizers(text).items():
        if (ids := ours(text)) != library(text):
            raise SystemExit(f"{name}: not the library's ids")
        runs = {"ours": partial(ours, text)}, {"library": partial(library, text)}
        found[name] = compare(*runs, rounds, warm=False) | {"text": source, "tokens": len(ids)}
    return found


MEASURES = {"decode": decode, "prefill": prefill, "encode": encode, "seq2seq": seq2seq, "tokenizing": tokenizing}


def measured(part: str, threads: int, rounds: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(threads)
    with torch.inference_mode():
        return MEASURES[part](rounds)


def in_process(part: str, threads: int, rounds: int) -> dict[str, Any]:
    """One part at one thread count, from a process that has never known another."""
    limits = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    environment = os.environ | {name: str(threads) for name in limits} | {"TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--rounds", str(rounds), "--only", part, "--child", str(threads)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True).stdout
    return json.loads(answer.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MEASURES, nargs="+", default=list(MEASURES), help="parts to measure")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "text.json", help="where the figures are kept")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.only[0], options.child, options.rounds)))
        return
    machine = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
    for part in options.only:
        for threads in options.threads if part != "tokenizing" else [1]:
            name = f"{part}, {threads} thread{'s' * (threads > 1)}"
            found = in_process(part, threads, options.rounds)
            show(name, found)
            kept = json.loads(options.out.read_text()) if options.out.exists() else {}  # each part as it comes
            kept[name] = {"machine": machine, "rounds": options.rounds} | found
            options.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
