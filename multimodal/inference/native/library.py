"""The compiled part: found in the user's cache folder, or compiled there once for this processor."""

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from multimodal.inference.tune import processor
from multimodal.system.files import ascii_only, cache_folder, write_whole

SOURCES = ("linear.h", "step.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")
COMPILERS = ("c++", "g++", "clang++")
LONGEST = 120  # seconds of compiling
DIGEST = 32  # bytes at a library's end: the SHA-256 of the others
POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64


class LinearRecord(ctypes.Structure):
    """See `linear.h`, as for all structures."""

    _fields_ = (
        ("weight", POINTER), ("steps", POINTER), ("bias", POINTER), ("sums", POINTER), ("outputs", NUMBER),
        ("inputs", NUMBER),
    )  # fmt: skip


class NormRecord(ctypes.Structure):
    _fields_ = (("weight", POINTER), ("bias", POINTER), ("eps", ctypes.c_double), ("root", NUMBER))


MAPS = ("qkv", "out", "query", "cross_out", "gate", "up", "down")


class LayerRecord(ctypes.Structure):
    _fields_ = (
        ("norms", NormRecord * 3), *((name, LinearRecord) for name in MAPS), ("scale", ctypes.c_double),
        ("cross_scale", ctypes.c_double),
    )  # fmt: skip


class DecoderRecord(ctypes.Structure):
    _fields_ = (("layers", ctypes.POINTER(LayerRecord)), ("norm", NormRecord), ("head", LinearRecord), *(
        (name, NUMBER) for name in ("count", "width", "heads", "kv_heads", "head_width", "cross_heads", "cross_width",
                                    "activation")
    ))  # fmt: skip


class TokenRecord(ctypes.Structure):
    _fields_ = (*(
        (name, POINTER) for name in ("x", "logits", "keys", "values", "source_keys", "source_values", "starts", "bias",
                                     "cos", "sin", "seen", "capacities")
    ), *(
        (name, NUMBER) for name in ("rows", "length", "bias_capacity", "turns", "interleaved", "sources",
                                    "source_length", "source_halves", "threads")
    ))  # fmt: skip


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None without a compiler and with MULTIMODAL_NATIVE=0. The first call on a machine takes
    some seconds to compile and says so on stderr, as does one that fails."""
    if os.environ.get("MULTIMODAL_NATIVE") == "0" or sys.platform == "win32":
        return None
    try:
        found = ctypes.CDLL(str(_compiled()))
    except (_UnusableError, OSError) as error:
        _say(f"models decode without compiled steps: {error}")
        return None
    found.panel.argtypes, found.panel.restype = (NUMBER,), NUMBER
    found.linear.argtypes = (POINTER, POINTER, NUMBER, NUMBER, POINTER, NUMBER, NUMBER)
    found.step.argtypes = (POINTER, POINTER)
    found.best.argtypes = (POINTER, NUMBER, NUMBER, POINTER, POINTER)
    found.linear.restype = found.step.restype = found.best.restype = None
    return found


class _UnusableError(Exception):
    """Why there is no library, in a line."""


def _say(line: str) -> None:
    print(f"multimodal: {line}", file=sys.stderr, flush=True)


def _compiled() -> Path:
    sources = [Path(__file__).with_name(name).read_bytes() for name in SOURCES]
    key = hashlib.sha256(b"\0".join([*sources, " ".join(FLAGS).encode(), processor().encode()])).hexdigest()[:16]
    try:
        path = cache_folder() / "native" / f"{key}.so"
    except RuntimeError:
        raise _UnusableError("no home folder (MULTIMODAL_CACHE names another)") from None
    if path.exists():
        _check_owner(path)
        _check_owner(path.parent)
        if _is_whole(path):
            return path
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path.parent)
        compiler = _compiler()
        start = time.perf_counter()
        data = _build(compiler)
        write_whole(path, data + hashlib.sha256(data).digest())
        path.chmod(0o700)
    except OSError as error:
        raise _UnusableError(f"{error.filename}: {error.strerror} (MULTIMODAL_CACHE names another folder)") from None
    _say(f"compiled decoding steps in {time.perf_counter() - start:.1f} s (MULTIMODAL_NATIVE=0 does without): {path}")
    return path


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise _UnusableError(f"no C++ compiler ({', '.join(names)})")
    return found


def _build(compiler: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        made, source = Path(folder) / "step.so", Path(__file__).with_name(SOURCES[-1])
        command = [compiler, *FLAGS, "-o", str(made), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LONGEST)
        except subprocess.TimeoutExpired:
            raise _UnusableError(f"{compiler} took over {LONGEST} s") from None
        if done.returncode or not made.is_file():
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
            raise _UnusableError(f"{compiler} failed ({ascii_only(lines[0])[:200]})")
        return made.read_bytes()


def _is_whole(path: Path) -> bool:
    data = path.read_bytes()
    return hashlib.sha256(data[:-DIGEST]).digest() == data[-DIGEST:]


def _check_owner(path: Path) -> None:
    """Code is loaded only from what nobody else may write."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise _UnusableError(f"{path}: must be yours alone to write (chmod go-w)")
