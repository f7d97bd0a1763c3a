"""Options of measuring speech models."""

from multimodal.system.options import OptionSet, option


class NormalizerOptions(OptionSet):
    normalizer: str | None = option(None, "Whisper's text normalizer (default: by the language)",
                                    choices=("english", "basic", "letters", "none"))  # fmt: skip


class NoiseOptions(OptionSet):
    windows: int = option(100, "windows of each kind: silence, white noise, pink noise, tones, clicks", "N", low=1)
