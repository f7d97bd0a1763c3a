"""Headers of tars that would take memory, time or another error than a TarError; good ones as tarfile reads them."""

import io
import tarfile

import pytest

from multimodal.system import tars
from multimodal.system.tars import Header


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    data = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    data[124:136] = size.to_bytes(12, "big", signed=True)  # in base 256
    data[124] |= 0x80
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    return bytes(data)


def pax(records: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return header("x", len(records), kind) + records.ljust(-(-len(records) // 512) * 512, b"\0")


def names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", tarinfo=Header) as archive:
        return [member.name for member in archive if not member.issparse()]


LONG = header("x", 2 << 20, tarfile.GNUTYPE_LONGNAME)
NEGATIVE = "a negative size|invalid offset"  # ours, or that of later releases of Python
SPARSE = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (LONG + bytes(2 << 20), "a header of 2097152 bytes, not of 1048576"),
        (header("x", -512, tarfile.XHDTYPE), "a header of -512 bytes"), (header("x", -512), NEGATIVE),
        (pax(b"14 size=-1536\n"), NEGATIVE), (pax(b"5" * 200), "a number of 100 digits"),
        (pax(b"", tarfile.XGLTYPE) * 2000, "more than 20 headers"), (pax(b"0 x=1\n"), "invalid header"),
        (pax(b"9 hdrcharset=\xff\n"), "codec can't decode|invalid header"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", [b"", header("good")], ids=["first", "later"])
def test_a_hostile_header_is_a_tar_error(before, data, cause):
    with pytest.raises(tarfile.TarError, match=cause):
        names(before + data + header("z"))


def test_global_fields_are_bounded(monkeypatch):
    monkeypatch.setattr(tars, "MOST_GLOBAL", 10)
    parts = [pax(b"9 %04d=x\n" % number, tarfile.XGLTYPE) + header("z") for number in range(12)]
    assert names(b"".join(parts[:10])) == ["z"] * 10
    with pytest.raises(tarfile.TarError, match="too many global fields"):
        names(b"".join(parts))


@pytest.mark.parametrize("sparse", [pax(SPARSE) + header("s", 512), header("s", 512, tarfile.GNUTYPE_SPARSE)])
def test_a_sparse_file_whose_map_is_none_is_passed_over(sparse):
    assert names(header("a") + sparse + b"\x89PNG".ljust(512) + header("b")) == ["a", "b"]


@pytest.mark.parametrize("layout", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_are_read(layout):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=layout) as archive:
        for name in ("é" * 300, "b/" * 90 + "c", "d"):
            archive.addfile(tarfile.TarInfo(name))
    assert names(made.getvalue()) == ["é" * 300, "b/" * 90 + "c", "d"]
