"""Hallucination rate: the share of 100 generated clips without speech (`multimodal.data.datasets.noises`) for which
`transcribe` returns text.

    python benchmarks/studies/hallucination.py
    python benchmarks/studies/hallucination.py --speech an4=../shared/data/speech/an4/test.jsonl

Of the shipped models with and without voice activity detection. With `--speech` also the other side: the share of
recordings with speech, by a manifest, in which no text is found. Both are printed and kept in `hallucination.json`
beside this file.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import multimodal
from multimodal.data.datasets.noises import KINDS, Noise, collection
from multimodal.inference.prepare import prepare_for_inference
from multimodal.weights.folder import Checkpoint

HERE = Path(__file__).resolve().parent
RUNS = [(name, vad) for name in ("asr-conformer-en", "whisper-mini") for vad in (True, False)]


def noisy(clips: list[Noise], model: Checkpoint, vad: bool) -> dict[str, Any]:
    """Clips of each kind with text, the texts, and speed in seconds of audio per second."""
    began, got, texts = time.perf_counter(), Counter(), {}
    for clip in clips:
        if text := multimodal.transcribe(clip.wave, model, vad_filter=vad)["text"].strip():
            got[clip.kind] += 1
            texts[clip.name] = text[:200]
    speed = sum(len(clip.wave) for clip in clips) / 16000 / (time.perf_counter() - began)
    kinds = {kind: [got[kind], sum(clip.kind == kind for clip in clips)] for kind in KINDS}
    return {"with_text": got.total(), "clips": len(clips), "kinds": kinds, "texts": texts, "speed": round(speed, 1)}


def spoken(path: Path) -> Iterator[Path]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield path.parent / json.loads(line)["audio_filepath"]


def missed(recordings: list[Path], model: Checkpoint, vad: bool) -> dict[str, int]:
    """Number of recordings with speech but no text."""
    empty = [p for p in recordings if not multimodal.transcribe(p, model, vad_filter=vad)["text"].strip()]
    return {"without_text": len(empty), "recordings": len(recordings)}


def table(runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| kind | " + " | ".join(runs) + " |"
    yield "|---|" + "---:|" * len(runs)
    for kind in KINDS:
        yield f"| {kind} | " + " | ".join(f"{r['kinds'][kind][0]}/{r['kinds'][kind][1]}" for r in runs.values()) + " |"
    yield "| all | " + " | ".join(f"{r['with_text']}/{r['clips']}" for r in runs.values()) + " |"
    for name in next(iter(runs.values())).get("speech", ()):
        counts = [r.get("speech", {}).get(name) for r in runs.values()]
        shown = [f"{c['without_text']}/{c['recordings']}" if c else "" for c in counts]
        yield f"| {name}: no text | " + " | ".join(shown) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=10, help="clips of each kind")
    parser.add_argument("--speech", nargs="*", default=[], metavar="NAME=MANIFEST", help="recordings with speech")
    parser.add_argument("--most", type=int, default=100, help="recordings of a manifest")
    args = parser.parse_args()
    torch.set_num_threads(1)
    clips, speech = list(collection(args.each)), {}
    for name, path in (pair.split("=", 1) for pair in args.speech):
        found = list(spoken(Path(path)))
        speech[name] = found[:: max(1, len(found) // args.most)][: args.most]
    runs = {}
    for name, vad in RUNS:
        model = prepare_for_inference(multimodal.load(name))
        found = noisy(clips, model, vad)
        if speech and name == "asr-conformer-en":  # the other knows synthetic voices only
            found["speech"] = {key: missed(own, model, vad) for key, own in speech.items()}
        runs[f"{name}, {'VAD' if vad else 'no VAD'}"] = found
        print(f"{name}, VAD {vad}: text in {found['with_text']} of {found['clips']}", file=sys.stderr, flush=True)
    print("\n".join(table(runs)))
    (HERE / "hallucination.json").write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
