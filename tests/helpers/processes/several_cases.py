"""Functions that the multi-process tests run in each process. Results are numbers and lists."""

import logging
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import multimodal.train.loop
from multimodal.data.datasets.text import IGNORED
from multimodal.data.loader import Loader, shuffled
from multimodal.errors import DataError
from multimodal.models.clip import CLIP
from multimodal.tasks.ask.media import Medium, row_count
from multimodal.tokens.image.tiles import Tiled
from multimodal.train.distributed.processes import Processes
from multimodal.train.loop import Loop
from multimodal.train.lora import freeze
from multimodal.train.losses import contrastive_loss
from multimodal.train.objectives.any_to_text import Answering, ChatExample, Input, collate
from multimodal.train.objectives.contrastive import Contrastive, Pairs
from multimodal.train.optim import OptimSettings
from multimodal.train.signals import Stopped
from multimodal.weights.folder import Checkpoint
from tests.helpers import tiny_run
from tests.helpers.data.chats import checkpoint
from tests.helpers.tiny import CLIPS, VOCABULARY

ADAMW = OptimSettings(rate=1e-2, warmup=2, average=0.9)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def contrast(image_counts: list[int], text_counts: list[int], sigmoid: bool, alone: bool = True) -> list[list[float]]:
    """Loss of this process (of all if `alone`) and gradients of its features, scale and bias."""
    images, captions = (F.normalize(noise(sum(n), 4, seed=len(n)), dim=-1) for n in (image_counts, text_counts))
    concepts, terms = torch.arange(len(images)) % 3, torch.arange(len(captions)) % 3
    across = None
    if not alone:
        processes = Processes()
        across = processes.meeting()
        images, concepts = (x.split(image_counts)[processes.rank] for x in (images, concepts))
        captions, terms = (x.split(text_counts)[processes.rank] for x in (captions, terms))
    leaves = [images, captions, *(torch.tensor(x, dtype=torch.float64) for x in (9.0, -3.0))]
    leaves = [x.detach().requires_grad_() for x in leaves]
    loss = contrastive_loss(*leaves, concepts=concepts, terms=terms, sigmoid=sigmoid, across=across, block=8)
    loss.backward()
    return [x.flatten().tolist() for x in (loss, *(leaf.grad for leaf in leaves))]


def contrasts(image_counts: list[int], text_counts: list[int]) -> dict[bool, list[list[float]]]:
    found = {sigmoid: contrast(image_counts, text_counts, sigmoid, alone=False) for sigmoid in (False, True)}
    Processes().close()
    return found


class Recorder(tiny_run.Quiet):
    rows: dict[int, float]
    figures: dict[int, float]

    def __init__(self, *_: Any):
        super().__init__()
        Recorder.rows, Recorder.figures = {}, {}

    def step(self, number: int, metrics: dict[str, float], **_: Any) -> None:
        Recorder.rows[number] = metrics["loss"]

    def evaluated(self, number: int, figures: dict[str, float], seconds: float) -> None:
        Recorder.figures[number] = figures["sum"]


def figures(model: torch.nn.Module, step: int) -> dict[str, float]:
    assert os.environ["RANK"] == "0"
    return {"sum": sum(float(p.detach().double().abs().sum()) for p in model.parameters())}


class Texts(tiny_run.Images):
    """Images with a text each."""

    def read(self, key: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(1, VOCABULARY - 2, (9,), generator=torch.Generator().manual_seed(key))
        ids[-1] = VOCABULARY - 1
        return super().read(key)[0].double(), ids


def as_it_is(item: Any, generator: torch.Generator) -> Any:
    return item


def pairs(items: list[tuple[Tensor, Tensor]]) -> Pairs:
    return Pairs(*(torch.stack(x) for x in zip(*items, strict=True)))


def clip_loop(run: Path, kind: str, **changes: Any) -> Loop:
    s = tiny_run.settings(run, optim=ADAMW, **changes)
    torch.manual_seed(0)
    model = CLIP(CLIPS[kind]).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim else None
    loader = Loader(Texts(), shuffled(28, 8, 0), as_it_is, pairs, micro=s.accumulate)
    return Loop(s, Contrastive(model), loader)


class Labelled(tiny_run.Images):
    def read(self, key: int) -> tuple[Tensor, int]:
        image, label = super().read(key)
        return image.double(), label


class Classify(tiny_run.Classify):
    """Classification in float64: Adam would amplify the rounding errors of zero gradients."""

    def forward(self, batch: tiny_run.Batch) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.model(batch.images), batch.labels, reduction="sum")}


def image_loop(run: Path, nan: tuple[int, ...] = (), **changes: Any) -> Loop:
    s = tiny_run.settings(run, **{"optim": ADAMW} | changes)
    loader = Loader(Labelled(nan=nan), shuffled(28, 8, 0), as_it_is, tiny_run.collate, micro=s.accumulate)
    return Loop(s, Classify(tiny_run.model(drop=0.0).double()), loader, figures)


def half_loop(run: Path, **changes: Any) -> Loop:
    """Classification in float32 under autocast."""
    s = tiny_run.settings(run, **{"optim": ADAMW, "precision": "autocast"} | changes)
    loader = Loader(tiny_run.Images(), shuffled(28, 8, 0), as_it_is, tiny_run.collate, micro=s.accumulate)
    return Loop(s, tiny_run.Classify(tiny_run.model(drop=0.0)), loader, figures)


class Chats(tiny_run.Images):
    """Texts of two lengths, and images before the first four of them."""

    def __init__(self, known: Checkpoint):
        super().__init__()
        self.known = known

    def read(self, key: int) -> ChatExample:
        known, ids, inputs = self.known, [*range(10, 20 + 80 * (key % 2))], []
        if key < 4:
            pixels = super().read(key)[0].double()[None]
            medium = Medium("image", pixels, tile=Tiled(pixels, (0, 0), (8, 12)))
            inputs = [Input(medium, str(key))]
            ids = [known.model.config.placeholders[0]] * row_count(known.model, medium, known.preprocessing) + ids
        return ChatExample(ids[:-1], [IGNORED] * (len(ids) - 10) + ids[-9:], inputs)


def chat_loop(run: Path, frozen: tuple[str, ...], **changes: Any) -> Loop:
    """Conversations of which one in four has an image and none has sound."""
    s = tiny_run.settings(run, optim=ADAMW, **changes)
    known = checkpoint()
    freeze(known.model.double(), frozen)
    plan = lambda epoch: [[key, 4 + 3 * key, 5 + 3 * key, 6 + 3 * key] for key in range(4)]
    loader = Loader(Chats(known), plan, as_it_is, collate, micro=s.accumulate)
    return Loop(s, Answering(known.model, known.preprocessing), loader, figures)


def fit(loop: Loop) -> dict[str, Any]:
    """Train; return losses by step (first process), the end and the weights."""
    multimodal.train.loop.TrainingLog, Recorder.rows, Recorder.figures = Recorder, {}, {}
    rank, end = loop.rank, "done"
    try:
        model = loop.fit()
        weights = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    except (SystemExit, Stopped, Exception) as error:
        end, weights = f"{type(error).__name__}: {error}", {}
    return {"rank": rank, "losses": Recorder.rows, "figures": Recorder.figures, "end": end, "weights": weights,
            "done": loop.done, "not_finite": loop.not_finite}  # fmt: skip


def train(make: str, *args: Any) -> dict[str, Any]:
    """Train the named loop; the last of `args` are the settings."""
    *args, options = args
    logging.disable()
    os.environ["LOCAL_WORLD_SIZE"] = str(options.pop("inside", os.environ["WORLD_SIZE"]))  # processes of a machine
    return fit({"clip": clip_loop, "images": image_loop, "half": half_loop, "chats": chat_loop}[make](*args, **options))


def trouble(run: Path, kind: str, at: int = 3) -> dict[str, Any]:
    """Stop, fail or kill the last process in step `at`; the others do not know."""
    logging.disable()
    loop = image_loop(run, log_every=1)
    step, start = loop.step, loop.loader.start

    def stopping(batches):
        if loop.done + 1 == at:
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGTERM)
        return step(batches)

    def broken(number, check):
        for count, batches in enumerate(start(number, check)):
            if count == at:
                raise DataError("image-7.png: broken")
            yield batches

    if loop.rank == loop.world - 1:
        if kind != "error":
            loop.step = stopping
        else:
            loop.loader.start = broken
    return fit(loop)


def lonely(run: Path) -> str:
    """Train a model with a parameter that takes no part in the loss."""
    loop = image_loop(run)
    model = tiny_run.model().double()
    model.spare = torch.nn.Parameter(torch.zeros(3))
    return fit(Loop(loop.settings, Classify(model), loop.loader))["end"]


def full_disk(run: Path) -> dict[str, Any]:
    """Train while the second process cannot write its shard of a state."""
    from torch.distributed.checkpoint import filesystem

    logging.disable()
    loop = image_loop(run, steps=2, shard=True)
    if loop.rank == 1:

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        filesystem._write_files_from_queue = refuse
    return fit(loop)
