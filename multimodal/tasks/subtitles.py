"""Transcripts to files, in openai-whisper's formats: txt, vtt, srt, tsv, json."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def clock(seconds: float, mark: str = ".", always_hours: bool = False) -> str:
    """`MM:SS.mmm`, with hours where there are any or where always wanted."""
    total = round(seconds * 1000)
    hours, rest = divmod(total, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    head = f"{hours:02d}:" if always_hours or hours else ""
    return f"{head}{minutes:02d}:{rest // 1000:02d}{mark}{rest % 1000:03d}"


def txt(result: Result) -> str:
    return "".join(f"{segment['text'].strip()}\n" for segment in result["segments"])


def vtt(result: Result) -> str:
    cues = (f"{clock(s['start'])} --> {clock(s['end'])}\n{_cue(s)}\n\n" for s in result["segments"])
    return "WEBVTT\n\n" + "".join(cues)


def srt(result: Result) -> str:
    """Hours always, comma before the milliseconds, numbered from 1."""

    def time(seconds: float) -> str:
        return clock(seconds, ",", always_hours=True)

    return "".join(
        f"{number}\n{time(s['start'])} --> {time(s['end'])}\n{_cue(s)}\n\n"
        for number, s in enumerate(result["segments"], 1)
    )


def tsv(result: Result) -> str:
    """start, end (whole milliseconds), text."""
    rows = (f"{round(1000 * s['start'])}\t{round(1000 * s['end'])}\t{s['text'].strip().replace(chr(9), ' ')}\n"
            for s in result["segments"])  # fmt: skip
    return "start\tend\ttext\n" + "".join(rows)


def as_json(result: Result) -> str:
    return json.dumps(result, ensure_ascii=False)


FORMATS: dict[str, Callable[[Result], str]] = {"txt": txt, "vtt": vtt, "srt": srt, "tsv": tsv, "json": as_json}


def write_transcript(result: Result, audio: Path, folder: Path, which: str) -> list[Path]:
    """Writes `<stem of audio>.<format>` for one format or `all`; each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in FORMATS if which == "all" else [which]:
        path = folder / f"{audio.stem}.{name}"
        _write_whole(path, FORMATS[name](result))
        written.append(path)
    return written


def _write_whole(path: Path, text: str) -> None:
    """Raises OSError naming `path`; nothing half-written stays behind."""
    part = None
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False, suffix=".part") as part:
            part.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(part.name, 0o666 & ~umask)  # a temporary file is private; an output is like any other
        os.replace(part.name, path)
    except BaseException as error:
        if part is not None:
            Path(part.name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def _cue(segment: dict[str, Any]) -> str:
    """An arrow in the text would end the cue's header."""
    return segment["text"].strip().replace("-->", "->")
