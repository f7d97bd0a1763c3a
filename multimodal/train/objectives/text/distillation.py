"""Distillation of a text model as in DistilBERT (Sanh et al. 2019): the student starts with some of the teacher's
layers and learns from its predictions and states beside the task."""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from multimodal.data.datasets.text import IGNORED, TokenBatch
from multimodal.errors import UsageError, demand
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.tasks.evaluate.perplexity import mask_of
from multimodal.train.objective import Summed
from multimodal.train.objectives.text.masked import MaskedBatch, encode

TextBatch = TokenBatch | MaskedBatch


def student_config(teacher: TextConfig, layers: int) -> TextConfig:
    """Return the teacher's config with `layers`. Raises UsageError if it has no more, or shares them."""
    stack = teacher.stack
    if stack.shared is not None:
        raise UsageError("shares its weights among layers, so none can be dropped", argument="teacher")
    demand("layers", layers, 0 < layers < stack.layers, f"1 or more, and fewer than the teacher's {stack.layers}")
    return replace(teacher, stack=replace(stack, layers=layers))


def student_of(teacher: TextTransformer, layers: int) -> TextTransformer:
    """Copy the teacher with its layers i·L/n (every second one for half as many). Raises UsageError as
    `student_config`."""
    student = TextTransformer(student_config(teacher.config, layers))
    weights = teacher.state_dict()
    for name in list(weights):
        if name.startswith("stack.blocks."):
            del weights[name]
    for number in range(layers):
        own = teacher.stack.blocks[number * teacher.config.stack.layers // layers].state_dict()
        weights |= {f"stack.blocks.{number}.{name}": tensor for name, tensor in own.items()}
    student.load_state_dict(weights)
    return student


def real_tokens(batch: TextBatch) -> Bool[Tensor, "B T"]:
    """Mask of the tokens at which teacher and student are compared."""
    if isinstance(batch, MaskedBatch):
        return batch.valid
    return batch.targets != IGNORED


def states_of(model: TextTransformer, batch: TextBatch, real: Bool[Tensor, "B T"]) -> Float[Tensor, "N D"]:
    if isinstance(batch, MaskedBatch):
        return encode(model, batch, batch.ids)[real]
    return model.states(batch.ids, mask=mask_of(batch, model.config.window), positions=batch.places)[real]


def task_loss(logits: Float[Tensor, "N V"], batch: TextBatch, real: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Summed cross-entropy over the task's targets."""
    if isinstance(batch, MaskedBatch):
        return F.cross_entropy(logits[batch.chosen[real]], batch.targets, reduction="sum")
    return F.cross_entropy(logits, batch.targets[real], reduction="sum")


class Distillation(Summed):
    """Three means: `soft`, the Kullback-Leibler divergence from the teacher's predictions at `temperature`, times its
    square (Hinton et al. 2015), over all tokens; `task`, the cross-entropy over targets; `cosine`, one minus the cosine
    of the last states, over all tokens."""

    def __init__(
        self, student: TextTransformer, teacher: TextTransformer, temperature: float = 2.0,
        weights: Mapping[str, float] | None = None,
    ):  # fmt: skip
        super().__init__(student)
        self.teacher, self.temperature = teacher.requires_grad_(False).eval(), temperature
        self.weights = dict(weights or {"soft": 5.0, "task": 2.0, "cosine": 1.0})

    def train(self, mode: bool = True) -> "Distillation":
        super().train(mode)
        self.teacher.eval()  # without dropout
        return self

    def forward(self, batch: TextBatch) -> dict[str, Tensor]:
        real = real_tokens(batch)
        with torch.no_grad():
            target = states_of(self.teacher, batch, real)
            guesses = (self.teacher.logits(target[None])[0].float() / self.temperature).log_softmax(-1)
        states = states_of(self.model, batch, real)
        logits = self.model.logits(states[None])[0].float()
        own = (logits / self.temperature).log_softmax(-1)
        return {
            "soft": F.kl_div(own, guesses, reduction="sum", log_target=True) * self.temperature**2,
            "task": task_loss(logits, batch, real),
            "cosine": (1 - F.cosine_similarity(states.float(), target.float(), dim=-1)).sum(),
        }

    def counts(self, batch: TextBatch) -> dict[str, int | Tensor]:
        real = real_tokens(batch).sum()
        return {"soft": real, "task": len(batch.targets) if isinstance(batch, MaskedBatch) else real, "cosine": real}
