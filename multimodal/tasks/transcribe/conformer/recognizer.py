"""Recognizers of an utterance in progress: re-decode it each time, or chunk by chunk if the model can.

Each `wave` [T] holds the samples of the utterance from its beginning."""

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.inference.modules import inference_mode
from multimodal.models.conformer import ConformerCTC
from multimodal.tasks.transcribe.conformer.decode import decode_frames, decode_windows
from multimodal.tasks.transcribe.options import SpeechDecodingOptions
from multimodal.tasks.transcribe.results import WindowTranscript
from multimodal.tokens.audio.log_mel import HOP, WINDOW, filterbank
from multimodal.weights.folder import Checkpoint


def greedy(options: SpeechDecodingOptions) -> SpeechDecodingOptions:
    """The options of a partial text."""
    return options.replace(beam_size=1, lm=None, token_logprobs=False)


class RedecodingRecognizer:
    """For a model whose frames depend on the whole utterance: encodes it again each time."""

    def __init__(self, checkpoint: Checkpoint, options: SpeechDecodingOptions):
        self.checkpoint, self.options = checkpoint, options

    def partial(self, wave: Float[Tensor, "T"]) -> WindowTranscript:
        return decode_windows([wave], self.checkpoint, greedy(self.options))[0]

    def final(self, wave: Float[Tensor, "T"]) -> WindowTranscript:
        return decode_windows([wave], self.checkpoint, self.options)[0]


class ChunkedRecognizer:
    """For a chunked model: encodes each sample once. The frames equal those of the whole utterance; a dynamic model
    sees the utterance whole at its end."""

    def __init__(self, checkpoint: Checkpoint, options: SpeechDecodingOptions):
        self.checkpoint, self.options = checkpoint, options
        model: ConformerCTC = checkpoint.model
        self.bands, self.stream = model.config.encoder.bands, model.encoder.stream()
        self.features = self.samples = 0  # mel frames pushed, samples seen
        self.frames = model.ctc.weight.new_zeros(1, 0, model.config.encoder.width)

    def partial(self, wave: Float[Tensor, "T"]) -> WindowTranscript:
        self._push(wave, last=False)
        return decode_frames([self.frames[0]], self.checkpoint, greedy(self.options))[0]

    def final(self, wave: Float[Tensor, "T"]) -> WindowTranscript:
        """Ends the stream. An utterance that was cut shorter than what has been seen is encoded again."""
        if len(wave) < self.samples or not self.checkpoint.model.encoder.chunked:
            return RedecodingRecognizer(self.checkpoint, self.options).final(wave)
        self._push(wave, last=True)
        return decode_frames([self.frames[0]], self.checkpoint, self.options)[0].snap_to_audio(wave)

    @inference_mode()
    def _push(self, wave: Tensor, last: bool) -> None:
        fresh = wave[self.features * HOP :]
        features = torch.zeros(0, self.bands, dtype=torch.float32, device="cpu")
        # audio shorter than a window makes a frame only if there is nothing else
        if len(fresh) >= WINDOW or (last and not self.features):
            features = filterbank(fresh, self.bands)
        self.features, self.samples = self.features + len(features), len(wave)
        new = self.stream.push(features[None].to(self.frames.device), last)
        self.frames = torch.cat([self.frames, new.to(self.frames.dtype)], 1)
