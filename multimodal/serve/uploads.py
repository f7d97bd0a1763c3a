"""Uploads: forms whose files, unless small, go to disk as they come, and are removed with the request."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from multimodal.serve.errors import HttpError

MOST_FIELD = 10 << 20  # bytes of a text
MOST_FIELDS = 1000
FOLDER = "multimodal-serve-"
SMALL = 1 << 20  # bytes of a file that may stay in memory


class Form(NamedTuple):
    """Texts and files by field name, in order."""

    texts: dict[str, list[str]]
    files: dict[str, list[Path | bytes]]

    def text(self, name: str) -> str | None:
        """The only value of a field. Raises HttpError for several."""
        found = self.texts.get(name, [])
        if len(found) > 1:
            raise HttpError(400, f"{name}: expected one value, got {len(found)}", param=name)
        return found[0] if found else None

    def file(self) -> Path | bytes:
        """The only file of the field `file`. Raises HttpError."""
        found = self.files.get("file", [])
        if len(found) != 1:
            raise HttpError(400, f"file: expected one file, got {len(found)}", param="file")
        return found[0]


def sweep() -> None:
    """Remove the folders that crashed servers left."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):
            lock = _locked(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)


class UploadFolder:
    """A new folder, locked while its process lives."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER))
        self.lock = _locked(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _locked(folder: Path) -> int:
    """Open a folder of this user and lock it; its descriptor. Raises OSError for one of another server or user."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(opened).st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "of another user")
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened


@contextlib.asynccontextmanager
async def received(request: Request, root: Path, small: int = 0) -> AsyncIterator[Form]:
    """The form of a request. Its files are removed at the end; those of at most `small` bytes are the bytes
    themselves. Raises HttpError."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data":
        raise HttpError(415, f"expected multipart/form-data, got {kind.decode('latin-1')[:60] or 'no content type'}")
    if not (boundary := options.get(b"boundary")):
        raise HttpError(400, "content-type: multipart/form-data has no boundary")
    with NewFiles(root) as files:
        parts = _Parts(files, small)
        try:
            parser = MultipartParser(boundary, parts.callbacks)
            async for chunk in request.stream():
                parser.write(chunk)
            parser.finalize()
        except FormParserError as error:
            raise HttpError(400, f"the form cannot be read ({error})") from None
        finally:
            parts.close()
        yield parts.form


class _Parts:
    """Parts of a form as its parser finds them: those with a file name are written to files."""

    def __init__(self, files: "NewFiles", small: int):
        self.files, self.small, self.form = files, small, Form({}, {})
        self.header, self.name = [b"", b""], ""
        self.disposition = b""
        self.file: BinaryIO | None = None
        self.data, self.is_file, self.count = bytearray(), False, 0

    @property
    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin, "on_header_field": lambda data, a, b: self._add(0, data[a:b]),
            "on_header_value": lambda data, a, b: self._add(1, data[a:b]), "on_header_end": self._header,
            "on_headers_finished": self._start, "on_part_data": lambda data, a, b: self._data(data[a:b]),
            "on_part_end": self._end,
        }  # fmt: skip

    def _begin(self) -> None:
        self.count += 1
        if self.count > MOST_FIELDS:
            raise HttpError(400, f"the form has more than {MOST_FIELDS} parts")
        self.header, self.disposition = [b"", b""], b""

    def _add(self, which: int, data: bytes) -> None:
        self.header[which] += data

    def _header(self) -> None:
        if self.header[0].lower() == b"content-disposition":
            self.disposition = self.header[1]
        self.header = [b"", b""]

    def _start(self) -> None:
        _, options = parse_options_header(self.disposition)
        self.name = options.get(b"name", b"").decode("utf-8", "replace").removesuffix("[]")
        self.data = bytearray()
        # its name says nothing: content decides. The parser drops one of RFC 5987
        self.is_file = b"filename" in options or b"filename*=" in self.disposition.lower()
        if self.is_file and not self.small:
            self._open()

    def _data(self, data: bytes) -> None:
        if self.file is not None:
            self.file.write(data)
            return
        self.data += data
        if self.is_file and len(self.data) > self.small:
            self._open()
        elif len(self.data) > MOST_FIELD:
            raise HttpError(413, f"{self.name}: has more than {MOST_FIELD >> 20} MB of text", "too_large", self.name)

    def _open(self) -> None:
        path = self.files.path()
        self.file = path.open("wb")
        self.file.write(self.data)
        self._keep(path)

    def _keep(self, file: Path | bytes) -> None:
        self.form.files.setdefault(self.name, []).append(file)

    def _end(self) -> None:
        if self.file is not None:
            self.close()
        elif self.is_file:
            self._keep(bytes(self.data))
        else:
            try:
                self.form.texts.setdefault(self.name, []).append(self.data.decode())
            except UnicodeDecodeError:
                raise HttpError(400, f"{self.name}: is not UTF-8 text", param=self.name) from None

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class NewFiles:
    """New files in a folder, removed at the end."""

    def __init__(self, folder: Path):
        self.folder, self.made = folder, list[Path]()

    def __enter__(self) -> "NewFiles":
        return self

    def __exit__(self, *_: Any) -> None:
        for path in self.made:
            path.unlink(missing_ok=True)

    def path(self) -> Path:
        self.made.append(self.folder / uuid.uuid4().hex)
        return self.made[-1]
