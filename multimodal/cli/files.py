"""Files that flags and arguments name: inputs and outputs."""

import glob
import os
import re
import sys
import warnings
from argparse import Action, Namespace
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from multimodal.cli.output import fail
from multimodal.errors import TextError, UsageError
from multimodal.system.assets import shipped
from multimodal.system.outputs import Outputs

if TYPE_CHECKING:
    from multimodal.cli.parser import Parser
    from multimodal.data.remote.trust import Trust
    from multimodal.data.sources import ListColumns

# what commands write; every other text among their options may name an input
OUTPUTS = {
    "output", "explain", "report", "confusion", "reliability", "plot", "decode_log", "save_classifier", "heatmap",
    "regions", "features_cache", "model_dir", "answers",
}  # fmt: skip
FILES = ("FILE", "FILE|FOLDER", "FOLDER")
# metavars of inputs, and the error of one that does not exist
ABSENT = {
    "FILE": "cannot be read (No such file or directory)", "SOURCE": "cannot be read (No such file or directory)",
    "DATA": "no such file or folder", "MANIFEST": "no such file or folder",
    "INDEX": "holds no index (multimodal index makes one)", "LM": "does not exist",
}  # fmt: skip


def found_files(arguments: list[str], find: Callable[[list[str]], list[Path]]) -> tuple[list[Path], int]:
    """The files that the arguments name, each once; an argument that names none is reported, the others go on."""
    files: dict[Path, None] = {}
    code = 0
    for argument in arguments:
        try:
            files |= dict.fromkeys(find([argument]))
        except UsageError as error:
            code = fail(error)
    return list(files), code


def is_missing(name: str) -> bool:
    """Return True for the name of a file that does not exist, False for a glob or the standard input."""
    try:
        os.lstat(name)
    except FileNotFoundError:
        return name not in ("", "-") and not glob.has_magic(name)
    except (OSError, ValueError):  # reading it tells the cause
        pass
    return False


def check_inputs(actions: Iterable[Action], options: Namespace) -> None:
    """Raise UsageError for a flag or argument all of whose files are missing: at once, as reading them comes after
    torch's seconds of import. Also for the output "-", where a command writes to a file or folder alone."""
    for action in actions:
        if action.dest in OUTPUTS and getattr(options, action.dest, None) == "-" and action.metavar in FILES:
            raise UsageError(f"{action.option_strings[0]} -: expected a file's name")
        if action.metavar not in ABSENT or action.dest in OUTPUTS or not (value := getattr(options, action.dest, None)):
            continue
        names = [value] if isinstance(value, str) else value
        known = shipped() if action.metavar == "LM" else {}
        if all(is_missing(name) and name not in known and not re.search(r"\{|::|://", name) for name in names):
            flag = f"{action.option_strings[0]} " if action.option_strings else ""
            raise UsageError(f"{flag}{names[0]}: {ABSENT[action.metavar]}")


def trust(options: Namespace) -> "Trust":
    """Locations that lists may name, from the flags of `flags.lists`."""
    from multimodal.data.remote.trust import Trust  # slow: not for --help

    return Trust(options.trust_paths, tuple(options.remote))


def columns(options: Namespace) -> "ListColumns":
    """Columns of lists, from the flags of `flags.lists`."""
    from multimodal.data.sources import ListColumns

    return ListColumns(*(getattr(options, f"{name}_column", None) for name in ("path", "text", "label")))


def check_texts(p: "Parser", texts: list[str], read: str = "--file reads") -> None:
    """Refuse - among other texts, and the name of a file, which is no text. `read`: the flag that reads it."""
    if "-" in texts and len(texts) > 1:
        p.error("-: stands alone, for the lines of stdin")
    for text in texts:
        if Path(text).suffix and os.path.isfile(text):
            p.error(f"{text}: is a file, which {read}; - takes such a text from stdin")


def text_lines(texts: list[str], file: str | None) -> Iterator[tuple[str, str | bytes]]:
    """Name and text (bytes for a line that is not UTF-8) of each input: of arguments, or
    of the lines of a file or, for "-", of the standard input. Raises UsageError."""
    if file is None and texts != ["-"]:
        for number, text in enumerate(texts, 1):
            yield f"text {number}", text
        return
    from multimodal.data.manifests import is_manifest  # slow: not for --help

    name = "standard input" if file in (None, "-") else file
    if name == file and Path(file).exists() and not Path(file).is_file():
        raise UsageError(f"--file {file}: not a regular file (folders, pipes and devices are not read)")
    if name != file and sys.stdin is None:
        raise UsageError("-: stdin is closed")
    try:
        data = Path(file).read_bytes() if name == file else sys.stdin.buffer.read()
    except OSError as error:
        raise UsageError(f"--file {file}: cannot be read ({error.strerror})") from None
    if name == file and is_manifest(file):
        warnings.warn(f"--file {file}: each line is a text as it stands, with its keys or columns", stacklevel=1)
    if not data:
        raise UsageError(f"{name}: has no lines")
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n"), 1):
        line = line.removesuffix(b"\r")
        try:
            yield f"{name}, line {number}", line.decode()
        except UnicodeDecodeError:
            yield f"{name}, line {number}", line


def decoded(line: str | bytes, where: str = "") -> str:
    """The text of a line. Raises TextError that begins with `where` for one that is not UTF-8."""
    try:
        return line.decode() if isinstance(line, bytes) else line
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise TextError(f"{where}is not UTF-8 text (byte {error.start} of the line is {byte:#x})") from None


def outputs_of(options: Namespace, inputs: Iterable[str | Path] = (), but: Collection[str] = ()) -> Outputs:
    """Checks of a command's output files. Its inputs are the files and folders that its options (less `but`) name, and
    `inputs`."""
    values = [value for name, value in vars(options).items() if name not in OUTPUTS and name not in but]
    named = [text for value in values for text in (value if isinstance(value, list) else [value])]
    files = [text for text in named if isinstance(text, str) and text]
    return Outputs(chain(files, ["/dev/stdin"], inputs), bool(getattr(options, "overwrite", False)))


def output_file(path: str | None, flag: str, endings: Collection[str], outputs: Outputs) -> Path | None:
    """A file that a flag names to be written, checked before any work; its folder is made. Raises UsageError."""
    if path is None:
        return None
    file = Path(path)
    if endings and not file.name.lower().endswith(tuple(endings)):
        raise UsageError(f"{flag} {path}: must end in {' or '.join(endings)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{flag} {path}: its folder cannot be made ({error.strerror})") from None
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{flag} {path}: cannot be written (Permission denied)")
    return outputs.claim(file, f"{flag} {path}")


def output_folder(folder: Path, flag: str) -> Path:
    """A folder that a flag names to be written into, made where it is not there. Raises UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{flag} {folder}: cannot be made ({error.strerror})") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{flag} {folder}: cannot be written (Permission denied)")
    return folder
