r"""Trains a contrastive image-text model, such as the shipped `assets/clip-vit-16`.

    data=../shared/data/vision
    python recipes/train_clip.py --run clip-run --out clip-vit-16 --data "$data/tiny-imagenet/train-*.tar" \
        $data/caltech101/train $data/flickr8k-1000/train.jsonl \
        --val $data/tiny-imagenet/val-0000.tar $data/caltech101/val
    python recipes/evaluate.py --model clip-vit-16 --data $data/tiny-imagenet/val-0000.tar \
        $data/caltech101/val $data/cifar10-test

Captions are made of class names, synonyms, WordNet hypernyms and glosses, or come with the pictures: CSV (`filepath,
title`), JSON lines (`file_name,text` or `captions`), tars with `.txt`. `--loss sigmoid` trains as SigLIP does, `--init
FOLDER` goes on from a checkpoint, `--hold_out 0.1` leaves a tenth of the classes out and reports on them.

Cost: 0.6 to 0.7 s of one core a step of 192 pictures (AMD EPYC with AVX-512 bf16), 1.6 GB of memory.
Result of `assets/clip-vit-16` (4,200 steps in 46 minutes by this recipe at revision a77fa31, which drew one caption a
class of a batch, not one a picture): zero-shot with the names of all classes of a set, top-1 / top-5: Tiny ImageNet val
(5,050 pictures, 202 classes) 19.7 % / 45.4 %, Caltech-101 val (400, 80 classes) 36.0 % / 63.3 %, CIFAR-10 test (5,000,
10 classes, none of its pictures trained on) 29.9 % / 77.3 %.
With `--hold_out 0.1 --steps 1500 --schedule wsd` (28 of the 282 classes never seen, not even by name; 30 minutes of
half a core): on all classes Tiny ImageNet 13.3 % (505 pictures), Caltech-101 26.5 %. On pictures of the classes held
out, top-1 among all names 2.4 % of 500 and 2.5 % of 40; among the held-out names alone 8.8 % (20 classes, chance 5.0
%) and 27.5 % (8 classes, chance 12.5 %): what it knows of a class never named is little.
"""

import dataclasses
import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch
from evaluate_pictures import PictureOptions, accuracy, examples, read_labelled
from torch import nn

from multimodal.data.datasets.class_names import Captions, class_names
from multimodal.data.datasets.images import Pictures
from multimodal.data.loader import Loader, shuffled
from multimodal.data.remote.trust import Trust
from multimodal.errors import UsageError
from multimodal.models.clip import CLIP
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text.vocabulary import BytePairTokenizer
from multimodal.train.loop import Loop
from multimodal.train.objectives.contrastive import Contrastive
from multimodal.train.objectives.contrastive_model import TEMPLATES, ZERO_SHOT, Collate, ModelSettings, Prepare, build
from multimodal.train.optim import OptimSettings
from multimodal.train.recipe_cli import start
from multimodal.train.report import write_report
from multimodal.train.settings import LoopSettings
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.load import load

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run(LoopSettings):
    steps: int = 4200
    optim: OptimSettings = field(
        default_factory=lambda: OptimSettings(
            rate=3e-3, optimizer="muon", warmup=150, weight_decay=0.1, average=0.998
        )
    )  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """`data`: training sources. `val`: labelled pictures to watch the zero-shot accuracy on (500 of each). `classes`:
    names of classes by their ids, besides those of a `classes.jsonl` beside the data. `init`: a checkpoint to go on
    from.

    `patches`: share of them that is looked at (Li et al. 2023), but all in the last `whole` of the steps.
    `smallest_crop`: share of the area. `strength`: of the other augmentation. `cache`: megabytes of decoded pictures
    that are kept in memory. `hold_out`: share of the classes that are not trained on."""

    loop: Run
    data: list[str]
    out: Path
    val: tuple[str, ...] = ()
    classes: tuple[Path, ...] = PictureOptions.classes
    init: str | None = None
    model: ModelSettings = field(default_factory=ModelSettings)
    batch: int = 192
    patches: float = 0.45
    whole: float = 0.08
    smallest_crop: float = 0.5
    strength: float = 0.5
    cache: int = 2000
    hold_out: float = 0.0
    trust: Trust = field(default_factory=Trust)


def given(s: Settings) -> Checkpoint:
    """The checkpoint of `--init`. Raises UsageError for one that cannot be gone on from."""
    found = load(s.init)
    if not isinstance(found.model, CLIP) or found.tokenizer is None or found.preprocessing is None:
        raise UsageError(f"--init {s.init}: is a {found.kind}, or its tokenizer or preprocessing is not known")
    if found.model.config.loss != s.model.loss:
        raise UsageError(f"--init {s.init}: was trained with the {found.model.config.loss} loss, not {s.model.loss}")
    return dataclasses.replace(found, card={"templates": found.card.get("templates", ZERO_SHOT)})


def fresh(s: Settings, captions: Captions) -> Checkpoint:
    """A new model, with a tokenizer trained on the captions."""
    # bilinear, as the training crops are
    record = Preprocessing((s.model.image,) * 2, "shortest", "bilinear", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
    tokenizer = BytePairTokenizer.train(captions.texts(), s.model.vocabulary, lowercase=True)
    torch.manual_seed(s.loop.seed)
    return Checkpoint(build(s.model, tokenizer), tokenizer, record, "", {"templates": ZERO_SHOT})


def main(s: Settings) -> None:
    begun = given(s) if s.init else None
    side = max(begun.preprocessing.size) if begun else s.model.image
    pictures = Pictures(s.data, class_names(s.classes, s.data), side, s.hold_out, s.cache, s.trust)
    log.info("%d pictures of %d concepts, %d held out", len(pictures), len(pictures.concepts), len(pictures.held))
    captions = Captions(pictures.concepts, TEMPLATES)
    begun = begun or fresh(s, captions)
    begun = dataclasses.replace(begun, card=begun.card | ({"held_out": pictures.held} if pictures.held else {}))
    image, text = begun.model.config.image, begun.model.config.text
    loader = Loader(
        pictures, shuffled(len(pictures), s.batch, s.loop.seed), Prepare(captions, image.grid[0] * image.grid[1]),
        Collate(begun.tokenizer, text.context, begun.preprocessing, s.smallest_crop, s.strength),
        seed=s.loop.seed, workers=s.loop.workers, micro=s.loop.accumulate,
    )  # fmt: skip
    watched = {source: read_labelled(source, s.classes, 500, s.trust) for source in s.val}

    def evaluate(model: nn.Module, step: int) -> dict[str, float]:
        shown = dataclasses.replace(begun, model=model)
        figures = {"/".join(Path(source).parts[-2:]): accuracy(shown, labelled) for source, labelled in watched.items()}
        rows = [(f"{source}/{name}", value) for source, own in figures.items() for name, value in own.items()]
        return {name: value for name, value in rows if isinstance(value, float)}  # no counts

    objective = Contrastive(
        begun.model, captions.fits(), keep=lambda step: s.patches if step < s.loop.steps * (1 - s.whole) else 1.0
    )
    trained = Loop(s.loop, objective, loader, evaluate if watched else None).fit()
    done = dataclasses.replace(begun, model=trained)
    save_folder(done, s.out, torch.float16)
    shown = [line for labelled in watched.values() for line in examples(done, labelled)]
    write_report(s.loop.run, s, [*s.data, *s.val], shown)


if __name__ == "__main__":
    start(main, Settings)
