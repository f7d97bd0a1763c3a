"""Cross-attention from each decoded token to its source: a text, an image or an audio file."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.blocks.capture import capture_attention
from multimodal.decoding.sampling import cross_attention_step, greedy
from multimodal.errors import CheckpointError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.models.captioner import CaptionModel
from multimodal.models.conformer import ConformerCTC
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.models.whisper import Whisper
from multimodal.tasks.caption.regions import attention_by_head
from multimodal.tasks.inspect.maps import (
    AttentionMap,
    Axis,
    encode_audio,
    fitting,
    names,
    patches,
    read_pixels,
    source_ids,
    stacked,
    tower_of,
)
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.weights.folder import Checkpoint


class AlignmentRequest(NamedTuple):
    """`input`: a text or a file. `answer` None: greedy decoding. `source`, `target`: languages, for models with tokens
    for them."""

    input: str
    answer: str | None = None
    source: str | None = None
    target: str | None = None


@inference_mode()
def alignment(checkpoint: Checkpoint, request: AlignmentRequest) -> AttentionMap:
    """Attention of each layer and head from the tokens of an answer to the source. A token's row is the position that
    predicts it: at its own position the decoder attends for the next token.

    Raises UsageError for a model without cross-attention, TextError, ImageError, AudioError, CheckpointError."""
    model = checkpoint.model
    if isinstance(model, CaptionModel):
        return _image_alignment(checkpoint, request)
    if isinstance(model, EncoderDecoder):
        return _text_alignment(checkpoint, request)
    if isinstance(model, Whisper) or (isinstance(model, ConformerCTC) and model.decoder is not None):
        return _audio_alignment(checkpoint, request)
    raise UsageError(f"model {checkpoint.source}: expected an encoder-decoder, got {checkpoint.kind}")


def _image_alignment(checkpoint: Checkpoint, request: AlignmentRequest) -> AttentionMap:
    model, tokenizer, pixels = checkpoint.model, checkpoint.required_tokenizer(), read_pixels(checkpoint, request.input)
    device = next(model.parameters()).device
    if tokenizer.bos_id is None or tokenizer.eos_id is None:
        raise CheckpointError(f"model {checkpoint.source}: the tokenizer has no begin or end token")
    if request.answer is None:
        step, cache = model.decoding(model.encode(pixels[None].to(device)))
        start = torch.tensor([[tokenizer.bos_id]], device=device)
        words = greedy(step, start, cache, eos=tokenizer.eos_id, max_new=model.caption_context - 2).ids[0]
    else:
        words = tokenizer.encode(request.answer)
    ids = fitting("answer", [tokenizer.bos_id, *words, tokenizer.eos_id], model.caption_context)
    axis = patches(tower_of(model), pixels)._replace(prefix=0)
    weights = attention_by_head(model, pixels, ids).flatten(-2)
    return AttentionMap(weights, Axis("token", names(tokenizer, ids[1:])), axis)


def _text_alignment(checkpoint: Checkpoint, request: AlignmentRequest) -> AttentionMap:
    from multimodal.tasks.text.languages import direction

    model, tokenizer = checkpoint.model, checkpoint.required_tokenizer()
    ids, prompt = source_ids(checkpoint, request.input), [model.config.start_id]
    if tokenizer.language_ids:
        before, forced = direction(checkpoint, request.source, request.target)
        ids, prompt = fitting("text", [*before, *ids], model.config.encoder.context), [*prompt, *forced]
    source = model.encode(torch.tensor([ids], device=model.decoder.device))
    return _cross_attention(
        checkpoint, model.decoder, source, Axis("token", names(tokenizer, ids)), prompt, request.answer
    )


def _audio_alignment(checkpoint: Checkpoint, request: AlignmentRequest) -> AttentionMap:
    model, tokenizer = checkpoint.model, checkpoint.required_tokenizer()
    source, axis = encode_audio(model, request.input)
    prompt = [tokenizer.bos_id]
    if isinstance(tokenizer, WhisperTokenizer):
        prompt = tokenizer.sot_sequence(_language(model, tokenizer, source, request.source), timestamps=False)
    elif tokenizer.bos_id is None:
        raise CheckpointError(f"model {checkpoint.source}: the tokenizer has no begin token")
    return _cross_attention(checkpoint, model.decoder, source, axis, list(prompt), request.answer)


def _language(
    model: Whisper, tokenizer: WhisperTokenizer, source: Float[Tensor, "1 S D"], language: str | None
) -> str | None:
    from multimodal.tasks.transcribe.whisper.language import combine, language_probabilities

    if language is not None or not tokenizer.multilingual:
        return language
    return combine([(language_probabilities(model, tokenizer, source)[0], 1.0)])[0]


def _cross_attention(
    checkpoint: Checkpoint, decoder: TextTransformer, source: Float[Tensor, "1 S D"], axis: Axis, prompt: list[int],
    answer: str | None,
) -> AttentionMap:  # fmt: skip
    tokenizer, context = checkpoint.required_tokenizer(), decoder.config.context
    eos = -1 if tokenizer.eos_id is None else tokenizer.eos_id
    if answer is None:
        step, rows = cross_attention_step(decoder, source), torch.tensor([prompt], device=source.device)
        room = max(1, context - len(prompt) - 1)
        words = greedy(step, rows, decoder.new_cache(), eos=eos, max_new=room).ids[0]
    else:
        words = tokenizer.encode(answer)
    ids = fitting("answer", [*prompt, *words, *([] if eos < 0 else [eos])], context)
    with capture_attention() as captured:
        decoder.states(torch.tensor([ids[:-1]], device=source.device), source)
    weights = stacked({id(block.cross) for block in decoder.stack.blocks}, captured)[:, :, len(prompt) - 1 :]
    return AttentionMap(weights, Axis("token", names(tokenizer, ids[len(prompt) :])), axis)
