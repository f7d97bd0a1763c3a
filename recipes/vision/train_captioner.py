r"""Train a captioner (the image encoder of a contrastive checkpoint under a new text decoder) or a CoCa.

    data=data
    python recipes/vision/train_captioner.py --data $data/vision/flickr8k-1000/train.jsonl \
        --labelled "$data/vision/tiny-imagenet/train-*.tar" $data/vision/caltech101/train \
        --classes recipes/data/classes.jsonl --sentences $data/text/multi30k/train.en.gz \
        --without $data/vision/flickr8k-1000/test.jsonl --init clip-vit-16 --freeze image --share --encoder_layers 7 \
        --batch_labelled 1 --steps 750 --average 0.995 --evaluate_every 250 --run captioner-run --out captioner \
        --card recipes/data/captioner_card.json
    multimodal evaluate captions $data/vision/flickr8k-1000/test.jsonl --model captioner --beam_size 4

Multi30k describes Flickr30k's photographs, among them those of Flickr8k: `--without` drops sentences that resemble
captions of the test images; sentences that resemble captions of the validation images are always dropped.

Cost: 2 minutes of one core (AMD EPYC with AVX-512 bf16; 6 with AVX2 alone), 1.1 GB of memory. The result is the shipped
captioner-mini: of 80 validation images CIDEr 26.6, 27.9 and 28.0 at 250, 500 and 750 steps (above the clip-vit-16
before 27.8). On the 100 test images: BLEU-4 12.8 and CIDEr 26.4 (of 100; beam 4; in 16 bits; 27.2 above the one
before). For comparison: one caption for all images, chosen on the test images themselves, has 6.8 and 14.5, a
person's caption against the other four 20.6 and 86.6.

`--family coca` (Yu et al. 2022) keeps the text tower and the tokenizer too, and trains both losses:

    python recipes/vision/train_captioner.py --family coca --data $data/vision/flickr8k-1000/train.jsonl \
        --labelled "$data/vision/tiny-imagenet/train-*.tar" $data/vision/caltech101/train \
        --classes recipes/data/classes.jsonl --init assets/clip-vit-16 --freeze image --batch 32 --batch_labelled 16 \
        --rate 1e-3 --steps 1000 --average 0.99 --run coca-run --out coca
    multimodal evaluate captions $data/vision/flickr8k-1000/test.jsonl --model coca --beam_size 4
    multimodal evaluate retrieval $data/vision/flickr8k-1000/test.jsonl --model coca
    multimodal evaluate zeroshot $data/vision/caltech101/val --model coca

Cost: 4.3 minutes of one such core, 1.3 GB. On the same 100 test images: BLEU-4 10.2 and CIDEr 18.0; a captioner
trained on the same images without sentences (`--rate 3e-3`, all else the same) 11.0 and 22.7, so with so little data
contrast does not help captions. Retrieval is a little better than before: recall@1 / @10 image to text 13.0 /
44.0 % (clip-vit-16: 7.0 / 35.0), text to image 7.6 / 40.0 % (6.0 / 33.2). Zero-shot top-1 with clip-vit-16's prompts:
Caltech-101 val (400 images) 34.5 % (34.0), Tiny ImageNet val (5,050) 18.3 % (19.7). 10 MB; not shipped.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import nn

from multimodal.data.datasets.captions import (
    CHECKED,
    CaptionAugmentSettings,
    OneRowPerImage,
    PrepareCaption,
    SourcePart,
    caption_texts,
    captions_of,
    sentences,
    texts_of,
    tidy,
    together,
    warn_of_long,
)
from multimodal.data.datasets.class_names import class_names, evenly, words
from multimodal.data.loader import BROKEN, broken_item
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import ListColumns, open_source
from multimodal.errors import DataError, UsageError, demand
from multimodal.system.assets import shipped
from multimodal.system.files import read_json
from multimodal.system.options import NonNegativeFloat, Positive, Rate
from multimodal.tasks.caption.caption import caption
from multimodal.tasks.evaluate.caption_scores import caption_scores
from multimodal.tokens.image.reading import read_image
from multimodal.train import KeepBest, Loop, LoopSettings, OptimSettings, finish, log, start
from multimodal.train.lora import freeze, frozen
from multimodal.train.objective import Objective
from multimodal.train.objectives import captioning, coca
from multimodal.train.objectives.captioning import DecoderSettings
from multimodal.weights.files.shared import SharedPart
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


@dataclass(frozen=True)
class CaptionerRun:
    data: tuple[str, ...]  # images with captions
    out: Path  # folder for the checkpoint that captions the validation images best
    labelled: tuple[str, ...] = ()  # images with classes, captioned by templates
    classes: tuple[Path, ...] = ()  # JSONL of class names
    sentences: tuple[Path, ...] = ()  # texts without images, one sentence per line
    val: str | None = None  # validation images with captions
    hold: Rate = 0.1  # share of the training images held out without --val
    without: tuple[str, ...] = ()  # test images: sentences like their captions are dropped
    family: Literal["captioner", "coca"] = "captioner"  # coca: also contrasts, and keeps the text tower of --init
    init: str = "clip-vit-16"  # model whose image encoder is used, or a model of the family to train further
    freeze: tuple[str, ...] = ()  # parts to freeze, such as `image`
    share: bool = False  # leave the frozen image encoder out of the checkpoint, which takes it from a shipped --init
    batch: Positive = 20  # images with captions; labelled images and sentences are added
    batch_labelled: Positive = 4
    batch_sentences: Positive = 24
    vocabulary: Positive = 1536
    smoothing: Rate = 0.1  # label smoothing
    alone: NonNegativeFloat = 1.0  # weight of the sentences' loss
    caption_weight: NonNegativeFloat = 2.0  # weight of CoCa's captioning loss
    contrast_weight: NonNegativeFloat = 1.0  # weight of CoCa's contrastive loss
    beams: Positive = 1  # of the search that captions validation images
    card: Path | None = None  # JSON file of facts for the checkpoint's card
    decoder: DecoderSettings = DecoderSettings()
    augment: CaptionAugmentSettings = CaptionAugmentSettings()
    columns: ListColumns = ListColumns()
    trust: Trust = Trust()
    loop: LoopSettings = LoopSettings(
        Path("captioner-run"), 2000, OptimSettings(3e-3, "muon", warmup=30, average=0.98), evaluate_every=200
    )


def captions(images: Sequence[Image.Image], checkpoint: Checkpoint, beams: int) -> list[str]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the caption is empty")  # of a model that has just started to learn
        return [row["caption"] for row in caption(images, checkpoint, beam_size=beams)]


def parts_of(settings: CaptionerRun) -> tuple[list[SourcePart], SourcePart]:
    """Return the parts to train on, and the validation images."""
    opened = lambda data: open_source(data, columns=settings.columns, trust=settings.trust)
    images = SourcePart.whole(OneRowPerImage(opened(settings.data)), settings.batch)
    if settings.val:
        val = SourcePart.whole(OneRowPerImage(opened(settings.val)))
    else:
        images, val = images.held_out(settings.hold)
    parts = [images]
    if settings.labelled:
        parts.append(SourcePart.whole(opened(settings.labelled), settings.batch_labelled))
    if settings.sentences:
        tests = [SourcePart.whole(opened(data)) for data in settings.without]
        unseen = [text for part in (val, *tests) for text in texts_of(part)]
        parts.append(SourcePart.whole(sentences(settings.sentences, unseen), settings.batch_sentences))
    log.info("items: %s, validation: %d", " + ".join(str(len(part.keys)) for part in parts), len(val.keys))
    return parts, val


def judged(val: SourcePart) -> tuple[Sequence[str], Sequence[Image.Image], Sequence[list[str]]]:
    """Names, images and captions of the validation images without the broken ones, which are logged. Raises DataError
    where fewer than two are left."""
    found = []
    for key in val.keys:
        try:
            sample = val.source.read(key)
            if not (texts := [text for text in sample.texts if words(text)]):
                raise DataError("its caption is empty" if sample.texts else "no caption")
            found.append((val.source.name(key), read_image(sample.media), texts))
        except BROKEN as error:
            log.warning("broken item skipped: %s", broken_item(val.source.name(key), error))
    if len(found) < 2:
        raise DataError(f"{len(found)} of {len(val.keys)} validation images can be used, scores need at least 2")
    return tuple(zip(*found, strict=True))


OF_CAPTIONER = ("vocabulary", "alone", "sentences", "width", "heads", "context", "encoder_layers")
OF_COCA = ("caption_weight", "contrast_weight", "queries")


def check(settings: CaptionerRun) -> None:
    """Raises UsageError for flags that the family does not read."""
    other = OF_CAPTIONER if settings.family == "coca" else OF_COCA
    for part in (settings, settings.decoder):
        for flag in (f for f in fields(part) if f.name in other and getattr(part, f.name) != f.default):
            raise UsageError(f"--{flag.name}: has no part in --family {settings.family}")
    if settings.share and "image" not in settings.freeze:
        raise UsageError("needs --freeze image", argument="share")
    if settings.share:
        known = ", ".join(shipped())
        demand("init", settings.init, settings.init in shipped(), f"a shipped model with --share ({known})")


def begin(settings: CaptionerRun, texts: Iterable[str]) -> tuple[Checkpoint, Objective, Callable]:
    """Return the checkpoint to train, its objective, and the collate function."""
    known, decoder = load(settings.init), settings.decoder
    if settings.family == "coca":
        initial, weights = coca.begin(known, decoder), (settings.contrast_weight, settings.caption_weight)
        objective = coca.ContrastiveCaptioning(initial.model, settings.smoothing, *weights)
        return initial, objective, coca.CollateCoCa(initial.tokenizer.pad_id, initial.preprocessing, settings.augment)
    initial = captioning.begin(known, texts, settings.vocabulary, decoder)
    objective = captioning.Captioning(initial.model, settings.smoothing, settings.alone)
    return initial, objective, captioning.CollateCaptions(initial.preprocessing, settings.augment)


def main(settings: CaptionerRun) -> None:
    check(settings)
    loop = settings.loop
    torch.manual_seed(loop.seed)
    names = {identity: concept.names for identity, concept in class_names(settings.classes, settings.labelled).items()}
    parts, val = parts_of(settings)
    initial, objective, collate = begin(settings, caption_texts(parts, names))
    freeze(initial.model, settings.freeze)
    initial = replace(initial, shared=frozen(initial.shared, initial.model))
    context = initial.model.caption_context
    some = (part.source.row(key) for part in parts for key in evenly(part.keys, CHECKED))
    warn_of_long([tidy(text) for row in some for text in captions_of(row, names)], initial.tokenizer, context - 2)
    prepare = PrepareCaption(initial.tokenizer, context, initial.preprocessing, names)
    source, plan = together(parts, loop.seed)
    loader = loop.loader(source, plan, prepare, collate)
    names_of_images, images, references = judged(val)

    def measure(model: nn.Module) -> dict[str, float]:
        return caption_scores(captions(images, replace(initial, model=model), settings.beams), references)

    if settings.share:
        initial = replace(initial, shared=(SharedPart("image", settings.init, "image"),))
    kept = replace(initial, card={name: initial.card[name] for name in ("templates",) if name in initial.card})
    judge = KeepBest(loop, measure, lambda scores: scores["cider"], kept, {"images": len(images)}, newest=True)
    Loop(loop, objective, loader, judge, initial).fit()
    best = judge.load()
    facts = read_json(settings.card) if settings.card else {}
    examples = zip(names_of_images, captions(images, best, settings.beams), strict=True)
    finish(
        settings, replace(best, card=facts | best.card),
        [*settings.data, *settings.labelled, *settings.classes, *settings.sentences],
        [f"{name}: {text}" for name, text in examples][:20], store="float16",
    )  # fmt: skip


if __name__ == "__main__":
    start(main)
