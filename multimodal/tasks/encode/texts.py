"""Text vectors of a contrastive model."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import TextError
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.tokens.text.tokenizer import texts_of
from multimodal.tokens.text.vocabulary import Tokenizer

TOKENS = 640  # of a batch on a CPU: what the blocks make of them stays in the processor's cache


@torch.inference_mode()
def text_features(
    model: CLIP, tokenizer: Tokenizer, texts: Sequence[str], batch_size: int = 256
) -> Float[Tensor, "N D"]:
    """A unit vector a text, in their order and on the model's device; a text that is there twice is computed once.

    Texts of like length go together, cut to the longest of them where that changes nothing: what a text's vector is
    made of does not see the padding after it. Raises TextError; one TextCut warning says what was cut."""
    if not (texts := texts_of(texts, "texts")):
        raise TextError("texts: there are none")
    rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    context = model.config.text.context
    longest = min(context, tokenizer.context or context)
    free = _padding_is_free(model.config)
    ids, mask, _ = tokenizer.batch(list(rows), longest, pad_to_length=not free)
    lengths = mask.sum(1) if free else torch.full((len(ids),), ids.shape[1])
    order, device, vectors, done = lengths.argsort(descending=True), model.logit_scale.device, None, 0
    while done < len(order):
        width = int(lengths[order[done]])
        part = order[done : done + min(batch_size, max(1, TOKENS // width) if device.type == "cpu" else batch_size)]
        found = model.encode_text(ids[part, :width].to(device), mask[part, :width].to(device))
        if vectors is None:  # one tensor: small ones that stay, between large ones that go, would split the heap
            vectors = found.new_empty(len(rows), found.shape[1])
        vectors[part.to(device)] = found
        done += len(part)
    return vectors if len(rows) == len(texts) else vectors[[rows[text] for text in texts]]


def _padding_is_free(config: CLIPConfig) -> bool:
    """Whether a text's vector is the same however much padding follows. SigLIP's is that of its last position, which
    has seen all of the padding; CoCa places its class token by itself."""
    return config.text_pool == "class" or (config.text_pool == "eos" and (config.text.causal or config.text_valid))
