"""`multimodal transcribe --stream`: live transcription of audio from stdin."""

import json
import os
import select
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from multimodal.cli.console import console
from multimodal.cli.output import printable
from multimodal.errors import UsageError
from multimodal.system.options import number
from multimodal.system.signals import ENDS, handled
from multimodal.tasks.transcribe.writers import clock
from multimodal.weights.folder import Checkpoint

if TYPE_CHECKING:
    from multimodal.tasks.transcribe.live import Event
    from multimodal.tasks.transcribe.options import LiveOptions

# flag of each of these LiveOptions, and its units per second
SPANS = {"silence": ("vad_min_silence_duration_ms", 1000), "longest": ("vad_max_speech_duration_s", 1)}


def stream(given: Mapping[str, Any], checkpoint: Checkpoint, api: Mapping[str, Any]) -> int:
    """Print each event as it comes, and a summary at the end."""
    from multimodal.inference.prepare import prepare_for_inference
    from multimodal.tasks.transcribe import live

    options = _options(given, checkpoint, api)
    try:
        checkpoint = prepare_for_inference(checkpoint, api.get("compute_type", "auto"), api.get("device", "cpu"))
    except (RuntimeError, AssertionError) as error:  # torch's, of a device
        raise UsageError(f"--device {api['device']}: cannot be used ({str(error).splitlines()[0]})") from None
    show = _json if given.get("format") == "json" else _rewritten if sys.stdout.isatty() else _line
    with _until_interrupted() as (read, interrupted):
        for event in live.run(read, checkpoint, options):
            show(event)
            if event.kind == "summary":
                console.note(_summary(event.figures))
        return 128 + interrupted[0] if interrupted else 0


def _options(given: Mapping[str, Any], checkpoint: Checkpoint, api: Mapping[str, Any]) -> "LiveOptions":
    from multimodal.tasks.transcribe.options import LiveOptions, options_for

    chosen = options_for(checkpoint, {**api, "vad_filter": False})  # live sound has its own
    spans = {}
    for name, (flag, unit) in SPANS.items():
        if flag in given:
            own = LiveOptions.declared[name]
            try:
                spans[name] = number(given[flag], low=own.low * unit, high=own.high * unit) / unit
            except UsageError as error:
                raise UsageError(f"with --stream {error}", argument=flag) from None
    rate = {"rate": given["rate"]} if "rate" in given else {}
    return LiveOptions(decode=chosen, **spans, **rate)


POLL = 0.1  # seconds after which Ctrl-C is noticed


@contextmanager
def _until_interrupted() -> Iterator[tuple[Callable[[int], bytes], list[int]]]:
    """Yield a function that reads stdin up to its end or Ctrl-C, so that the last utterance is still printed, and the
    signals received. A second signal stops at once."""
    source = getattr(sys.stdin, "buffer", None)
    if source is None or source.closed:
        raise UsageError("--stream: stdin is closed")
    if source.isatty():
        raise UsageError("--stream: stdin is a terminal (pipe 16-bit samples into it)")
    number, interrupted = source.fileno(), []

    def stop(which: int, _: Any) -> None:
        if interrupted:
            os._exit(128 + which)  # each line is flushed
        interrupted.append(which)

    def read(size: int) -> bytes:
        while not interrupted:  # a writer that is silent must not keep the program after Ctrl-C
            if select.select([number], [], [], POLL)[0]:
                return os.read(number, size)  # a thread that waits in a buffered read at exit aborts Python
        return b""

    with handled(ENDS, stop):
        yield read, interrupted


def _json(event: "Event") -> None:
    print(json.dumps(event._asdict(), ensure_ascii=False), flush=True)


def _line(event: "Event") -> None:
    if event.kind != "summary":
        print(_text(event), flush=True)


def _rewritten(event: "Event") -> None:
    """Rewrite the partial line in place, on a terminal."""
    width = shutil.get_terminal_size().columns - 1
    text = _text(event)
    if event.kind == "partial":
        print(f"\r\x1b[K{text if len(text) <= width else '…' + text[1 - width :]}", end="", flush=True)
    elif event.kind == "final":
        print(f"\r\x1b[K{text}", flush=True)


def _text(event: "Event") -> str:
    times = f"[{clock(event.start)} --> {clock(event.end)}]"
    return f"{event.kind:<7} {times} ({event.latency:.2f} s)  {printable(event.text)}"


def _summary(figures: dict[str, float]) -> str:
    parts = [
        f"{figures['seconds']:.2f} s of audio, real-time factor {figures['real_time_factor']:.3f}",
        f"{figures['partials']:.0f} partial and {figures['finals']:.0f} final lines",
    ]
    for name, title in (("latency", "latency"), ("final_latency", "of final lines")):
        if f"{name}_p50" in figures:
            p50, p95, most = (figures[f"{name}_{which}"] for which in ("p50", "p95", "max"))
            parts.append(f"{title} {p50:.2f} s (median), {p95:.2f} s (95 %), {most:.2f} s (largest)")
    return "; ".join(parts)
