"""Compiled parts: found in the user's cache folder, or compiled there once for this processor."""

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from multimodal.errors import UsageError
from multimodal.system.config import is_on
from multimodal.system.files import cache_folder, printable, say, write_whole

FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")
COMPILERS = ("c++", "g++", "clang++")
LONGEST = 120  # seconds of compiling
DIGEST = 32  # bytes at a library's end: the SHA-256 of the others


@cache
def processor() -> str:
    """The processor's name, its features and PyTorch's release."""
    import torch

    has = torch.cpu.get_capabilities()
    digest = hashlib.blake2b(repr(sorted(has.items())).encode(), digest_size=6).hexdigest()
    return f"{has.get('cpu_name') or has.get('architecture')} {digest}, torch {torch.__version__}"


def load_compiled(
    sources: Sequence[Path], what: str, without: str, flags: Sequence[str] = FLAGS, build: bool = True
) -> ctypes.CDLL | None:
    """The functions of the last of `sources`, which includes the others. The first call on a machine takes some seconds
    to compile `what` and says so on stderr, as does one that fails: `without`, and why.

    None without a compiler, with MULTIMODAL_NATIVE=0, and if not `build` for what has not been compiled yet."""
    if not is_on("MULTIMODAL_NATIVE") or sys.platform == "win32":
        return None
    try:
        path = _compiled(sources, what, flags, build)
        return None if path is None else ctypes.CDLL(str(path))
    except (_UnusableError, OSError) as error:
        _say(f"{without}: {error}")
        return None


class _UnusableError(Exception):
    """Why there is no library, in a line."""


def _say(line: str) -> None:
    say(f"multimodal: {line}")


def _compiled(sources: Sequence[Path], what: str, flags: Sequence[str], build: bool) -> Path | None:
    parts = [*(path.read_bytes() for path in sources), " ".join(flags).encode(), processor().encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    try:
        path = cache_folder() / "native" / f"{key}.so"
    except UsageError as error:
        raise _UnusableError(error) from None
    if path.exists():
        _check_owner(path)
        _check_owner(path.parent)
        if _is_whole(path):
            return path
    if not build:
        return None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path.parent)
        compiler = _compiler()
        start = time.perf_counter()
        data = _build(compiler, flags, sources[-1])
        write_whole(path, data + hashlib.sha256(data).digest())
        path.chmod(0o700)
    except OSError as error:
        raise _UnusableError(f"{error.filename}: {error.strerror} (MULTIMODAL_CACHE names another folder)") from None
    _say(f"compiled {what} in {time.perf_counter() - start:.1f} s (MULTIMODAL_NATIVE=0 does without): {path}")
    return path


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise _UnusableError(f"no C++ compiler ({', '.join(names)})")
    return found


def _build(compiler: str, flags: Sequence[str], source: Path) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.so"
        command = [compiler, *flags, "-o", str(made), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LONGEST)
        except subprocess.TimeoutExpired:
            raise _UnusableError(f"{compiler} took over {LONGEST} s") from None
        if done.returncode or not made.is_file():
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
            raise _UnusableError(f"{compiler} failed ({printable(lines[0])[:200]})")
        return made.read_bytes()


def _is_whole(path: Path) -> bool:
    data = path.read_bytes()
    return hashlib.sha256(data[:-DIGEST]).digest() == data[-DIGEST:]


def _check_owner(path: Path) -> None:
    """Code is loaded only from what nobody else may write."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise _UnusableError(f"{path}: must be yours alone to write (chmod go-w)")
