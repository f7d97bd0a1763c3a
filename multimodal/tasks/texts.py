"""Text vectors of a contrastive model."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.models.clip import CLIP
from multimodal.tokens.text import Tokenizer


@torch.inference_mode()
def text_features(
    model: CLIP, tokenizer: Tokenizer, texts: Sequence[str], batch_size: int = 256
) -> Float[Tensor, "N D"]:
    """A unit vector a text, in their order. Raises TextError."""
    context = model.config.text.context
    longest = min(context, tokenizer.context or context)
    vectors = []
    for start in range(0, len(texts), batch_size):
        batch = tokenizer.batch(texts[start : start + batch_size], longest)
        vectors.append(model.encode_text(batch.ids, batch.mask))
    return torch.cat(vectors)
