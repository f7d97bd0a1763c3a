"""Where somebody speaks: silero-vad (snakers4/silero-vad, version 6), its weights from the installed package."""

import functools
import importlib.util
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.errors import CheckpointError, UsageError
from multimodal.tokens.audio.log_mel import RATE
from multimodal.weights.folder import fill
from multimodal.weights.speech.onnx_tensors import read_onnx_tensors

FRAME = 512  # samples a probability, 32 ms
CONTEXT = 64  # samples before each frame that the network sees too
BLOCK = 1024  # frames convolved at once, about 20 MB
SHORTEST_CUT = 98 * RATE // 1000  # samples of a pause at which too long speech may be cut, as in the package
Span = tuple[int, int]

NAMES = {
    "model.stft.forward_basis_buffer": "spectrum.weight",
    **{f"model.encoder.{i}.reparam_conv.{part}": f"convs.{i}.{part}" for i in range(4) for part in ("weight", "bias")},
    **{f"model.decoder.rnn.{part}": f"lstm.{part}_l0" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
    **{f"model.decoder.decoder.2.{part}": f"head.{part}" for part in ("weight", "bias")},
}


@dataclass(frozen=True)
class VadOptions:
    """silero-vad's options with faster-whisper's defaults. `neg_threshold` None: `threshold` - 0.15, at least 0.01.

    Speech begins at a probability of `threshold` and ends where it stays under `neg_threshold` for
    `min_silence_duration_ms`; shorter speech than `min_speech_duration_ms` is dropped, longer than
    `max_speech_duration_s` is cut at its longest pause; `speech_pad_ms` are added on both sides."""

    threshold: float | int = 0.5
    neg_threshold: float | int | None = None
    min_speech_duration_ms: float | int = 0
    max_speech_duration_s: float | int = math.inf
    min_silence_duration_ms: float | int = 2000
    speech_pad_ms: float | int = 400

    def __post_init__(self):
        if not 0 < self.threshold <= 1:
            raise UsageError(f"vad_threshold: must be above 0 and at most 1 ({self.threshold})")
        if self.neg_threshold is not None and not 0 < self.neg_threshold <= self.threshold:
            raise UsageError(f"vad_neg_threshold: must be above 0 and at most vad_threshold ({self.neg_threshold})")
        for name in ("min_speech_duration_ms", "min_silence_duration_ms", "speech_pad_ms"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise UsageError(f"vad_{name}: must be 0 or more ({value})")
        if not self.max_speech_duration_s * RATE >= (least := 2 * FRAME + 2 * self.pad):
            raise UsageError(
                f"vad_max_speech_duration_s: must be at least {least / RATE:g}, two frames and the padding "
                f"({self.max_speech_duration_s:g})"
            )

    @property
    def pad(self) -> float:
        """Samples added on each side."""
        return RATE * self.speech_pad_ms / 1000

    @property
    def release(self) -> float:
        """The probability under which speech ends."""
        return max(self.threshold - 0.15, 0.01) if self.neg_threshold is None else self.neg_threshold


class SileroVad(nn.Module):
    """A short-time spectrum as a convolution, four convolutions over it, and an LSTM over the frames."""

    def __init__(self):
        super().__init__()
        self.spectrum = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        sizes = [(129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1)]
        self.convs = nn.ModuleList(nn.Conv1d(of, to, 3, stride, padding=1) for of, to, stride in sizes)
        self.lstm = nn.LSTM(128, 128)
        self.head = nn.Conv1d(128, 1, 1)

    def forward(
        self, frames: Float[Tensor, "T S"], state: tuple[Tensor, Tensor] | None
    ) -> tuple[Float[Tensor, "T"], tuple[Tensor, Tensor]]:
        """Probabilities of frames that follow each other, each with the CONTEXT before it, and the LSTM's state."""
        x = self.spectrum(F.pad(frames, (0, 64), "reflect")[:, None])
        x = torch.hypot(*x.chunk(2, 1))
        for conv in self.convs:
            x = conv(x).relu()
        x, state = self.lstm(x[..., 0], state)
        return self.head(x.relu().T)[0].sigmoid(), state


@functools.cache
def silero() -> SileroVad:
    """The network with the weights of the installed package, which is not imported: its import would set torch to one
    thread. Raises CheckpointError when the package or its file is missing or unfit."""
    spec = importlib.util.find_spec("silero_vad")
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(
            "silero-vad: the package is not installed, voice activity detection needs it (vad_filter False does not)"
        )
    # the package's .safetensors file holds an older version, whose probabilities differ by up to 0.4
    path = Path(spec.submodule_search_locations[0]) / "data" / "silero_vad_16k_op15.onnx"
    tensors = read_onnx_tensors(path)
    if strange := sorted(tensors.keys() - NAMES.keys()):
        raise CheckpointError(f"{path}: tensor {strange[0]!r} is not of silero-vad 6")
    ours = {NAMES[name]: tensor for name, tensor in tensors.items()}
    with torch.device("meta"):
        model = SileroVad()
    fill(model, ours, str(path))
    return model.eval()


class SpeechDetector:
    """Probabilities of speech of a recording that comes in pieces of any size."""

    def __init__(self):
        self._model, self._state = silero(), None
        self._found = array("f")  # one growing buffer: see pieces.Ear
        self._rest = torch.zeros(CONTEXT)  # the context, and then what does not fill a frame yet

    @torch.inference_mode()
    def push(self, samples: Float[Tensor, "T"]) -> None:
        """Takes the next samples (16 kHz)."""
        for piece in samples.split(BLOCK * FRAME):
            self._rest = torch.cat([self._rest, piece.detach().float().cpu()])
            frames = (len(self._rest) - CONTEXT) // FRAME
            if frames:
                found, self._state = self._model(_framed(self._rest), self._state)
                self._found.frombytes(found.numpy().tobytes())
                self._rest = self._rest[frames * FRAME :].clone()

    @torch.inference_mode()
    def probabilities(self) -> Float[Tensor, "T"]:
        """One for each FRAME of what was taken so far, an unfilled last one with zeros after it."""
        found = torch.tensor(self._found)
        if missing := (CONTEXT - len(self._rest)) % FRAME:
            found = torch.cat([found, self._model(_framed(F.pad(self._rest, (0, missing))), self._state)[0]])
        return found


def _framed(samples: Tensor) -> Tensor:
    return samples.unfold(0, CONTEXT + FRAME, FRAME)


def speech_share(probabilities: Float[Tensor, "T"], start: int, end: int) -> float:
    """Mean probability of speech of the samples from `start` to `end`; 0 of none."""
    frames = probabilities[start // FRAME : -(-end // FRAME)]
    return frames.mean().item() if len(frames) else 0.0


def speech_spans(probabilities: Float[Tensor, "T"], samples: int, options: VadOptions) -> list[Span]:
    """Where speech is, in samples, ascending, equal to `silero_vad.get_speech_timestamps`.

    `probabilities`: one a FRAME of a recording of `samples` samples; ValueError for another number of them."""
    if len(probabilities) != -(-samples // FRAME):
        raise ValueError(f"{len(probabilities)} probabilities are not those of {samples} samples")
    spans, pad = _unpadded(probabilities.tolist(), samples, options), options.pad
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    for i in range(len(spans)):
        if i == 0:
            starts[i] = int(max(0, starts[i] - pad))
        if i + 1 < len(spans) and (pause := starts[i + 1] - ends[i]) < 2 * pad:
            ends[i] += pause // 2
            starts[i + 1] -= pause // 2
            continue
        ends[i] = int(min(samples, ends[i] + pad))
        if i + 1 < len(spans):
            starts[i + 1] = int(max(0, starts[i + 1] - pad))
    return list(zip(starts, ends, strict=True))


def _unpadded(probabilities: list[float], samples: int, options: VadOptions) -> list[Span]:
    """The spans before padding. `quiet`: where a pause that may end the speech began; `pauses`: (begin, length) of
    those inside the going speech at which it may be cut."""
    threshold, release = options.threshold, options.release
    shortest, silence = (RATE * ms / 1000 for ms in (options.min_speech_duration_ms, options.min_silence_duration_ms))
    longest = RATE * options.max_speech_duration_s - FRAME - 2 * options.pad
    spans: list[Span] = []
    start, quiet, pauses = -1, 0, []
    for i, probability in enumerate(probabilities):
        here = FRAME * i
        if start < 0:
            start = here if probability >= threshold else -1
            continue
        if probability >= threshold and quiet:
            pauses += [(quiet, here - quiet)] if here - quiet > SHORTEST_CUT else []
            quiet = 0
        if here - start > longest:
            end, pause = max(pauses, key=lambda own: own[1], default=(here, 0))
            spans.append((start, end))
            start, quiet, pauses = (end + pause if pauses else -1), 0, []
            if start < 0:
                continue
        if probability < release:
            quiet = quiet or here
            if here - quiet >= silence:
                spans += [(start, quiet)] if quiet - start > shortest else []
                start, quiet, pauses = -1, 0, []
    return spans + ([(start, samples)] if start >= 0 and samples - start > shortest else [])


def clips(spans: Iterable[Span], longest: int, gap: int) -> list[Span]:
    """Spans in a row joined into pieces of at most `longest` samples, over pauses of at most `gap` samples.

    Raises ValueError for a span that is longer itself; `windows` gives none."""
    found: list[Span] = []
    for start, end in spans:
        if end - start > longest:
            raise ValueError(f"span {start}..{end} is longer than {longest} samples")
        if found and start - found[-1][1] <= gap and end - found[-1][0] <= longest:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def windows(probabilities: Float[Tensor, "T"], samples: int, options: VadOptions, longest: int, gap: int) -> list[Span]:
    """The speech of a recording as pieces of at most `longest` samples, ascending and apart: `speech_spans` with
    `max_speech_duration_s` at most `longest`, joined by `clips`. Raises UsageError when the padding fills `longest`."""
    limited = replace(options, max_speech_duration_s=min(options.max_speech_duration_s, longest / RATE))
    return clips(speech_spans(probabilities, samples, limited), longest, gap)


def complement(spans: Iterable[Span], samples: int) -> list[Span]:
    """What lies between, before and after ascending spans: with them it tiles [0, samples]."""
    found, last = [], 0
    for start, end in [*spans, (samples, samples)]:
        found += [(last, start)] if start > last else []
        last = end
    return found
