"""Error rates of a Conformer recognizer's decoders on whole recordings, without voice detection or thresholds."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from multimodal.data.batching import bucketed
from multimodal.data.datasets.class_names import evenly
from multimodal.data.datasets.speech import read_features
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import USUAL, ListColumns, open_source
from multimodal.decoding.ctc import ctc_greedy
from multimodal.errors import UsageError, demand
from multimodal.inference.modules import inference_mode
from multimodal.models.conformer import ConformerCTC
from multimodal.tasks.evaluate.scores import normalizer, word_errors
from multimodal.tasks.transcribe.conformer.decode import HybridBeam, hybrid_beam_search
from multimodal.tasks.transcribe.sessions import only_language
from multimodal.weights.encode import evaluating
from multimodal.weights.folder import Checkpoint

Decoder = Literal["greedy", "ctc", "attention", "joint", "fused"]
DECODERS: tuple[Decoder, ...] = ("greedy", "ctc", "attention", "joint")
BATCH_FRAMES = 12000  # padded 10 ms frames per batch


@dataclass(frozen=True)
class DecoderOptions:
    """`decoders`: CTC best path, CTC prefix beam search, attention beam search, joint beam search. `ctc_weight`: of
    the CTC score in the joint search. `fused`: the search of that decoder, such as joint with a language model.
    `language`: of the references (None: the one in the checkpoint's card). `normalizer`, `keep_marks`: see
    `scores.normalizer`."""

    decoders: tuple[Decoder, ...] = DECODERS
    beam_size: int = 10
    ctc_weight: float = 0.3
    fused: HybridBeam | None = None
    language: str | None = None
    normalizer: str | None = None
    keep_marks: bool = False

    def __post_init__(self):
        demand("ctc_weight", self.ctc_weight, 0 < self.ctc_weight < 1, "between 0 and 1")
        demand("beam_size", self.beam_size, self.beam_size >= 1, "1 or more")
        normalizer(self.normalizer or "basic", self.keep_marks)  # refused before an hour of work


class EncodedFrames(NamedTuple):
    frames: Float[Tensor, "B T D"]
    logprobs: Float[Tensor, "B T W"]
    """of the CTC"""
    lengths: Int[Tensor, "B"]


@inference_mode()
def encode(model: ConformerCTC, features: Sequence[Float[Tensor, "_ M"]]) -> EncodedFrames:
    device, lengths = model.ctc.weight.device, torch.tensor([len(row) for row in features])
    batch = pad_sequence(list(features), batch_first=True)
    frames, _, lengths = model.encode(batch.to(device), lengths.to(device))
    return EncodedFrames(frames, model.ctc_logits(frames).float().log_softmax(-1), lengths)


def decode(checkpoint: Checkpoint, batch: EncodedFrames, decoder: Decoder, options: DecoderOptions) -> list[str]:
    """Texts of a batch. The attention decoder cuts a text at its context."""
    if decoder == "greedy":
        ids = ctc_greedy(batch.logprobs, batch.lengths, checkpoint.model.config.blank)
    elif decoder == "fused":
        ids = hybrid_beam_search(*batch, checkpoint, options.fused).ids
    else:
        weight = {"ctc": 1.0, "attention": 0.0, "joint": options.ctc_weight}[decoder]
        ids = hybrid_beam_search(*batch, checkpoint, HybridBeam(options.beam_size, weight)).ids
    return [checkpoint.tokenizer.decode(row).strip() for row in ids]


def transcripts(
    checkpoint: Checkpoint, features: Sequence[Float[Tensor, "_ M"]], options: DecoderOptions
) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Texts by decoder, in the order of `features`; seconds spent in the encoder and in each decoder."""
    if checkpoint.model.decoder is None and {"attention", "joint"} & set(options.decoders):
        raise UsageError(f"decoders: {checkpoint.source} has no attention decoder, only greedy and ctc")
    texts = {decoder: [""] * len(features) for decoder in options.decoders}
    seconds = dict.fromkeys(("encoder", *options.decoders), 0.0)
    for rows in bucketed([len(row) for row in features], BATCH_FRAMES):
        with evaluating(checkpoint.model):
            start = time.perf_counter()
            batch = encode(checkpoint.model, [features[i].float() for i in rows])
            seconds["encoder"] += time.perf_counter() - start
            for decoder, hypotheses in texts.items():
                start = time.perf_counter()
                for i, text in zip(rows, decode(checkpoint, batch, decoder, options), strict=True):
                    hypotheses[i] = text
                seconds[decoder] += time.perf_counter() - start
    return texts, {name: round(value, 2) for name, value in seconds.items()}


def evaluate_decoders(
    checkpoint: Checkpoint,
    manifest: str,
    options: DecoderOptions | None = None,
    limit: int | None = None,
    trust: Trust = OWN_FOLDER,
    columns: ListColumns = USUAL,
) -> dict[str, Any]:
    """WER and CER of each decoder on at most `limit` recordings, evenly spread. A decoder's seconds exclude those of
    the encoder. Raises DataError for a recording that cannot be read, UsageError for a decoder the model lacks."""
    options = options or DecoderOptions()
    language = only_language(checkpoint, options.language, "transcribe") or options.language
    errors = partial(word_errors, language=language, name=options.normalizer, keep_marks=options.keep_marks)
    source = open_source(manifest, columns=columns, trust=trust)
    keys = evenly(range(len(source)), limit)
    references = [" ".join(source.read(key).texts[:1]) for key in keys]
    encoder = checkpoint.model.config.encoder
    features = [read_features(source, key, encoder.bands, encoder.features) for key in keys]
    texts, seconds = transcripts(checkpoint, features, options)
    return {
        "utterances": len(references), "audio_seconds": round(sum(map(len, features)) / 100, 2),
        "encoder": {"seconds": seconds["encoder"]},
        **{name: errors(references, rows) | {"seconds": seconds[name]} for name, rows in texts.items()},
    }  # fmt: skip


class ErrorRates:
    """Validation during training: error rates of one decoder, with a beam of 1, in the language of the card of `start`.
    `examples`: reference and hypothesis of a few recordings of the last call."""

    def __init__(self, start: Checkpoint, references: list[str], features: list[Tensor], decoder: Decoder):
        self.start, self.references, self.features = start, references, features
        self.options, self.examples = DecoderOptions((decoder,), beam_size=1), []

    def __call__(self, model: nn.Module, step: int = 0) -> dict[str, float | None]:
        checkpoint = replace(self.start, model=model)
        (hypotheses,) = transcripts(checkpoint, self.features, self.options)[0].values()
        self.examples = [f"{a} | {b}" for a, b in zip(self.references, hypotheses, strict=True)][:10]
        return word_errors(self.references, hypotheses, self.start.card.get("language"))
