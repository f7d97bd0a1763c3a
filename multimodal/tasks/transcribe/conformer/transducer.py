"""Transcription by a transducer: greedy, or beam search with a language model; word times from the frames of tokens."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.decoding.lm_fusion import Fuse, LanguageModel, NeuralScorer, WordStarts
from multimodal.decoding.transducer import TransducerPath, no_text_probability, transducer_beam, transducer_greedy
from multimodal.models.speech.transducer import Transducer
from multimodal.tasks.transcribe.results import WindowTranscript
from multimodal.tasks.transcribe.word_times import WordTiming, split_on_spaces
from multimodal.tokens.text.tokenizer import Tokenizer


def fused(lm: LanguageModel, weight: float, bonus: float, starts: WordStarts, device: torch.device) -> Fuse:
    """Scores that a language model adds for each next token of a text, with `bonus` for each word begun."""

    def fuse(ids: tuple[int, ...]) -> Float[Tensor, "V"]:
        text = torch.tensor([ids], dtype=torch.long, device=device).reshape(1, len(ids))
        own = lm.after(ids) if isinstance(lm, NeuralScorer) else lm(text)[0]
        return (weight * own + bonus * starts(text)[0].float()).cpu().float()

    return fuse


def transducer_words(path: TransducerPath, tokenizer: Tokenizer, frame_seconds: float) -> list[WordTiming]:
    """Words from the first to the last frame of their tokens, in seconds; probabilities averaged over tokens."""
    timings, first = [], 0
    for text, part in split_on_spaces(tokenizer, path.ids):
        spans, own = path.spans[first : first + len(part)], path.probabilities[first : first + len(part)]
        first += len(part)
        start, end = spans[0][0] * frame_seconds, spans[-1][1] * frame_seconds
        timings.append(WordTiming(text, part, start, end, sum(own) / len(own), tuple(own)))
    return timings


def decode_all(
    model: Transducer, encoded: Sequence[Float[Tensor, "_ J"]], tokenizer: Tokenizer, beams: int, fuse: Fuse | None,
    end: int | None,
) -> list[WindowTranscript]:  # fmt: skip
    """Transcripts of the windows. `end`: see `transducer_beam`."""
    seconds, made = model.config.encoder.seconds, []
    for frames in encoded:
        path = transducer_greedy(model, frames) if beams == 1 else transducer_beam(model, frames, beams, fuse, end)
        score = path.logprob / (len(path.ids) + 1)
        words, empty = transducer_words(path, tokenizer, seconds), no_text_probability(model, frames)
        made.append(WindowTranscript(path.ids, words, score, empty))
    return made
