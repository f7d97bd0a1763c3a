"""Contrastive training of an image-text model: the settings, the model, and a run that moves step by step."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.blocks.stack import transformer
from multimodal.heads import matching_loss
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.text import TextConfig
from multimodal.models.vit import ViTConfig
from multimodal.tokens.image import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text import BytePairTokenizer
from multimodal.train.captions import Captions, read_classes
from multimodal.train.optim import Average, parameter_groups, set_learning_rate, warmup_cosine
from multimodal.train.pictures import draw_batch, read_sets
from multimodal.train.state import newest_state, save_state
from multimodal.weights.folder import Checkpoint

TEMPLATES = [
    "a photo of a {}.", "a picture of a {}.", "{}", "a {}", "a photo of the {}.", "a small photo of a {}.",
    "a blurry photo of a {}.", "a close-up of a {}.", "this is a {}.", "a photo of one {}.", "a good photo of a {}.",
]  # fmt: skip
ZERO_SHOT = ["a photo of a {}.", "a picture of a {}.", "{}", "a photo of the {}.", "a small photo of a {}."]
PATCH = 16


@dataclass
class Settings:
    """`data`: training sources. `classes`: extra class names. `val`: labelled pictures to watch the zero-shot
    accuracy on. `state`: folder of the resumable states."""

    data: list[Path]
    out: Path
    state: Path
    classes: Path
    val: Path | None = None
    steps: int = 4200
    batch: int = 192
    rate: float = 3e-3
    weight_decay: float = 0.1
    warmup: int = 150
    average: float = 0.998
    keep: float = 0.45  # share of the patches looked at, but all in the last `whole` of the steps
    whole: float = 0.08
    smallest_crop: float = 0.5
    strength: float = 0.5  # of the other augmentation
    drop_path: float = 0.0
    image: int = 96
    width: int = 192
    layers: int = 6
    text_width: int = 128
    text_layers: int = 3
    context: int = 32
    vocabulary: int = 2048
    every: int = 500  # steps between states
    seed: int = 0
    resume: bool = False


def build(s: Settings, tokenizer: BytePairTokenizer) -> CLIP:
    image = transformer(s.width, s.layers, s.width // 64, s.width * 4, drop_path=s.drop_path)
    text = transformer(s.text_width, s.text_layers, s.text_width // 32, s.text_width * 4)
    return CLIP(
        CLIPConfig(
            ViTConfig((s.image, s.image), PATCH, image, pool="mean", class_token=False),
            TextConfig(tokenizer.vocab_size, s.context, text, causal=True),
            embed=s.width, loss="softmax", text_pool="eos", eos_id=tokenizer.eos_id,
        )
    )  # fmt: skip


def optimizers(model: CLIP, s: Settings) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices of the blocks, which here learns about twice as fast a step as
    AdamW does; AdamW for embeddings, projections, norms and biases."""
    matrices = [p for stack in (model.image.stack, model.text.stack) for p in stack.parameters() if p.ndim == 2]
    own = {id(p) for p in matrices}
    groups = parameter_groups(model, s.weight_decay)
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in own]
    return [
        torch.optim.Muon(matrices, lr=s.rate, weight_decay=s.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=s.rate, betas=(0.9, 0.98), fused=True),
    ]


class Run:
    """Model, optimiser and average, which move one step at a time and are saved together."""

    def __init__(self, s: Settings):
        torch.manual_seed(s.seed)
        self.settings = s
        # bilinear, as the training crops are
        self.record = Preprocessing((s.image, s.image), "shortest", "bilinear", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
        self.sets = read_sets(s.data, read_classes(s.classes))
        self.captions = Captions([concept for pictures in self.sets for concept in pictures.concepts], TEMPLATES)
        self.tokenizer = BytePairTokenizer.train(self.captions.texts(), s.vocabulary, lowercase=True)
        self.model = build(s, self.tokenizer).train()
        self.optimizers = optimizers(self.model, s)
        self.average, self.done = Average(self.model, s.average), 0

    def loss(self) -> Float[Tensor, ""]:
        s = self.settings
        # each step has its own seed, so that a resumed run draws what an unbroken one would
        torch.manual_seed(s.seed * 1_000_003 + self.done)
        images, groups = draw_batch(self.sets, s.batch, s.smallest_crop, s.strength, self.record)
        texts, fits = self.captions.draw(groups, np.random.default_rng([s.seed, self.done]))
        with warnings.catch_warnings(action="ignore"):  # long captions are cut
            ids = self.tokenizer.batch(texts, s.context).ids
        patches, keep = (s.image // PATCH) ** 2, None
        if self.done < s.steps * (1 - s.whole):
            keep = torch.rand(s.batch, patches).argsort(1)[:, : round(patches * s.keep)]
        with torch.autocast("cpu", torch.bfloat16):
            pictures, captions = self.model.encode_image(images, keep), self.model.encode_text(ids)
        return matching_loss(self.model.logits(pictures.float(), captions.float()), fits)

    def step(self) -> float:
        s = self.settings
        loss = self.loss()
        self.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            set_learning_rate(optimizer, s.rate * warmup_cosine(self.done, s.steps, s.warmup))
            optimizer.step()
        with torch.no_grad():
            self.model.logit_scale.clamp_(max=np.log(100.0))
        self.average.update(self.model)
        self.done += 1
        return loss.item()

    def save(self) -> None:
        state = {"done": self.done, "model": self.model.state_dict(),
                 "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                 "average": self.average.weights, "updates": self.average.updates}  # fmt: skip
        save_state(self.settings.state, self.done, state)

    def resume(self) -> None:
        state = newest_state(self.settings.state)
        if state is not None:
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.average.weights, self.average.updates = state["average"], state["updates"]
            self.done = state["done"]

    def checkpoint(self) -> Checkpoint:
        """The averaged weights."""
        model = build(self.settings, self.tokenizer)
        model.load_state_dict(self.average.weights)
        return Checkpoint(model.eval(), self.tokenizer, self.record, "", {"templates": ZERO_SHOT})
