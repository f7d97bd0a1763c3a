"""Whisper over an utterance in progress: one window, decoded again each time."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from multimodal.inference.modules import inference_mode
from multimodal.tasks.transcribe.audio_source import AudioSource, MelReader, survey
from multimodal.tasks.transcribe.options import WhisperOptions
from multimodal.tasks.transcribe.results import WindowTranscript
from multimodal.tasks.transcribe.sessions import whisper_language
from multimodal.tasks.transcribe.whisper.decode import (
    Decode,
    Encode,
    Identify,
    decode,
    encode,
    identify,
    model_and_tokenizer,
    sampling_seed,
)
from multimodal.tasks.transcribe.whisper.language import likeliest
from multimodal.tasks.transcribe.whisper.windows import DecoderPrompt, fallback_reason, is_silent
from multimodal.tasks.transcribe.whisper.words import STRIDE
from multimodal.tasks.transcribe.word_times import WordTiming
from multimodal.tokens.audio.log_mel import RATE
from multimodal.weights.folder import Checkpoint


class WhisperRecognizer:
    """Decodes the utterance, of a window at most: greedily for a partial line, as the options say for the final one.
    Its only word is as long as the utterance, and without a given language it is detected each time."""

    def __init__(self, checkpoint: Checkpoint, options: WhisperOptions):
        self.checkpoint, self.options = checkpoint, options.replace(without_timestamps=True)
        self.quick = self.options.replace(beam_size=None, temperature=self.options.temperature[:1])
        self.language = whisper_language(checkpoint, options)

    def partial(self, wave: Float[Tensor, "T"]) -> WindowTranscript:
        return self._decoded(wave, self.quick)

    def final(self, wave: Float[Tensor, "T"]) -> WindowTranscript:
        return self._decoded(wave, self.options)

    @inference_mode()
    def _decoded(self, wave: Tensor, options: WhisperOptions) -> WindowTranscript:
        model, tokenizer = model_and_tokenizer(self.checkpoint)
        encoder, source = model.config.encoder, AudioSource(wave, quiet=True)
        overview = survey(source, bands=encoder.bands, device=model.encoder.positions.device)
        reader = MelReader(source, encoder.bands, overview.mel_peak, overview.samples, mel=overview.mel)
        mel = reader.window(0, STRIDE * encoder.context)
        (features,) = encode(self.checkpoint, options, [Encode(mel)])
        language = self.language or self._identified(features, options.languages)
        previous = DecoderPrompt.of(tokenizer, options).tokens([], False, model.config.decoder.context)
        for temperature in options.temperature:
            seed = sampling_seed(options.seed, 0, temperature)
            (result,) = decode(self.checkpoint, options, [Decode(features, previous, language, temperature, seed)])
            if fallback_reason(result, options) is None:
                break
        ids = [] if is_silent(result, options) else [token for token in result.tokens if token < tokenizer.eot]
        whole = WordTiming("", [], 0.0, len(wave) / RATE, 1.0)
        return WindowTranscript(ids, [whole], result.avg_logprob, result.no_speech_prob)

    def _identified(self, features: Tensor, languages: Sequence[str] | None) -> str:
        (found,) = identify(self.checkpoint, self.options, [Identify(features)])
        return likeliest(found, languages)
