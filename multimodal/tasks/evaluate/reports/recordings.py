"""Recordings of a report's utterances, and when each word was said."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from multimodal.data.sources import Source
from multimodal.models.speech.seq2seq import SpeechSeq2Seq
from multimodal.tasks.evaluate.transcripts import Utterance
from multimodal.tasks.report.media import UNREADABLE, recording
from multimodal.tasks.transcribe.transcribe import transcribe_many
from multimodal.tokens.audio.reading import SAMPLE_RATE, stream_audio
from multimodal.weights.folder import Checkpoint

LONGEST = 60.0  # seconds of an utterance


class Recording(NamedTuple):
    """`uri`: the sound. `times`: seconds of each word found, None where unknown. `seconds`: of the whole utterance."""

    uri: str
    times: Sequence[float | None]
    seconds: float

    def html(self) -> str:
        cut = f"<small>the first {LONGEST:g} s of {self.seconds:.0f} s</small>" if self.seconds > LONGEST else ""
        return f"<audio controls src='{self.uri}'></audio>{cut}"


def recordings(
    utterances: Sequence[Utterance], normal: Callable[[str], str], source: Source, checkpoint: Checkpoint,
    options: Mapping[str, Any],
) -> dict[int, Recording]:  # fmt: skip
    """By the key of each utterance that can still be read; one warning names the others. Word times come from
    transcribing the same seconds again, except in translations, whose words nobody said, and with models that give
    none."""
    waves, sounds, faults = {}, {}, []
    for one in utterances:
        try:
            track = options.get("audio_track")
            sound = source.read(one.key).media
            waves[one.key] = next(stream_audio(sound, SAMPLE_RATE, LONGEST, "ignore", None, [], track))
            sounds[one.key] = recording(waves[one.key])
        except UNREADABLE as error:
            faults.append(error)
    if faults:
        warnings.warn(f"cannot play {len(faults)} of {len(utterances)} recordings ({faults[0]})", stacklevel=2)
    untimed = options.get("task") == "translate" or isinstance(checkpoint.model, SpeechSeq2Seq)
    spoken = {} if untimed else _timed(waves, checkpoint, options)
    found = {one.key: [edit.found for edit in one.edits if edit.found] for one in utterances}
    return {
        one.key: Recording(uri, word_times(found[one.key], spoken.get(one.key, []), normal), one.seconds)
        for one in utterances if (uri := sounds.get(one.key))
    }  # fmt: skip


def _timed(
    waves: Mapping[int, Float[Tensor, "T"]], checkpoint: Checkpoint, options: Mapping[str, Any]
) -> dict[int, list[tuple[str, float]]]:
    """Words and their times of each recording; none for one that fails now."""
    again = {**options, "word_timestamps": True, "audio_track": None}
    results = transcribe_many(waves.items(), checkpoint, keyed=True, **again)
    return {
        key: [(word["word"], word["start"]) for segment in result["segments"] for word in segment["words"]]
        for key, result in results if not isinstance(result, Exception)
    }  # fmt: skip


def word_times(
    found: Sequence[str], spoken: Sequence[tuple[str, float]], normal: Callable[[str], str]
) -> list[float | None]:
    """The time of each normalized word. `spoken`: words as the model wrote them, which the normalizer may have split,
    joined or dropped."""
    from rapidfuzz.distance import Levenshtein

    parts = [(part, time) for word, time in spoken for part in normal(word).split()]
    times: list[float | None] = [None] * len(found)
    for step in Levenshtein.opcodes(found, [part for part, _ in parts]):
        for place, other in zip(
            range(step.src_start, step.src_end), range(step.dest_start, step.dest_end), strict=False
        ):
            times[place] = parts[other][1]
    return times
