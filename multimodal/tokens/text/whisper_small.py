"""Whisper's format with a trained vocabulary: byte-level tokens, few languages, few timestamps."""

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError, UsageError
from multimodal.tokens.text.bytepair import SPECIALS, BytePairTokenizer
from multimodal.tokens.text.languages import LANGUAGES
from multimodal.tokens.text.tiktokens import WORDS, WhisperTokenizer, read_ranks
from multimodal.tokens.text.tokenizer import naming, write_record, write_text

FILE = "ranks.tiktoken"
MOST_TOKEN = 1000  # bytes
MOST_TIMESTAMPS = 1501  # Whisper's 30 s


class SmallWhisperTokenizer(WhisperTokenizer):
    """Text, `<|endoftext|>`, `<|startoftranscript|>`, languages, six tasks, then the timestamps 0.00, 0.02, … of a
    shorter window: the order of Whisper's multilingual vocabulary."""

    def __init__(self, ranks: dict[bytes, int], languages: Sequence[str], timestamps: int):
        """`ranks`: id and merge rank of each token, from 0 on.

        Raises UsageError for unknown or repeated languages, and unless `timestamps` is 2 to 1,501; CheckpointError for
        ranks that lack a byte or a number, or with a token that no merge makes."""
        if not languages or len(set(languages)) != len(languages) or not set(languages) <= set(LANGUAGES):
            raise UsageError(f"languages: must be Whisper's codes, each once (got {list(languages)!r:.60})")
        if not 2 <= timestamps <= MOST_TIMESTAMPS:
            raise UsageError(f"timestamps: must be 2 to {MOST_TIMESTAMPS} (got {timestamps})")
        import tiktoken

        _check(ranks)
        self.ranks = ranks
        encoding = tiktoken.Encoding("own", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={})
        self._build(encoding, len(ranks), tuple(languages), timestamps)
        self.multilingual, self.timestamps = True, timestamps

    @classmethod
    def train(
        cls, texts: Iterable[str], size: int, languages: Sequence[str], timestamps: int
    ) -> "SmallWhisperTokenizer":
        """Learn `size` text tokens (256 bytes and merges; fewer if the texts have no more pairs).

        Whisper's texts begin with a space, so that a first word has the same tokens as inside a sentence."""
        learnt = BytePairTokenizer.train(texts, size + len(SPECIALS))
        return cls({token: i for i, token in enumerate(learnt.token_bytes()[len(SPECIALS) :])}, languages, timestamps)

    def non_speech_tokens(self) -> tuple[int, ...]:
        """Whisper's list, as far as its marks are one token here: parts of one may be parts of words."""
        marks = [*'"#()*+/:;<=>@[\\]^_`{|}~', "<<", ">>", "--", "((", "))", "[[", "]]"]
        encoded = [self._encode(text) for mark in marks for text in (mark, " " + mark)]
        encoded += [self._encode(" -"), self._encode(" '")]
        return tuple(sorted({ids[0] for ids in encoded if len(ids) == 1}))

    def save(self, folder: Path | str) -> None:
        """Write the ranks in tiktoken's format, and the record."""
        lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in self.ranks.items())
        write_text(Path(folder) / FILE, "".join(lines))
        record = {"kind": "whisper-small", "languages": list(self.languages), "timestamps": self.timestamps}
        write_record(folder, record)


def whisper_small_from(folder: Path, settings: dict[str, Any]) -> SmallWhisperTokenizer:
    """Build from a record and the ranks beside it. Raises CheckpointError, UsageError for the record's values."""
    ranks = read_ranks(folder / FILE)
    if not all(isinstance(code, str) for code in settings["languages"]):
        raise UsageError(f"languages: must be codes of Whisper's languages (got {settings['languages']!r:.60})")
    with naming(folder / FILE):
        return SmallWhisperTokenizer(ranks, **settings)


def _check(ranks: dict[bytes, int]) -> None:
    if list(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"the ranks of {len(ranks)} tokens must be 0 to {len(ranks) - 1} in order")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"lacks {len(missing)} of the 256 bytes, first {missing[0]}")
    if (longest := max(map(len, ranks))) > MOST_TOKEN:  # their cuts are tried
        raise CheckpointError(f"a token of {longest} bytes, more than {MOST_TOKEN}")
    for token, rank in ranks.items():
        cuts = ((ranks.get(token[:i], rank), ranks.get(token[i:], rank)) for i in range(1, len(token)))
        if len(token) != 1 and not any(max(pair) < rank for pair in cuts):
            raise CheckpointError(f"token {token!r:.40} is not a merge of two earlier tokens")
