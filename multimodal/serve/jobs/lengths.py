"""Lengths of texts in tokens, against a model's context."""

from multimodal.errors import TextError
from multimodal.models.clip import CLIP
from multimodal.weights.folder import Checkpoint


def length_read(checkpoint: Checkpoint, text: str, place: str) -> int:
    """Number of tokens that the model reads of a text, with its control tokens. Raises TextError, which begins with
    `place`, for more than its context."""
    model, tokenizer = checkpoint.model, checkpoint.required_tokenizer()
    config = model.config.text if isinstance(model, CLIP) else getattr(model, "encoder", model).config
    begin, end = tokenizer.frame
    ends = isinstance(model, CLIP) or tokenizer.puts_end or not config.causal
    try:
        count = len(begin) + len(tokenizer.encode(text)) + (len(end) if ends else 0)
    except TextError as error:
        raise TextError(f"{place}: {error}") from None
    most = tokenizer.length_in(config.context)
    if count > most:
        raise TextError(f"{place}: has {count} tokens, this model's maximum context length is {most} tokens")
    return count
