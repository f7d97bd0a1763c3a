"""Figures of a joint CTC and attention recogniser, for evaluate.py: error rates and times of its four decoders."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from multimodal.data.batching import bucketed
from multimodal.data.datasets.class_names import evenly
from multimodal.data.datasets.speech import read_features
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import open_source
from multimodal.decoding.ctc import ctc_greedy
from multimodal.errors import UsageError
from multimodal.models.whisper import JointConformer
from multimodal.tasks.evaluate.scores import word_errors
from multimodal.tasks.transcribe.conformer.windows import JointBeam, joint_beam
from multimodal.train.objectives.augment_speech import stacked
from multimodal.weights.folder import Checkpoint

Decoder = Literal["greedy", "ctc", "attention", "joint"]


@dataclass(frozen=True)
class SpeechOptions:
    """Of a joint Conformer. A beam ends when no going text can overtake the best ended one."""

    decoders: tuple[Decoder, ...] = ("greedy", "ctc", "attention", "joint")
    """CTC best path, CTC prefix beam, attention beam, both"""
    beam: int = 10
    """beams of the last three"""
    ctc_weight: float = 0.3
    """of the CTC score in joint decoding"""
    frames: int = 12000
    """most padded frames (10 ms) of a batch"""

    def __post_init__(self):
        if not 0 < self.ctc_weight < 1:
            raise UsageError(f"--ctc_weight {self.ctc_weight}: is not between 0 and 1")
        if self.beam < 1:
            raise UsageError(f"--beam {self.beam}: is under 1")


class Encoded(NamedTuple):
    frames: Tensor  # [B T D]
    logprobs: Tensor  # [B T W] of the CTC
    lengths: Tensor  # [B]


@torch.inference_mode()
def encode(model: JointConformer, features: list[Tensor]) -> Encoded:
    batch, lengths = stacked(features)
    device = model.ctc.weight.device
    frames, _, lengths = model.encode(batch.to(device), lengths.to(device))
    return Encoded(frames, model.ctc_logits(frames).float().log_softmax(-1), lengths)


def decode(checkpoint: Checkpoint, batch: Encoded, decoder: Decoder, options: SpeechOptions) -> list[str]:
    """The texts of a batch; with the attention's, one longer than its context is cut there."""
    if decoder == "greedy":
        found = ctc_greedy(batch.logprobs, batch.lengths, checkpoint.model.config.blank)
    else:
        weight = {"ctc": 1.0, "attention": 0.0, "joint": options.ctc_weight}[decoder]
        found = joint_beam(*batch, checkpoint, JointBeam(options.beam, weight)).ids
    return [checkpoint.tokenizer.decode(ids).strip() for ids in found]


def transcripts(
    checkpoint: Checkpoint, features: Sequence[Tensor], options: SpeechOptions
) -> tuple[dict[str, list[str]], dict[str, float]]:
    """The texts of each decoder in the order of `features`, and seconds of each and of the encoder."""
    if checkpoint.model.decoder is None and {"attention", "joint"} & set(options.decoders):
        raise UsageError(f"--decoders: {checkpoint.source} has no attention decoder, only greedy and ctc")
    texts = {decoder: [""] * len(features) for decoder in options.decoders}
    seconds = dict.fromkeys(("encoder", *options.decoders), 0.0)
    for rows in bucketed([len(f) for f in features], options.frames):
        began = time.perf_counter()
        batch = encode(checkpoint.model, [features[i].float() for i in rows])
        seconds["encoder"] += time.perf_counter() - began
        for decoder, own in texts.items():
            began = time.perf_counter()
            for i, text in zip(rows, decode(checkpoint, batch, decoder, options), strict=True):
                own[i] = text
            seconds[decoder] += time.perf_counter() - began
    return texts, {name: round(value, 2) for name, value in seconds.items()}


def recognise(
    checkpoint: Checkpoint, path: str, options: SpeechOptions, count: int | None, trust: Trust = OWN_FOLDER
) -> dict[str, Any]:
    """Error rates on recordings with transcripts. The seconds of a decoder are without those of the encoder."""
    source = open_source(path, trust=trust)
    numbers = evenly(range(len(source)), count)
    wanted = [" ".join(source.read(number).texts[:1]) for number in numbers]
    features = [read_features(source, number, checkpoint.model.config.encoder.bands) for number in numbers]
    texts, seconds = transcripts(checkpoint, features, options)
    lines = [" | ".join([wanted[i], *(own[i] for own in texts.values())]) for i in evenly(range(len(wanted)), 8)]
    return {
        "utterances": len(wanted), "sound": {"seconds": sum(map(len, features)) // 100},
        "encoder": {"seconds": seconds["encoder"]},
        **{name: word_errors(wanted, own) | {"seconds": seconds[name]} for name, own in texts.items()},
        "examples": [f"wanted | {' | '.join(texts)}", *lines],
    }  # fmt: skip


class ErrorRates:
    """For the loop of a training: error rates of one decoder, the attention's without a beam. `examples`: the last
    texts, wanted and found."""

    def __init__(self, begun: Checkpoint, wanted: list[str], features: list[Tensor], decoder: Decoder):
        self.begun, self.wanted, self.features = begun, wanted, features
        self.options, self.examples = SpeechOptions((decoder,), beam=1), []

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        checkpoint = replace(self.begun, model=model)
        (found,) = transcripts(checkpoint, self.features, self.options)[0].values()
        self.examples = [f"{a} | {b}" for a, b in zip(self.wanted, found, strict=True)][:10]
        return word_errors(self.wanted, found)
