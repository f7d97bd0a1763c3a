"""Word and character error rates of transcripts against references, with the errors aligned word by word."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from multimodal.data.pending import PendingItems
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import USUAL, ListColumns, Sample, open_source
from multimodal.errors import DataError, MultimodalError
from multimodal.tasks.evaluate.scores import error_rates, normalizer, normalizer_name
from multimodal.tasks.transcribe.transcribe import transcribe_many
from multimodal.tokens.text.tokenizer import checked
from multimodal.weights.folder import Checkpoint

Kind = Literal["same", "substitution", "deletion", "insertion"]
KINDS: dict[str, Kind] = {
    "equal": "same", "substitute": "substitution", "delete": "deletion", "insert": "insertion"
}  # fmt: skip
MOST_COMMON, MOST_WRONG = 10, 20  # errors of a kind, and utterances, that a report names


class WordEdit(NamedTuple):
    """A word wanted and what was found for it; the one that is not there is empty."""

    kind: Kind
    wanted: str
    found: str


class TranscribedItem(NamedTuple):
    """`key`: of the recording in its source. `name`: "list.jsonl line 3: path". Texts as they came; the language the
    model took; how much is damaged."""

    key: int
    name: str
    wanted: str
    found: str
    seconds: float
    language: str | None
    damaged: int


@dataclass(frozen=True)
class Utterance:
    """The edits that turn the normalized words wanted into those found, as few as can be."""

    key: int
    name: str
    seconds: float
    edits: list[WordEdit]

    @property
    def words(self) -> int:
        return sum(edit.kind != "insertion" for edit in self.edits)

    @property
    def errors(self) -> int:
        return sum(edit.kind != "same" for edit in self.edits)

    @property
    def rate(self) -> float:
        """Errors a word wanted; where none is wanted, a word."""
        return self.errors / max(1, self.words)


@dataclass(frozen=True)
class TranscriptEvaluation:
    """`wer` and `cer`: all errors over all words, or characters, wanted. `broken`: what was left out and why.
    `normal`: what the texts were compared after, and its name."""

    normalizer: str
    normal: Callable[[str], str]
    wer: float | None
    cer: float | None
    audio_seconds: float
    compute_seconds: float
    damaged: int
    utterances: list[Utterance]
    broken: list[str]

    def figures(self) -> dict[str, Any]:
        """`wer`, `cer`: None where no word is wanted. `rtfx`: seconds of sound a second of computing, in which reading
        and voice detection count and loading of the model does not."""
        kinds = Counter(edit.kind for one in self.utterances for edit in one.edits)
        words = sum(one.words for one in self.utterances)
        return {
            "utterances": len(self.utterances), "words": words, "wer": self.wer, "cer": self.cer,
            **{f"{kind}s": kinds[kind] for kind in KINDS.values() if kind != "same"},
            "sentence_error_rate": sum(one.errors > 0 for one in self.utterances) / len(self.utterances),
            "audio_seconds": round(self.audio_seconds, 2), "compute_seconds": round(self.compute_seconds, 2),
            "rtfx": round(self.audio_seconds / max(self.compute_seconds, 1e-9), 1), "normalizer": self.normalizer,
            "damaged": self.damaged, "broken": len(self.broken),
        }  # fmt: skip

    def common(self, kind: Kind) -> list[tuple[str, int]]:
        """The most frequent errors of a kind, and how often each is there."""
        found = Counter(
            f"{edit.wanted} → {edit.found}" if kind == "substitution" else edit.wanted or edit.found
            for one in self.utterances for edit in one.edits if edit.kind == kind
        )  # fmt: skip
        return found.most_common(MOST_COMMON)

    def worst(self) -> list[Utterance]:
        wrong = [one for one in self.utterances if one.errors]
        return sorted(wrong, key=lambda one: (-one.rate, -one.errors))[:MOST_WRONG]


def evaluate(
    manifest: str | Path, checkpoint: Checkpoint, *, normalizer_name: str | None = None, keep_marks: bool = False,
    limit: int | None = None, trust: Trust = OWN_FOLDER, columns: ListColumns = USUAL,
    watch: Callable[[int, int, int], None] = lambda *_: None, **options: Any,
) -> TranscriptEvaluation:  # fmt: skip
    """Transcribes the recordings of a manifest ({"audio_filepath", "text"} a line, CSV, or WebDataset tars) with the
    `options` of `transcribe_many`, and compares.

    `normalizer_name` None: that of the language of most of it (`scores.normalizer_name`). A line or recording that
    cannot be used is left out and named. `watch(done, of, broken)`. Raises DataError where nothing can be compared,
    UsageError, CheckpointError."""
    if normalizer_name is not None or keep_marks:  # told before an hour of work
        normalizer(normalizer_name or "basic", keep_marks)
    source = open_source(manifest, columns=columns, trust=trust)
    items = PendingItems(source, range(len(source))[:limit], _check)
    results = transcribe_many(items.keyed(), checkpoint, keyed=True, **options)
    began, heard = time.perf_counter(), []
    for key, result in results:
        if isinstance(result, MultimodalError):
            items.skip(key, result)
        else:
            language = "en" if options.get("task") == "translate" else result["language"]
            row = source.row(key)
            name = row.place if row.place == row.name else f"{row.place}: {Path(row.name).name}"
            heard.append(TranscribedItem(
                key, name, row.texts[0], result["text"], result["duration"], language, len(result["damaged"])
            ))  # fmt: skip
        watch(len(heard) + len(items.broken), len(items.keys), len(items.broken))
    seconds, broken = time.perf_counter() - began, items.causes()
    if not heard:
        raise DataError(f"{manifest}: no utterance could be evaluated ({broken[0]})")
    return compared(heard, broken, seconds, normalizer_name, keep_marks)


def _check(sample: Sample) -> None:
    if len(sample.texts) != 1:
        raise DataError(f"has {len(sample.texts)} texts, not one")
    checked(sample.texts[0])


def compared(
    heard: Iterable[TranscribedItem],
    broken: list[str],
    seconds: float,
    name: str | None = None,
    keep_marks: bool = False,
) -> TranscriptEvaluation:
    """The figures of texts that were transcribed in so many seconds."""
    heard = list(heard)
    ((language, _),) = Counter(one.language for one in heard).most_common(1)
    chosen = normalizer_name(language, name, keep_marks)
    normal = normalizer(chosen, keep_marks)
    texts = [(normal(one.wanted), normal(one.found)) for one in heard]
    wer, cer = error_rates(*zip(*texts, strict=True), [chosen] * len(texts))
    utterances = [
        Utterance(one.key, one.name, one.seconds, aligned(*pair)) for one, pair in zip(heard, texts, strict=True)
    ]
    damaged, length = sum(one.damaged > 0 for one in heard), sum(one.seconds for one in heard)
    label = "none" if chosen == "none" else f"whisper {chosen}{', marks kept' if keep_marks else ''}"
    return TranscriptEvaluation(label, normal, wer, cer, length, seconds, damaged, utterances, broken)


def aligned(wanted: str, found: str) -> list[WordEdit]:
    """Word by word with the fewest errors (jiwer)."""
    import jiwer

    result = jiwer.process_words(wanted, found)
    (words,), (others,), (parts,) = result.references, result.hypotheses, result.alignments
    edits = []
    for part in parts:
        a, b = words[part.ref_start_idx : part.ref_end_idx], others[part.hyp_start_idx : part.hyp_end_idx]
        pairs = zip(a or [""] * len(b), b or [""] * len(a), strict=True)
        edits += [WordEdit(KINDS[part.type], *pair) for pair in pairs]
    return edits
