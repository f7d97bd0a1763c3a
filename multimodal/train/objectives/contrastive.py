"""Contrastive objective: one loss over all micro-batches of all processes, with its exact gradient.

The features of all micro-batches are computed without a graph, then the loss and its gradient for features, scale and
bias; then each micro-batch runs again with a graph and backpropagates its features' gradient (GradCache, Gao et al.
2021). open_clip's scheme, one loss for every micro-batch, makes the gradients of scale and bias k times too large.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from multimodal.train.losses import contrastive_loss
from multimodal.train.objective import Engine, Objective


class Pairs(NamedTuple):
    """A micro-batch of images and texts.

    `concepts` and `terms` tell which text matches which image; without them texts match images in order. `order`: each
    image's patches in random order, of which the model may see the first ones."""

    images: Tensor  # [B 3 height width]
    ids: Tensor  # [C T]
    valid: Tensor | None = None  # [C T]
    concepts: Tensor | None = None  # [B]
    terms: Tensor | None = None  # [C]
    order: Tensor | None = None  # [B N]
    anchors: Tensor | None = None  # [C D], by the objective: where texts shall stay; 0 where they are free


class Contrastive(Objective):
    """The contrastive loss over all images and texts of a step: sigmoid if the model has a `logit_bias`, else softmax.

    `fits` [concepts, terms]: True if a text of the term matches an image of the concept; by default, if their numbers
    are equal. A text drawn twice counts twice, and an image's target is spread over all matching texts, so the loss is
    a function of the pairs alone, whatever their micro-batch or process. `keep(step)`: share of the patches that the
    model sees (FLIP, Li et al. 2023). `anchor`: weight of 1 - cosine between the vectors of texts now and before
    training, so that new texts are learned without forgetting these (Li and Hoiem 2016): texts without a match, and of
    terms from `anchored` on."""

    def __init__(
        self, model: nn.Module, fits: Bool[Tensor, "concepts terms"] | None = None,
        keep: Callable[[int], float] | None = None, anchor: float = 0.0, anchored: int = 0,
    ):  # fmt: skip
        super().__init__(model)
        self.keep, self.anchor, self.anchored = keep, anchor, anchored
        self.before = (copy.deepcopy(model).eval(),) if anchor else ()  # a tuple hides it from state and optimizer
        for before in self.before:
            before.training = True  # but not its parts: no dropout, and no check that makes the host wait for a GPU
        # Radford et al. 2021, section 2.5; SigLIP's checkpoints have a larger one, such as 117
        self.highest = max(math.log(100), model.logit_scale.item())
        self.register_buffer("table", fits, persistent=False)

    def forward(self, batch: Pairs) -> tuple[Tensor, ...]:
        """Return features of images [B D] and texts [C D] in float32 or better, the scale, and the bias, if any."""
        images = self.model.encode_image(batch.images, batch.order)
        return self._with_scalars(images, self.model.encode_text(batch.ids, batch.valid))

    def _with_scalars(self, *rows: Tensor) -> tuple[Tensor, ...]:
        bias = self.model.logit_bias
        return (*map(wide, rows), self.model.logit_scale.exp(), *([] if bias is None else [bias]))

    def backward(self, engine: Engine, batches: Sequence[Any]) -> dict[str, Tensor]:
        if len(batches) == 1:
            with engine.micro_batch(True):
                loss = self._loss(engine, batches, *engine.forward(batches[0]))
                engine.backward(loss * engine.world)  # DDP averages over processes
        else:
            loss = self._cached(engine, batches)
        return {"loss": engine.total(loss.detach()), "scale": self.model.logit_scale.detach().exp()}

    def at_step(self, batch: Any, step: int) -> Any:
        if isinstance(batch, Pairs) and self.before:
            batch = batch._replace(anchors=self._anchors(batch))
        if not isinstance(batch, Pairs) or batch.order is None:
            return batch
        share = self.keep(step) if self.keep else 1.0
        seen = max(1, round(batch.order.shape[1] * share))
        return batch._replace(order=batch.order[:, :seen] if share < 1 else None)

    @torch.no_grad()
    def _anchors(self, batch: Pairs) -> Tensor:
        """Vectors of the texts before training [C D], 0 for texts that may move."""
        stays = (batch.terms < 0) | (batch.terms >= self.anchored)
        before = self.before[0].to(batch.ids.device)
        return wide(before.encode_text(batch.ids, batch.valid)) * stays[:, None]

    def _cached(self, engine: Engine, batches: list[Any]) -> Tensor:
        random, found = [], []
        for batch in batches:
            random.append(_random_state())
            with torch.no_grad():
                found.append(engine.forward(batch))
        outputs = list(zip(*found, strict=True))  # rows of each micro-batch, and scalars equal in all
        leaves = [torch.cat(parts) if parts[0].ndim else parts[0].detach().clone() for parts in outputs]
        leaves = [x.requires_grad_() for x in leaves]
        loss = self._loss(engine, batches, *leaves)
        loss.backward()
        pulls = [
            x.grad.split([len(own) for own in parts]) if x.ndim else [x.grad / len(batches)] * len(batches)
            for x, parts in zip(leaves, outputs, strict=True)
        ]
        for number, batch in enumerate(batches):
            with engine.micro_batch(number == len(batches) - 1):
                _set_random_state(random[number])
                again = engine.forward(batch)
                pulled = sum((x * pull[number]).sum() for x, pull in zip(again, pulls, strict=True))
                engine.backward(pulled * engine.world)
        return loss

    def _loss(self, engine: Engine, batches: list[Any], images, texts, scale, bias=None) -> Tensor:
        if batches[0].concepts is not None:
            concepts, terms = (
                torch.cat(parts) for parts in zip(*((b.concepts, b.terms) for b in batches), strict=True)
            )
        elif len(images) != len(texts):
            raise ValueError(f"concepts and terms are needed for {len(images)} images and {len(texts)} texts")
        else:
            first = sum(engine.processes.counts(len(images))[: engine.processes.rank])
            concepts = terms = torch.arange(first, first + len(images), device=images.device)
        fits = None if self.table is None else lambda concepts, terms: self.table[concepts[:, None], terms]
        loss = contrastive_loss(
            images, texts, scale, bias, concepts=concepts, terms=terms, fits=fits, sigmoid=bias is not None,
            across=engine.processes.meeting(),
        )  # fmt: skip
        if not self.anchor:
            return loss
        anchors = torch.cat([batch.anchors for batch in batches])
        stays = anchors.any(-1)
        moved = (1 - (texts * anchors).sum(-1)) * stays
        return loss + self.anchor * moved.sum() / engine.total(stays.sum()).clamp(min=1)

    @torch.no_grad()
    def after_step(self) -> None:
        self.model.logit_scale.clamp_(max=self.highest)


def wide(x: Tensor) -> Tensor:
    """Cast to float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _random_state() -> list[Tensor]:
    """Random states of the CPU and the GPU in use, so that the second forward repeats the dropout of the first."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def _set_random_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
