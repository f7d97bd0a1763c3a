"""Argument parser: subcommands that load their flags when asked for, one-line errors, types of values."""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from multimodal.errors import did_you_mean

PATHS = ("FILE", "SOURCE", "MANIFEST", "FOLDER", "INDEX", "FILE|FOLDER", "DIR", "DATA", "PNG", "IMAGE", "SET", "SRC",
         "DST")  # fmt: skip

# flags that --help-all alone shows
RARE = frozenset({
    "architecture", "preprocessing", "trust_paths", "remote", "native", "features_cache", "prepend_punctuations",
    "append_punctuations", "suppress_tokens", "suppress_blank", "sample_len", "max_initial_timestamp", "patience",
    "length_penalty", "carry_initial_prompt", "vad_min_speech_duration_ms", "vad_max_speech_duration_s",
    "vad_min_silence_duration_ms", "vad_speech_pad_ms", "language_detection_segments", "fp16", "lm_weight", "lm_bonus",
    "compression_ratio_threshold", "logprob_threshold", "hallucination_silence_threshold", "remove_repetitions",
    "confidence_threshold", "decode_log", "model_dir", "batched", "on_truncated", "max_words_per_line",
    "snap_words_to_audio", "audio_track", "temperature_increment_on_fallback", "rate", "reliability", "calibration",
    "min_tokens", "no_repeat_ngram", "repetition_penalty", "on_long", "batch_tokens", "heatmap_top", "token_logprobs",
    "target_language",
})  # fmt: skip


class Parser(argparse.ArgumentParser):
    """`module` names the module of a command: its `add_flags(parser)` runs when the command is parsed, so that a start
    imports no other command. After parsing, its `check(parser, options)`, if it has one, refuses contradictions.

    A flag whose value may be left out may stand alone before a file's name, and a value may begin with a minus sign and
    a digit. An error is one line, without the usage."""

    module: str | None = None
    full = False  # whether help shows the flags of `RARE`, too

    def load(self) -> "Parser":
        """Add the flags of the command."""
        if self.module is not None:
            command, self.module = import_module(self.module), None
            command.add_flags(self)
            if hasattr(command, "run"):
                self._add_common_flags()
            self.run = getattr(command, "run", None)
            if check := getattr(command, "check", None):
                self.check = partial(check, self)
        return self

    def _get_formatter(self) -> Any:
        formatter = super()._get_formatter()
        if not self.full:
            formatter.hidden = RARE
        return formatter

    def _add_common_flags(self) -> None:
        group = self.add_argument_group("messages and help")
        group.add_argument("--quiet", "-q", action="store_true", help="only warnings and errors on stderr, no notes or "
                           "progress")  # fmt: skip
        if "--verbose" not in self._option_string_actions:
            group.add_argument("--verbose", action="store_true", help="show each step with its time on stderr, and the "
                               "traceback of an error")  # fmt: skip
        group.add_argument(
            "--help-all", action=_FullHelp, nargs=0, default=argparse.SUPPRESS, help="show this help with all flags"
        )

    check: Callable[[argparse.Namespace], None] | None = None
    run: Callable[[argparse.Namespace], int] | None = None

    def parse_known_args(self, args: list[str] | None = None, namespace: Any = None) -> Any:
        self.load()
        given = sys.argv[1:] if args is None else list(args)
        filled: list[str] = []
        for argument in given:
            action = self._option_string_actions.get(filled[-1]) if filled else None
            nargs = action.nargs if action is not None else 0
            if nargs == "?" and not _is_value(action, argument):
                filled.append(str(action.const))
            elif nargs is None and re.match(r"-\d", argument):
                argument = f"{filled.pop()}={argument}"
            filled.append(argument)
        self._refuse_unknown(filled)
        options, rest = super().parse_known_args(filled, namespace)
        if rest and self.run is not None:
            self._refuse_unexpected(rest[0], filled)
        for action in self._actions if not rest else ():
            if hasattr(action, "settle"):
                action.settle(self, options)
        if not rest and self.run is not None and options.quiet and getattr(options, "verbose", False) is True:
            self.error("--quiet: contradicts --verbose")
        if not rest and self.check is not None:
            self.check(options)
        if self.run is not None:
            options.parser = self
        return options, rest

    def _refuse_unknown(self, arguments: list[str]) -> None:
        """Name an unknown flag or command, and the nearest one, before argparse asks for what is missing."""
        for argument in arguments:
            if self._subparsers is not None and not argument.startswith("-"):
                names = self._subparsers._group_actions[0].choices
                if argument not in names:
                    self.error(
                        f"unknown {self._subparsers._group_actions[0].dest} {argument!r}{did_you_mean(argument, names)}"
                    )
                return  # the rest is the command's
            if argument == "--":
                return
            name, known = argument.split("=")[0], self._option_string_actions
            if not name.startswith("-") or " " in name or re.match(r"-(\d|\.\d|$)", name):
                continue
            if not any(flag.startswith(name) for flag in known) and (name.startswith("--") or name[:2] not in known):
                self.error(f"unknown flag {name}{did_you_mean(name, known)}")

    def _refuse_unexpected(self, argument: str, arguments: list[str]) -> NoReturn:
        """Name an argument that has no place, and the flag before it that did not take it."""
        before = arguments[arguments.index(argument) - 1] if argument in arguments[1:] else ""
        flag = arguments[arguments.index(argument) - 2] if before == "True" else before
        after = f" after {flag}" if flag.startswith("-") else ""
        self.error(f"unexpected argument {argument!r}{after} (files and texts stand together, before the flags)")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.metavar in PATHS and "" in arg_strings:  # which would be the working directory
            raise argparse.ArgumentError(action, "an empty name ('')")
        return super()._get_values(action, arg_strings)

    def refuse(self, options: argparse.Namespace, names: Iterable[str], cause: str) -> None:
        """End with `cause` if one of these flags is given."""
        for name in names:
            if getattr(options, name, None) is not None:
                self.error(f"--{name}: {cause}")

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


class _FullHelp(argparse.Action):
    def __call__(self, parser: Any, *_: Any) -> NoReturn:
        parser.full = True
        parser.print_help()
        parser.exit()


def _is_value(action: argparse.Action, argument: str) -> bool:
    """Return True if this is the value of an optional-value flag: True, False or None, or a number for a word."""
    if action.const is True:
        return argument in ("True", "False", "None")
    return argument == action.const or argument.isdecimal()


def add_commands(p: argparse.ArgumentParser, commands: Mapping[str, tuple[str, str]], dest: str) -> None:
    """`commands`: the module below `multimodal.cli` and the help line of each."""
    group = p.add_subparsers(dest=dest, required=True, metavar=dest.upper())
    for name, (module, text) in commands.items():
        group.add_parser(name, help=text, formatter_class=Help).module = f"multimodal.cli.{module}"


class Help(argparse.RawDescriptionHelpFormatter):
    """Wider than argparse's, each flag's value named once. `hidden`: flags that are left out."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=42, width=min(120, _columns() - 2))
        self.hidden: Collection[str] = ()

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest not in self.hidden:
            super().add_argument(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, action.dest.upper())}"


def _columns() -> int:
    """Width of the terminal, as of shutil.get_terminal_size, whose import takes a tenth of a --help."""
    if (width := os.environ.get("COLUMNS", "")).isdecimal() and int(width):
        return int(width)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80
    except (AttributeError, ValueError, OSError):  # closed, or no terminal
        return 80


def count(text: str) -> int:
    value = whole(text)
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


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a whole number") from None


def limited(kind: Callable[[str], Any], fits: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """A type for values that fit; `expected` describes them."""

    def read(text: str) -> Any:
        if not fits(value := kind(text)):
            raise argparse.ArgumentTypeError(f"{text}: expected {expected}")
        return value

    return read


def or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """openai-whisper's convention: the word None is a value."""
    return lambda text: None if text == "None" else kind(text)
