"""What is heard of an utterance that is still going on: anew each time, or chunk by chunk where the model can.

Each `wave` [T] that an utterance is given holds its samples from the begin on."""

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.models.whisper import JointConformer
from multimodal.tasks.transcribe.conformer.decode import Heard, JointOptions, decode_frames, decode_windows
from multimodal.tokens.audio.log_mel import HOP, WINDOW, filterbank
from multimodal.weights.folder import Checkpoint

BEST_PATH = JointOptions(beam_size=1)


class Again:
    """For a model whose frames need the whole utterance: it is encoded anew each time."""

    def __init__(self, checkpoint: Checkpoint, options: JointOptions):
        self.checkpoint, self.options = checkpoint, options

    def partial(self, wave: Float[Tensor, "T"]) -> Heard:
        return decode_windows([wave], self.checkpoint, BEST_PATH)[0]

    def final(self, wave: Float[Tensor, "T"]) -> Heard:
        return decode_windows([wave], self.checkpoint, self.options)[0]


class Chunks:
    """For a chunked model: each sample is encoded once, and the frames equal those of the whole utterance."""

    def __init__(self, checkpoint: Checkpoint, options: JointOptions):
        self.checkpoint, self.options = checkpoint, options
        model: JointConformer = checkpoint.model
        self.bands, self.stream = model.config.encoder.bands, model.encoder.stream()
        self.features = self.samples = 0  # mel frames that were pushed, samples that were seen
        self.frames = model.ctc.weight.new_zeros(1, 0, model.config.encoder.width)

    def partial(self, wave: Float[Tensor, "T"]) -> Heard:
        self._push(wave, last=False)
        return decode_frames([self.frames[0]], self.checkpoint, BEST_PATH)[0]

    def final(self, wave: Float[Tensor, "T"]) -> Heard:
        """The stream ends with it. An utterance that was cut before what was seen already is encoded anew."""
        if len(wave) < self.samples:
            return Again(self.checkpoint, self.options).final(wave)
        self._push(wave, last=True)
        return decode_frames([self.frames[0]], self.checkpoint, self.options)[0].on_sound(wave)

    @torch.inference_mode()
    def _push(self, wave: Tensor, last: bool) -> None:
        fresh = wave[self.features * HOP :]
        features = torch.zeros(0, self.bands)
        # sound shorter than a window makes a frame only where it is all that there is
        if len(fresh) >= WINDOW or (last and not self.features):
            features = filterbank(fresh, self.bands)
        self.features, self.samples = self.features + len(features), len(wave)
        new = self.stream.push(features[None].to(self.frames.device), last)
        self.frames = torch.cat([self.frames, new.to(self.frames.dtype)], 1)


Hearing = Again | Chunks


def hearing(checkpoint: Checkpoint, options: JointOptions) -> Hearing:
    """A new utterance."""
    kind = Chunks if checkpoint.model.config.encoder.chunk else Again
    return kind(checkpoint, options)
