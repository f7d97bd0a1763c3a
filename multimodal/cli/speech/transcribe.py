"""`multimodal transcribe`: speech to text."""

import argparse
import json
import os
import sys
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from multimodal.cli import flags
from multimodal.cli.console import console
from multimodal.cli.files import found_files, is_missing, output_file, output_folder, outputs_of
from multimodal.cli.loading import choose_device
from multimodal.cli.output import fail
from multimodal.cli.parser import Parser, boolean, or_none
from multimodal.cli.speech import flags as speech_flags
from multimodal.cli.speech.flags import flag, switch
from multimodal.errors import MultimodalError, UsageError
from multimodal.system.files import path_of
from multimodal.system.options import add_flags as add_option_flags
from multimodal.system.outputs import opened_output, write_output
from multimodal.system.signals import at_stop, unbroken
from multimodal.tasks.transcribe.options import LiveOptions, SpeechOptions
from multimodal.tasks.transcribe.writers import FORMATS, Layout, write_transcript

if TYPE_CHECKING:
    from multimodal.weights.folder import Checkpoint

# what the command does itself; every other value of the namespace is an option of multimodal.transcribe
COMMAND_ONLY = {
    "command", "audio", "model", "quiet", "model_dir", "architecture", "output", "format", "verbose", "fp16",
    "temperature_increment_on_fallback", "threads", "highlight_words", "max_line_width", "max_line_count",
    "max_words_per_line", "plot", "skip_existing", "overwrite", "stream", "rate", "decode_log",
}  # fmt: skip
NEED_WORDS = (*Layout.declared, "hallucination_silence_threshold", "plot")  # these turn word_timestamps on
STREAMED = {
    "command", "audio", "model", "quiet", "model_dir", "architecture", "stream", "rate", "threads", "device",
    "compute_type", "fp16", "format", "verbose", "language", "task", "beam_size", "lm", "lm_weight", "lm_bonus",
    "no_speech_threshold", "logprob_threshold", "confidence_threshold", "vad_threshold", "vad_min_silence_duration_ms",
    "vad_max_speech_duration_s",
}  # fmt: skip
USAGE = "%(prog)s AUDIO [AUDIO ...] [flags]"
DESCRIPTION = """Transcribe speech. openai-whisper's flags keep their names, values and defaults; a model may set other
defaults. A flag that the model cannot use is an error. BOOL is True or False; the flag alone means True. Flags marked
* turn on --word_timestamps."""
STDIN = "stdin"  # the name of what comes through -
PIECE = 1 << 20  # bytes of stdin held at once
_Log = Callable[[str, Iterable[Mapping[str, Any]]], None]

EXAMPLES = """examples:
  multimodal transcribe talk.mp3                                      # talk.txt, .srt, .vtt, .tsv and .json, here
  multimodal transcribe talks/ --model whisper-small --format srt --output subtitles/
  ffmpeg -i film.mkv -f wav - | multimodal transcribe - --output - --format json
  arecord -f S16_LE -r 16000 | multimodal transcribe --stream
"""


def add_flags(p: Parser) -> None:
    p.description, p.usage, p.epilog = DESCRIPTION, USAGE, EXAMPLES
    _files(p.add_argument_group("input and output"))
    speech_flags.speed(p.add_argument_group("speed"))
    speech_flags.decoding(p.add_argument_group("decoding"))
    speech_flags.checks(p.add_argument_group("fallback, silence and loops"))
    speech_flags.times(p.add_argument_group("times and subtitles"))
    speech_flags.voice(p.add_argument_group("voice activity (silero-vad) and channels"))
    speech_flags.language(p.add_argument_group("language"))


def check(p: Parser, options: Namespace) -> None:
    """Refuse contradictory flags."""
    given = vars(options)
    if not options.audio and not given.get("stream"):
        p.error("AUDIO: name a recording, or - for stdin")
    if given.get("stream"):
        _check_stream(p, given)
    elif url := next((name for name in options.audio if "://" in name and is_missing(name)), None):
        p.error(f"{url}: URLs are not read (curl -L URL | multimodal transcribe -)")
    if "rate" in given and not given.get("stream"):
        p.error("--rate: is for --stream (a file says its own)")
    timed = [name for name in NEED_WORDS if name != "plot" and given.get(name)]
    if timed and given.get("word_timestamps") is False:
        p.error(f"--{timed[0]}: needs the words' times, and --word_timestamps is False")
    if given.get("fp16") is False and given.get("compute_type", "float32") != "float32":
        p.error(f"--fp16 False: contradicts --compute_type {options.compute_type}")
    target = Path(given.get("output") or ".")
    if target.suffix.lstrip(".").lower() in FORMATS and not target.is_dir():
        p.error(f"--output {target}: expected a folder, for files named as the recordings (or --output - > {target})")
    if given.get("output") == "-":
        if given.get("format") == "all":
            p.error("--format all: stdout takes one format (--output -)")
        if given.get("plot"):
            p.error("--plot: needs a folder (--output -)")
        if given.get("skip_existing"):
            p.error("--skip_existing: needs a folder (--output -)")


def _check_stream(p: Parser, given: dict[str, Any]) -> None:
    if files := [name for name in given["audio"] if name != "-"]:
        p.error(f"--stream: reads samples from stdin, not a file ({files[0]})")
    if others := [name for name in given if name not in STREAMED and given[name] is not None]:
        p.error(f"--{others[0]}: is not for --stream")
    if given.get("format", "txt") not in ("txt", "json"):
        p.error(f"--format {given['format']}: --stream prints txt or json")


def _files(g: Any) -> None:
    g.add_argument("audio", nargs="*", metavar="AUDIO", help="files, folders, globs; - reads a recording from stdin")
    flags.model(g, "transcribe")
    flag(g, "--model_dir DIR", "folder searched for MODEL first, and cache of hub models")
    flag(g, "--output DIR", "output folder; - writes to stdout (default: .)", also=("-o", "--output_dir"))
    flag(g, "--format FORMAT", "txt, vtt, srt, tsv, json or all (default: all, on stdout txt)",
         choices=["txt", "vtt", "srt", "tsv", "json", "all"], also=("-f", "--output_format"))  # fmt: skip
    g.add_argument("--verbose", metavar="True|False|None", nargs="?", const=True, type=or_none(boolean),
                   default=argparse.SUPPRESS, help="True: print the text as it comes; False: a progress bar; None: "
                   "neither (default: True). If you pass True, also show each step with its time on stderr, and the "
                   "traceback of an error")  # fmt: skip
    switch(g, "--skip_existing", "skip files whose outputs all exist")
    switch(g, "--overwrite", "replace outputs that multimodal did not write or that changed since; never an input")
    switch(g, "--plot", "also draw NAME.png: spectrogram, words, skipped spans and their reasons *")
    flag(g, "--decode_log FILE", "JSON lines: the attempts at each window, with their scores")
    add_option_flags(g, SpeechOptions, ["on_truncated"])
    switch(g, "--stream", "live: read 16-bit little-endian mono samples from stdin, print lines (txt or json)")
    add_option_flags(g, LiveOptions, ["rate"])


def run(options: Namespace) -> int:
    import shutil  # slow: not for --help
    import tempfile

    missing = [name for name in options.audio if is_missing(name)]
    code = max((fail(f"{name}: no such file (cannot be opened)") for name in missing), default=0)
    if missing == options.audio and missing:  # before torch is imported
        return code
    from multimodal.tasks.transcribe.transcribe import transcribe_many

    vars(options).setdefault("device", "auto")
    given = vars(options)
    # oneDNN keeps a kernel for each new length of a window, 1,024 by default: over 100 MB in a long recording
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    if given.get("stream"):
        from multimodal.cli.speech.stream import stream

        checkpoint = _checkpoint(options)
        chosen = api_options(given, checkpoint)
        warn_of_no_effect({name: chosen[name] for name in chosen if not name.startswith("vad_")}, checkpoint)
        return stream(given, checkpoint, chosen)
    from multimodal.cli.speech.journals import Journals
    from multimodal.cli.speech.transcript_output import TranscriptOutput
    from multimodal.tokens.audio.reading import find_audio

    with ExitStack() as stack:
        piped = ""
        if "-" in options.audio:
            with unbroken():  # a stop finds no copy of stdin, or one that it can remove
                piped = stack.enter_context(tempfile.TemporaryDirectory(prefix="multimodal-"))
                stack.enter_context(at_stop(partial(shutil.rmtree, piped, ignore_errors=True)))
        there = [name for name in options.audio if name not in missing]
        files, wrong = found_files(there, lambda a: [_stdin(Path(piped))] if a == ["-"] else find_audio(a))
        names = {file: STDIN if piped and file.parent == Path(piped) else str(file) for file in files}
        outputs = _outputs(given, names)
        every = {*names.values()}
        names, refused = _claimed(options, outputs, names)
        code = max(code, wrong, refused)
        if not names:
            return code
        log = stack.enter_context(_log(given.get("decode_log"), every - {*names.values()}))
        checkpoint = _checkpoint(options)
        chosen = api_options(given, checkpoint)
        warn_of_no_effect(chosen, checkpoint)
        shown = stack.enter_context(TranscriptOutput(given, names))
        told = {"on_progress": shown.progress, "on_segments": shown.segments, "in_order": outputs.folder is None}
        journals = None
        if outputs.folder is not None:
            journals = stack.enter_context(Journals(outputs.folder, names, checkpoint, chosen, shown.note))
            told["journal"] = journals.open
        for file, result in transcribe_many(list(names), checkpoint, **told, **chosen):
            shown.writing(file)
            failed = shown.attempt(partial(_finish, file, names[file], result, outputs, log))
            code = max(code, failed)
            if journals is not None:
                journals.close(file, finished=not failed)
            shown.ended(file)
            if isinstance(result, dict):
                shown.done(file, result)
        return max(code, shown.code)


def _finish(
    file: Path, name: str, result: dict[str, Any] | MultimodalError, outputs: "_Outputs", log: _Log | None
) -> None:
    """Raises `result` where it is an error, and OSError where an output cannot be written."""
    if isinstance(result, MultimodalError):
        raise result
    entries = result.pop("log", ())
    outputs.write(file, name, result)
    if log is not None:
        log(name, entries)


def _stdin(folder: Path) -> Path:
    """Write stdin to a file in `folder`."""
    source = getattr(sys.stdin, "buffer", None)
    if source is None or source.closed:
        raise UsageError("-: stdin is closed")
    if source.isatty():
        raise UsageError("-: stdin is a terminal (pipe a recording into it)")
    path = folder / STDIN
    if path.exists():  # - stands twice on the command line
        return path
    with path.open("wb") as file:
        while piece := source.read(PIECE):
            file.write(piece)
    if not path.stat().st_size:
        raise UsageError("-: stdin holds nothing (0 bytes)")
    return path


class _Outputs(NamedTuple):
    """`folder` None: stdout."""

    folder: Path | None
    which: str
    layout: Layout
    plot: bool
    audio_track: int | None = None

    def paths(self, file: Path) -> list[Path]:
        names = [*(FORMATS if self.which == "all" else [self.which]), *(["png"] if self.plot else [])]
        return [self.folder / f"{file.stem}.{name}" for name in names]

    def write(self, file: Path, name: str, result: dict[str, Any]) -> None:
        if self.folder is None:
            text = FORMATS[self.which](result, self.layout)
            sys.stdout.buffer.write(f"{text}\n".encode() if self.which == "json" else text.encode())
            sys.stdout.flush()
            return
        write_transcript(result, file, self.folder, self.which, self.layout)
        if self.plot:
            from multimodal.tasks.transcribe.plot import plot_transcript

            write_output(self.folder / f"{file.stem}.png", plot_transcript(result, file, name, self.audio_track))


def _outputs(given: Mapping[str, Any], files: Collection[Path]) -> _Outputs:
    """Check options before any audio is read. Raises UsageError."""
    layout = Layout(**Layout.among(given))
    if layout.max_line_count and not layout.max_line_width:
        warnings.warn("--max_line_count: has no effect without --max_line_width", stacklevel=1)
    if layout.max_words_per_line and layout.max_line_count and layout.max_line_width:
        warnings.warn("--max_words_per_line: has no effect with a line's width and count", stacklevel=1)
    target = given.get("output", ".")
    which = given.get("format", "txt" if target == "-" else "all")
    if target == "-":
        if getattr(sys.stdout, "buffer", None) is None:
            raise UsageError("--output -: stdout is closed")
        if len(files) > 1 and which not in ("txt", "json"):
            raise UsageError(f"--format {which}: stdout takes one recording so, not {len(files)}")
        return _Outputs(None, which, layout, False)
    if not target:
        raise UsageError("--output: an empty name ('')")
    folder = output_folder(Path(target), "--output")
    return _Outputs(folder, which, layout, bool(given.get("plot")), given.get("audio_track"))


def _claimed(options: Namespace, outputs: _Outputs, names: Mapping[Path, str]) -> tuple[dict[Path, str], int]:
    """Files to transcribe: all but those whose outputs are there, or may not be written. Before any work."""
    places, kept, code = outputs_of(options, names, but=("audio",)), dict[Path, str](), 0
    stems = Counter(file.stem for file in names)
    if log := getattr(options, "decode_log", None):
        if not os.path.isdir(os.path.dirname(log) or "."):
            raise UsageError(f"--decode_log {log}: cannot be written (no such folder)")
        output_file(log, "--decode_log", (), places)
    for file, name in names.items():
        paths = outputs.paths(file) if outputs.folder is not None else []
        try:
            path_of(file, UsageError, "audio")
            if paths and stems[file.stem] > 1:
                other = next(one for one in names if one.stem == file.stem and one != file)
                raise UsageError(f"{name}: would be written as {file.stem}.*, as {other} would; use a folder for each")
            there = [places.spare(path) is not None and path.exists() for path in paths]
            if getattr(options, "skip_existing", False) and all(there):
                console.note(f"skipped {name}: {paths[0].name} is there")
                continue
            for path in paths:
                places.claim(path)
            kept[file] = name
        except UsageError as error:
            code = fail(error)
    return kept, code


@contextmanager
def _log(name: str | None, skipped: Iterable[str]) -> Iterator[_Log | None]:
    """Also of a run that was stopped. What an earlier log has of the `skipped` recordings stays in it."""
    if name is None:
        yield None
        return
    path = Path(name)
    begin = tuple(json.dumps({"file": name}, ensure_ascii=False)[:-1].encode(errors="backslashreplace")
                  for name in skipped)  # fmt: skip
    earlier = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    with opened_output(path, "place") as file:
        file.writelines(line for line in earlier if line.startswith(begin))

        def add(name: str, entries: Iterable[Mapping[str, Any]]) -> None:
            lines = [json.dumps({"file": name, **entry}, ensure_ascii=False) + "\n" for entry in entries]
            try:
                file.write("".join(lines).encode(errors="backslashreplace"))
                file.flush()
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None

        yield add


def _checkpoint(options: Namespace) -> "Checkpoint":
    from multimodal.weights.load import load

    choose_device(options)
    given = vars(options)
    name = given["model"]
    if folder := given.get("model_dir"):
        os.environ["HF_HUB_CACHE"] = folder  # read when huggingface_hub is first imported, which only a download does
        if os.path.exists(inside := os.path.join(folder, name)):
            name = inside
    return load(name, given["architecture"], task="transcribe")


def api_options(given: Mapping[str, Any], checkpoint: "Checkpoint") -> dict[str, Any]:
    """Options of `multimodal.transcribe`: what was given, and this command's own defaults. Raises UsageError for a flag
    that needs times of words, with a model that does not give them."""
    from multimodal.tasks.encode.search_defaults import search_defaults
    from multimodal.tasks.transcribe.conformer.text_decoder import check_words
    from multimodal.tasks.transcribe.options import SpeechDecodingOptions

    chosen = {name: value for name, value in given.items() if name not in COMMAND_ONLY}
    whisper, card = checkpoint.kind == "speech_to_text", checkpoint.card.get("transcribe")
    if whisper:  # openai-whisper's command has other defaults than its function
        own = search_defaults(checkpoint, card if isinstance(card, Mapping) else {}, SpeechDecodingOptions)
        chosen = {name: 5 for name in ("beam_size", "best_of") if name not in own} | chosen
    if "temperature" in given or "temperature_increment_on_fallback" in given:
        step = given.get("temperature_increment_on_fallback", 0.2 if whisper else None)
        chosen["temperature"] = _temperatures(given.get("temperature", 0.0), step)
    if given.get("fp16") is False:
        chosen["compute_type"] = "float32"
    if timed := [name for name in NEED_WORDS if given.get(name)]:
        check_words(checkpoint, timed[0])
        chosen.setdefault("word_timestamps", True)
    if "decode_log" in given:
        chosen["decode_log"] = True
    return chosen


def warn_of_no_effect(chosen: Mapping[str, Any], checkpoint: "Checkpoint") -> None:
    from multimodal.tasks.transcribe.options import options_for

    options = options_for(checkpoint, chosen)
    for start, needed in (("vad_", "vad_filter"), ("lm_", "lm")):
        idle = next((name for name in chosen if name.startswith(start) and name != needed), None)
        if idle is not None and not getattr(options, needed, None):
            warnings.warn(f"--{idle}: has no effect without --{needed}", stacklevel=1)


def _temperatures(first: float, step: float | None) -> list[float]:
    """`first`, and steps up to 1."""
    if step is None:
        return [first]
    return [first, *(round(first + i * step, 6) for i in range(1, int((1 - first + 1e-6) / step) + 1))]
