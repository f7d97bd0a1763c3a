"""The console script. This file is light, so that --help is quick; the work is in `commands.py`."""

import argparse
import io
import os
import sys
import warnings
from typing import NoReturn

from multimodal import __version__
from multimodal.errors import MultimodalError

EXAMPLES = """examples:
  multimodal classify photo.jpg --labels "a dog" "a cat"
  multimodal transcribe talk.mp3 --output_format srt
  multimodal info clip-vit-16
"""


def main(arguments: list[str] | None = None) -> None:
    """Exits 0 when all went well, 1 when a file or value could not be used, 2 when the flags are wrong."""
    options = parser().parse_args(arguments)
    warnings.showwarning = _one_line
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal's encoding lacks is escaped, not an error
        if isinstance(stream, io.TextIOWrapper):  # not where it is closed, or a program collects it
            stream.reconfigure(errors="backslashreplace")
    try:
        from multimodal import commands

        code = getattr(commands, options.command)(options)
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except MultimodalError as error:
        code = fail(error)
    except BrokenPipeError:  # the reader, such as head, has gone: not a fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        code = fail(f"{error.filename or 'output'}: {error.strerror or error}")
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def fail(error: object) -> int:
    """One line on stderr."""
    print(f"multimodal: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    return 1


def printable(text: str) -> str:
    """The text with what would break a line or steer a terminal as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _one_line(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    print(f"multimodal: warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it."""

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
    for add in (_classify, _transcribe, _caption, _generate, _models, _info, _convert, _validate, _env):
        add(commands)
    return top


def _classify(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("classify", help="score labels for pictures, zero-shot")
    p.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders or globs")
    p.add_argument("--labels", nargs="+", metavar="LABEL", help="labels; one value with commas is split")
    p.add_argument("--labels_file", metavar="FILE", help="labels, one a line")
    p.add_argument("--templates", metavar="SET", help="clip80, clip7, none or a file; default: the model's own")
    p.add_argument("--format", choices=["table", "json", "csv"], default="table")
    p.add_argument("--top", type=_count, metavar="N", help="labels a picture (default: 5 in the table, else all)")
    p.add_argument("--batch_size", type=_count, default=32)
    _model(p, "clip-vit-16")


def _transcribe(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("transcribe", help="speech to text")
    p.add_argument("audio", nargs="+", metavar="AUDIO", help="files, folders or globs")
    p.add_argument("--output_format", "-f", choices=["txt", "vtt", "srt", "tsv", "json", "all"], default="all")
    p.add_argument("--output_dir", "-o", default=".", metavar="DIR", help="where the outputs go (default: .)")
    p.add_argument("--language", help="spoken language; default: detected, where the model has several")
    p.add_argument("--task", choices=["transcribe", "translate"], default="transcribe")
    p.add_argument("--beam_size", type=_count, help="beams; default: the model's usual decoding")
    p.add_argument("--verbose", type=_boolean, default=True, help="print the text as it comes (default: True)")
    _model(p, "asr-conformer-en")


def _caption(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("caption", help="describe pictures with a captioner checkpoint")
    p.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders or globs")
    p.add_argument("--format", choices=["table", "json", "csv"], default="table")
    p.add_argument("--beam_size", type=_count, default=1)
    p.add_argument("--max_tokens", type=_count, default=40)
    _model(p, None)


def _generate(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("generate", help="continue a text with a language model checkpoint")
    p.add_argument("prompt", metavar="TEXT")
    p.add_argument("--max_tokens", type=_count, default=100)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--seed", type=int, default=0)
    _model(p, None)


def _models(commands: argparse._SubParsersAction) -> None:
    commands.add_parser("models", help="list the shipped models, presets and readable formats")


def _info(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("info", help="show a model's configuration, parameters, licence and training data")
    p.add_argument("model", metavar="MODEL")
    p.add_argument("--architecture", help="OpenCLIP or timm name of a bare weights file")
    p.add_argument("--format", choices=["table", "json"], default="table")


def _convert(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("convert", help="bring a .pt checkpoint over, or export to foreign names")
    p.add_argument("source", metavar="SRC")
    p.add_argument("target", metavar="DST", help="a new folder; with --to a new .safetensors file")
    p.add_argument("--architecture", help="OpenCLIP or timm name of a bare weights file")
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
    p.add_argument("--workers", type=_count, help="processes (default: one a core, at most 8)")
    p.add_argument("--format", choices=["table", "json"], default="table")
    p.add_argument("--classes", metavar="FILE", help="table of the known labels (default: classes.jsonl beside DATA)")
    for name in ("path", "text", "label"):
        p.add_argument(
            f"--{name}_column", metavar="NAME", help=f"column of the {name} in a list (default: usual names)"
        )


def _env(commands: argparse._SubParsersAction) -> None:
    commands.add_parser("env", help="report versions and machine, for a bug report")


def _model(p: argparse.ArgumentParser, default: str | None) -> None:
    p.add_argument("--model", "-m", default=default, required=default is None, metavar="MODEL",
                   help="shipped name, folder, .safetensors file or hf-hub:owner/name"
                   + (f" (default: {default})" if default else ""))  # fmt: skip
    p.add_argument("--architecture", help="OpenCLIP or timm name of a bare weights file")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return number


def _boolean(text: str) -> bool:
    """openai-whisper's convention."""
    values = {"True": True, "False": False}
    if text not in values:
        raise argparse.ArgumentTypeError(f"{text!r}: expected True or False")
    return values[text]
