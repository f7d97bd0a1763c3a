"""Transcript writers in openai-whisper's formats with its line breaking: txt, vtt, srt, tsv, json."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.system.options import OptionSet, option
from multimodal.system.outputs import Outputs, write_output

Result = dict[str, Any]
Word = dict[str, Any]
CUE_PAUSE = 3.0  # seconds between the starts of two words that end a subtitle


class Layout(OptionSet):
    """Subtitle layout (openai-whisper's options); any but the default needs `words` in the segments.

    With both a width and a count, subtitles span segments; otherwise each segment begins a new one, and
    `max_words_per_line` applies. `highlight_words` adds a cue for each word with that word underlined."""

    highlight_words: bool = option(False, "srt, vtt: underline each word as it is spoken *")
    max_line_width: int | None = option(None, "srt, vtt: characters per line *", "N", low=1)
    max_line_count: int | None = option(None, "srt, vtt: lines per subtitle, with a width *", "N", low=1)
    max_words_per_line: int | None = option(None, "srt, vtt: words per subtitle *", "N", low=1)


PLAIN = Layout()


class Cue(NamedTuple):
    """One subtitle; `start` and `end` formatted."""

    start: str
    end: str
    text: str
    speaker: str | None


def clock(seconds: float, mark: str = ".", always_hours: bool = False) -> str:
    """`MM:SS.mmm`, or `HH:MM:SS.mmm` if there are hours or with `always_hours`."""
    total = round(seconds * 1000)
    hours, rest = divmod(total, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    head = f"{hours:02d}:" if always_hours or hours else ""
    return f"{head}{minutes:02d}:{rest // 1000:02d}{mark}{rest % 1000:03d}"


def line(segment: dict[str, Any]) -> str:
    """A segment's text on one line, after its speaker if it has one."""
    return _prefix(segment.get("speaker")) + _flat(segment["text"]).strip()


def txt(result: Result, layout: Layout = PLAIN) -> str:
    return "".join(f"{line(segment)}\n" for segment in result["segments"])


def vtt(result: Result, layout: Layout = PLAIN) -> str:
    """Speakers are voice spans."""
    cues = cues_of(result, layout, clock, _vtt_text)
    voices = ((cue, f"<v {_vtt_text(_flat(cue.speaker))}>" if cue.speaker else "") for cue in cues)
    return "WEBVTT\n\n" + "".join(f"{cue.start} --> {cue.end}\n{voice}{cue.text}\n\n" for cue, voice in voices)


def srt(result: Result, layout: Layout = PLAIN) -> str:
    """Times have hours and a comma before the milliseconds; cues are numbered from 1."""

    def time(seconds: float) -> str:
        return clock(seconds, ",", always_hours=True)

    cues = cues_of(result, layout, time, _text)
    return "".join(
        f"{number}\n{cue.start} --> {cue.end}\n{_prefix(cue.speaker)}{cue.text}\n\n"
        for number, cue in enumerate(cues, 1)
    )


def tsv(result: Result, layout: Layout = PLAIN) -> str:
    """Columns start, end (milliseconds), text."""
    rows = (f"{round(1000 * s['start'])}\t{round(1000 * s['end'])}\t{line(s).replace(chr(9), ' ')}\n"
            for s in result["segments"])  # fmt: skip
    return "start\tend\ttext\n" + "".join(rows)


def as_json(result: Result, layout: Layout = PLAIN) -> str:
    return json.dumps(result, ensure_ascii=False)


FORMATS: dict[str, Callable[[Result, Layout], str]] = {
    "txt": txt, "vtt": vtt, "srt": srt, "tsv": tsv, "json": as_json,
}  # fmt: skip


def cues_of(result: Result, layout: Layout, time: Callable[[float], str], clean: Callable[[str], str]) -> Iterator[Cue]:
    """Subtitles by `layout` if there are words, else one per segment (whisper.utils.SubtitlesWriter)."""
    segments = result["segments"]
    if not any("words" in segment for segment in segments):
        for s in segments:
            yield Cue(time(s["start"]), time(s["end"]), clean(_flat(s["text"]).strip()), s.get("speaker"))
        return
    for speaker, words in _subtitles(segments, layout):
        times = [(time(word["start"]), time(word["end"])) for word in words]
        texts = [word["gap"] + _flat(word["word"]) for word in words]
        plain = clean("".join(texts))
        if layout.highlight_words:
            yield from (Cue(*cue, speaker) for cue in _highlighted(times, texts, plain, clean))
        else:
            yield Cue(times[0][0], times[-1][1], plain, speaker)


def _words(segment: dict[str, Any]) -> list[Word]:
    """Words of a segment. One without words counts as a single word, so that its text is not lost."""
    whole = {"word": segment["text"], "start": segment["start"], "end": segment["end"]}
    return segment.get("words") or ([whole] if segment["text"].strip() else [])


def _subtitles(segments: list[dict[str, Any]], layout: Layout) -> Iterator[tuple[str | None, list[Word]]]:
    """(speaker, words) of each subtitle; a word's `gap` is the line break before it, if any."""
    keep = layout.max_line_count is None or layout.max_line_width is None
    width, share = layout.max_line_width or 1000, layout.max_words_per_line or 1000
    cue: list[Word] = []
    length, lines, last, speaker = 0, 1, None, None
    for segment in segments:
        turn = segment.get("speaker") != speaker
        for index, timing in enumerate(_words(segment)):
            pause = not keep and last is not None and timing["start"] - last > CUE_PAUSE
            fresh = bool(cue) and ((keep and index % share == 0) or turn)
            gap, word = "", timing["word"]
            if not 0 < length <= width - len(word) or pause or fresh:
                word = word.strip()
                full = layout.max_line_count is not None and (pause or lines >= layout.max_line_count)
                if (cue and full) or fresh:
                    yield speaker, cue
                    cue, lines = [], 1
                elif length > 0:
                    lines, gap = lines + 1, "\n"
                length = 0
            length += len(word)
            cue.append({**timing, "word": word, "gap": gap})
            last, speaker, turn = timing["start"], segment.get("speaker"), False
    if cue:
        yield speaker, cue


def _highlighted(
    times: list[tuple[str, str]], texts: list[str], plain: str, clean: Callable[[str], str]
) -> Iterator[tuple[str, str, str]]:
    """A cue for each word, underlined in the text, and one with the plain text for each pause."""
    last = times[0][0]
    for i, (start, end) in enumerate(times):
        if last != start:
            yield last, start, plain
        marked = re.sub(r"^(\s*)(.*)$", r"\1<u>\2</u>", clean(texts[i]))
        yield start, end, clean("".join(texts[:i])) + marked + clean("".join(texts[i + 1 :]))
        last = end


def write_transcript(result: Result, audio: Path, folder: Path, which: str, layout: Layout = PLAIN) -> list[Path]:
    """Write `<stem of audio>.<format>` for one format or `all`, each file atomically. Raises UsageError if one would
    replace the audio."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(FORMATS) if which == "all" else [which]
    paths, outputs = [folder / f"{audio.stem}.{name}" for name in names], Outputs([audio])
    for path in paths:
        outputs.spare(path)
    for path, name in zip(paths, names, strict=True):
        write_output(path, FORMATS[name](result, layout).encode())
    return paths


def _flat(text: str) -> str:
    """Remove line breaks, which would end the line, row or cue."""
    return re.sub(r"\s*[\r\n]\s*", " ", text)


def _text(text: str) -> str:
    """Escape arrows, which belong to a cue's header."""
    return text.replace("-->", "->")


def _vtt_text(text: str) -> str:
    """Escape tags and character references."""
    return re.sub(r"&(?=#?\w+;)", "&amp;", _text(text)).replace("<", "&lt;")


def _prefix(speaker: str | None) -> str:
    return f"[{_text(_flat(speaker))}] " if speaker else ""
