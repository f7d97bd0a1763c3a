"""Near duplicates of pages: MinHash signatures of word 5-grams (Broder 1997), in bands, by datasketch."""

from hashlib import blake2b
from typing import NamedTuple

import numpy as np

HASHES, WORDS = 128, 5


class Signature(NamedTuple):
    """`values`: the hashes as bytes. `bands`: a key for each; pages that share one may be alike."""

    values: bytes
    bands: list[int]


class Signatures:
    """Make signatures of texts, in the bands that fit a Jaccard `threshold`."""

    def __init__(self, threshold: float):
        from datasketch import MinHash, MinHashLSH  # slow, by scipy

        self._new = MinHash(HASHES)
        # above, a single band would fit best, which datasketch refuses
        self.bands, self.rows = (index := MinHashLSH(min(threshold, 0.98), HASHES)).b, index.r

    def __call__(self, text: str) -> Signature:
        words = text.lower().split()
        grams = {" ".join(words[at : at + WORDS]).encode() for at in range(max(1, len(words) - WORDS + 1))}
        signature = self._new.copy()
        signature.update_batch(list(grams))
        values = np.asarray(signature.hashvalues, "<u8").tobytes()
        size = 8 * self.rows
        parts = (number.to_bytes(2, "little") + values[size * number : size * (number + 1)]
                 for number in range(self.bands))  # fmt: skip
        keys = [int.from_bytes(blake2b(part, digest_size=8).digest(), "little", signed=True) for part in parts]
        return Signature(values, keys)


def similarity(a: bytes, b: bytes) -> float:
    """Estimate the Jaccard similarity of two texts from the values of their signatures."""
    return float(np.mean(np.frombuffer(a, "<u8") == np.frombuffer(b, "<u8")))
