"""Voice activity detection with silero-vad 6 (snakers4/silero-vad).

recipes/data/silero_vad.py made the shipped weights."""

import functools
from array import array

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.inference.modules import inference_mode
from multimodal.system.assets import asset
from multimodal.tasks.transcribe.options import VadOptions
from multimodal.tokens.audio.log_mel import RATE
from multimodal.weights.files.tensor_files import read_tensors
from multimodal.weights.folder import fill

FRAME = 512  # samples per probability, 32 ms
CONTEXT = 64  # samples before each frame that the network also sees
BLOCK = 1024  # frames convolved at once, about 20 MB
SHORTEST_CUT = 98 * RATE // 1000  # samples of a pause at which overlong speech may be cut, as in the package
Interval = tuple[int, int]


class SileroVad(nn.Module):
    """Short-time spectrum as a convolution, four convolutions over it, and an LSTM over the frames."""

    def __init__(self):
        super().__init__()
        self.spectrum = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        sizes = [(129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1)]
        self.convs = nn.ModuleList(
            nn.Conv1d(inputs, outputs, 3, stride, padding=1) for inputs, outputs, stride in sizes
        )
        self.lstm = nn.LSTM(128, 128)
        self.head = nn.Conv1d(128, 1, 1)

    def forward(
        self, frames: Float[Tensor, "T S"], state: tuple[Tensor, Tensor] | None
    ) -> tuple[Float[Tensor, "T"], tuple[Tensor, Tensor]]:
        """Speech probabilities of consecutive frames, each preceded by its CONTEXT, and the LSTM's state."""
        x = self.spectrum(F.pad(frames, (0, 64), "reflect")[:, None])
        x = torch.hypot(*x.chunk(2, 1))
        for conv in self.convs:
            x = conv(x).relu()
        x, state = self.lstm(x[..., 0], state)
        return self.head(x.relu().T)[0].sigmoid(), state


@functools.cache
def silero(device: str = "cpu") -> SileroVad:
    """The 16 kHz network with the shipped weights. Raises CheckpointError if they are missing or damaged."""
    path = asset("silero-vad", "model.safetensors")
    with torch.device("meta"):
        model = SileroVad()
    fill(model, read_tensors(path), str(path))
    return model.eval().to(device)


class SpeechDetector:
    """Streaming speech probabilities, found on `device`; samples may come in pieces of any size."""

    def __init__(self, device: torch.device | str = "cpu"):
        self._model, self._state, self._device = silero(str(device)), None, device
        self._probabilities = array("f")  # one growing buffer: see segmentation.LevelMeter
        # the context, then samples that do not fill a frame yet
        self._rest = torch.zeros(CONTEXT, dtype=torch.float32, device="cpu")

    @inference_mode()
    def push(self, samples: Float[Tensor, "T"]) -> None:
        """Add samples (16 kHz)."""
        for piece in samples.split(BLOCK * FRAME):
            self._rest = torch.cat([self._rest, piece.detach().float().cpu()])
            frames = (len(self._rest) - CONTEXT) // FRAME
            if frames:
                probabilities, self._state = self._model(_framed(self._rest.to(self._device)), self._state)
                self._probabilities.frombytes(probabilities.cpu().numpy().tobytes())
                self._rest = self._rest[frames * FRAME :].clone()

    @inference_mode()
    def probabilities(self) -> Float[Tensor, "T"]:
        """One for each FRAME so far, the last one zero-padded."""
        probabilities = torch.tensor(self._probabilities, dtype=torch.float32, device="cpu")
        if missing := (CONTEXT - len(self._rest)) % FRAME:
            rest = F.pad(self._rest, (0, missing)).to(self._device)
            probabilities = torch.cat([probabilities, self._model(_framed(rest), self._state)[0].cpu()])
        return probabilities

    def take(self) -> list[float]:
        """Remove and return the probabilities of the frames filled since the last call."""
        probabilities, self._probabilities = self._probabilities.tolist(), array("f")
        return probabilities


def _framed(samples: Tensor) -> Tensor:
    return samples.unfold(0, CONTEXT + FRAME, FRAME)


def speech_spans(probabilities: Float[Tensor, "T"], samples: int, options: VadOptions) -> list[Interval]:
    """Ascending spans of speech in samples, equal to `silero_vad.get_speech_timestamps`.

    `probabilities`: one per FRAME of a recording of `samples` samples, else ValueError."""
    if len(probabilities) != (expected := -(-samples // FRAME)):
        raise ValueError(f"expected {expected} probabilities for {samples} samples, got {len(probabilities)}")
    spans, pad = _unpadded(probabilities.tolist(), samples, options), RATE * options.speech_pad_ms / 1000
    if not spans:
        return []
    starts, ends = (list(side) for side in zip(*spans, strict=True))
    starts[0], ends[-1] = int(max(0, starts[0] - pad)), int(min(samples, ends[-1] + pad))
    for i in range(len(spans) - 1):
        pause = starts[i + 1] - ends[i]
        each = pause // 2 if pause < 2 * pad else pad
        ends[i], starts[i + 1] = int(ends[i] + each), int(starts[i + 1] - each)
    return list(zip(starts, ends, strict=True))


def _unpadded(probabilities: list[float], samples: int, options: VadOptions) -> list[Interval]:
    """Spans before padding. `quiet`: start of a pause that may end the speech; `pauses`: (start, length) of pauses at
    which the current speech may be cut."""
    threshold, release = options.threshold, options.neg_threshold
    if release is None:
        release = max(threshold - 0.15, 0.01)
    milliseconds = (options.min_speech_duration_ms, options.min_silence_duration_ms, options.speech_pad_ms)
    shortest, silence, pad = (RATE * ms / 1000 for ms in milliseconds)
    longest = RATE * options.max_speech_duration_s - FRAME - 2 * pad
    spans: list[Interval] = []
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


def speech_windows(
    probabilities: Float[Tensor, "T"], samples: int, options: VadOptions, longest: int, gap: int
) -> list[Interval]:
    """`speech_spans` joined over pauses of at most `gap` samples into windows of at most `longest` samples; longer
    speech is cut. Raises UsageError if the padding alone fills `longest`."""
    limited = options.replace(max_speech_duration_s=min(options.max_speech_duration_s, longest / RATE))
    windows: list[Interval] = []
    for start, end in speech_spans(probabilities, samples, limited):
        if windows and start - windows[-1][1] <= gap and end - windows[-1][0] <= longest:
            windows[-1] = (windows[-1][0], end)
        else:
            windows.append((start, end))
    return windows
