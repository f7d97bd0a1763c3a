"""The console script. This file is light, so that --help is quick; the work is in `commands.py`."""

import argparse
import contextlib
import io
import os
import re
import sys
import warnings
from functools import partial
from typing import Any, NoReturn

from multimodal import __version__
from multimodal.cli import machine
from multimodal.cli.flags import caption, classify, encode, evaluate, generate, inspect, search, transcribe, translate
from multimodal.cli.flags.transcribe import count
from multimodal.cli.output import fail, printable
from multimodal.errors import MultimodalError
from multimodal.system.memory import out_of_memory
from multimodal.system.signals import ending

PATHS = ("FILE", "FOLDER", "FILE|FOLDER", "DIR", "DATA", "PNG", "IMAGE", "SET", "SRC", "DST")
EXAMPLES = """examples:
  multimodal classify photo.jpg --labels "a dog" "a cat"
  multimodal transcribe talk.mp3 --output_format srt
  multimodal info clip-vit-16
"""


def main(arguments: list[str] | None = None) -> None:
    """Exits 0 when all went well, 1 when a file or value could not be used, 2 when the flags are wrong; 130 after
    Ctrl-C, 143 after SIGTERM. A program that calls this with `arguments` keeps its own ways with signals."""
    with ending() if arguments is None else contextlib.nullcontext():
        _main(arguments)


def _main(arguments: list[str] | None) -> None:
    for name in ("stdout", "stderr"):  # closed by the caller: then nobody reads it
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w")))
    for stream in (sys.stdout, sys.stderr):  # a letter that the terminal's encoding lacks is escaped, not an error
        if isinstance(stream, io.TextIOWrapper):  # not where it is closed, or a program collects it
            stream.reconfigure(errors="backslashreplace")
    options = parser().parse_args(arguments)
    if check := vars(options).pop("check", None):
        check(options)
    warnings.showwarning = _one_line
    try:
        from multimodal.cli import dispatch as commands

        code = getattr(commands, options.command.replace("-", "_"))(options)
        sys.stdout.flush()
    except MultimodalError as error:
        code = fail(error)
    except BrokenPipeError:  # the reader, such as head, has gone: not a fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        code = fail(f"{error.filename or 'output'}: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if not (cause := out_of_memory(error)):
            raise
        code = fail(f"{cause}: shorter inputs, smaller batches or fewer beams need less")
    except Warning as warning:  # python -W error
        code = fail(warning)
    sys.exit(code)


def _one_line(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    print(f"multimodal: warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)


def _its_value(action: argparse.Action, argument: str) -> bool:
    """Whether this is the value of a flag that may stand alone: True or False, or a number in place of a word."""
    return argument in ("True", "False") if action.const is True else argument == action.const or argument.isdecimal()


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it. A flag whose value, True or False or a number, may
    be left out may stand alone before a file's name, and a value may begin with a minus sign and a digit."""

    def parse_known_args(self, args: list[str] | None = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        filled: list[str] = []
        for argument in given:
            action = self._option_string_actions.get(filled[-1]) if filled else None
            nargs = action.nargs if action is not None else 0
            if nargs == "?" and not _its_value(action, argument):
                filled.append(str(action.const))
            elif nargs is None and re.match(r"-\d", argument):
                argument = f"{filled.pop()}={argument}"
            filled.append(argument)
        return super().parse_known_args(filled, namespace)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.metavar in PATHS and "" in arg_strings:  # which would be the working directory
            raise argparse.ArgumentError(action, "an empty name ('')")
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        "multimodal", description="Vision, speech and text transformers: classify pictures, transcribe speech.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"multimodal {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    classify.add(commands, _picture_model)
    _transcribe(commands)
    evaluate.add(commands, _model, _picture_model)
    caption.add(commands, _picture_model)
    search.add(commands, _picture_model)
    generate.add(commands, _model)
    encode.add(commands, _model)
    translate.add(commands, _model)
    inspect.add(commands, _preprocessing)
    inspect.add_info(commands, _preprocessing)
    for add in (_models, _convert, _validate, _env):
        add(commands)
    return top


def _transcribe(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("transcribe", help="speech to text")
    transcribe.add(p, _model)
    p.set_defaults(check=partial(transcribe.check, p))


def _models(commands: argparse._SubParsersAction) -> None:
    commands.add_parser("models", help="list the shipped models, presets and readable formats")


def _convert(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("convert", help="bring a .pt checkpoint over, or export to foreign names")
    p.add_argument("source", metavar="SRC")
    p.add_argument("target", metavar="DST", help="a new folder; with --to a new .safetensors file")
    p.add_argument("--architecture", help="OpenCLIP or timm name of a bare weights file")
    _preprocessing(p)
    p.add_argument("--config", metavar="FILE", help="the foreign configuration (JSON)")
    p.add_argument("--to", metavar="FORMAT", help="write under this family's names")
    p.add_argument("--half", action="store_true", help="store half precision")


def _validate(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("validate", help="decode every item of training data and list what is broken")
    p.add_argument(
        "data",
        nargs="+",
        metavar="DATA",
        help="folder with a folder a class, WebDataset tars (also URLs), .csv, .tsv or .jsonl",
    )
    p.add_argument("--kind", choices=["auto", "image", "audio"], default="auto", help="auto: by the file's ending")
    p.add_argument("--workers", type=count, help="processes (default: one a core, at most 8)")
    p.add_argument("--format", choices=["table", "json"], default="table")
    p.add_argument("--classes", metavar="FILE", help="table of the known labels (default: classes.jsonl beside DATA)")
    machine.lists(p)
    for name in ("path", "text", "label"):
        p.add_argument(
            f"--{name}_column", metavar="NAME", help=f"column of the {name} in a list (default: usual names)"
        )


def _env(commands: argparse._SubParsersAction) -> None:
    commands.add_parser("env", help="report versions and machine, for a bug report")


def _model(p: argparse._ActionsContainer, default: str | None) -> None:
    p.add_argument("--model", "-m", default=default, required=default is None, metavar="MODEL",
                   help="shipped name, folder, .safetensors file or hf-hub:owner/name"
                   + (f" (default: {default})" if default else ""))  # fmt: skip
    p.add_argument("--architecture", help="OpenCLIP or timm name of a bare weights file")


def _picture_model(p: argparse._ActionsContainer, default: str | None) -> None:
    _model(p, default)
    _preprocessing(p)


def _preprocessing(p: argparse._ActionsContainer) -> None:
    p.add_argument("--preprocessing", metavar="NAME",
                   help="of pictures, for a bare weights file, which does not say it: openai, imagenet, inception, "
                   "siglip, or a JSON file as preprocessing.json of a checkpoint folder")  # fmt: skip
