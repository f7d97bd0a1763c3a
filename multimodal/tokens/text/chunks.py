"""Encoding of texts by chunks, with a cache, since words repeat."""

import re
from abc import abstractmethod
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

MOST_CHUNKS, LONGEST_CHUNK = 1 << 16, 40  # cached: about 20 MB at most
BLOCK = 8192  # chunks of a long text that are examined together
FEW = 1000  # chunks: always cached
LONG = 100_000  # characters
# blanks as in the libraries' \s (Python's has four more), with what follows up to the next
AT_BLANKS = re.compile(r"[^\S\x1c-\x1f]*+[\S\x1c-\x1f]++|[^\S\x1c-\x1f]++")


class ChunkCache(dict[str, list[int]]):
    """Cache of the ids of short chunks. No word may cross the boundary of a chunk."""

    @abstractmethod
    def one(self, chunk: str) -> list[int]:
        """Ids of a chunk that is not cached."""

    def __missing__(self, chunk: str) -> list[int]:
        ids = self.one(chunk)
        if len(chunk) <= LONGEST_CHUNK:
            if len(self) >= MOST_CHUNKS:
                self.clear()
            self[chunk] = ids
        return ids


class BackendChunkCache(ChunkCache):
    """Cache for a `tokenizers` pipeline that always splits where `pattern` does, without context across the split.
    `pattern` must match every character."""

    def __init__(self, backend: "tokenizers.Tokenizer", pattern: re.Pattern[str] = AT_BLANKS):
        self._backend, self._pattern = backend, pattern

    def one(self, chunk: str) -> list[int]:
        return self._backend.encode(chunk, add_special_tokens=False).ids

    def encode(self, text: str) -> list[int]:
        chunks, ids = self._pattern.findall(text), []
        for at in range(0, len(chunks), BLOCK):
            block = chunks[at : at + BLOCK]
            # if few chunks repeat, one call for all is faster
            if len(block) > FEW and 2 * len(set(block).difference(self)) > len(block):
                ids += encode_whole(self._backend, "".join(block))
            else:
                ids += chain.from_iterable(map(self.__getitem__, block))
        return ids


def encode_whole(backend: "tokenizers.Tokenizer", text: str) -> list[int]:
    if len(text) < LONG:
        return backend.encode(text, add_special_tokens=False).ids
    # encode_batch_fast omits offsets: half the time, but later forks warn
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
