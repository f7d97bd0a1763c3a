"""Peak resident memory of a long recording compared to a short one.

    python benchmarks/studies/memory.py [--data FOLDER] [--stages read asr-conformer-en whisper-mini] [--hours 3]

Stages: `read` is the survey (mel peak, voice activity) and every mel window after it; any other name is a model, and
the stage is `multimodal transcribe --model NAME` as its own process. The recording is 3 minutes of joined clips (of
`--data`, else the sample in `assets`) as mp3, the long one the same stream again and again. `--options` are further
flags of the command. Peaks are the processes' ru_maxrss. Printed, and kept in `memory.json` beside this file.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHORT_SECONDS = 180

# Run by other processes: this one stays small, since a child's ru_maxrss begins with its parent's size.
MAKE = """
import sys, itertools, av, numpy as np
from multimodal.tokens.audio.reading import find_audio, read_audio
folder, target, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3])
room = seconds * 16000
with av.open(target, "w", format="mp3", options={"write_xing": "0", "id3v2_version": "0"}) as out:
    stream = out.add_stream("libmp3lame", rate=16000, layout="mono", bit_rate=48000)
    at = 0
    for path in itertools.cycle(find_audio([folder])):
        sound = np.concatenate([read_audio(path).numpy(), np.zeros(8000, np.float32)])[: room - at]
        for start in range(0, len(sound), 16000):
            frame = av.AudioFrame.from_ndarray(sound[None, start : start + 16000], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16000, at + start
            out.mux(stream.encode(frame))
        at += len(sound)
        if at >= room:
            break
    out.mux(stream.encode(None))
"""
READ = """
import sys, time, json, torch
from multimodal.tasks.transcribe.audio_source import AudioSource, MelReader, survey
from multimodal.tasks.transcribe.vad import SpeechDetector
torch.set_num_threads(1)
seconds = {}
def timed(name, work):
    start = time.perf_counter()
    value = work()
    seconds[name] = round(time.perf_counter() - start, 2)
    return value
recording = AudioSource(sys.argv[1])
def windows(found):
    reader = MelReader(recording, 80, found.mel_peak, found.samples)
    return sum(float(reader.window(at, 3000).sum()) for at in range(0, reader.frames, 3000))
timed("decoding alone", lambda: sum(len(chunk) for chunk in recording.chunks()))
found = timed("survey with mel peak", lambda: survey(recording, bands=80, windows=8))
timed("survey with voice activity", lambda: survey(recording, push=SpeechDetector().push))
timed("all mel windows", lambda: windows(found))
print(json.dumps({"hours": found.samples / 16000 / 3600, "seconds": seconds}))
"""


def peak(command: list[str]) -> tuple[float, float, str]:
    """Peak resident MB, seconds and stdout of a process."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:6])}: exit code {process.returncode}")
    kilobytes = usage.ru_maxrss / (1024 if platform.system() == "Darwin" else 1)
    return kilobytes / 1024, time.perf_counter() - start, text


def recordings(folder: Path, data: Path, hours: float) -> tuple[Path, Path]:
    short, long = folder / "short.mp3", folder / "long.mp3"
    subprocess.run([sys.executable, "-c", MAKE, str(data), str(short), str(SHORT_SECONDS)], check=True, timeout=3600)
    stream = short.read_bytes()
    with long.open("wb") as out:
        for _ in range(round(hours * 3600 / SHORT_SECONDS)):
            out.write(stream)
    return short, long


def stage(name: str, recording: Path, options: list[str]) -> tuple[float, float, str]:
    if name == "read":
        return peak([sys.executable, "-c", READ, str(recording)])
    with tempfile.TemporaryDirectory() as out:
        flags = ["--model", name, "--device", "cpu", "--verbose", "None", "--output_dir", out, *options]
        return peak([sys.executable, "-m", "multimodal", "transcribe", str(recording), *flags])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=HERE.parents[1] / "assets" / "sample", help="folder of recordings")
    parser.add_argument("--stages", nargs="+", default=["read", "asr-conformer-en", "whisper-mini"])
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument(
        "--options", nargs=argparse.REMAINDER, default=["--beam_size", "1"], help="flags of the command"
    )
    args = parser.parse_args()
    kept = HERE / "memory.json"
    result = json.loads(kept.read_text()) if kept.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        short, long = recordings(Path(folder), args.data, args.hours)
        for name in args.stages:
            small, _, _ = stage(name, short, args.options)
            large, seconds, text = stage(name, long, args.options)
            row = {"hours": args.hours, "MB of 3 min": round(small), "MB of the long one": round(large),
                   "MB more": round(large - small), "seconds an hour": round(seconds / args.hours, 1)}  # fmt: skip
            if name == "read":
                parts = json.loads(text)["seconds"]
                row["parts, seconds an hour"] = {part: round(s / args.hours, 1) for part, s in parts.items()}
            else:
                row["options"] = " ".join(args.options)
            result[name] = row
            print(name, json.dumps(row))
            kept.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
