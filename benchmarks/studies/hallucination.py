"""Hallucination rate: the share of 100 generated clips without speech (`benchmarks.studies.noises`) for which
`transcribe` returns text, by the shipped models with and without voice activity detection.

    python -m benchmarks.studies.hallucination --speech an4=../shared/data/speech/an4/test.jsonl

`--speech` adds the opposite error of `asr-conformer-en`: recordings with speech, listed in a manifest, that yield no
text. Results are printed and saved in `hallucination.json`.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import multimodal
from benchmarks.studies.noises import KINDS, Noise, collection
from multimodal.inference.prepare import prepare_for_inference
from multimodal.weights.folder import Checkpoint

RUNS = [(name, vad) for name in ("asr-conformer-en", "whisper-mini") for vad in (True, False)]


def on_noise(clips: list[Noise], model: Checkpoint, vad: bool) -> dict[str, Any]:
    """Clips with text by kind, the texts, and speed in seconds of audio per second."""
    start, counts, texts = time.perf_counter(), Counter(), {}
    for clip in clips:
        if text := multimodal.transcribe(clip.wave, model, vad_filter=vad)["text"].strip():
            counts[clip.kind] += 1
            texts[clip.name] = text[:200]
    speed = sum(len(clip.wave) for clip in clips) / 16000 / (time.perf_counter() - start)
    kinds = {kind: [counts[kind], sum(clip.kind == kind for clip in clips)] for kind in KINDS}
    return {"with_text": counts.total(), "clips": len(clips), "kinds": kinds, "texts": texts, "speed": round(speed, 1)}


def on_speech(recordings: list[Path], model: Checkpoint, vad: bool) -> dict[str, int]:
    """Recordings with speech but no text."""
    empty = [p for p in recordings if not multimodal.transcribe(p, model, vad_filter=vad)["text"].strip()]
    return {"without_text": len(empty), "recordings": len(recordings)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=10, help="clips of each kind")
    parser.add_argument("--speech", nargs="*", default=[], metavar="NAME=MANIFEST", help="recordings with speech")
    parser.add_argument("--most", type=int, default=100, help="recordings from each manifest")
    args = parser.parse_args()
    torch.set_num_threads(1)
    clips, speech, results = list(collection(args.each)), {}, {}
    for name, path in (pair.split("=", 1) for pair in args.speech):
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        files = [Path(path).parent / json.loads(line)["audio_filepath"] for line in lines]
        speech[name] = files[:: max(1, len(files) // args.most)][: args.most]
    for name, vad in RUNS:
        model = prepare_for_inference(multimodal.load(name))
        row = on_noise(clips, model, vad)
        if speech and name == "asr-conformer-en":  # whisper-mini knows synthetic voices only
            row["speech"] = {key: on_speech(files, model, vad) for key, files in speech.items()}
        results[f"{name}, {'VAD' if vad else 'no VAD'}"] = row
        print(f"{name}, {'VAD' if vad else 'no VAD'}:", json.dumps(row, ensure_ascii=False), flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
