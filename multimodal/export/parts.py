"""Graphs of each kind of model, and what no graph holds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from multimodal.errors import UsageError
from multimodal.export.graphs import (
    Axes,
    Decoding,
    Graph,
    Method,
    SourceEncoding,
    SpeechRecognition,
    TextEmbedding,
    TextEncoding,
    cache_names,
    empty_cache,
    valid_of,
)
from multimodal.export.refusals import check_kind
from multimodal.models.speech.wave_encoder import WaveEncoderConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.tasks.text.embed import is_language_model
from multimodal.weights.folder import Checkpoint

ROWS, SOURCE, PAST, TOKENS = 2, 6, 4, 3  # of the examples; lengths differ, so that no two are taken for one
FRAMES = 97
BATCH = {0: "batch"}
TEXT: Axes = {0: "batch", 1: "length"}
PREVIOUS: Axes = {0: "batch", 2: "past"}
GROWN: Axes = {0: "batch", 2: "total"}
SPOKEN: Axes = {0: "batch", 1: "source"}
HEARD: Axes = {0: "batch", 2: "source"}


def graphs_of(checkpoint: Checkpoint) -> list[Graph]:
    """Raises UsageError for a model that ONNX graphs do not hold."""
    check_kind(checkpoint, "onnx")
    for config in _texts(checkpoint.original()):
        _check(config, checkpoint.source)
    return KINDS[checkpoint.kind](checkpoint)


def _texts(model: nn.Module) -> list[TextConfig]:
    return [part.config for part in model.modules() if isinstance(part, TextTransformer)]


def _check(config: TextConfig, source: str) -> None:
    """Raise UsageError for what depends on the data in ways that a graph does not hold."""
    block = config.stack.block
    kinds = {"linear attention": block.attention.linear, "mixtures of experts": block.experts,
             "feed-forwards by language": config.languages}  # fmt: skip
    if found := next((name for name, has in kinds.items() if has), None):
        raise UsageError(f"model {source}: ONNX export does not support {found}")


def vit(checkpoint: Checkpoint) -> list[Graph]:
    model = checkpoint.model
    output = "logits" if model.config.classes else "image_features"
    return [_image("model", model if model.config.pool != "none" else Method(model, "tokens"), model.config, output)]


def _image(name: str, module: nn.Module, config: Any, output: str) -> Graph:
    pixels = torch.zeros(ROWS, config.channels, *config.image)
    return Graph(name, module, {"pixel_values": pixels}, (output,), {"pixel_values": BATCH, output: BATCH})


def clip(checkpoint: Checkpoint) -> list[Graph]:
    model = checkpoint.model
    shape = (ROWS, min(SOURCE, model.config.text.context))
    ids = torch.full(shape, max(model.config.eos_id, 0))
    inputs = {"input_ids": ids, "attention_mask": valid_of(shape)}
    axes = {**dict.fromkeys(inputs, TEXT), "text_embeds": BATCH}
    return [
        _image("vision_model", Method(model, "encode_image"), model.config.image, "image_embeds"),
        Graph("text_model", TextEmbedding(model), inputs, ("text_embeds",), axes),
    ]


def speech(checkpoint: Checkpoint) -> list[Graph]:
    encoder = checkpoint.model.config.encoder
    wave = isinstance(encoder, WaveEncoderConfig)
    name, shape = ("input_values", (ROWS, 8000)) if wave else ("input_features", (ROWS, FRAMES, encoder.bands))
    inputs = {name: torch.zeros(shape), "lengths": torch.full((ROWS,), shape[1])}
    axes = {name: {0: "batch", 1: "frames"}, "lengths": BATCH, "logits": {0: "batch", 1: "steps"},
            "logit_lengths": BATCH}  # fmt: skip
    return [Graph("model", SpeechRecognition(checkpoint.model), inputs, ("logits", "logit_lengths"), axes)]


def text(checkpoint: Checkpoint) -> list[Graph]:
    model = checkpoint.model
    if is_language_model(checkpoint):
        return [_decoder("model", model)]
    module = TextEncoding(model, checkpoint.card.get("pooling"), bool(checkpoint.card.get("normalize")))
    shape = (ROWS, SOURCE)
    inputs = {"input_ids": torch.zeros(shape, dtype=torch.long), "attention_mask": valid_of(shape)}
    if model.config.segments > 1:  # RoBERTa has one, which needs no ids
        inputs["token_type_ids"] = torch.zeros(shape, dtype=torch.long)
    axes = dict.fromkeys(inputs, TEXT) | {name: TEXT if each else BATCH for name, each in module.outputs.items()}
    return [Graph("model", module, inputs, tuple(module.outputs), axes)]


def whisper(checkpoint: Checkpoint) -> list[Graph]:
    model, config = checkpoint.model, checkpoint.model.config.encoder
    frames = min(2 * config.context, FRAMES)
    inputs = {"input_features": torch.zeros(ROWS, config.bands, frames)}
    return _pair(model.encoder, model.decoder, inputs, {"input_features": {0: "batch", 2: "frames"}})


def translator(checkpoint: Checkpoint) -> list[Graph]:
    model, shape = checkpoint.model, (ROWS, SOURCE)
    inputs = {"input_ids": torch.zeros(shape, dtype=torch.long), "attention_mask": valid_of(shape)}
    return _pair(model.encoder, model.decoder, inputs, dict.fromkeys(inputs, SPOKEN), True)


def captioner(checkpoint: Checkpoint) -> list[Graph]:
    model, config = checkpoint.model, checkpoint.model.config.image
    inputs = {"pixel_values": torch.zeros(ROWS, config.channels, *config.image)}
    return _pair(Method(model.image, "tokens"), model.decoder, inputs, {"pixel_values": BATCH})


def _pair(
    encoder: nn.Module, decoder: TextTransformer, inputs: dict[str, torch.Tensor], axes: dict[str, Axes],
    masked: bool = False,
) -> list[Graph]:  # fmt: skip
    """An encoder, which also makes the keys and values that the decoder needs of its states, and the decoder."""
    outputs = ("last_hidden_state", *cache_names(decoder.config, "present", "encoder"))
    axes = axes | {"last_hidden_state": SPOKEN, **dict.fromkeys(outputs[1:], HEARD)}
    module = SourceEncoding(encoder, decoder)
    return [Graph("encoder_model", module, inputs, outputs, axes), _decoder("decoder_model", decoder, True, masked)]


def _decoder(name: str, decoder: TextTransformer, crossing: bool = False, masked: bool = False) -> Graph:
    """`crossing`: with a source, whose padding is marked if `masked`."""
    config, part = decoder.config, "decoder" if crossing else ""
    past, present = (cache_names(config, prefix, part) for prefix in ("past_key_values", "present"))
    inputs = {
        "input_ids": torch.zeros(ROWS, TOKENS, dtype=torch.long),
        "attention_mask": valid_of((ROWS, PAST + TOKENS)),
    }
    axes: dict[str, Axes] = {"input_ids": TEXT, "attention_mask": {0: "batch", 1: "total"}, "logits": TEXT}
    if masked:
        inputs["encoder_attention_mask"] = valid_of((ROWS, SOURCE))
        axes["encoder_attention_mask"] = SPOKEN
    inputs |= dict(zip(past, empty_cache(config.stack.block.attention, config.stack.layers, ROWS, PAST), strict=True))
    axes |= dict.fromkeys(past, PREVIOUS) | dict.fromkeys(present, GROWN)
    if crossing:
        heard = cache_names(config, "past_key_values", "encoder")
        tensors = empty_cache(config.stack.block.cross, config.stack.layers, ROWS, SOURCE)
        inputs |= dict(zip(heard, tensors, strict=True))
        axes |= dict.fromkeys(heard, HEARD)
    return Graph(name, Decoding(decoder, crossing, masked), inputs, ("logits", *present), axes)


KINDS: dict[str, Callable[[Checkpoint], Sequence[Graph]]] = {
    "clip": clip, "vit": vit, "joint_conformer": speech, "text": text, "speech_to_text": whisper,
    "text_to_text": translator, "captioner": captioner,
}  # fmt: skip
