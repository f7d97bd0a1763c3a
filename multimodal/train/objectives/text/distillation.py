"""A small text model that learns from a large one, as DistilBERT did (Sanh et al. 2019): it begins with some of the
teacher's layers, and is pulled towards the teacher's guesses and states beside its own task."""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from multimodal.blocks.masks import padding
from multimodal.data.datasets.text import IGNORED, Batch
from multimodal.errors import UsageError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.train.objective import Summed
from multimodal.train.objectives.text.language import mask_of
from multimodal.train.objectives.text.masked import MaskedBatch, encode

TextBatch = Batch | MaskedBatch


def student_config(teacher: TextConfig, layers: int) -> TextConfig:
    """The teacher's with so many layers. Raises UsageError where it has no more, or shares them."""
    stack = teacher.stack
    if stack.shared is not None:
        raise UsageError("--teacher: its layers share their weights, so that none can be left out")
    if not 0 < layers < stack.layers:
        raise UsageError(f"--layers {layers}: must be 1 or more, and fewer than the teacher's {stack.layers}")
    return replace(teacher, stack=replace(stack, layers=layers))


def student_of(teacher: TextTransformer, layers: int) -> TextTransformer:
    """Layer i of n has the weights of the teacher's layer i·L/n (of 2n layers: every second one, from the first on);
    all else is the teacher's. Raises UsageError as `student_config`."""
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
    """Those that teacher and student are compared at."""
    if isinstance(batch, MaskedBatch):
        return padding(batch.lengths, batch.ids.shape[1])
    return batch.targets != IGNORED


def states_of(model: TextTransformer, batch: TextBatch, real: Bool[Tensor, "B T"]) -> Float[Tensor, "N D"]:
    if isinstance(batch, MaskedBatch):
        return encode(model, batch, batch.ids)[real]
    return model.states(batch.ids, mask=mask_of(batch, model.config.window), places=batch.places)[real]


def task_loss(logits: Float[Tensor, "N V"], batch: TextBatch, real: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Summed cross-entropy of the tokens that the task asks for."""
    if isinstance(batch, MaskedBatch):
        return F.cross_entropy(logits[batch.chosen[real]], batch.targets, reduction="sum")
    return F.cross_entropy(logits, batch.targets[real], reduction="sum")


class Distillation(Summed):
    """Three means: `soft`, the Kullback-Leibler divergence of the student from the teacher's guesses, both at
    `temperature`, times its square (Hinton et al. 2015), over all tokens; `task`, the cross-entropy of what is to be
    guessed; `cosine`, 1 minus the cosine of the last states, over all tokens."""

    def __init__(
        self, student: TextTransformer, teacher: TextTransformer, temperature: float = 2.0,
        weights: Mapping[str, float] | None = None,
    ):  # fmt: skip
        super().__init__(student)
        self.teacher, self.temperature = teacher.requires_grad_(False).eval(), temperature
        self.weights = dict(weights or {"soft": 5.0, "task": 2.0, "cosine": 1.0})

    def train(self, mode: bool = True) -> "Distillation":
        super().train(mode)
        self.teacher.eval()  # it drops nothing
        return self

    def forward(self, batch: TextBatch) -> dict[str, Tensor]:
        real = real_tokens(batch)
        with torch.no_grad():
            wanted = states_of(self.teacher, batch, real)
            guesses = (self.teacher.logits(wanted[None])[0].float() / self.temperature).log_softmax(-1)
        states = states_of(self.model, batch, real)
        logits = self.model.logits(states[None])[0].float()
        own = (logits / self.temperature).log_softmax(-1)
        return {
            "soft": F.kl_div(own, guesses, reduction="sum", log_target=True) * self.temperature**2,
            "task": task_loss(logits, batch, real),
            "cosine": (1 - F.cosine_similarity(states.float(), wanted.float(), dim=-1)).sum(),
        }

    def counts(self, batch: TextBatch) -> dict[str, int | Tensor]:
        real = real_tokens(batch).sum()
        return {"soft": real, "task": len(batch.targets) if isinstance(batch, MaskedBatch) else real, "cosine": real}
