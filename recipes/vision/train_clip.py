r"""Train a contrastive image-text model, such as the shipped `assets/clip-vit-16`.

    data=data/vision
    python recipes/vision/train_clip.py --run clip-run --out clip-vit-16 --data "$data/tiny-imagenet/train-*.tar" \
        $data/caltech101/train $data/flickr8k-1000/train.jsonl --val $data/tiny-imagenet/val-0000.tar \
        $data/caltech101/val --layers 8 --drop_path 0.05 --strength 0.8 --coarse 0.12 --smallest_crop 0.4 \
        --patches 0.5 --average 0.999 --schedule wsd --decay 0.2 --steps 8600
    python recipes/vision/train_clip.py --init clip-vit-16 --run clip-run-2 --out clip-vit-16-2 --data \
        "$data/tiny-imagenet/train-*.tar" $data/caltech101/train=2 $data/flickr8k-1000/train.jsonl=5 --val \
        $data/tiny-imagenet/val-0000.tar $data/caltech101/val --strength 0.8 --coarse 0.3 --smallest_crop 0.4 \
        --patches 0.5 --average 0.999 --rate 2e-3 --schedule wsd --decay 0.5 --steps 1350
    python recipes/vision/train_clip.py --init clip-vit-16-2 --run clip-run-3 --out clip-vit-16-3 ... (data as before)
        --strength 0.8 --coarse 0.12 --smallest_crop 0.4 --patches 0.5 --average 0.999 --rate 2.5e-3 --schedule wsd \
        --decay 0.3 --steps 6000
    python recipes/average.py --models clip-vit-16-2 clip-vit-16-3 --out clip-mean
    python recipes/vision/train_clip.py --init clip-mean --run clip-run-4 --out clip-vit-16-4 ... (data as before)
        --strength 0.6 --coarse 0.3 --smallest_crop 0.4 --patches 1 --average 0.99 --rate 1.5e-3 --schedule wsd \
        --decay 0.6 --steps 600 --freeze image --unseen data/text/multi30k/train.en.gz
    python recipes/average.py --models clip-mean clip-vit-16-4 --weights 0.3 0.7 --out clip-mean-2
    python recipes/vision/train_clip.py --init clip-mean-2 --run clip-run-5 --out clip-vit-16 --data \
        "$data/tiny-imagenet/train-*.tar" $data/caltech101/train=2 $data/flickr8k-1000/train.jsonl=10 --val \
        $data/tiny-imagenet/val-0000.tar $data/caltech101/val --strength 0.6 --coarse 0.3 --smallest_crop 0.4 \
        --patches 1 --average 0.99 --rate 1e-3 --schedule wsd --decay 0.6 --steps 400 --freeze image \
        --unseen data/text/multi30k/train.en.gz --named 0.4 --anchor 60
    multimodal evaluate zeroshot $data/caltech101/val --model clip-vit-16 --classes recipes/data/classes.jsonl

Captions are made of class names, synonyms, WordNet hypernyms and glosses, or come with the images: CSV (`filepath,
title`), JSON lines (`file_name,text` or `captions`), tars with `.txt`. `--loss sigmoid` trains as SigLIP does, `--init
FOLDER` continues from a checkpoint, `--hold_out 0.1` excludes a tenth of the classes and reports on them. A source
`PATH=3` is seen three times an epoch. `--unseen FILE`: words of a text that no caption has are wrong captions of every
image; otherwise their vectors lie anywhere and such a label may win (before, "deer" took two fifths of CIFAR-10's cats
and dogs). `--test_image 112` makes a model for larger images than it was trained on.

Cost: 1.8 s of one core a step of 192 images (AMD EPYC with AVX2 alone), 0.6 s with AVX-512 bf16, twice that in the last
8 % of the steps, which see all patches: 4.6 and 0.8 hours, then 70 and 8 minutes with bf16, 23 with AVX2; 3 GB of
memory. Zero-shot with the names of all classes of a set, top-1 after each run (the first three were begun with more
steps and resumed) and of each mean, and recall@10 of Flickr8k's 100 test images, image to text and text to image; the
last is `assets/clip-vit-16`:

| | Tiny ImageNet val (202 classes) | Caltech-101 val (80) | CIFAR-10 test (10, never trained on) | Flickr8k |
|---|---|---|---|---|
| first | 25.7 % | 46.8 % | 33.5 % | 47.0, 34.2 % |
| second | 26.8 | 49.5 | 32.4 | 50.0, 45.6 |
| third | 28.9 | 53.8 | 33.5 | 41.0, 42.2 |
| mean of these two | 26.8 | 52.0 | 30.8 | 53.0, 46.6 |
| fourth | 28.1 | 50.5 | 37.0 | 48.0, 43.8 |
| mean of these two, with 0.3 and 0.7 | 27.9 | 52.0 | 37.1 | 53.0, 45.2 |
| fifth, from this mean in 8 bits | 27.8 | 52.5 | 36.8 | 51.0, 45.8 |

`--named 0.4`: before the fifth, "a man" was nearer than "a dog" to 22 of 77 test images of people alone, now to 65
(with 19 of 19 and 17 of 19 images of dogs right); "a person" to 52, now 72, "people" to 39, now 66. `--anchor 60` kept
whole captions meanwhile: without it 500 such steps had 38.0, 43.4 %.

Captions seen too often are learned by heart: 135 passes cost the third what five times as many had brought the second.
The fourth from the third alone: 29.0, 53.5, 36.6 %; 44.0, 42.6 %. Flickr8k's test images have judged 22 candidates.
Six layers and 4,200 steps without these flags (46 minutes with bfloat16): 19.7, 36.0, 29.9 %; 35.0, 33.2 %.
With `--hold_out 0.1 --steps 1500` and the first command's other flags (28 of the 282 classes never seen, not even by
name; 15 minutes of a core): on all classes Tiny ImageNet 9.9 %, Caltech-101 24.0 %. On images of the held-out classes,
top-1 among all names 1.4 % of 500 and 5.0 % of 40; among the held-out names alone 9.4 % (20 classes, chance 5.0 %) and
15.0 % (8 classes, chance 12.5 %). A name never read says little; with its three nearest hypernyms (`evaluate zeroshot
--hypernyms 3`; figures `unseen_described`) 11.4 and 30.0 %.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from torch import nn

from multimodal.data.datasets.captions import warn_of_long
from multimodal.data.datasets.class_names import CaptionSampler, Concept, class_names, unseen_words
from multimodal.data.datasets.images import LabelledImageSource
from multimodal.data.loader import shuffled
from multimodal.data.manifests import read_text, repeated, short_names
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import ListColumns
from multimodal.errors import UsageError, demand
from multimodal.models.clip import CLIP
from multimodal.models.vit import ViTConfig
from multimodal.system.options import Limits, Natural, NonNegativeFloat, Positive, PositiveShare, Rate, Share
from multimodal.tasks.evaluate.zero_shot import accuracy, examples, read_named
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.train import Loop, LoopSettings, OptimSettings, finish, log, start
from multimodal.train.lora import freeze, keep_sizes, with_rates
from multimodal.train.objectives.contrastive import Contrastive
from multimodal.train.objectives.contrastive_model import (
    TEMPLATES,
    ZERO_SHOT,
    CollateContrastive,
    ContrastiveModelSettings,
    PrepareContrastive,
    build,
    with_image_size,
)
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class CLIPRun:
    data: tuple[str, ...]  # labelled or captioned training images, each PATH or PATH=TIMES
    out: Path  # folder for the trained checkpoint
    val: tuple[str, ...] = ()  # labelled images to measure zero-shot accuracy on, 500 of each
    classes: tuple[Path, ...] = (DATA / "classes.jsonl",)  # JSONL of class names by id, besides one beside the data
    init: str | None = None  # checkpoint to start from, instead of random weights
    model: ContrastiveModelSettings = ContrastiveModelSettings()
    batch: Positive = 192
    patches: PositiveShare = 0.45  # share of the patches that the model sees (Li et al. 2023)
    whole: Share = 0.08  # share of the steps at the end that see all patches
    smallest_crop: PositiveShare = 0.5  # smallest crop, as a share of the image's area
    strength: Annotated[float, Limits(0, 2.5)] = 0.5  # of the other augmentation
    coarse: Share = 0.08  # share of the images downsampled by two, as thumbnails are
    test_image: Natural = 0  # pixels per side in use (0: as in training, whose crops enlarge: Touvron et al. 2019)
    cache: Natural = 2000  # megabytes of decoded images kept in memory
    hold_out: Rate = 0.0  # share of the classes that are not trained on
    named: Share = 0.0  # share of the draws for captioned images that say a class which two of their captions name
    unseen: tuple[Path, ...] = ()  # texts: words of theirs that no caption has are wrong captions of every image
    anchor: NonNegativeFloat = 0.0  # weight of keeping --init's vectors of whole captions and unseen words
    freeze: tuple[str, ...] = ()  # parts to freeze, such as `image`
    columns: ListColumns = ListColumns()
    trust: Trust = Trust()
    loop: LoopSettings = LoopSettings(
        Path("clip-run"), 4200, OptimSettings(3e-3, "muon", warmup=150, weight_decay=0.1, average=0.998)
    )


def start_checkpoint(s: CLIPRun) -> Checkpoint:
    """Load `--init`. Raises UsageError for a checkpoint that this recipe cannot train."""
    known = load(s.init)
    if not isinstance(known.model, CLIP) or known.tokenizer is None or known.preprocessing is None:
        raise UsageError(f"--init {s.init}: expected a CLIP with tokenizer and preprocessing, got {known.kind}")
    if known.model.config.loss != s.model.loss:
        raise UsageError(f"--init {s.init}: was trained with the {known.model.config.loss} loss, not {s.model.loss}")
    image, text = known.model.config.image, known.model.config.text
    if isinstance(image, ViTConfig):
        own = {"image": max(image.image), "patch": image.patch, "context": text.context, "vocabulary": text.vocabulary}
        for name, stack in (("", image.stack), ("text_", text.stack)):
            own |= {f"{name}width": stack.block.attention.width, f"{name}layers": stack.layers}
        keep_sizes(s.init, own, s.model, CLIPRun.model)
    model = with_rates(known.model, {"image.stack.drop_path": s.model.drop_path})
    return replace(known, model=model, card={"templates": known.card.get("templates", ZERO_SHOT)})


def fresh(s: CLIPRun, captions: CaptionSampler) -> Checkpoint:
    """Build a new model, with a tokenizer trained on the captions."""
    # bilinear, as the training crops are
    record = Preprocessing((s.model.image,) * 2, "shortest", "bilinear", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
    tokenizer = BytePairTokenizer.train(captions.texts(), s.model.vocabulary, lowercase=True)
    torch.manual_seed(s.loop.seed)
    return Checkpoint(build(s.model, tokenizer), tokenizer, record, "", {"templates": ZERO_SHOT})


def words_of_no_image(s: CLIPRun, captions: CaptionSampler, held: Sequence[Concept]) -> list[str]:
    """Words of `--unseen` that neither a caption nor a held-out class has. Raises UsageError where there are none."""
    lines = [line for path in s.unseen for line in read_text(path).splitlines()]
    words = unseen_words(lines, [*captions.texts(), *(name for concept in held for name in concept.names)])
    if s.unseen and not words:
        raise UsageError(f"--unseen {' '.join(map(str, s.unseen))}: captions have all its words")
    if words:
        log.info("%d unseen words: %s ...", len(words), ", ".join(words[:: len(words) // 8 or 1][:8]))
    return words


def whole_repeats(spec: str) -> tuple[str, int]:
    """Path and TIMES of `--data PATH=TIMES`."""
    path, times = repeated(spec)
    if times % 1:
        raise UsageError(f"--data {spec}: expected a whole number of repeats")
    return path, int(times)


def main(s: CLIPRun) -> None:
    if s.anchor and not s.init:
        raise UsageError(f"--anchor {s.anchor}: without --init there are no vectors to keep")
    initial = start_checkpoint(s) if s.init else None
    side = max(initial.preprocessing.size) if initial else s.model.image
    paths, times = zip(*map(whole_repeats, s.data), strict=True)
    names = class_names(s.classes, paths)
    images = LabelledImageSource(paths, names, side, s.hold_out, s.cache, times=times, columns=s.columns, trust=s.trust)
    log.info("%d images of %d concepts, %d held out", len(images), len(images.concepts), len(images.held))
    others = [concept for concept in names.values() if concept not in images.held]
    captions = CaptionSampler(images.concepts, TEMPLATES, others, s.named)
    unseen = words_of_no_image(s, captions, images.held)
    initial = initial or fresh(s, captions)
    freeze(initial.model, s.freeze)
    held = {"held_out": [concept.names[0] for concept in images.held]} if images.held else {}
    initial = replace(initial, card=initial.card | held)
    image, text = initial.model.config.image, initial.model.config.text
    fits = s.test_image % image.patch == 0
    demand("test_image", s.test_image, fits, f"a multiple of the patch of {image.patch} pixels")
    warn_of_long(captions.texts(), initial.tokenizer, text.context - sum(map(len, initial.tokenizer.frame)))
    loader = s.loop.loader(
        images, shuffled(len(images), s.batch, s.loop.seed),
        PrepareContrastive(captions, (side // image.patch) ** 2, unseen),
        CollateContrastive(
            initial.tokenizer, text.context, initial.preprocessing, s.smallest_crop, s.strength, s.coarse
        ),
    )  # fmt: skip
    watched = [read_named(source, s.classes, 500, s.columns, s.trust) for source in s.val]
    val_names = short_names(s.val, 2)

    def in_use(model: nn.Module) -> Checkpoint:
        if s.test_image in (0, side):
            return replace(initial, model=model)
        used = replace(initial.preprocessing, size=(s.test_image, s.test_image))
        return replace(initial, model=with_image_size(model, s.test_image), preprocessing=used)

    def evaluate(model: nn.Module, step: int) -> dict[str, float]:
        shown = in_use(model)
        figures = {source: accuracy(shown, labelled) for source, labelled in zip(val_names, watched, strict=True)}
        return {f"{source}/{name}": value for source, own in figures.items() for name, value in own.items()}

    objective = Contrastive(
        initial.model, captions.fits(), lambda step: s.patches if step < s.loop.steps * (1 - s.whole) else 1.0,
        s.anchor, len(captions.index),
    )  # fmt: skip
    trained = Loop(s.loop, objective, loader, evaluate if watched else None, initial).fit()
    done = in_use(trained)
    shown = [line for labelled in watched for line in examples(done, labelled)]
    finish(s, done, [*paths, *s.val], shown, store="float16")


if __name__ == "__main__":
    start(main)
