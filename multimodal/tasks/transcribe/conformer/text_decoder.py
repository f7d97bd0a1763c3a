"""Transcription by a decoder without CTC (Moonshine, Canary): greedy or transformers' beam search, without times of
words."""

import math
import re
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam_search, per_token
from multimodal.errors import CheckpointError, UsageError
from multimodal.models.speech.canary import Canary
from multimodal.models.speech.seq2seq import SpeechSeq2Seq
from multimodal.tasks.transcribe.options import SpeechDecodingOptions
from multimodal.tasks.transcribe.results import WindowTranscript
from multimodal.tasks.transcribe.word_times import WordTiming
from multimodal.tokens.text.tokenizer import Tokenizer

ENGLISH = "en"
# the most that Moonshine's authors let it write on the cards of its languages (6.5 of English); a loop is longer
TOKENS_PER_SECOND = 13
MORE_THAN_FRAMES = 50  # tokens that Canary may write beyond its frames (NeMo's max_generation_delta)
# of canary-1b-v2 and the flash models, and of the first canary-1b: as NeMo's prompt formatters canary2 and canary
PROMPTS = (
    ("<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>", "<|{source}|>", "<|{target}|>", "<|pnc|>",
     "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>"),
    ("<|startoftranscript|>", "<|{source}|>", "<|{task}|>", "<|{target}|>", "<|pnc|>"),
)  # fmt: skip


def check_options(source: str, options: SpeechDecodingOptions) -> None:
    """Raise UsageError for what needs the frame of each token."""
    for name in ("word_timestamps", "lm"):
        if getattr(options, name):
            raise UsageError(f"{source} has no CTC, which this needs", argument=name)


def prompt_of(model: SpeechSeq2Seq, tokenizer: Tokenizer, options: SpeechDecodingOptions) -> list[int]:
    """Ids that a text begins with. Raises UsageError for a language that Canary lacks, CheckpointError for a tokenizer
    without its prompt."""
    if not isinstance(model, Canary):
        return [model.config.start_id]
    names, source = tokenizer.control_names, getattr(options, "language", None) or ENGLISH
    task = getattr(options, "task", "transcribe")
    target = source if task != "translate" else getattr(options, "target_language", None) or ENGLISH
    for argument, code in (("language", source), ("target_language", target)):
        if f"<|{code}|>" not in names:
            raise UsageError(f"{code!r}: the model knows {', '.join(languages(names))}", argument=argument)
    values = {"source": source, "target": target, "task": task}
    for prompt in PROMPTS:
        filled = [name.format(**values) for name in prompt]
        if names.keys() >= set(filled):
            return [names[name] for name in filled]
    raise CheckpointError("the tokenizer lacks the control tokens of Canary's prompts")


def languages(names: Mapping[str, int]) -> list[str]:
    """Codes of the languages among a recognizer's control tokens."""
    return sorted(name[2:-2] for name in names if re.fullmatch(r"<\|[a-z]{2}\|>", name))


def decode_texts(
    model: SpeechSeq2Seq, encoded: Sequence[Float[Tensor, "_ D"]], tokenizer: Tokenizer,
    options: SpeechDecodingOptions, further: Sequence[int],
) -> list[WindowTranscript]:  # fmt: skip
    """Transcripts, each with its text as one word over the window. `further`: ids that end a text besides the model's
    and the tokenizer's."""
    prompt, ends = prompt_of(model, tokenizer, options), (model.config.end_id, *tokenizer.end_ids, *further)
    return [_decoded(model, frames, tokenizer, prompt, ends, options.beam_size or 1) for frames in encoded]


def _decoded(
    model: SpeechSeq2Seq, frames: Float[Tensor, "T D"], tokenizer: Tokenizer, start: list[int], ends: Sequence[int],
    beams: int,
) -> WindowTranscript:  # fmt: skip
    config, seconds = model.config, len(frames) * model.config.encoder.seconds
    step = sampling.cross_attention_step(model.decode, frames[None])
    prompt = torch.tensor([start], device=frames.device)
    most = len(frames) + MORE_THAN_FRAMES if isinstance(model, Canary) else math.ceil(seconds * TOKENS_PER_SECOND)
    limits = {"eos": ends, "max_new": min(most, config.decoder.context - len(start))}
    if beams == 1:
        found = sampling.greedy(step, prompt, model.decoder.new_cache(), **limits)
    else:
        found = beam_search(step, prompt, model.decoder.new_cache(), beams=beams, early_stopping=False,
                            length_penalty=per_token(1.0), **limits)  # fmt: skip
    ids, score = found.ids[0], found.logprobs[0] / (len(found.ids[0]) + 1)
    empty = model.decode(prompt, frames[None])[0, -1].float().softmax(-1)[list(dict.fromkeys(ends))].sum()
    word = WordTiming(f" {tokenizer.decode(ids).strip()}", ids, 0.0, seconds, math.exp(score))
    words = [word] if word.word.strip() else []
    return WindowTranscript(ids, words, score, float(empty), len(ids) == limits["max_new"])
