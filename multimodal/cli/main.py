"""The console script."""

import contextlib
import gc
import io
import os
import stat
import sys
import warnings
from argparse import Namespace

from multimodal import __version__
from multimodal.cli import output
from multimodal.cli.console import console
from multimodal.cli.files import OUTPUTS, check_inputs, output_file, outputs_of
from multimodal.cli.flags import Format, Model
from multimodal.cli.output import fail, in_flags, printable, written_to
from multimodal.cli.parser import Help, Parser, add_commands
from multimodal.errors import MultimodalError
from multimodal.system.config import SHIPPED, required_model
from multimodal.system.files import say
from multimodal.system.signals import ending

# of each command, its module and its help line
COMMANDS = {
    "classify": ("vision.classify", "score labels for images, without training"),
    "transcribe": ("speech.transcribe", "speech to text"),
    "evaluate": ("evaluate.evaluate", "evaluate a model on labelled data"),
    "caption": ("vision.caption", "describe images with a captioner checkpoint"),
    "ask": ("text.ask", "answer questions about images, audio and video with an any-to-text checkpoint"),
    "index": ("vision.index", "build or update a search index of images"),
    "search": ("vision.search", "search an image index by text or by image"),
    "generate": ("text.generate", "generate text with a language model checkpoint"),
    "fill-mask": ("text.fill_mask", "predict the masked words or spans of a text"),
    "tag": ("text.tag", "find names and other entities in texts"),
    "answer": ("text.answer", "answer a question from a text, or choose its answer"),
    "serve": ("system.serve", "serve models over HTTP with OpenAI's protocol, and a page"),
    "clean": ("text.clean", "clean text for language models by C4's rules, without duplicates"),
    "embed": ("text.embed", "embed texts or images as vectors"),
    "translate": ("text.translate", "translate texts with an encoder-decoder checkpoint"),
    "inspect": ("checkpoints.inspect",
                "inspect a model: attention, filters, positions, alignment, induction heads"),
    "info": ("checkpoints.info",
             "show a model's configuration, parameters, operations, memory, licence and training data"),
    "models": ("checkpoints.models", "list shipped and public models, presets and formats; show or clear the cache"),
    "download": ("checkpoints.download", "download public models into the hub's cache, and check those in it"),
    "convert": ("checkpoints.convert", "convert a foreign checkpoint, or export to a foreign format"),
    "export": ("checkpoints.export", "write a model for ONNX Runtime, transformers, CTranslate2 or llama.cpp"),
    "validate": ("validate", "decode every item of training data and list broken ones"),
    "completion": ("system.completion", "print a script that completes commands and flags in bash, zsh or fish"),
    "env": ("system.env", "show versions, machine and default models, for a bug report"),
}  # fmt: skip
LOADED = ("model", "index", "source")  # options that name what a command loads
EXAMPLES = """examples:
  multimodal classify photo.jpg --labels "a dog" "a cat"
  multimodal transcribe talk.mp3 --format srt
  multimodal info clip-vit-16
"""


def main(arguments: list[str] | None = None) -> None:
    """Exit with 0 on success, 1 if a file or value cannot be used, 2 for wrong flags, 130 after Ctrl-C, 143 after
    SIGTERM, 129 if the terminal closes. With `arguments`, the caller's signal handlers stay."""
    own = arguments is None
    if own:
        gc.set_threshold(10_000)  # every 700 objects cost 0.1 s of importing torch
    try:
        with ending(otherwise=_stopped) if own else contextlib.nullcontext():
            _main(arguments)
    finally:
        if own:
            gc.freeze()  # at its end the interpreter would walk torch's objects, for 0.4 s


def _main(arguments: list[str] | None) -> None:
    for name in ("stdout", "stderr"):  # closed by the caller
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w")))
    for stream in (sys.stdout, sys.stderr):  # escape characters that the encoding lacks
        if isinstance(stream, io.TextIOWrapper):  # not if closed, or collected by a program
            stream.reconfigure(errors="backslashreplace")
    options = parser().parse_args(arguments)
    command: Parser = vars(options).pop("parser")
    verbose = getattr(options, "verbose", False) is True
    output.FLAGS.clear()
    output.FLAGS.update({a.dest: a.option_strings[0] for a in command._actions if a.option_strings})
    warnings.showwarning = _one_line
    try:
        if threads := getattr(options, "threads", None):
            import torch  # heavy: not for --help

            torch.set_num_threads(threads)
        with console.shown(vars(options).pop("quiet"), verbose):
            code = _run(command, options)
    except MultimodalError as error:
        if verbose:
            sys.excepthook(type(error), error, error.__traceback__)
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


def _stopped() -> str:
    """The line after Ctrl-C in a command that keeps nothing, or has nothing to keep yet."""
    place = f"; nothing new in {console.output}" if console.output not in ("", "-") else ""
    return printable(f"multimodal: stopped{place}")


def _run(command: Parser, options: Namespace) -> int:
    console.output = getattr(options, "output", None) or ""
    check_inputs(command._actions, options)
    _choose_model(command, options)
    name = next((name for key in LOADED if (name := getattr(options, key, None))), "")
    console.step(f"Loading {name} …".replace("  ", " "))
    action = next((a for a in command._actions if isinstance(a, Format)), None)
    path = getattr(options, "output", None) if action else None
    flagged = (getattr(options, key, None) for key in sorted(OUTPUTS - {"output"}))
    others = {name: _stamp(name) for name in flagged if isinstance(name, str)}
    with written_to(output_file(path, "--output", (), outputs_of(options))):
        code = command.run(options)
        sys.stdout.flush()
    if path is not None:
        console.note(f"{path}: written")
    for name, stamp in others.items():
        if _stamp(name) != stamp:
            console.note(f"{name}: written")
    return code


def _stamp(name: str) -> tuple[int, int] | None:
    """Changes when a file is written; None for a folder, and for what is not there."""
    try:
        found = os.stat(name)
    except (OSError, ValueError):
        return None
    return None if stat.S_ISDIR(found.st_mode) else (found.st_ino, found.st_mtime_ns)


def _choose_model(command: Parser, options: Namespace) -> None:
    """Take the task's default model where none is named. Say once that a shipped one is small, and which one is
    good."""
    action = next((a for a in command._actions if isinstance(a, Model)), None)
    if action is None or options.model is not None or (task := action.task(options)) is None:
        return
    options.model, source = required_model(task)
    if source != SHIPPED or console.quiet:
        return
    from multimodal.weights.hub.registry import DEMONSTRATIONS  # not for --help

    if options.model in DEMONSTRATIONS and not os.path.exists(options.model):
        size, better = DEMONSTRATIONS[options.model]
        console.note(f"{options.model}: demonstration model, {size} parameters; for real use: --model {better}")


def _one_line(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    say(f"multimodal: warning: {printable(' '.join(in_flags(message).split()))}")


def parser() -> Parser:
    top = Parser(
        "multimodal", description="Transformers for vision, speech and text.",
        epilog=EXAMPLES, formatter_class=Help,
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"multimodal {__version__}")
    add_commands(top, COMMANDS, "command")
    return top
