"""A tiny Whisper with random weights, as openai-whisper's model and as ours."""

from functools import cache

import pytest
import torch

from multimodal.weights.speech.whisper import WHISPER_OPENAI

DIMS = {
    "n_mels": 80, "n_audio_ctx": 1500, "n_audio_state": 16, "n_audio_head": 2, "n_audio_layer": 1,
    "n_vocab": 51865, "n_text_ctx": 40, "n_text_state": 16, "n_text_head": 2, "n_text_layer": 2,
}  # fmt: skip
# openai-whisper leaves its vocabulary file open and calls numpy in an old way
THEIR_WARNINGS = [
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Performing inference on CPU:UserWarning"),
    pytest.mark.filterwarnings("ignore:Word-level timestamps on translations:UserWarning"),
]
KEYS = {"id", "seek", "start", "end", "text", "tokens", "temperature", "avg_logprob", "compression_ratio",
        "no_speech_prob"}  # fmt: skip


@cache
def whispers():
    """(openai-whisper's model, our checkpoint)."""
    from whisper.model import ModelDimensions, Whisper

    torch.manual_seed(3)
    theirs = Whisper(ModelDimensions(**DIMS)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (1.5 if "embed" in name else 0.4))
        # the audio must matter and beams must finish, so only a few words and the end are likely
        theirs.decoder.blocks[0].cross_attn.out.weight *= 3
        theirs.decoder.positional_embedding *= 2
        words = theirs.decoder.token_embedding.weight
        words[torch.arange(51865) % 500 != 257] *= 0.3
        words[50364:51865:10] *= 1.8
        words[50257] = 0.46 * (words[26757] + words[14257])  # near the likeliest two
    return theirs, WHISPER_OPENAI.load(dict(theirs.state_dict()), {"dims": DIMS}, "tiny")


@cache
def tiny_hybrid():
    """A joint CTC/attention model with random weights and its tokenizer."""
    from multimodal.blocks.attention import AttentionConfig
    from multimodal.blocks.conformer import ConformerConfig
    from multimodal.blocks.stack import transformer
    from multimodal.models.conformer import ConformerCTC, ConformerCTCConfig, ConformerEncoderConfig
    from multimodal.models.text_config import TextConfig
    from multimodal.tokens.text.bytepair import BytePairTokenizer
    from multimodal.weights.folder import Checkpoint

    sentences = ["the cat sat on the mat", "a dog ran over the hill", "seven birds sang", "we went home", "rain fell"]
    tokenizer = BytePairTokenizer.train(sentences, 280)
    size = tokenizer.vocab_size
    block = ConformerConfig(AttentionConfig(16, 2, relative=True), 32, 7)
    encoder = ConformerEncoderConfig(bands=40, block=block, layers=2, subsample=4, channels=8)
    decoder = TextConfig(size, 600, transformer(16, 1, 2, 32, source_width=16), causal=True, tied=True)
    torch.manual_seed(2)
    model = ConformerCTC(ConformerCTCConfig(encoder, size, decoder)).eval()
    with torch.no_grad():
        model.ctc.weight.mul_(4)
        model.ctc.bias[-1] += 2.5  # blanks between the tokens
    return Checkpoint(model, tokenizer, None, "joint", {"language": "en"})


# a random model writes language tokens, which only openai-whisper would then show as text
SUPPRESSED = [-1, *range(50259, 50358)]
RATE = 16000


def sound(seconds, seed=0):
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(int(seconds * RATE)) / RATE
    loudness = (0.5 + 0.5 * torch.sin(2 * torch.pi * 0.7 * time)) * 0.3
    return loudness * (torch.sin(2 * torch.pi * 300 * time) + 0.3 * torch.randn(len(time), generator=generator))


COMMON = {"language": "en", "temperature": 0.0, "sample_len": 10, "suppress_tokens": SUPPRESSED}
