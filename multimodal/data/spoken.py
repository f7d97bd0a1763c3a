"""Synthetic speech: sentences spoken by command-line synthesizers such as espeak-ng, with their manifest."""

import itertools
import json
import math
import subprocess
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multimodal.system.outputs import opened_output


@dataclass(frozen=True)
class SpokenText:
    """`spoken`: the text as the synthesizer must read it. `command`: its arguments; `{wav}` and `{text}` stand for the
    audio file and the spoken text. `facts`: further fields of the manifest line."""

    text: str
    spoken: str
    voice: str
    command: list[str]
    facts: dict[str, Any] = field(default_factory=dict)


def synthesize(utterance: SpokenText, path: Path) -> dict[str, Any]:
    """Write the audio file and return its manifest line. Raises CalledProcessError where the synthesizer fails."""
    values = {"{wav}": str(path), "{text}": utterance.spoken}
    subprocess.run([values.get(part, part) for part in utterance.command], check=True, capture_output=True)
    with wave.open(str(path)) as file:
        seconds = file.getnframes() / file.getframerate()
    line = {"audio_filepath": f"{path.parent.name}/{path.name}", "duration": round(seconds, 3)}
    return line | {"text": utterance.text, "voice": utterance.voice} | utterance.facts


def write_speech(manifest: Path, utterances: Iterator[SpokenText], most_seconds: float = math.inf) -> None:
    """Write audio files into a folder beside the JSONL manifest, until `most_seconds` of audio are reached. An earlier
    manifest goes first: after a stop its texts would stand beside other recordings."""
    folder = manifest.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    manifest.unlink(missing_ok=True)
    seconds, count, numbered = 0.0, 0, enumerate(utterances)
    with ThreadPoolExecutor(2) as pool, opened_output(manifest, "keep") as file:
        while seconds < most_seconds and (part := list(itertools.islice(numbered, 64))):
            for line in pool.map(lambda item: synthesize(item[1], folder / f"{item[0]:06d}.wav"), part):
                file.write(f"{json.dumps(line, ensure_ascii=False)}\n".encode())
                seconds, count = seconds + line["duration"], count + 1
    print(f"{manifest}: {count} utterances, {seconds / 3600:.2f} h")
