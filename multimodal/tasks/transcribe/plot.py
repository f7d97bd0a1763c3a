"""Transcript plot: log-mel spectrogram, timed words, voice activity, and the spans skipped."""

import itertools
import math
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from multimodal.tasks.figures import fonts, new_figure, png, shown
from multimodal.tasks.transcribe.vad import FRAME, SpeechDetector, VadOptions, speech_spans
from multimodal.tokens.audio.log_mel import BANK_FFT, BANK_MEAN, BANK_SCALE, HOP, RATE, filterbank, mel_filters
from multimodal.tokens.audio.reading import stream_audio

BANDS = 80
ROWS = 20
ROW_SECONDS = (12.0, 30.0)  # words are readable up to about 15 s a row; 30 s is the limit
LANES = 4  # lines of words above a spectrogram
RANGE = 70.0  # dB shown below the loudest band
WIDTH = 16.0  # inches
FONT = 8.0  # points
COLOURS = {"silence": "tab:gray", "no_speech": "tab:purple", "unlikely": "tab:pink", "repetition": "tab:orange",
           "hallucination": "gold", "clip": "tab:brown", "damaged": "red"}  # fmt: skip
TRANSCRIBED, VOICE = "tab:cyan", "lime"
CURVE = 20.0  # height of probability 1 in bands
SPEAKER_COLOURS = ["black", "tab:blue", "tab:purple", "tab:brown"]
BAR, LANE = 7.0, 13.0  # heights of a word's bar and of a line of words in bands
DECIBELS = 10 / math.log(10)


def rows(seconds: float) -> tuple[float, int, float]:
    """(seconds per row, rows, seconds not drawn at the end)."""
    least, most = ROW_SECONDS
    length = min(most, max(least, seconds / ROWS))
    count = max(1, min(ROWS, math.ceil(seconds / length - 1e-6)))
    if seconds < length * count:
        length = max(0.1, seconds / count)
    return length, count, max(0.0, seconds - length * count)


def plot_transcript(
    result: dict[str, Any], audio: str | Path | bytes, title: str, audio_track: int | None = None
) -> bytes:
    """Draw the `transcribe` result of a recording as a PNG of at most 20 rows of up to 30 s.

    Words are coloured by probability, segments without word times by their average token probability. Raises
    AudioError."""
    waves = _waves(audio, result, audio_track)
    length, count, omitted = rows(float(result["duration"]))
    rest = f"; the last {omitted:.1f} s are not drawn" if omitted else ""
    figure = new_figure((WIDTH, 1.1 + 2.2 * count), f"{title}: {result['duration']:.1f} s{rest}", dpi=100)
    axes = figure.subplots(count, 1, squeeze=False)[:, 0]
    row_waves = list(itertools.islice(waves, count))
    pieces = [_decibels(wave) for wave in row_waves]
    voice, probabilities = _voice(row_waves)
    top = max((float(piece.max()) for piece in pieces), default=0.0)
    image = None
    for number, row in enumerate(axes):
        start = number * length
        if number < len(pieces):
            extent = (start, start + pieces[number].shape[1] * HOP / RATE, 0, BANDS)
            image = row.imshow(pieces[number].numpy(), origin="lower", aspect="auto", extent=extent, cmap="magma",
                               vmin=top - RANGE, vmax=top, interpolation="nearest")  # fmt: skip
        _draw(row, result, start, start + length)
        _draw_voice(row, voice, probabilities)
    axes[-1].set_xlabel("time (s)")
    _legends(figure, axes, image, result)
    return png(figure)


def _waves(audio: str | Path | bytes, result: dict[str, Any], track: int | None) -> Iterator[Float[Tensor, "T"]]:
    """The audio of each row, without warnings: transcription already gave them."""
    length, _, _ = rows(float(result["duration"]))
    return stream_audio(audio, RATE, round(length * RATE) / RATE, "ignore", damage=[], audio_track=track)


def _decibels(wave: Float[Tensor, "T"]) -> Float[Tensor, "M F"]:
    """Mel power in dB; a full-scale sine is about 0."""
    loudest = float(mel_filters(BANDS, BANK_FFT).max()) * (400 / 4) ** 2  # half a Hann window's sum, squared
    return (filterbank(wave, BANDS).T * BANK_SCALE + BANK_MEAN - math.log(loudest)) * DECIBELS


def _voice(waves: list[Tensor]) -> tuple[list[tuple[float, float]], list[float]]:
    """Spans of speech in seconds, unpadded, and the detector's probability for each frame."""
    detector = SpeechDetector()
    for wave in waves:
        detector.push(wave)
    probabilities, samples = detector.probabilities(), sum(map(len, waves))
    spans = speech_spans(probabilities, samples, VadOptions(min_silence_duration_ms=100, speech_pad_ms=0))
    return [(a / RATE, b / RATE) for a, b in spans], probabilities.tolist()


def _draw_voice(row: Any, voice: list[tuple[float, float]], probabilities: list[float]) -> None:
    """Spans of speech above those transcribed, and the probability, scaled to CURVE."""
    start, end = row.get_xlim()
    for a, b in voice:
        if a < end and b > start:
            row.hlines(5, max(a, start), min(b, end), color=VOICE, lw=4)
    first, last = int(start * RATE / FRAME), math.ceil(end * RATE / FRAME)
    own = probabilities[first:last]
    row.plot([(first + i + 0.5) * FRAME / RATE for i in range(len(own))], [CURVE * p for p in own], color=VOICE, lw=0.8)


def _draw(row: Any, result: dict[str, Any], start: float, end: float) -> None:
    """One row: frequencies, spans, words."""
    ticks = [500.0, 1000.0, 2000.0, 4000.0]
    row.set_yticks([_band(hertz) for hertz in ticks], [f"{hertz / 1000:g}" for hertz in ticks])
    row.spines[["top", "right"]].set_visible(False)
    for span in [*result.get("skipped", ()), *({**s, "reason": "damaged"} for s in result.get("damaged", ()))]:
        a, b = max(span["start"], start), min(span["end"], end)
        if a < b:
            row.add_patch(_patch(span["reason"], (a, 0), b - a, BANDS))
    for a, b in result.get("transcribed", ()):
        if a < end and b > start:
            row.hlines(1, max(a, start), min(b, end), color=TRANSCRIBED, lw=4)
    words, base = list(spoken(result)), BANDS + 1.0
    row.set_xlim(start, end)
    for number, speaker in enumerate(dict.fromkeys(word["speaker"] for word in words)):
        own = [w for w in words if w["speaker"] == speaker and w["start"] < end and w["end"] >= start]
        ends = [-math.inf] * LANES
        for word in own:
            _write(row, word, ends, base, SPEAKER_COLOURS[number % len(SPEAKER_COLOURS)])
        base += BAR + LANE * max(1, sum(taken > -math.inf for taken in ends))
    row.set(ylim=(0, max(base, BANDS + BAR + LANE)), ylabel="frequency (kHz)")


def _patch(reason: str, *rectangle: Any, **options: Any) -> Any:
    from matplotlib.patches import Rectangle

    rectangle = rectangle or ((0, 0), 1, 1)
    colour = COLOURS.get(reason, "tab:pink")
    return Rectangle(*rectangle, facecolor=colour, alpha=0.6, hatch="//", ec="white", lw=0, **options)


def spoken(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Words in order of time, or whole segments without words: `word`, `start`, `end`, `probability`, `speaker`."""
    words = []
    for segment in result["segments"]:
        whole = {"word": segment["text"], "start": segment["start"], "end": segment["end"],
                 "probability": math.exp(min(0.0, segment.get("avg_logprob", 0.0)))}  # fmt: skip
        speaker = segment.get("speaker")
        for number, word in enumerate(segment.get("words") or [whole]):
            name = f"[{speaker}] " if speaker and not number else ""
            words.append({**word, "word": name + word["word"].strip(), "speaker": speaker})
    return iter(sorted((word for word in words if word["word"]), key=lambda word: word["start"]))


def _write(row: Any, word: dict[str, Any], ends: list[float], base: float, ink: str) -> None:
    """A word in the first free lane above `base`, with its span as a bar below and edges on the spectrogram."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colour = colormaps["RdYlGn"](word["probability"])
    start, end = row.get_xlim()
    a, b = max(word["start"], start), min(word["end"], end)
    row.add_patch(Rectangle((a, base), max(b - a, 0.005), 4, facecolor=colour, edgecolor="black", lw=0.3))
    row.vlines([a, b], 0, BANDS + 1, color="white", lw=0.5, alpha=0.6)
    if word["start"] < start:
        return  # the previous row has its text
    text = shown(word["word"])
    each = (end - start) / (WIDTH - 1.6) / 72 * FONT * 0.6  # seconds per character
    width = each * sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)
    fitting = (end - a) / each
    if width > end - a and len(text) > fitting > 8:
        text, width = text[: int(fitting) - 1] + "…", end - a
    lane = next((i for i, taken in enumerate(ends) if taken <= a), min(range(LANES), key=ends.__getitem__))
    ends[lane] = a + width + each
    height = base + BAR + lane * LANE
    row.vlines(a, base, height + 9, color=colour, lw=0.8)
    row.text(a + each * 0.3, height, text, color=ink, fontsize=FONT, va="bottom", parse_math=False,
             fontfamily=fonts(text))  # fmt: skip


def _legends(figure: Any, axes: Any, image: Any, result: dict[str, Any]) -> None:
    """Colour bars of power and probability, and a legend of the spans present."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], color=TRANSCRIBED, lw=4, label="transcribed"),
        Line2D([], [], color=VOICE, lw=4, label="speech by voice activity detection (line: its probability)"),
    ]
    for reason in sorted({span["reason"] for span in result.get("skipped", ())}):
        marks.append(_patch(reason, label=f"skipped: {reason}"))
    if result.get("damaged"):
        marks.append(_patch("damaged", label="damaged"))
    figure.legend(handles=marks, loc="outside lower left", ncols=len(marks), fontsize=8, frameon=False)
    if image is not None:
        figure.colorbar(image, ax=axes[0], label="mel power (dB)", pad=0.005, aspect=20)
    figure.colorbar(ScalarMappable(cmap="RdYlGn"), ax=axes[0], label="word probability", pad=0.005, aspect=20)


def _band(hertz: float) -> float:
    """Position of a frequency on the axis of bands (Slaney's mel scale, linear up to 1 kHz)."""
    top = 15 + 27 * math.log(RATE / 2 / 1000) / math.log(6.4)
    mel = hertz * 3 / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)
    return mel / top * (BANDS + 1) - 0.5
