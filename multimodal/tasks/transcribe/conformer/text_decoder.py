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
from multimodal.system.options import number
from multimodal.tasks.encode.search_defaults import search_settings
from multimodal.tasks.transcribe.options import SpeechDecodingOptions
from multimodal.tasks.transcribe.results import WindowTranscript
from multimodal.tasks.transcribe.word_times import WordTiming
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.folder import Checkpoint

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


def check_words(checkpoint: Checkpoint, argument: str) -> None:
    """Raise UsageError for a model that has no frame of each token. `argument`: what needs it."""
    if isinstance(checkpoint.model, SpeechSeq2Seq):
        raise UsageError(f"needs times of words, which {checkpoint.source} does not give", argument=argument)


def check_decoding(checkpoint: Checkpoint, tokenizer: Tokenizer, options: SpeechDecodingOptions) -> None:
    """Raise UsageError for options that the model lacks, CheckpointError for a bad generation_config.json."""
    if options.word_timestamps:
        check_words(checkpoint, "word_timestamps")
    if options.lm is not None:
        raise UsageError(f"needs a CTC model or a transducer (got {checkpoint.source})", argument="lm")
    token_limit(checkpoint, prompt_of(checkpoint.model, tokenizer, options))


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


def token_limit(checkpoint: Checkpoint, prompt: Sequence[int]) -> int:
    """Most tokens after the prompt, by the decoder's context and, as in transformers, the checkpoint's
    generation_config.json. Raises CheckpointError."""
    limit, asked = checkpoint.model.config.decoder.context - len(prompt), search_settings(checkpoint)
    for name, before in (("max_new_tokens", 0), ("max_length", len(prompt))):
        if name in asked:
            try:
                return min(limit, number(asked[name], int, before + 1) - before)
            except UsageError as error:
                raise CheckpointError(f"{checkpoint.source}: generation_config.json: {name} {error}") from None
    return limit


def languages(names: Mapping[str, int]) -> list[str]:
    """Codes of the languages among a recognizer's control tokens."""
    return sorted(name[2:-2] for name in names if re.fullmatch(r"<\|[a-z]{2}\|>", name))


def decode_texts(
    checkpoint: Checkpoint, tokenizer: Tokenizer, encoded: Sequence[Float[Tensor, "_ D"]],
    options: SpeechDecodingOptions,
) -> list[WindowTranscript]:  # fmt: skip
    """Transcripts, each with its text as one word over the window."""
    model: SpeechSeq2Seq = checkpoint.model
    prompt = prompt_of(model, tokenizer, options)
    ends = (model.config.end_id, *tokenizer.end_ids, *search_settings(checkpoint).get("eos_token_id", ()))
    limit = token_limit(checkpoint, prompt)
    return [_decoded(model, frames, tokenizer, prompt, ends, limit, options) for frames in encoded]


def _decoded(
    model: SpeechSeq2Seq, frames: Float[Tensor, "T D"], tokenizer: Tokenizer, start: list[int], ends: Sequence[int],
    limit: int, options: SpeechDecodingOptions,
) -> WindowTranscript:  # fmt: skip
    seconds, beams = len(frames) * model.config.encoder.seconds, options.beam_size or 1
    step = sampling.cross_attention_step(model.decode, frames[None])
    prompt = torch.tensor([start], device=frames.device)
    most = len(frames) + MORE_THAN_FRAMES if isinstance(model, Canary) else math.ceil(seconds * TOKENS_PER_SECOND)
    limits = {"eos": ends, "max_new": min(most, limit)}
    if beams == 1:
        found = sampling.greedy(step, prompt, model.decoder.new_cache(), **limits)
    else:
        found = beam_search(step, prompt, model.decoder.new_cache(), beams=beams, early_stopping=False,
                            length_penalty=per_token(1.0), **limits)  # fmt: skip
    ids, score = found.ids[0], found.logprobs[0] / (len(found.ids[0]) + 1)
    empty = model.decode(prompt, frames[None])[0, -1].float().softmax(-1)[list(dict.fromkeys(ends))].sum()
    each = _probabilities(model, frames, start, ids) if options.token_logprobs and ids else ()
    word = WordTiming(f" {tokenizer.decode(ids).strip()}", ids, 0.0, seconds, math.exp(score), each)
    words = [word] if word.word.strip() else []
    return WindowTranscript(ids, words, score, float(empty), len(ids) == limits["max_new"])


def _probabilities(
    model: SpeechSeq2Seq, frames: Float[Tensor, "T D"], start: list[int], ids: list[int]
) -> tuple[float, ...]:
    """The probability of each of `ids` after `start`."""
    row = torch.tensor(start + ids, device=frames.device)
    logits = model.decode(row[None, :-1], frames[None])[0, len(start) - 1 :].float()
    return tuple(sampling.logprobs_of(logits, row[len(start) :]).exp().tolist())
