"""A tiny Whisper with random weights, as openai-whisper's model and as ours."""

from functools import cache

import torch

from multimodal.weights.whisper import WHISPER_OPENAI

DIMS = {
    "n_mels": 80, "n_audio_ctx": 1500, "n_audio_state": 16, "n_audio_head": 2, "n_audio_layer": 1,
    "n_vocab": 51865, "n_text_ctx": 40, "n_text_state": 16, "n_text_head": 2, "n_text_layer": 2,
}  # fmt: skip


@cache
def whispers():
    """(openai-whisper's model, our checkpoint)."""
    from whisper.model import ModelDimensions, Whisper

    torch.manual_seed(3)
    theirs = Whisper(ModelDimensions(**DIMS)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (1.5 if "embed" in name else 0.4))
        # What is heard must matter, and the end must be likely enough that beams finish: so few words are likely.
        theirs.decoder.blocks[0].cross_attn.out.weight *= 3
        theirs.decoder.positional_embedding *= 2
        words = theirs.decoder.token_embedding.weight
        words[torch.arange(51865) % 500 != 257] *= 0.3
        words[50364:51865:10] *= 1.8
        words[50257] = 0.46 * (words[26757] + words[14257])  # near the likeliest two
    return theirs, WHISPER_OPENAI.load(dict(theirs.state_dict()), {"dims": DIMS}, "tiny")
