"""The flags of `multimodal transcribe`: openai-whisper's by name, default and spelling of values, and ours.

Only what was given on the command line is in the namespace, so that a model's own defaults hold for the rest."""

import argparse
import math
import shutil
from collections.abc import Callable
from typing import Any

from multimodal.tokens.audio.tracks import RATES

# what the command does itself; every other value of the namespace is an option of multimodal.transcribe
COMMAND_ONLY = {
    "command", "audio", "model", "model_dir", "architecture", "output_dir", "output_format", "verbose", "fp16",
    "temperature_increment_on_fallback", "threads", "highlight_words", "max_line_width", "max_line_count",
    "max_words_per_line", "plot", "skip_existing", "overwrite", "stream", "rate", "decode_log",
}  # fmt: skip
LAYOUT = ("max_line_width", "max_line_count", "max_words_per_line", "highlight_words")
NEED_WORDS = (*LAYOUT, "hallucination_silence_threshold", "plot")  # these turn word_timestamps on
STREAMED = {
    "command", "audio", "model", "model_dir", "architecture", "stream", "rate", "threads", "device",
    "compute_type", "fp16", "output_format", "language", "task", "beam_size", "lm", "lm_weight", "lm_bonus",
    "no_speech_threshold", "logprob_threshold", "confidence_threshold", "vad_threshold", "vad_min_silence_duration_ms",
    "vad_max_speech_duration_s",
}  # fmt: skip
USAGE = "%(prog)s AUDIO [AUDIO ...] [flags]"
DESCRIPTION = """Speech to text. Flags of openai-whisper have its names, values and defaults; a model may have other
defaults of its own. A flag that the model cannot use is an error. BOOL is True or False; the flag alone means True.
* turns --word_timestamps on."""


class Help(argparse.HelpFormatter):
    """Wider than argparse's, each flag's value named once."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=42, width=min(120, shutil.get_terminal_size().columns - 2))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, action.dest.upper())}"


def add(p: argparse.ArgumentParser, add_model: Callable[..., None]) -> None:
    p.description, p.usage, p.formatter_class = DESCRIPTION, USAGE, Help
    _files(p.add_argument_group("input and output"), add_model)
    speed(p.add_argument_group("speed"))
    decoding(p.add_argument_group("decoding"))
    checks(p.add_argument_group("fallback, silence and loops"))
    _times(p.add_argument_group("times and subtitles"))
    voice(p.add_argument_group("voice activity (silero-vad) and channels"))
    language(p.add_argument_group("language"))


def check(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What the flags say together; a contradiction ends the program with one line and exit code 2."""
    given = vars(options)
    if not options.audio and not given.get("stream"):
        p.error("AUDIO: name a recording, or - for stdin")
    if given.get("stream"):
        _check_stream(p, given)
    if "rate" in given and not given.get("stream"):
        p.error("--rate: is for --stream (a file says its own)")
    timed = [name for name in NEED_WORDS if name != "plot" and given.get(name)]
    if timed and given.get("word_timestamps") is False:
        p.error(f"--{timed[0]}: needs the words' times, and --word_timestamps is False")
    if given.get("fp16") is False and given.get("compute_type", "float32") != "float32":
        p.error(f"--fp16 False: contradicts --compute_type {options.compute_type}")
    if given.get("output_dir") == "-":
        if given.get("output_format") == "all":
            p.error("--output_format all: stdout takes one format (--output_dir -)")
        if given.get("plot"):
            p.error("--plot: needs a folder (--output_dir -)")
        if given.get("skip_existing"):
            p.error("--skip_existing: needs a folder (--output_dir -)")


def _check_stream(p: argparse.ArgumentParser, given: dict[str, Any]) -> None:
    if files := [name for name in given["audio"] if name != "-"]:
        p.error(f"--stream: reads samples from stdin, not a file ({files[0]})")
    if others := [name for name in given if name not in STREAMED and given[name] is not None]:
        p.error(f"--{others[0]}: is not for --stream")
    if given.get("output_format", "txt") not in ("txt", "json"):
        p.error(f"--output_format {given['output_format']}: --stream prints txt or json")


def _files(g: Any, add_model: Callable[..., None]) -> None:
    g.add_argument("audio", nargs="*", metavar="AUDIO", help="files, folders, globs; - reads a recording from stdin")
    add_model(g, "asr-conformer-en")
    _flag(g, "--model_dir DIR", "where MODEL is looked for first, and hub models are kept")
    _flag(g, "--output_dir DIR", "where the outputs go; - writes to stdout (default: .)", short="-o")
    _flag(g, "--output_format FORMAT", "txt, vtt, srt, tsv, json or all (default: all, on stdout txt)",
          choices=["txt", "vtt", "srt", "tsv", "json", "all"], short="-f")  # fmt: skip
    _flag(g, "--verbose True|False|None",
          "True: print the text as it comes; False: a progress bar; None: neither (default: True)",
          _or_none(boolean))  # fmt: skip
    _switch(g, "--skip_existing", "skip files whose outputs all exist")
    _switch(
        g, "--overwrite", "replace outputs that multimodal did not write or that were changed since; never an input"
    )
    _switch(g, "--plot", "also draw NAME.png: spectrogram, words, what was skipped and why *")
    _flag(g, "--decode_log FILE", "JSON lines: what was tried for each window, with its figures")
    _flag(g, "--on_truncated error|warn",
          "a recording that ends early or is damaged: refused, or what is there (default: warn)",
          choices=["error", "warn"])  # fmt: skip
    _switch(g, "--stream", "live: 16-bit little-endian mono samples from stdin, lines (txt or json) as they are heard")
    _flag(g, "--rate HZ", "samples a second of --stream (default: 16000)", _rate)


def speed(g: Any) -> None:
    _flag(g, "--device NAME", "such as cpu or cuda (default: cuda where there is one)")
    _flag(g, "--compute_type TYPE", "auto, float32, bfloat16, float16 or int8 (default: auto)",
          choices=["auto", "float32", "bfloat16", "float16", "int8"])  # fmt: skip
    _switch(g, "--fp16", "False: float32; True: automatic (default: True)")
    _flag(g, "--batch_size N", "recordings or windows side by side; the text does not depend on it (default: 8)", count)
    _switch(g, "--batched", "cut at pauses and decode the pieces independently, instead of Whisper's own order")
    _flag(g, "--threads N", "processor threads; 0: torch's own (default: 0)", _or_none(_threads))


def decoding(g: Any) -> None:
    _flag(g, "--task TASK", "transcribe, or translate into English (default: transcribe)",
          choices=["transcribe", "translate"])  # fmt: skip
    _flag(g, "--beam_size N", "beams at temperature 0; 1: greedy (default: 5; a CTC with no decoder and no LM: 1)",
          _or_none(count))  # fmt: skip
    _flag(g, "--best_of N", "candidates at other temperatures (default: 5)", _or_none(count))
    _flag(g, "--patience FACTOR", "beams to end, as a factor of beam_size (default: 1)", _or_none(number))
    _flag(g, "--length_penalty ALPHA", "0 to 1 (default: plain normalisation)", _or_none(number))
    _flag(g, "--suppress_tokens IDS", "never written; -1: most special characters (default: -1)", _integers)
    _switch(g, "--suppress_blank", "no empty text at a window's start (default: True)")
    _flag(g, "--sample_len N", "most tokens a window", _or_none(count))
    _flag(g, "--initial_prompt TEXT", "text before the first window")
    _switch(g, "--carry_initial_prompt", "keep it before every window (default: False)")
    _flag(g, "--hotwords TEXT", "words to expect, before every window")
    _switch(g, "--condition_on_previous_text", "the last window's text leads the next one (default: True)")
    _flag(g, "--seed N", "of the sampling, the same in any order of files (default: 0)", _natural)
    _flag(g, "--lm FILE", "CTC models: a language model, ARPA or a folder, for the beams")
    _flag(g, "--lm_weight WEIGHT", "of its log-probabilities (default: 0.3)", number)
    _flag(g, "--lm_bonus BONUS", "for each word (default: 0)", number)


def checks(g: Any) -> None:
    _flag(g, "--temperature T", "of the sampling, first one tried (default: 0)", _natural_number)
    _flag(g, "--temperature_increment_on_fallback STEP",
          "up to 1 where a text fails a threshold below; None: no fallback (default: 0.2)",
          _or_none(_step))  # fmt: skip
    _flag(g, "--compression_ratio_threshold RATIO", "a text that zlib shortens more repeats itself (default: 2.4)",
          _or_none(number))  # fmt: skip
    _flag(g, "--logprob_threshold LOGPROB", "a text less probable a token has failed (default: -1)", _or_none(number))
    _flag(g, "--no_speech_threshold P", "a failed text is silence above this probability of it (default: 0.6)",
          _or_none(number))  # fmt: skip
    _flag(g, "--confidence_threshold P", "CTC models: a window whose words have less on average has none",
          _or_none(_probability))  # fmt: skip
    _flag(g, "--hallucination_silence_threshold SECONDS", "skip longer silences around improbable words *",
          _or_none(_natural_number))  # fmt: skip
    _switch(g, "--cut_loops", "leave out text that goes round in a loop, and digital silence (default: True)")


def _times(g: Any) -> None:
    _flag(g, "--clip_timestamps S,E,…", "only these spans, in seconds (default: 0)", _times_list)
    _switch(g, "--without_timestamps", "no time tokens: one segment a window (default: False)")
    _flag(g, "--max_initial_timestamp SECONDS", "latest first time in a window (default: 1)", _or_none(_natural_number))
    _switch(g, "--word_timestamps", "start, end and probability of each word (default: False)")
    _flag(g, "--prepend_punctuations MARKS", "go with the next word (default: \"'“¿([{-)")
    _flag(g, "--append_punctuations MARKS", "go with the word before (default: \"'.。,，!！?？:：”)]}、)")
    _switch(g, "--words_on_sound", "Whisper models: words beside a pause begin and end with their sound")
    _switch(g, "--highlight_words", "srt, vtt: underline each word as it is spoken *")
    _flag(g, "--max_line_width N", "srt, vtt: letters a line *", _or_none(count))
    _flag(g, "--max_line_count N", "srt, vtt: lines a subtitle, with a width *", _or_none(count))
    _flag(g, "--max_words_per_line N", "srt, vtt: words a subtitle *", _or_none(count))


def voice(g: Any) -> None:
    _switch(g, "--vad_filter", "decode only what sounds like speech (default: True for CTC models, else False)")
    _flag(g, "--vad_threshold P", "speech above this probability (default: 0.5)", _probability)
    _flag(g, "--vad_min_speech_duration_ms MS", "drop shorter speech (default: 0)", _natural)
    _flag(g, "--vad_max_speech_duration_s SECONDS", "cut longer speech (default: inf)", _positive)
    _flag(g, "--vad_min_silence_duration_ms MS", "shorter pauses do not end speech (default: 2000)", _natural)
    _flag(g, "--vad_speech_pad_ms MS", "kept on each side (default: 400)", _natural)
    _flag(g, "--audio_track N", "of several, from 1 (default: the one marked as default, or the first)", count)
    _switch(g, "--split_channels", "each channel is a speaker of its own")


def language(g: Any) -> None:
    _flag(g, "--language NAME", "code or English name (default: detected, where the model has several)", _or_none(str))
    _flag(g, "--languages A,B,…", "the only ones to choose from", _names)
    _switch(g, "--multilingual", "the language may change: detected for each window")
    _flag(g, "--language_detection_segments N",
          "windows listened to, spread over the recording; 1: the first 30 s (default: 8)", count)  # fmt: skip


def _flag(
    g: Any, name: str, text: str, kind: Callable[[str], Any] = str, choices: list[str] | None = None, short: str = ""
) -> None:
    """`name`: the flag, a blank, and what its value is called."""
    flag, metavar = name.split(" ")
    names = [flag, short] if short else [flag]
    g.add_argument(*names, metavar=metavar, type=kind, choices=choices, help=text, default=argparse.SUPPRESS)


def _switch(g: Any, name: str, text: str) -> None:
    g.add_argument(name, metavar="BOOL", type=boolean, nargs="?", const=True, help=text, default=argparse.SUPPRESS)


def count(text: str) -> int:
    value = _int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a number") from None
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text}: expected a number")
    return value


def boolean(text: str) -> bool:
    """openai-whisper's convention."""
    values = {"True": True, "False": False}
    if text not in values:
        raise argparse.ArgumentTypeError(f"{text!r}: expected True or False")
    return values[text]


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a whole number") from None


def _limited(kind: Callable[[str], Any], fits: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """A reader of values that fit; `expected` says which."""

    def read(text: str) -> Any:
        if not fits(value := kind(text)):
            raise argparse.ArgumentTypeError(f"{text}: expected {expected}")
        return value

    return read


_natural = _limited(_int, lambda value: value >= 0, "0 or more")
_threads = _limited(_int, lambda value: 0 <= value <= 1024, "0 to 1024")  # torch starts them all
_natural_number = _limited(number, lambda value: 0 <= value < math.inf, "0 or more")
_positive = _limited(number, lambda value: value > 0, "above 0")
_step = _limited(number, lambda value: 0.01 <= value < math.inf, "0.01 or more")
_rate = _limited(_int, lambda value: RATES[0] <= value <= RATES[1], f"{RATES[0]:,} to {RATES[1]:,}")
_probability = _limited(number, lambda value: 0 <= value <= 1, "0 to 1")


def _integers(text: str) -> str:
    for part in text.split(",") if text else []:
        _int(part)
    return text


def _times_list(text: str) -> list[float]:
    return [_natural_number(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r}: expected names with commas between")
    return names


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """openai-whisper's: the word None is a value."""

    def read(text: str) -> Any:
        return None if text == "None" else kind(text)

    return read
