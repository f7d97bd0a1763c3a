"""Models as modules of tensors alone, with the names of inputs and outputs that Optimum gives to ONNX."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.masks import key_mask
from multimodal.blocks.positions import relative_distances
from multimodal.blocks.stack import select_positions
from multimodal.export.tensor_cache import TensorCache
from multimodal.models.clip import CLIP
from multimodal.models.conformer import ConformerCTC
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig

Axes = dict[int, str]  # names of dimensions of any size
BY_TEXT = ("pooled", "classes", "sentence_embedding")
# names of the logits of several heads, BERT's as in transformers; those of one head are `logits`
LOGITS = {"words": "prediction_logits", "classes": "seq_relationship_logits", "tags": "tag_logits",
          "replaced": "replaced_logits"}  # fmt: skip


@dataclass(frozen=True)
class Graph:
    """`inputs`: an example of each input, two rows at least where any number may come. `axes`: of both sides."""

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    axes: dict[str, Axes] = field(default_factory=dict)


class Method(nn.Module):
    """Calls the method `name` of a model."""

    def __init__(self, model: nn.Module, name: str):
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *inputs: Tensor) -> Tensor:
        return getattr(self.model, self.name)(*inputs)


class TextEmbedding(nn.Module):
    """Unit vectors of texts. A row without the end-of-text id gives that of its first position."""

    def __init__(self, model: CLIP):
        super().__init__()
        self.model = model

    def forward(self, ids: Int[Tensor, "B T"], valid: Int[Tensor, "B T"]) -> Float[Tensor, "B D"]:
        config = self.model.config
        only = torch.full_like(ids[:, 0], 0 if config.text_pool == "first" else ids.shape[1] - 1)
        if config.text_pool == "eos":
            only = (ids == config.eos_id).int().argmax(1)
        x = self.model.text.states(ids, valid=valid.bool() if config.text_valid else None, only=only)[:, 0]
        return F.normalize(x if self.model.text_project is None else self.model.text_project(x), dim=-1)


class SpeechRecognition(nn.Module):
    """CTC logits, in the columns of the family that the model came from, and how many of each row count."""

    def __init__(self, model: ConformerCTC):
        super().__init__()
        self.model = model

    def forward(
        self, features: Float[Tensor, "B F *M"], lengths: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B T V"], Int[Tensor, "B"]]:
        frames, lengths = self.model.encoder(features, lengths)
        logits, row = self.model.ctc_logits(frames), self.model.config.blank_row
        if row is not None:
            logits = torch.cat([logits[..., :row], logits[..., -1:], logits[..., row:-1]], -1)
        return logits, lengths


class TextEncoding(nn.Module):
    """States of texts, the outputs of the heads that the model has, and with `pooling` one vector of each text, of
    length 1 with `normalize`. Rows are padded on the right."""

    def __init__(self, model: TextTransformer, pooling: str | None = None, normalize: bool = False):
        super().__init__()
        self.model, self.pooling, self.normalize, config = model, pooling, normalize, model.config
        heads = {"pooled": config.pool and not config.classes, "words": config.tied is not None,
                 "classes": config.classes, "tags": config.tags, "replaced": config.detect, "starts": config.spans,
                 "ends": config.spans, "sentence_embedding": pooling}  # fmt: skip
        self.parts = ("states", *(part for part, kept in heads.items() if kept))
        one = sum(part in LOGITS for part in self.parts) == 1
        names = {"states": "last_hidden_state", "pooled": "pooler_output", "starts": "start_logits",
                 "ends": "end_logits"} | (dict.fromkeys(LOGITS, "logits") if one else LOGITS)  # fmt: skip
        self.outputs = {names.get(part, part): part not in BY_TEXT for part in self.parts}  # True: of each token

    def forward(
        self, ids: Int[Tensor, "B T"], valid: Int[Tensor, "B T"], segments: Int[Tensor, "B T"] | None = None
    ) -> tuple[Tensor, ...]:
        model, valid = self.model, valid.bool()
        mask = key_mask(valid)
        if model.config.causal:
            mask = mask & _seen(model.config, ids.shape[1], ids.shape[1])
        states = model.states(ids, valid=valid, mask=mask, segments=segments)
        made = {
            "states": lambda: states,
            "words": lambda: model.logits(states),
            "pooled": lambda: model.pooled(states, valid),
            "classes": lambda: model.classes(model.pooled(states, valid)),
            "tags": lambda: model.tags(states),
            "replaced": lambda: model.detect(states),
            "starts": lambda: model.spans(states)[..., 0],
            "ends": lambda: model.spans(states)[..., 1],
            "sentence_embedding": lambda: self._vector(states, valid),
        }
        return tuple(made[part]() for part in self.parts)

    def _vector(self, states: Float[Tensor, "B T D"], valid: Bool[Tensor, "B T"]) -> Float[Tensor, "B E"]:
        """As `multimodal.embed` pools and scales."""
        kept = valid[..., None]
        kinds = {
            "mean": lambda: torch.where(kept, states, 0).sum(1) / kept.sum(1),
            "max": lambda: torch.where(kept, states, -torch.inf).amax(1),
            "cls": lambda: states[:, 0],
            "pooler": lambda: self.model.pooled(states, valid),
            "last": lambda: select_positions(states, valid.sum(1) - 1)[:, 0],
        }
        vector = kinds[self.pooling]()
        vector = vector if self.model.project is None else self.model.project(vector)
        return F.normalize(vector, dim=-1) if self.normalize else vector


class SourceEncoding(nn.Module):
    """States of a source, and the keys and values that each layer of the decoder needs of them."""

    def __init__(self, encoder: nn.Module, decoder: TextTransformer):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, source: Tensor, valid: Int[Tensor, "B S"] | None = None) -> tuple[Tensor, ...]:
        if isinstance(self.encoder, TextTransformer):
            valid = valid.bool()
            states = self.encoder.states(source, valid=valid, mask=key_mask(valid), table=self.decoder.embed)
            known = torch.where(valid[..., None], states, 0)
        else:
            states = known = self.encoder(source)
        return states, *(tensor for layer in range(self.decoder.config.stack.layers)
                         for tensor in self._crossed(known, layer))  # fmt: skip

    def _crossed(self, states: Float[Tensor, "B S _"], layer: int) -> tuple[Tensor, Tensor]:
        blocks = self.decoder.stack.blocks
        block = blocks[layer % len(blocks)]
        states = states if block.source_norm is None else block.source_norm(states)
        return block.cross.keys_values(states)


class Decoding(nn.Module):
    """Logits of the next tokens, and the keys and values of all tokens so far. Rows may be padded on the left."""

    def __init__(self, decoder: TextTransformer, crossing: bool = False, source_valid: bool = False):
        super().__init__()
        self.decoder, self.crossing, self.source_valid = decoder, crossing, source_valid

    def forward(
        self, ids: Int[Tensor, "B T"], valid: Int[Tensor, "B S"], *rest: Tensor
    ) -> tuple[Float[Tensor, "B T V"], *tuple[Tensor, ...]]:
        """`rest`: the source's validity if there is one, then keys and values of each layer, then the source's."""
        source_mask = key_mask(rest[0].bool()) if self.source_valid else None
        tensors = list(rest[self.source_valid :])
        half = len(tensors) // 2 if self.crossing else len(tensors)
        cache = TensorCache(tensors[:half], tensors[half:], source_mask)
        positions = (valid.cumsum(1) - 1)[:, -ids.shape[1] :].clamp(min=0)
        # the cross-attention's keys stand in for the source, which is not read
        source = tensors[half][:, 0] if self.crossing else None
        states = self.decoder.states(
            ids, source, cache=cache, positions=positions, mask=self._mask(ids.shape[1], valid.bool())
        )
        return self.decoder.logits(states), *cache.tensors

    def _mask(self, count: int, valid: Tensor) -> Tensor:
        """Earlier tokens that are not padding, and itself: a row without keys would be NaN."""
        itself = relative_distances(count, valid.shape[1]) == 0
        return (_seen(self.decoder.config, count, valid.shape[1]) & valid[:, None] | itself)[:, None]


def _seen(config: TextConfig, count: int, keys: int) -> Bool[Tensor, "T S"]:
    """Itself and earlier tokens, as far as the window goes; that of a pattern narrows the mask in its layers."""
    distance = relative_distances(count, keys)
    return distance <= 0 if config.window is None else (distance <= 0) & (distance > -config.window)


def cache_names(decoder: TextConfig, prefix: str, part: str = "") -> list[str]:
    """Names of the keys and values of each layer in turn."""
    part = f".{part}" if part else ""
    return [f"{prefix}.{layer}{part}.{side}" for layer in range(decoder.stack.layers) for side in ("key", "value")]


def empty_cache(own: AttentionConfig, layers: int, rows: int, length: int) -> list[Float[Tensor, "B K S E"]]:
    """Example keys and values."""
    shape = rows, own.key_heads, length, own.head_size
    return [torch.zeros(shape) for _ in range(2 * layers)]


def valid_of(shape: Sequence[int]) -> Int[Tensor, "B T"]:
    return torch.ones(shape, dtype=torch.long)
