"""Fill-mask: the tokens that a masked language model predicts for the masks in a text, all at once or step by step."""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.inference.text_packing import encode_ragged
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.tasks.encode.arguments import FillMaskArguments
from multimodal.tasks.encode.loaded import Model, loaded
from multimodal.tasks.encode.search_defaults import warn_of_search
from multimodal.tasks.text.fill_spans import fill_spans, spelling
from multimodal.tasks.text.options import FillMaskOptions, GenerateOptions
from multimodal.tokens.text.tokenizer import Tokenizer, texts_of
from multimodal.weights.encode import evaluating
from multimodal.weights.folder import Checkpoint

OF_DECODERS = ("beam_size", "max_new_tokens")


def fill_mask(
    texts: Sequence[str], model: Model, top_k: int = FillMaskOptions.top_k.default,
    **options: Unpack[FillMaskArguments],
) -> list[dict[str, Any]]:  # fmt: skip
    """For each text, `masks` (the `top_k` most probable tokens of each mask, best first, as `token`, `id` and
    `probability`) and `filled` (the text with the best ones). Masks are predicted independently, with the others masked
    (Devlin et al. 2019), or in several `iterations`, each of which predicts the least probable again (Mask-Predict,
    Ghazvininejad et al. 2019). An encoder-decoder writes spans of any length: see `fill_spans`.

    The mask is spelled as in the tokenizer, such as [MASK] or <mask>. Raises UsageError for another kind of model,
    TextError for a text that is empty, has no mask or exceeds the context, CheckpointError."""
    checkpoint = masked_model(loaded(model, "fill-mask"))
    texts, settings = texts_of(texts, "texts"), FillMaskOptions(top_k=top_k, **options)
    network, tokenizer = checkpoint.model, checkpoint.tokenizer
    if isinstance(network, EncoderDecoder):
        if settings.iterations > 1:
            raise UsageError(f"is for masked language models, {checkpoint.source} has a decoder", argument="iterations")
        warn_of_search(checkpoint, options, GenerateOptions)
        chosen = {name: getattr(settings, name) for name in OF_DECODERS if options.get(name) is not None}
        with evaluating(network):
            return fill_spans(texts, checkpoint, chosen)
    if decoder := [name for name in OF_DECODERS if name in options]:
        raise UsageError(f"is for an encoder-decoder, {checkpoint.source} has no decoder", argument=decoder[0])
    if top_k > network.config.vocabulary:
        raise UsageError(f"top_k must be from 1 to the vocabulary size {network.config.vocabulary} (got {top_k})")
    rows = [masked_ids(text, tokenizer, network.config.context) for text in texts]
    places = [[at for at, i in enumerate(row) if i == tokenizer.mask_id] for row in rows]
    with inference_mode(), evaluating(network):
        if settings.iterations > 1:
            return [
                _filled(text, tokenizer, mask_predict(network, row, tokenizer.mask_id, settings.iterations), top_k)
                for text, row in zip(texts, rows, strict=True)
            ]
        states = encode_ragged(network, rows)
        chances = [_chances(network, own[at]) for own, at in zip(states, places, strict=True)]
    return [_filled(text, tokenizer, own, top_k) for text, own in zip(texts, chances, strict=True)]


@inference_mode()
def mask_predict(network: TextTransformer, row: list[int], mask_id: int, iterations: int) -> Float[Tensor, "N V"]:
    """Probabilities of the tokens of N masks, each from the last time that it was predicted. Iteration t of T predicts
    the N (T - t) / T least probable ones again, with the others filled in (Ghazvininejad et al. 2019, section 3.1)."""
    ids = torch.tensor([row], device=network.device)
    places = (ids[0] == mask_id).nonzero()[:, 0]
    chances = _chances(network, network.states(ids)[0, places])
    for iteration in range(1, iterations):
        count = len(places) * (iterations - iteration) // iterations
        if not count:
            break
        best = chances.max(-1)
        again = best.values.argsort(stable=True)[:count]
        ids[0, places] = best.indices
        ids[0, places[again]] = mask_id
        chances[again] = _chances(network, network.states(ids)[0, places[again]])
    return chances


def _chances(network: TextTransformer, states: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
    return network.logits(states[None])[0].float().softmax(-1)


def masked_model(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint. Raises UsageError unless it is a masked language model or an encoder-decoder,
    CheckpointError for the former without a mask."""
    network = checkpoint.model
    if isinstance(network, EncoderDecoder):
        checkpoint.required_tokenizer()
        return checkpoint
    if not isinstance(network, TextTransformer) or network.config.tied is None or network.config.causal:
        causal = isinstance(network, TextTransformer) and network.config.causal
        kind = "a causal one" if causal else f"{checkpoint.kind} without token logits"
        raise UsageError(f"model {checkpoint.source}: expected a masked language model, got {kind}")
    if checkpoint.required_tokenizer().mask_id is None:
        raise CheckpointError(f"model {checkpoint.source}: its tokenizer has no mask")
    return checkpoint


def masked_ids(text: str, tokenizer: Tokenizer, context: int) -> list[int]:
    """Ids of a text between bos and eos, the mask's spelling read as its control token. Spaces before a mask belong to
    it if the tokenizer says so, as in vocabularies whose tokens begin with a space. Raises TextError."""
    if not text.strip():
        raise TextError(f"text {text[:40]!r}: is empty")
    mask = spelling(tokenizer)
    *before, last = text.split(mask)
    if not before:
        raise TextError(f"text {text[:40]!r}: has no {mask}")
    ids, end = tokenizer.frame
    for part in before:
        ids += [*tokenizer.encode(part.rstrip() if tokenizer.mask_lstrip else part), tokenizer.mask_id]
    ids += [*tokenizer.encode(last), *end]
    if len(ids) > context:
        raise TextError(f"text {text[:40]!r}: has {len(ids)} tokens, the model's context is {context}")
    return ids


def _filled(text: str, tokenizer: Tokenizer, chances: Float[Tensor, "N V"], top_k: int) -> dict[str, Any]:
    best = chances.topk(top_k)
    masks = [
        [
            {"token": tokenizer.decode([i], skip_control=False), "id": i, "probability": p}
            for i, p in zip(*one, strict=True)
        ]
        for one in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    first, *others = text.split(spelling(tokenizer))
    filled, run = first, []
    for number, (guesses, part) in enumerate(zip(masks, others, strict=True), 1):
        run.append(guesses[0]["id"])
        if part.strip() or number == len(masks):  # neighbours are decoded together
            words = tokenizer.decode(run, skip_control=False).strip()
            filled = (filled.rstrip() + words[2:] if _continues(run[0], tokenizer) else filled + words) + part
            run = []
    return {"text": text, "masks": masks, "filled": filled}


def _continues(token: int, tokenizer: Tokenizer) -> bool:
    """Return True for WordPiece's ##ing, which continues a word; to others ## is text, also the second time."""
    return (text := tokenizer.decode([token])).startswith("##") and tokenizer.decode([token] * 2) == text + text[2:]
