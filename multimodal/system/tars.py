"""Headers of tar archives from strangers."""

import re
import tarfile

from multimodal.errors import one_line

MOST_HEADER = 1 << 20  # bytes of an extended header, which tarfile reads whole; names have at most 4096
MOST_GLOBAL = 1000  # fields for all members that follow
MOST_IN_A_ROW = 20  # extended headers of one member; each takes three calls of the stack
_EXTENDED = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
)  # fmt: skip


class Header(tarfile.TarInfo):
    """Header of a member, for `tarfile.open(..., tarinfo=Header)`: extended ones are bounded, damage of any kind is a
    TarError, and the map of a sparse file is not read, so its content cannot be."""

    __slots__ = ()

    def _proc_member(self, archive):
        archive.in_a_row = getattr(archive, "in_a_row", 0) + 1 if self.type in _EXTENDED else 0
        if archive.in_a_row and not 0 <= self.size <= MOST_HEADER:
            raise tarfile.HeaderError(f"a header of {self.size} bytes, not of {MOST_HEADER} at most")
        if archive.in_a_row > MOST_IN_A_ROW:
            raise tarfile.HeaderError(f"more than {MOST_IN_A_ROW} headers of one member")
        try:
            member = super()._proc_member(archive)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # of all kinds; after an InvalidHeaderError, tarfile ends the archive without a word
            raise tarfile.HeaderError(one_line(error, 80)) from None
        if member.size < 0 or len(archive.pax_headers) > MOST_GLOBAL:
            raise tarfile.HeaderError("a negative size" if member.size < 0 else "too many global fields")
        return member

    def _proc_pax(self, archive):
        start = archive.fileobj.tell()
        if re.search(rb"\d{100}", archive.fileobj.read(self._block(self.size))):  # tarfile's search would be quadratic
            raise tarfile.HeaderError("a number of 100 digits or more")
        archive.fileobj.seek(start)
        return super()._proc_pax(archive)

    def _proc_sparse(self, archive):
        extended = self._sparse_structs[1]
        while extended:
            extended = archive.fileobj.read(tarfile.BLOCKSIZE)[504]
        self.sparse = []
        return self._proc_builtin(archive)

    def _proc_gnusparse_10(self, member, headers, archive):
        member.sparse = []
