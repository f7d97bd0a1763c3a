"""Terminal output of transcription."""

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from multimodal.cli.console import console
from multimodal.cli.output import in_flags, printable
from multimodal.errors import MultimodalError
from multimodal.system.files import say
from multimodal.system.signals import at_stop
from multimodal.tasks.transcribe.writers import clock, line
from multimodal.tokens.audio.reading import TruncatedAudio

BAR = (
    "{{desc}}{{percentage:3.0f}}%|{{bar}}| {{n:.0f}} {} {{total:.0f}} s of audio "
    "[{{elapsed}}<{{remaining}}, {{rate_fmt}}]"
)
DAMAGE = 5  # damaged spans of a recording listed one by one


class TranscriptOutput:
    """Segment lines or a progress bar; warnings and errors name their file."""

    def __init__(self, given: Mapping[str, Any], names: dict[Path, str]):
        verbose = given.get("verbose", True)
        self.lines = bool(verbose) and given.get("output") != "-"
        self.bar_wanted = verbose is False and console.terminal()
        self.names, self.several = names, len(names) > 1
        self.live = not self.several or given.get("batch_size") == 1  # else lines of several files would mix
        self.piped = {str(file): name for file, name in names.items() if name != str(file)}  # a temporary file's name
        self.printed: dict[Path, set[str]] = {}
        self.seconds: dict[Path, tuple[float, float]] = {}
        self.finished = 0  # recordings
        self.held: list[str] = []  # warnings of recordings that end early
        self.bar: Any = None
        self.code = 0

    def __enter__(self) -> "TranscriptOutput":
        if self.bar_wanted:
            from tqdm import tqdm

            shape = {"bar_format": BAR.format("of"), "dynamic_ncols": True, "leave": False}
            self.bar = tqdm(total=0, unit="s", file=sys.stderr, **shape)
        self.before, warnings.showwarning = warnings.showwarning, self._warning
        self.stopped = at_stop(self._at_stop)
        self.stopped.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.__exit__(None, None, None)
        warnings.showwarning = self.before
        for text in self.held:
            self.say(f"warning: {text}")
        if self.bar is not None:
            self.bar.close()

    def _at_stop(self) -> str:
        lines = [f"warning: {text}" for text in self.held]
        if self.finished:
            lines.append(f"stopped; {self.finished} of {len(self.names)} recordings are finished")
        return "\n".join(map(self._line, lines))

    def progress(self, source: Path, done: float, total: float) -> None:
        """Update the bar. Recordings not yet opened count with the mean length of the others."""
        self.seconds[source] = done, total
        if self.bar is not None:
            known, ahead = sum(total for _, total in self.seconds.values()), len(self.names) - len(self.seconds)
            self.bar.total = known * (1 + ahead / len(self.seconds))
            self.bar.bar_format = BAR.format("of about" if ahead else "of")
            self.bar.update(sum(done for done, _ in self.seconds.values()) - self.bar.n)

    def segments(self, source: Path, new: list[dict[str, Any]]) -> None:
        if self.lines and self.live:
            self._try_print(source, new)

    def done(self, source: Path, result: dict[str, Any]) -> None:
        if self.lines:
            self._try_print(source, result["segments"])
        spans = result.get("damaged", ())
        for span in spans[:DAMAGE]:
            until = f" to {clock(span['end'])}" if span["end"] > span["start"] else ""  # an unknown length is lost
            self._warn(source, f"{clock(span['start'])}{until}: {span['what']}")
        if len(spans) > DAMAGE:
            self._warn(source, f"{len(spans) - DAMAGE} more such spans, the last to {clock(spans[-1]['end'])}")
        heard = {segment.get("speaker") for segment in result["segments"]}
        for one in result.get("channels", [result]):
            causes, speaker = {span["reason"] for span in one.get("skipped", ())} - {"silence"}, one.get("speaker")
            if causes and speaker not in heard:
                who = "" if speaker is None else f"{speaker}: "
                self._warn(source, f"{who}no speech recognized ({', '.join(sorted(causes))})")
        if spans:  # listed with its times above
            self.held = [text for text in self.held if not text.startswith(f"{source}:")]

    def attempt(self, work: Callable[[], None]) -> int:
        """Return 0, or print one line and return 1 if `work` fails."""
        try:
            work()
        except MultimodalError as error:
            return self._failed(in_flags(error))
        except BrokenPipeError:
            raise
        except OSError as error:
            if error.filename is None:
                _discard_stdout()
            return self._failed(f"{error.filename or 'output'}: cannot be written ({error.strerror})")
        return 0

    def note(self, text: str) -> None:
        if not console.quiet:
            self.say(text)

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.clear()
        say(self._line(text))

    def _line(self, text: str) -> str:
        for path, name in self.piped.items():
            text = text.replace(path, name)
        return f"multimodal: {printable(' '.join(in_flags(text).split()))}"

    def writing(self, source: Path) -> None:
        """Name the file whose outputs are being written: a plot of a long recording takes minutes."""
        if self.bar is not None:
            self.bar.set_description_str(f"writing {printable(self.names[source])} ")

    def ended(self, source: Path) -> None:
        """Count the recording as done, also one that failed before its length was known."""
        if self.bar is not None:
            self.bar.set_description_str("", refresh=False)
        self.finished += 1
        _, total = self.seconds.get(source, (0.0, 0.0))
        self.progress(source, total, total)

    def _warn(self, source: Path, text: str) -> None:
        self.say(f"warning: {self.names[source]}: {text}")

    def _failed(self, text: str) -> int:
        self.say(f"error: {text}")
        return 1

    def _try_print(self, source: Path, segments: list[dict[str, Any]]) -> None:
        """Continue when stdout is full or its reader, such as head, has exited: the outputs are files."""
        try:
            self._print(source, segments)
        except OSError as error:
            self.lines = False
            _discard_stdout()
            if not isinstance(error, BrokenPipeError):
                self.code = self._failed(f"stdout: cannot be written ({error.strerror})")

    def _print(self, source: Path, segments: list[dict[str, Any]]) -> None:
        """Print each segment once, and the name of each of several files before its first segment."""
        before = self.printed.setdefault(source, set())
        for s in segments:
            text = f"[{clock(s['start'])} --> {clock(s['end'])}]  {printable(line(s))}"
            if text in before:
                continue
            if self.several and not before:
                print(f"{printable(self.names[source])}:")
            before.add(text)
            print(text, flush=True)

    def _warning(self, message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if issubclass(category, TruncatedAudio):
            self.held.append(str(message))
        else:
            self.say(f"warning: {message}")


def _discard_stdout() -> None:
    """Send what is left in the buffer of stdout to the null device, so that it does not fail again."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
