"""Command line of a recipe: flags from its settings, log on stderr, one-line errors, exit codes.

0: done. 1: bad data or a failed run. 2: wrong flags. 75: stopped by a signal of `SIGNALS` with the state saved; run it
again with `--resume`. 128 and its number: such a signal outside the training loop.
"""

import contextlib
import dataclasses
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro

from multimodal.errors import MultimodalError, UsageError, did_you_mean, one_line
from multimodal.system.files import say
from multimodal.system.options import check_limits
from multimodal.system.outputs import Outputs
from multimodal.system.signals import SIGNALS, at_stop, ending
from multimodal.train.signals import EXIT_CODE, Stopped
from multimodal.weights.folder import check_place

Settings = TypeVar("Settings")
log = logging.getLogger(__name__)


def start(main: Callable[[Any], Any], args: Sequence[str] | None = None) -> Any:
    """Call `main(settings)`: its argument's type is a dataclass, parsed from the command line or from `args`, with
    nested dataclasses as flat flags. The help starts with the docstring of the recipe's module.

    Returns the result of `main`; raises SystemExit with the codes above if it fails. With `args`, signals outside the
    training loop keep the caller's handlers."""
    settings = next(iter(get_type_hints(main).values()))
    module = sys.modules[main.__module__]
    prog = Path(getattr(module, "__file__", None) or sys.argv[0]).name
    try:
        values = parse(settings, prog, module.__doc__, args)
        check_limits(values)
    except MultimodalError as error:  # the settings check themselves
        _end(2, f"{prog}: error: {_in_flags(error)} (see {prog} --help)")
    write_logs(main.__module__)
    try:
        _check_places(values)
        with _ending(prog) if args is None else contextlib.nullcontext():
            return main(values)
    except MultimodalError as error:
        _end(1, f"{prog}: error: {_in_flags(error)}")
    except Stopped as stopped:
        _end(EXIT_CODE, f"{prog}: stopped by {stopped}; the state is saved, continue with --resume")
    except OSError as error:
        if error.filename is None:
            raise
        _end(1, f"{prog}: error: {error.filename}: {error.strerror or error}")


def _check_places(values: Any) -> None:
    """Raise UsageError for a run or an output that could not be saved, or would replace an input."""
    out, run = getattr(values, "out", None), getattr(getattr(values, "loop", None), "run", None)
    for name, path in (("run", run), ("out", out)):
        if any("\ud800" <= c <= "\udfff" for c in str(path)):
            raise UsageError(f"{path}: expected a path in UTF-8, since safetensors reads no other", name)
    if isinstance(out, Path):
        check_place(out)
        _check_parents(out, run)
        Outputs(_named(values, ("out", "run"))).spare(out, f"--out {out}", folder=True)


def _check_parents(out: Path, run: Path | None) -> None:
    """Raise UsageError for an output that would hold the run, or whose nearest existing folder cannot be written."""
    full = Path(os.path.realpath(out))
    if run is not None and full in ((whole := Path(os.path.realpath(run))), *whole.parents):
        raise UsageError(f"{out}: expected a folder for the checkpoint alone, got one that holds the run {run}", "out")
    near = next(path for path in full.parents if os.path.lexists(path))
    if not near.is_dir() or not os.access(near, os.W_OK | os.X_OK):
        raise UsageError(f"{out}: cannot be written, since {near} is not a folder that may be written", "out")


def _in_flags(error: MultimodalError) -> str:
    return f"--{error}" if error.argument else str(error)


@contextlib.contextmanager
def _ending(prog: str) -> Iterator[None]:
    with ending(SIGNALS), at_stop(lambda: f"{prog}: stopped outside the training loop"):
        yield


def _named(values: Any, but: Sequence[str]) -> Iterator[str | Path]:
    """Yield the paths and strings among nested settings, which a run may read."""
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        if dataclasses.is_dataclass(value):
            yield from _named(value, but)
        elif field.name not in but:
            yield from (one for one in (value if isinstance(value, tuple) else [value]) if isinstance(one, str | Path))


def parse(settings: type[Settings], prog: str, description: str | None, args: Sequence[str] | None = None) -> Settings:
    """Parse flags, with `_` or `-`, into settings. Errors are one line. Raises UsageError for an unknown flag."""
    args = sys.argv[1:] if args is None else args
    _refuse_unknown(settings, args)
    message, before = io.StringIO(), os.environ.get("COLUMNS")
    flat = tyro.conf.configure(tyro.conf.OmitArgPrefixes)(settings)
    if not {"-h", "--help"} & set(args):
        os.environ["COLUMNS"] = "1000"  # tyro wraps its message there, even inside a path
    try:
        with contextlib.redirect_stderr(message):
            return tyro.cli(flat, prog=prog, description=description, args=args, use_underscores=True)
    except SystemExit as end:
        if end.code:
            _end(2, f"{prog}: error: {_first_part(message.getvalue())} (see {prog} --help)")
        raise
    except BrokenPipeError:  # the reader of the help, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    finally:
        os.environ.pop("COLUMNS", None)
        os.environ.update({"COLUMNS": before} if before is not None else {})


def _refuse_unknown(settings: type, args: Sequence[str]) -> None:
    """Name an unknown flag and the nearest one, before tyro asks for what is missing."""
    known = {f"--{name}" for name in ("help", *_flags(settings))}
    for name in (argument.split("=")[0] for argument in args):
        if name == "--":
            return
        plain = "--" + name[2:].replace("-", "_")
        if name.startswith("--") and not {plain, plain.replace("--no_", "--", 1)} & known:
            raise UsageError(f"unknown flag {name}{did_you_mean(plain, known)}")


def _flags(settings: type) -> Iterator[str]:
    """Yield the names of the flags of nested settings."""
    types = get_type_hints(settings)
    for field in dataclasses.fields(settings):
        nested = dataclasses.is_dataclass(types[field.name])
        yield from _flags(types[field.name]) if nested else (field.name,)


def _first_part(box: str) -> str:
    """Return the text of tyro's framed message, without its title and the help below the first rule."""
    rows = [line.strip(" │") for line in box.splitlines()][1:]
    rules = [number for number, row in enumerate(rows) if not row.strip("─-╰╯")]
    if rules[:1] == [0]:  # without frames the title is underlined
        rows, rules = rows[1:], [number - 1 for number in rules[1:]]
    return " ".join(" ".join(rows[: rules[0] if rules else None]).split()) or " ".join(box.split())


def write_logs(*names: str) -> None:
    """Log this package and the modules `names` to stderr, other packages from warnings up. Of several processes only
    the first logs more than warnings."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    for name in ("multimodal", *names):
        logging.getLogger(name).setLevel(level)
    warnings.showwarning = lambda message, *_, **__: log.warning(one_line(message))


def _end(code: int, line: str) -> None:
    say("".join(c if c.isprintable() else "?" for c in " ".join(line.split())))
    sys.exit(code)
