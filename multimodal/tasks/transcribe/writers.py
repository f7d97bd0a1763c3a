"""Transcripts to files, in openai-whisper's formats and with its line breaking: txt, vtt, srt, tsv, json."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.system.outputs import Outputs, write_output

Result = dict[str, Any]
Word = dict[str, Any]
PAUSE = 3.0  # s between the starts of two words that end a subtitle


@dataclass(frozen=True)
class Layout:
    """Lines of subtitles (openai-whisper's options); all but the default need `words` in the segments.

    A width and a count together fill subtitles across segments, else each segment begins a new one.
    `max_words_per_line` acts where segments are kept. `highlight_words` gives each word a cue with it underlined."""

    max_line_width: int | None = None
    max_line_count: int | None = None
    max_words_per_line: int | None = None
    highlight_words: bool = False


class Cue(NamedTuple):
    """One subtitle: `start` and `end` as the format writes them."""

    start: str
    end: str
    text: str
    speaker: str | None


def clock(seconds: float, mark: str = ".", always_hours: bool = False) -> str:
    """`MM:SS.mmm`, with hours where there are any or where always wanted."""
    total = round(seconds * 1000)
    hours, rest = divmod(total, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    head = f"{hours:02d}:" if always_hours or hours else ""
    return f"{head}{minutes:02d}:{rest // 1000:02d}{mark}{rest % 1000:03d}"


def line(segment: dict[str, Any]) -> str:
    """A segment's text on one line, with its speaker where it has one."""
    return _prefix(segment.get("speaker")) + _flat(segment["text"]).strip()


def txt(result: Result, layout: Layout | None = None) -> str:
    return "".join(f"{line(segment)}\n" for segment in result["segments"])


def vtt(result: Result, layout: Layout | None = None) -> str:
    """A speaker is a voice span."""
    cues = cues_of(result, layout or Layout(), clock, _vtt_text)
    voices = ((cue, f"<v {_vtt_text(_flat(cue.speaker))}>" if cue.speaker else "") for cue in cues)
    return "WEBVTT\n\n" + "".join(f"{cue.start} --> {cue.end}\n{voice}{cue.text}\n\n" for cue, voice in voices)


def srt(result: Result, layout: Layout | None = None) -> str:
    """Hours always, comma before the milliseconds, numbered from 1."""

    def time(seconds: float) -> str:
        return clock(seconds, ",", always_hours=True)

    cues = cues_of(result, layout or Layout(), time, _text)
    return "".join(
        f"{number}\n{cue.start} --> {cue.end}\n{_prefix(cue.speaker)}{cue.text}\n\n"
        for number, cue in enumerate(cues, 1)
    )


def tsv(result: Result, layout: Layout | None = None) -> str:
    """start, end (whole milliseconds), text."""
    rows = (f"{round(1000 * s['start'])}\t{round(1000 * s['end'])}\t{line(s).replace(chr(9), ' ')}\n"
            for s in result["segments"])  # fmt: skip
    return "start\tend\ttext\n" + "".join(rows)


def as_json(result: Result, layout: Layout | None = None) -> str:
    return json.dumps(result, ensure_ascii=False)


FORMATS: dict[str, Callable[[Result, Layout | None], str]] = {
    "txt": txt, "vtt": vtt, "srt": srt, "tsv": tsv, "json": as_json,
}  # fmt: skip


def cues_of(result: Result, layout: Layout, time: Callable[[float], str], clean: Callable[[str], str]) -> Iterator[Cue]:
    """The subtitles: one a segment, or as `layout` has it where there are words (whisper.utils.SubtitlesWriter)."""
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
    """A segment whose words are not known is one word, so that its text is not lost."""
    whole = {"word": segment["text"], "start": segment["start"], "end": segment["end"]}
    return segment.get("words") or ([whole] if segment["text"].strip() else [])


def _subtitles(segments: list[dict[str, Any]], layout: Layout) -> Iterator[tuple[str | None, list[Word]]]:
    """(speaker, words of one subtitle); a word's `gap` is the line break before it, if any."""
    keep = layout.max_line_count is None or layout.max_line_width is None
    width, share = layout.max_line_width or 1000, layout.max_words_per_line or 1000
    held: list[Word] = []
    length, lines, last, speaker = 0, 1, None, None
    for segment in segments:
        turn = segment.get("speaker") != speaker
        for index, timing in enumerate(_words(segment)):
            pause = not keep and last is not None and timing["start"] - last > PAUSE
            fresh = bool(held) and ((keep and index % share == 0) or turn)
            gap, word = "", timing["word"]
            if not 0 < length <= width - len(word) or pause or fresh:
                word = word.strip()
                full = layout.max_line_count is not None and (pause or lines >= layout.max_line_count)
                if (held and full) or fresh:
                    yield speaker, held
                    held, lines = [], 1
                elif length > 0:
                    lines, gap = lines + 1, "\n"
                length = 0
            length += len(word)
            held.append({**timing, "word": word, "gap": gap})
            last, speaker, turn = timing["start"], segment.get("speaker"), False
    if held:
        yield speaker, held


def _highlighted(
    times: list[tuple[str, str]], texts: list[str], plain: str, clean: Callable[[str], str]
) -> Iterator[tuple[str, str, str]]:
    """A cue for each word with it underlined, and one of the plain text in each pause."""
    last = times[0][0]
    for i, (start, end) in enumerate(times):
        if last != start:
            yield last, start, plain
        marked = re.sub(r"^(\s*)(.*)$", r"\1<u>\2</u>", clean(texts[i]))
        yield start, end, clean("".join(texts[:i])) + marked + clean("".join(texts[i + 1 :]))
        last = end


def write_transcript(result: Result, audio: Path, folder: Path, which: str, layout: Layout | None = None) -> list[Path]:
    """Writes `<stem of audio>.<format>` for one format or `all`; each file appears whole or not at all. Raises
    UsageError where one would replace the audio."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(FORMATS) if which == "all" else [which]
    written, outputs = [folder / f"{audio.stem}.{name}" for name in names], Outputs([audio])
    for path in written:
        outputs.spare(path)
    for path, name in zip(written, names, strict=True):
        write_output(path, FORMATS[name](result, layout).encode())
    return written


def _flat(text: str) -> str:
    """A line break in a text would end its line, row or cue."""
    return re.sub(r"\s*[\r\n]\s*", " ", text)


def _text(text: str) -> str:
    """An arrow in the text would end the cue's header."""
    return text.replace("-->", "->")


def _vtt_text(text: str) -> str:
    """What WebVTT would take as a tag or a character reference is escaped."""
    return re.sub(r"&(?=#?\w+;)", "&amp;", _text(text)).replace("<", "&lt;")


def _prefix(speaker: str | None) -> str:
    return f"[{_text(_flat(speaker))}] " if speaker else ""
