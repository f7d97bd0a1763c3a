"""GPT-2's and Whisper's vocabularies in tiktoken, from the rank files in assets/vocabularies."""

import binascii
import gzip
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from multimodal.errors import CheckpointError, UsageError
from multimodal.system.assets import asset
from multimodal.tokens.text.bytepair import byte_letters, byte_level
from multimodal.tokens.text.languages import LANGUAGES, language_code
from multimodal.tokens.text.tokenizer import Tokenizer, write_record

if TYPE_CHECKING:
    import tiktoken

# GPT-2's split into words (Radford et al. 2019) with fewer alternatives and the lookahead last: 1.3 times as fast.
# `\s++$` changes no match, but saves stack at a text's end
WORDS = r"""(?:'(?:[sdmt]|ll|ve|re)| ?(?:\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+))|\s++$|\s+(?!\S)|\s"""
# blanks of tiktoken's \s (Python's has four more); a run of about 1e6 overflows its stack
LONGEST_BLANK = 10_000
_LONG_BLANK = re.compile(rf"[^\S\x1c-\x1f]{{{LONGEST_BLANK},}}")
_NEXT_BLANK = re.compile(r"(?<=[\S\x1c-\x1f])[^\S\x1c-\x1f]")  # a text can be split before the first blank after a word
LEAST = 50_000  # characters per thread
_RANKS = {"gpt2": 50256, "multilingual": 50257}


def read_ranks(path: Path) -> dict[bytes, int]:
    """Tokens and ranks of a file in tiktoken's format (`.gz`: compressed). Raises CheckpointError."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        pairs = (line.split() for line in data.splitlines() if line)
        return {binascii.a2b_base64(token): int(rank) for token, rank in pairs}
    except (OSError, EOFError, zlib.error, ValueError, binascii.Error) as error:
        raise CheckpointError(f"{path}: not a list of tokens and ranks ({error})") from None


@lru_cache(maxsize=2)
def _encoding(name: Literal["gpt2", "multilingual"]) -> "tiktoken.Encoding":
    """The vocabulary without control tokens, so that no text can spell one."""
    import tiktoken

    path = asset("vocabularies", f"{name}.tiktoken.gz")
    ranks = read_ranks(path)
    if sorted(ranks.values()) != list(range(_RANKS[name])):
        raise CheckpointError(f"{path}: {len(ranks)} tokens, not {_RANKS[name]}")
    return tiktoken.Encoding(name, pat_str=WORDS, mergeable_ranks=ranks, special_tokens={})


class _TiktokenTokenizer(Tokenizer):
    """Plain ids from tiktoken, control ids from our own table."""

    def __init__(self, encoding: "tiktoken.Encoding", size: int, controls: Sequence[str]):
        self._encoding = encoding
        self.plain_size = size
        self.control_ids = {token: self.plain_size + i for i, token in enumerate(controls)}
        self.control = frozenset(self.control_ids.values())
        self.vocab_size = self.plain_size + len(controls)
        self._bytes = [token.encode() for token in controls]

    def _encode(self, text: str) -> list[int]:
        threads = min(torch.get_num_threads(), len(text) // LEAST)
        parts = [part for whole in _parts(text, threads) for part in _without_long_blanks(whole)]
        if len(parts) == 1:
            return self._encoding.encode_ordinary(text)
        return list(chain.from_iterable(self._encoding.encode_ordinary_batch(parts, num_threads=max(1, threads))))

    def pipeline(self) -> dict[str, Any]:
        """Byte-level BPE with the merges that the ranks imply. Takes a second for 50,000 tokens."""
        letters = byte_letters()
        ranks = self._encoding._mergeable_ranks
        names = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
        merges = [[names[part] for part in parts] for token in ranks if len(parts := _merged(ranks, token)) == 2]
        return byte_level({name: ranks[token] for token, name in names.items()}, merges)

    def _decode(self, ids: list[int]) -> str:
        parts = (
            self._bytes[i - self.plain_size] if i >= self.plain_size else self._encoding.decode_single_token_bytes(i)
            for i in ids
        )
        return b"".join(parts).decode("utf-8", errors="replace")


def _parts(text: str, count: int) -> list[str]:
    """Split a text into at most `count` parts of similar length, before a blank that follows another character, which
    no word crosses."""
    cuts = [0]
    for number in range(1, count):
        if match := _NEXT_BLANK.search(text, max(cuts[-1] + 1, number * len(text) // count)):
            cuts.append(match.start())
    return [text[start:end] for start, end in pairwise([*cuts, len(text)])]


def _without_long_blanks(text: str) -> list[str]:
    """Split after long runs of blanks, less the last one, which belongs to the next word."""
    half = LONGEST_BLANK // 2  # a long run fills at least one such slice
    if not any(text[at : at + half].isspace() for at in range(0, len(text) - half, half)):
        return [text]
    ends = [run.end() - (run.end() < len(text)) for run in _LONG_BLANK.finditer(text)]
    return [text[start:end] for start, end in pairwise([0, *ends, len(text)])]


def _merged(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """The tokens of lower rank that become this one."""
    parts, own = [bytes([byte]) for byte in token], ranks[token]
    while len(parts) > 1:
        rank, at = min((ranks.get(a + b, own), at) for at, (a, b) in enumerate(pairwise(parts)))
        if rank >= own:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


class GPT2Tokenizer(_TiktokenTokenizer):
    """GPT-2's 50,257 ids. `<|endoftext|>` (50256) ends a text and pads; GPT-2 has no bos."""

    pad_id = eos_id = 50256

    def __init__(self):
        super().__init__(_encoding("gpt2"), _RANKS["gpt2"], ["<|endoftext|>"])

    def save(self, folder: Path | str) -> None:
        write_record(folder, {"kind": "gpt2"})


class WhisperTokenizer(_TiktokenTokenizer):
    """Whisper's ids (Radford et al. 2022): text, then `<|endoftext|>`, tasks, languages and 1,501 timestamps.

    `languages` is 99, or 100 (Cantonese) for large-v3 and later, which shifts later ids by one. A `batch` is
    <|startoftranscript|> text <|endoftext|>; a decoder's prompt is `sot_sequence`."""

    SECONDS_PER_TIMESTAMP = 0.02

    def __init__(self, multilingual: bool, languages: int = 99):
        """Raises UsageError unless `languages` is 99, or 100 with `multilingual`."""
        if languages not in ((99, 100) if multilingual else (99,)):
            raise UsageError(
                f"languages: must be 99, or 100 for multilingual models from large-v3 on (got {languages})"
            )
        self.multilingual = multilingual
        name = "multilingual" if multilingual else "gpt2"
        self._build(_encoding(name), _RANKS[name], tuple(LANGUAGES)[:languages], 1501)

    def _build(self, encoding: "tiktoken.Encoding", size: int, languages: tuple[str, ...], timestamps: int) -> None:
        self.languages = languages
        stamps = [f"<|{i * self.SECONDS_PER_TIMESTAMP:.2f}|>" for i in range(timestamps)]
        names = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
        marks = ["endoftext", "startoftranscript", *languages, *names]
        super().__init__(encoding, size, [f"<|{m}|>" for m in marks] + stamps)
        self.eot, self.sot, *_ = self.control_ids.values()
        self.translate, self.transcribe, self.sot_lm, self.sot_prev, self.no_speech, self.no_timestamps = (
            self.control_ids[f"<|{name}|>"] for name in names
        )
        self.timestamp_begin = self.no_timestamps + 1
        self.bos_id, self.eos_id, self.pad_id = self.sot, self.eot, self.eot

    def misplaced(self, tokens: Mapping[str, int]) -> int:
        """Number of tokens that another vocabulary, in GPT-2's letters for bytes, lacks or has elsewhere; it may lack
        control tokens."""
        letters, ranks = byte_letters(), self._encoding._mergeable_ranks
        plain = {token.decode("latin-1").translate(letters): i for token, i in ranks.items() if token}
        count = sum(tokens.get(token) != i for token, i in plain.items())
        return count + sum(tokens.get(token, i) != i for token, i in self.control_ids.items())

    @property
    def language_tokens(self) -> tuple[int, ...]:
        """Ids of the language tokens in the order of `languages`."""
        return tuple(range(self.sot + 1, self.sot + 1 + len(self.languages)))

    def language_token(self, language: str) -> int:
        """Id of a language given by code or name. Raises UsageError if the model lacks it."""
        code = language_code(language)
        if code not in self.languages:
            raise UsageError(f"language {language!r} is not one of the {len(self.languages)} of this model")
        return self.control_ids[f"<|{code}|>"]

    def sot_sequence(
        self, language: str | None = None, task: Literal["transcribe", "translate"] = "transcribe",
        timestamps: bool = True,
    ) -> tuple[int, ...]:  # fmt: skip
        """Ids that a decoder starts from; English-only models have no language and task token."""
        end = () if timestamps else (self.no_timestamps,)
        if not self.multilingual:
            if language is not None and language_code(language) != "en":
                raise UsageError(f"language {language!r}: this model is English-only")
            if task != "transcribe":
                raise UsageError(f"task {task!r}: an English-only model can only transcribe")
            return (self.sot, *end)
        if language is None:
            raise UsageError("language: a multilingual Whisper model needs one; detect or name it")
        if task not in ("transcribe", "translate"):
            raise UsageError(f"task must be 'transcribe' or 'translate' (got {task!r})")
        return (self.sot, self.language_token(language), self.control_ids[f"<|{task}|>"], *end)

    def non_speech_tokens(self) -> tuple[int, ...]:
        """Ids to suppress against speaker tags, brackets and music notes (openai/whisper)."""
        notes = "♩♪♫♬♭♮♯"  # several tokens each; the first ones are shared with other symbols only
        marks = [*'"#()*+/:;<=>@[\\]^_`{|}~「」『』', *notes]
        marks += ["<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))"]
        marks += ["[[", "]]", "{{", "}}", "♪♪", "♪♪♪"]
        # a hyphen or apostrophe may stand inside a word, but not begin one
        first = {self._encode(" -")[0], self._encode(" '")[0]}
        for mark in marks:
            for ids in (self._encode(mark), self._encode(" " + mark)):
                if len(ids) == 1 or mark in notes:
                    first.add(ids[0])
        return tuple(sorted(first))

    def suppressed_tokens(self, listed: Sequence[int] | None = (-1,)) -> list[int]:
        """Ids that are never written: the `listed`, of which -1 stands for `non_speech_tokens`, and the control tokens
        of a prompt. As in openai-whisper, an empty list allows even these."""
        if not listed:
            return []
        own = (self.transcribe, self.translate, self.sot, self.sot_prev, self.sot_lm, self.no_speech)
        return sorted({*(i for i in listed if i >= 0), *(self.non_speech_tokens() if -1 in listed else ()), *own})

    def save(self, folder: Path | str) -> None:
        record = {"kind": "whisper", "multilingual": self.multilingual, "languages": len(self.languages)}
        write_record(folder, record)
