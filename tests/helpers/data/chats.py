"""A tiny any-to-text checkpoint with a chat format, every weight random."""

import json
from dataclasses import replace

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from multimodal.models.any_to_text import AnyToText
from multimodal.models.text_config import PositionConfig
from multimodal.tokens.chat.format import CONTROLS, PLAIN, ChatFormat
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.text.hub.pipeline import HubTokenizer
from multimodal.weights.folder import Checkpoint
from tests.helpers.tiny import ANY, ANYS, randomized, text

NAMES = (*CONTROLS, "<|stop|>")


def tokenizer_with(names: tuple[str, ...]) -> HubTokenizer:
    """Bytes, then control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)} | {n: 256 + i for i, n in enumerate(names)},
                              merges=[]))  # fmt: skip
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    control = {name: 256 + i for i, name in enumerate(names)}
    return HubTokenizer(json.loads(made.to_str()), control, 256 + len(names), pad_id=256, eos_id=control["<|end|>"])


def checkpoint(name: str = "any", seed: int = 0) -> Checkpoint:
    tokenizer = tokenizer_with(NAMES)
    config = ANYS[name]
    size = {"vocabulary": tokenizer.vocab_size, "context": 400}
    decoder = replace(config.decoder, **size)
    if config.crosses:
        decoder = replace(text(tied=True, source=True), positions=PositionConfig("rotary"), **size)
    ids = tuple(tokenizer.control_names[n] for n in ("<|image|>", "<|audio|>"))
    config = replace(config, decoder=decoder, placeholders=ids)
    if name == "any":  # windows of 1.28 s
        config = replace(config, audio=replace(ANY.audio, context=64))
    preprocessing = Preprocessing((8, 12), "squash", "bicubic", (0.5,) * 3, (0.5,) * 3, 0, 1.0)
    form = ChatFormat(PLAIN, image="<|image|>", audio="<|audio|>", eos=("<|stop|>",))
    return Checkpoint(randomized(AnyToText(config), seed), tokenizer, preprocessing, "tiny", chat=form)
