r"""Train a language model of pixels (Chen et al. 2020): colours of a palette, row by row. It completes half images,
and a linear probe of its middle layer classifies them.

    data=data/vision
    python recipes/vision/train_igpt.py --data $data/cifar10-test --more "$data/tiny-imagenet/train-*.tar" \
        --run igpt-run --out igpt --threads 1

A fifth of the labelled images is held out. On it the recipe measures bits per colour beside two baselines (a uniform
and a unigram model), and a linear probe of the features beside one of the raw pixels. The report shows completed
images.

Cost: 20 minutes of a core shared with other work, 1.3 GB, with one of Tiny ImageNet's tars beside. Bits per colour on
the held-out images 3.97 (uniform 9.0, unigram 8.52); linear probe of ten classes 40.9 % (raw pixels 36.4 %).
"""

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from PIL import Image
from torch import Tensor

from multimodal.data.batching import stack_fields
from multimodal.data.datasets.class_names import class_labels
from multimodal.data.datasets.text import PrepareTokens
from multimodal.data.loader import shuffled
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import ListColumns, open_source
from multimodal.decoding.sampling import sample
from multimodal.errors import demand
from multimodal.models.text import TextTransformer
from multimodal.system.options import Limits, NonNegativeFloat, Positive
from multimodal.system.outputs import write_output
from multimodal.tasks.evaluate import linear_probe
from multimodal.train import Loop, LoopSettings, OptimSettings, finish, log, start
from multimodal.train.objectives.pixels import (
    FlippedImages,
    ImagesInMemory,
    Palette,
    PixelRows,
    after,
    bits,
    marginal_bits,
    middle_features,
)
from multimodal.train.objectives.text.language import Language, LanguageModelSettings, gpt2_weights, language_config
from multimodal.weights.folder import Checkpoint


@dataclass(frozen=True)
class ImageGPTRun:
    data: tuple[str, ...]  # labelled images
    out: Path  # folder for the trained checkpoint
    more: tuple[str, ...] = ()  # further training images, labelled or not
    side: Annotated[int, Limits(2)] = 16  # pixels
    colours: Annotated[int, Limits(2)] = 512  # size of the palette; 512 as in the paper
    batch: Positive = 16
    count: Positive = 256  # held-out images scored while training runs; all of them at the end
    sheet: Positive = 8  # images to complete
    completions: Positive = 3  # of each image
    probe_count: Positive = 4000  # labelled training images for the probes
    probe_c: NonNegativeFloat = 0.0  # inverse strength of the probes' penalty; 0: chosen on training images
    probe_iterations: Positive = 200
    model: LanguageModelSettings = LanguageModelSettings(width=192, layers=4, positions="learned")
    columns: ListColumns = ListColumns()
    trust: Trust = Trust()
    loop: LoopSettings = LoopSettings(
        Path("igpt-run"), 1000, OptimSettings(3e-3, "muon", warmup=50, average=0.99), evaluate_every=250
    )

    def __post_init__(self):
        context = self.model.context
        demand("context", context, context == LanguageModelSettings.context, "left out: it is side²")


@torch.inference_mode()
def completed(model: TextTransformer, ids: Tensor, begin: int, copies: int, seed: int) -> Tensor:
    """Sample the lower half of each image: [N copies T]."""
    count, half = ids.shape[1], ids.shape[1] // 2

    def no_begin(seen: Tensor, logits: Tensor) -> Tensor:
        logits[:, begin] = -torch.inf
        return logits

    generators = [torch.Generator().manual_seed(seed + row) for row in range(len(ids))]
    drawn = sample(
        lambda new, cache: model(new, cache=cache, last=1), after(ids[:, :half], begin), model.new_cache(), eos=begin,
        max_new=count - half, temperature=1.0, generators=generators, copies=copies, processors=[no_begin],
    )  # fmt: skip
    made = torch.tensor(drawn.ids).view(len(ids), copies, count - half)
    return torch.cat([ids[:, None, :half].expand(-1, copies, -1), made], 2)


def sheet(palette: Palette, ids: Tensor, made: Tensor, path: Path, zoom: int = 4) -> None:
    """Draw a row per image: the original, its upper half, and completions."""
    upper = palette.pixels(ids)
    upper[:, upper.shape[1] // 2 :] = 128
    columns = [palette.pixels(ids), upper, *(palette.pixels(made[:, n]) for n in range(made.shape[1]))]
    rows = [torch.nn.functional.pad(column, (0, 0, 1, 1, 1, 1), value=255) for column in columns]
    whole = torch.cat([torch.cat(list(part), 0) for part in rows], 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = io.BytesIO()
    made = Image.fromarray(whole.numpy())
    made.resize((whole.shape[1] * zoom, whole.shape[0] * zoom), Image.NEAREST).save(data, "PNG")
    write_output(path, data.getvalue())


def probed(s: ImageGPTRun, train: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor], names: list[str]) -> float:
    """Accuracy of a linear probe of vectors, standardized by the training vectors."""
    mean, deviation = train[0].mean(0), train[0].std(0).clamp(min=1e-6)
    parts = [linear_probe.LabelledVectors((vectors - mean) / deviation, labels) for vectors, labels in (train, held)]
    features = linear_probe.linear_probe(*parts, names, s.probe_c or None, s.loop.seed, s.probe_iterations)
    return features.scores.figures()["acc1"]


def probes(
    s: ImageGPTRun, model: TextTransformer, palette: Palette, train: ImagesInMemory, held: ImagesInMemory
) -> dict[str, float]:
    """Accuracy of linear probes of the middle layer and of the raw pixels."""
    train = train.part(torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[: s.probe_count])
    middle, features = model.config.stack.layers // 2, []
    with torch.autocast("cpu", torch.bfloat16, enabled=s.loop.used_precision == "autocast"):
        for part in (train, held):
            features.append(middle_features(model, palette.ids(part.pixels), len(palette), middle))
    names, raw = list(train.names), [part.pixels.flatten(1).float() for part in (train, held)]
    labels = train.labels, held.labels
    return {
        name: probed(s, *zip(vectors, labels, strict=True), names)
        for name, vectors in (("probe", features), ("probe_of_pixels", raw))
    }


def main(s: ImageGPTRun) -> dict[str, float]:
    torch.manual_seed(s.loop.seed)
    source = open_source(s.data, columns=s.columns, trust=s.trust)
    class_labels(source, " ".join(s.data))
    labelled = ImagesInMemory.read(source, s.side)
    held = linear_probe.held_out(labelled.labels, linear_probe.HELD_OUT, s.loop.seed)
    own, unseen = labelled.part(~held), labelled.part(held)
    more = [ImagesInMemory.read(open_source(part, columns=s.columns, trust=s.trust), s.side).pixels for part in s.more]
    pixels = torch.cat([own.pixels, *more])
    palette = Palette.of(pixels, s.colours, s.loop.seed)
    ids, held_ids, begin = palette.ids(pixels), palette.ids(unseen.pixels), len(palette)
    context = s.side**2
    model = TextTransformer(language_config(replace(s.model, context=context), begin + 1))
    gpt2_weights(model)
    log.info("%d images to train on, %d held out, %d colours", len(ids), len(held_ids), begin)
    loader = s.loop.loader(
        PixelRows(ids, begin), shuffled(len(ids), s.batch, s.loop.seed), FlippedImages(PrepareTokens(context)),
        stack_fields,
    )  # fmt: skip
    some = held_ids[torch.randperm(len(held_ids), generator=torch.Generator().manual_seed(0))[: s.count]]
    watch = lambda model, step: {"bits": bits(model, some, begin)}
    colours = {"palette": palette.colours.tolist()}
    trained = Loop(s.loop, Language(model), loader, watch, Checkpoint(model, card=colours)).fit()
    figures = {
        "bits": bits(trained, held_ids, begin), "bits_uniform": float(torch.tensor(float(begin)).log2()),
        "bits_marginal": marginal_bits(ids, held_ids, begin),
    }  # fmt: skip
    figures |= probes(s, trained, palette, own, unseen)
    card = {"side": s.side, **colours, "figures": figures}
    made = completed(trained, some[: s.sheet], begin, s.completions, s.loop.seed)
    sheet(palette, some[: s.sheet], made, s.loop.run / "report" / "completions.png")
    lines = [f"{name}: {value:.4g}" for name, value in figures.items()]
    checkpoint = Checkpoint(trained, card=card)
    finish(s, checkpoint, [*s.data, *s.more], lines, figures=figures, images=["completions.png"])
    return figures


if __name__ == "__main__":
    start(main)
