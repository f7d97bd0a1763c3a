"""Where a decoder looks in its source for each token that it writes: a text, a picture or a recording."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.blocks.capture import capture_attention
from multimodal.decoding.sampling import greedy, over_source
from multimodal.errors import CheckpointError, UsageError
from multimodal.models.captioner import Captions
from multimodal.models.encoder_decoder import TextToText
from multimodal.models.text import TextTransformer
from multimodal.models.whisper import JointConformer, SpeechToText
from multimodal.tasks.caption.regions import attention_by_head
from multimodal.tasks.inspect.maps import (
    Axis,
    Seen,
    fitting,
    heard,
    names,
    patches,
    picture,
    source_ids,
    stacked,
    tokenizer_of,
    tower_of,
)
from multimodal.tokens.text.vocabulary import WhisperTokenizer
from multimodal.weights.folder import Checkpoint


class Asked(NamedTuple):
    """`answer` None: what greedy decoding gives. `source`, `target`: languages, where the model has tokens for them."""

    given: str
    answer: str | None = None
    source: str | None = None
    target: str | None = None


@torch.inference_mode()
def alignment(checkpoint: Checkpoint, asked: Asked) -> Seen:
    """The attention of each layer and head from the tokens of an answer to the source. A token's row is that of the
    position that chose it: at its own the decoder already looks for what comes next.

    Raises UsageError for a model without cross-attention, TextError, ImageError, AudioError, CheckpointError."""
    model = checkpoint.model
    if isinstance(model, Captions):
        return _picture(checkpoint, asked)
    if isinstance(model, TextToText):
        return _text(checkpoint, asked)
    if isinstance(model, SpeechToText) or (isinstance(model, JointConformer) and model.decoder is not None):
        return _sound(checkpoint, asked)
    raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, alignment needs an encoder and a decoder")


def _picture(checkpoint: Checkpoint, asked: Asked) -> Seen:
    model, tokenizer, pixels = checkpoint.model, tokenizer_of(checkpoint), picture(checkpoint, asked.given)
    device = next(model.parameters()).device
    if tokenizer.bos_id is None or tokenizer.eos_id is None:
        raise CheckpointError(f"model {checkpoint.source}: its vocabulary has no token for begin or end of a text")
    if asked.answer is None:
        step, cache = model.decoding(model.encode(pixels[None].to(device)))
        start = torch.tensor([[tokenizer.bos_id]], device=device)
        words = greedy(step, start, cache, eos=tokenizer.eos_id, max_new=model.caption_context - 2).ids[0]
    else:
        words = tokenizer.encode(asked.answer)
    ids = fitting("answer", [tokenizer.bos_id, *words, tokenizer.eos_id], model.caption_context)
    axis = patches(tower_of(model), pixels)._replace(prefix=0)
    weights = attention_by_head(model, pixels, ids).flatten(-2)
    return Seen(weights, Axis("token", names(tokenizer, ids[1:])), axis)


def _text(checkpoint: Checkpoint, asked: Asked) -> Seen:
    from multimodal.tasks.text.languages import direction

    model, tokenizer = checkpoint.model, tokenizer_of(checkpoint)
    ids, prompt = source_ids(checkpoint, asked.given, None), [model.config.start_id]
    if tokenizer.language_ids:
        before, forced = direction(checkpoint, asked.source, asked.target)
        ids, prompt = fitting("text", [*before, *ids], model.config.encoder.context), [*prompt, *forced]
    source = model.encode(torch.tensor([ids], device=model.decoder.device))
    return _crossing(checkpoint, model.decoder, source, Axis("token", names(tokenizer, ids)), prompt, asked.answer)


def _sound(checkpoint: Checkpoint, asked: Asked) -> Seen:
    model, tokenizer = checkpoint.model, tokenizer_of(checkpoint)
    source, axis = heard(model, asked.given)
    prompt = [tokenizer.bos_id]
    if isinstance(tokenizer, WhisperTokenizer):
        prompt = tokenizer.sot_sequence(_spoken(model, tokenizer, source, asked.source), timestamps=False)
    elif tokenizer.bos_id is None:
        raise CheckpointError(f"model {checkpoint.source}: its tokenizer has no token for the begin of a text")
    return _crossing(checkpoint, model.decoder, source, axis, list(prompt), asked.answer)


def _spoken(
    model: SpeechToText, tokenizer: WhisperTokenizer, source: Float[Tensor, "1 S D"], language: str | None
) -> str | None:
    from multimodal.tasks.transcribe.whisper.language import combine, language_probabilities

    if language is not None or not tokenizer.multilingual:
        return language
    return combine([(language_probabilities(model, tokenizer, source)[0], 1.0)])[0]


def _crossing(
    checkpoint: Checkpoint, decoder: TextTransformer, source: Float[Tensor, "1 S D"], axis: Axis, prompt: list[int],
    answer: str | None,
) -> Seen:  # fmt: skip
    tokenizer, context = tokenizer_of(checkpoint), decoder.config.context
    eos = -1 if tokenizer.eos_id is None else tokenizer.eos_id
    if answer is None:
        step, rows = over_source(decoder, source), torch.tensor([prompt], device=source.device)
        room = max(1, context - len(prompt) - 1)
        words = greedy(step, rows, decoder.new_cache(), eos=eos, max_new=room).ids[0]
    else:
        words = tokenizer.encode(answer)
    ids = fitting("answer", [*prompt, *words, *([] if eos < 0 else [eos])], context)
    with capture_attention() as seen:
        decoder.states(torch.tensor([ids[:-1]], device=source.device), source)
    weights = stacked({id(block.cross) for block in decoder.stack.blocks}, seen)[:, :, len(prompt) - 1 :]
    return Seen(weights, Axis("token", names(tokenizer, ids[len(prompt) :])), axis)
