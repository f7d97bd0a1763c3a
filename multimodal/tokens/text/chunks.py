"""Texts encoded by chunks: words repeat, and what a vocabulary makes of a repeated one is looked up."""

import re
from abc import abstractmethod
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

MOST_CHUNKS, LONGEST_CHUNK = 1 << 16, 40  # kept: about 20 MB at most
BLOCK = 8192  # chunks of a long text that are looked at together
FEW = 1000  # chunks, of which all are worth keeping
LONG = 100_000  # characters
# blanks as the libraries' \s has them (Python's has four more), and what follows them up to the next
AT_BLANKS = re.compile(r"[^\S\x1c-\x1f]*+[\S\x1c-\x1f]++|[^\S\x1c-\x1f]++")


class Chunks(dict[str, list[int]]):
    """Ids of chunks, for a split into words that no word crosses: a chunk's ids are the same wherever it stands. Those
    of short ones are kept."""

    @abstractmethod
    def one(self, chunk: str) -> list[int]:
        """Ids of a chunk that is not kept."""

    def __missing__(self, chunk: str) -> list[int]:
        ids = self.one(chunk)
        if len(chunk) <= LONGEST_CHUNK:
            if len(self) >= MOST_CHUNKS:
                self.clear()
            self[chunk] = ids
        return ids


class BackendChunks(Chunks):
    """Of a pipeline of the `tokenizers` library that always splits where `pattern`, which leaves out no character,
    does, and there looks at nothing beyond."""

    def __init__(self, backend: "tokenizers.Tokenizer", pattern: re.Pattern[str] = AT_BLANKS):
        self._backend, self._pattern = backend, pattern

    def one(self, chunk: str) -> list[int]:
        return self._backend.encode(chunk, add_special_tokens=False).ids

    def encode(self, text: str) -> list[int]:
        chunks, ids = self._pattern.findall(text), []
        for at in range(0, len(chunks), BLOCK):
            block = chunks[at : at + BLOCK]
            # where hardly a chunk repeats, one call is quicker than one for each
            if len(block) > FEW and 2 * len(set(block).difference(self)) > len(block):
                ids += encode_whole(self._backend, "".join(block))
            else:
                ids += chain.from_iterable(map(self.__getitem__, block))
        return ids


def encode_whole(backend: "tokenizers.Tokenizer", text: str) -> list[int]:
    if len(text) < LONG:
        return backend.encode(text, add_special_tokens=False).ids
    # without the places of tokens in the text: half the time, but forks after it are warned of
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
