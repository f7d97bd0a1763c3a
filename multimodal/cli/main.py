"""The console script."""

import contextlib
import io
import os
import sys
import warnings
from argparse import Namespace

from multimodal import __version__
from multimodal.cli import output
from multimodal.cli.output import fail, in_flags, printable
from multimodal.cli.parser import Parser, RawHelp, add_commands
from multimodal.errors import MultimodalError
from multimodal.system.signals import ending

# of each command, its module and its help line
COMMANDS = {
    "classify": ("vision.classify", "score labels for images, zero-shot"),
    "transcribe": ("speech.transcribe", "speech to text"),
    "evaluate": ("evaluate.evaluate", "evaluate a model on labelled data"),
    "caption": ("vision.caption", "describe images with a captioner checkpoint"),
    "index": ("vision.index", "build or update a search index of images"),
    "search": ("vision.search", "search an image index by text or by image"),
    "generate": ("text.generate", "generate text with a language model checkpoint"),
    "fill-mask": ("text.fill_mask", "predict the masked words of a text"),
    "embed": ("text.embed", "embed texts or images as vectors"),
    "translate": ("text.translate", "translate texts with an encoder-decoder checkpoint"),
    "inspect": ("checkpoints.inspect",
                "inspect a model: attention, filters, positions, alignment, induction heads"),
    "info": ("checkpoints.info",
             "show a model's configuration, parameters, operations, memory, licence and training data"),
    "models": ("checkpoints.models", "list shipped and public models, presets and formats; show or clear the cache"),
    "download": ("checkpoints.download", "download public models into the hub's cache, and check those in it"),
    "convert": ("checkpoints.convert", "convert a foreign checkpoint, or export to a foreign format"),
    "validate": ("validate", "decode every item of training data and list broken ones"),
    "env": ("env", "report versions and machine, for a bug report"),
}  # fmt: skip
EXAMPLES = """examples:
  multimodal classify photo.jpg --labels "a dog" "a cat"
  multimodal transcribe talk.mp3 --output_format srt
  multimodal info clip-vit-16
"""


def main(arguments: list[str] | None = None) -> None:
    """Exit with 0 on success, 1 if a file or value cannot be used, 2 for wrong flags, 130 after Ctrl-C, 143 after
    SIGTERM. With `arguments`, the caller's signal handlers stay."""
    with ending() if arguments is None else contextlib.nullcontext():
        _main(arguments)


def _main(arguments: list[str] | None) -> None:
    for name in ("stdout", "stderr"):  # closed by the caller
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w")))
    for stream in (sys.stdout, sys.stderr):  # escape characters that the encoding lacks
        if isinstance(stream, io.TextIOWrapper):  # not if closed, or collected by a program
            stream.reconfigure(errors="backslashreplace")
    options = parser().parse_args(arguments)
    command: Parser = vars(options).pop("parser")
    output.FLAGS.clear()
    output.FLAGS.update({a.dest: a.option_strings[0] for a in command._actions if a.option_strings})
    warnings.showwarning = _one_line
    try:
        if threads := getattr(options, "threads", None):
            import torch  # heavy: not for --help

            torch.set_num_threads(threads)
        _note_demonstration(command, options)
        code = command.run(options)
        sys.stdout.flush()
    except MultimodalError as error:
        code = fail(error)
    except BrokenPipeError:  # the reader, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        code = fail(f"{error.filename or 'output'}: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        from multimodal.system.memory import out_of_memory  # slow: not for --help

        if not (cause := out_of_memory(error)):
            raise
        code = fail(f"{cause}: shorter inputs, smaller batches or fewer beams need less")
    except Warning as warning:  # python -W error
        code = fail(warning)
    sys.exit(code)


def _note_demonstration(command: Parser, options: Namespace) -> None:
    """Say once that the model nobody chose is small, and which one is good."""
    name = getattr(options, "model", None)
    if not name or name != command.get_default("model") or options.quiet:
        return
    from multimodal.weights.hub.registry import DEMONSTRATIONS  # not for --help

    if name in DEMONSTRATIONS and not os.path.exists(name):
        size, better = DEMONSTRATIONS[name]
        print(
            f"multimodal: {name}: demonstration model, {size} parameters; for real use: --model {better}",
            file=sys.stderr,
        )


def _one_line(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    print(f"multimodal: warning: {printable(' '.join(in_flags(message).split()))}", file=sys.stderr)


def parser() -> Parser:
    top = Parser(
        "multimodal", description="Vision, speech and text transformers: classify images, transcribe speech.",
        epilog=EXAMPLES, formatter_class=RawHelp,
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"multimodal {__version__}")
    add_commands(top, COMMANDS, "command")
    return top
