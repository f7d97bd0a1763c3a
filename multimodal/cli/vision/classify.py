"""`multimodal classify`: score labels for images, zero-shot, or by the head of a ViT."""

import argparse
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal.cli import flags
from multimodal.cli.console import Progress, console
from multimodal.cli.files import columns, output_file, outputs_of, trust
from multimodal.cli.loading import loaded
from multimodal.cli.output import fail, printable, six_digits
from multimodal.cli.parser import Parser
from multimodal.cli.vision.images import (
    APPENDED,
    NOTHING,
    Add,
    ImageOutput,
    ImageProgress,
    There,
    append_to,
    attempt,
    found,
    no_videos,
    results_place,
)
from multimodal.errors import UsageError
from multimodal.inference.options import BatchOptions
from multimodal.system.assets import shipped
from multimodal.system.config import required_model
from multimodal.system.files import read_text_lines
from multimodal.system.options import add_flags as add_option_flags
from multimodal.system.outputs import Outputs, write_output
from multimodal.tasks.classify.options import ClassifyOptions
from multimodal.tokens.video.options import ClipOptions

if TYPE_CHECKING:
    from multimodal.tasks.classify.classifier import ZeroShotClassifier
    from multimodal.tasks.classify.ranking import ImageClassifier
    from multimodal.weights.folder import Checkpoint

USAGE = "%(prog)s IMAGE [IMAGE ...] [--labels LABEL [LABEL ...]] [flags]"
EXAMPLES = """examples:
  multimodal classify photo.jpg --labels "a dog" "a cat"
  multimodal classify photos/ --labels_file names.txt -o photos.csv          # rerun to resume after a stop
  multimodal classify --labels_file names.txt --calibrate labelled/ --threshold 0.5 --save_classifier pets.safetensors
  multimodal classify photos/ --classifier pets.safetensors -o photos.csv
  multimodal classify clip.mp4 --labels "a dog" "a cat" --every_s 2
  multimodal classify photos/ --model my-vit/                                # a ViT with a head has its own labels
"""
STYLES = ("table", "csv", "json", "jsonl")
LABELS = ("labels", "labels_file", "classifier")
FOR_CLIP = (*LABELS, "templates", "save_classifier", "calibrate", "heatmap", "native")
HEADER = ["file", "label", "score"]


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = USAGE, EXAMPLES
    p.add_argument("images", nargs="*", metavar="IMAGE", help="files, folders or globs; of a video, each sampled "
                   "frame is an image")  # fmt: skip
    _labels(p.add_argument_group("labels"))
    _output(p.add_argument_group("results"))
    _scores(p.add_argument_group("scores"))
    flags.videos(p)
    g = flags.model_and_machine(p, "classify", BatchOptions)
    flags.native(g)


def _labels(g: argparse._ArgumentGroup) -> None:
    g.add_argument(
        "--labels",
        nargs="+",
        metavar="LABEL",
        help="labels; a single value is split at commas, several values only if one begins or ends with a comma",
    )
    g.add_argument("--labels_file", metavar="FILE", help="labels, one per line; or .json: a list of labels, or an "
                   "object that maps each label to a list of prompts")  # fmt: skip
    g.add_argument("--templates", metavar="SET", help="clip80, clip7, none, or a file of prompts with {} for the "
                   "label, one per line or a .json list (default: the model's own)")  # fmt: skip
    g.add_argument("--classifier", metavar="FILE", help="labels, vectors, calibration and threshold from a file that "
                   "--save_classifier wrote with the same model")  # fmt: skip
    g.add_argument("--save_classifier", metavar="FILE", help="write the classifier as .safetensors")


def _output(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--format", choices=STYLES, help="default: table, or by the ending of --output (.csv, .jsonl)")
    g.add_argument("--output", "-o", metavar="FILE", help="append the results of each image to a .csv or .jsonl file; "
                   "rerun to resume: finished images are skipped. FILE.settings.json records the settings")  # fmt: skip
    g.add_argument("--overwrite", action="store_true", help="overwrite --output and --save_classifier, and "
                   "images that multimodal did not draw or that changed since; never an input")  # fmt: skip
    add_option_flags(g, ClassifyOptions, ["top"], defaults=True)
    g.add_argument("--heatmap", metavar="DIR", help="draw NAME.heatmap.png for each image: a heat map for each of its "
                   "best labels")  # fmt: skip
    add_option_flags(g, ClassifyOptions, ["heatmap_top"], defaults=True)


def _scores(g: argparse._ArgumentGroup) -> None:
    add_option_flags(g, ClassifyOptions, ["scores", "threshold"], defaults=True)
    g.add_argument("--calibrate", metavar="DATA", help="fit the scores to images with known labels: a folder per "
                   "label, tars or a list. If you name no labels, its classes are the labels; else images of other "
                   "classes count as 'none of these'")  # fmt: skip
    add_option_flags(g, ClassifyOptions, ["calibration"], defaults=True)
    g.add_argument("--classes", metavar="FILE", help="names of the classes of --calibrate (default: classes.jsonl "
                   "beside DATA, or the ids)")  # fmt: skip
    g.add_argument("--reliability", metavar="PNG", help="draw how often scores were right before and after it")
    flags.lists(g, "path", "label")


def check(p: Parser, options: Namespace) -> None:
    """Refuse contradictory flags."""
    given = [name for name in LABELS if getattr(options, name) is not None]
    if len(given) > 1 or (not given and options.calibrate is None and not _may_have_head(options.model)):
        names = ", ".join(f"--{name}" for name in given) or "none is given"
        p.error(f"--labels: give labels in one way: --labels, --labels_file or --classifier ({names})")
    if not options.images and not options.save_classifier and options.calibrate is None:
        p.error("IMAGE: name a file, folder or glob")
    if options.templates is not None and options.classifier is not None:
        p.error("--templates: a classifier file has its own (--classifier)")
    for name in ("calibration", "classes", "reliability", "path_column", "label_column"):
        if getattr(options, name) is not None and options.calibrate is None:
            p.error(f"--{name}: says how to --calibrate, which is not given")
    if options.calibrate is not None and options.scores is not None:
        p.error(f"--scores {options.scores}: --calibration says which scores come out")
    if options.calibrate is not None:
        flags.check_columns(p, options, options.calibrate)
    written = ("output", "save_classifier", "reliability", "heatmap")
    if options.overwrite and not any(getattr(options, name) for name in written):
        p.error(f"--overwrite: names no file ({', '.join(f'--{name}' for name in written)})")
    if options.heatmap_top is not None and options.heatmap is None:
        p.error("--heatmap_top: says how much to draw in --heatmap, which is not given")
    if options.save_classifier is not None and Path(options.save_classifier).suffix.lower() != ".safetensors":
        p.error(f"--save_classifier {options.save_classifier}: must end in .safetensors")
    if options.native is not None and options.calibrate is not None:
        p.error("--native: --calibrate sees images at the model's own size")
    _check_output(p, options)


def _may_have_head(model: str | None) -> bool:
    """Return True if the model may be a ViT with labels of its own: not one that ships, nor a public one."""
    if model is None:
        with suppress(UsageError):  # of the configuration file, named later
            model = required_model("classify").model
    if model is None or model in shipped():
        return False
    from multimodal.weights.hub.registry import find

    return find(model) is None or Path(model).exists()


def _check_output(p: Parser, options: Namespace) -> None:
    options.format = options.format or flags.by_ending(options.output, APPENDED, "table")
    if options.output is not None and not options.images:
        p.error("--output: no images are named")
    if options.output is not None and options.format not in APPENDED:
        p.error(f"--output {options.output}: results are appended to csv or jsonl (--format {options.format or 'csv'})")
    flags.check_ending(p, options)


def run(options: Namespace) -> int:
    files, code = found(options.images, options)
    if options.images and not files:  # before torch is imported
        return code
    from multimodal.tasks.classify.classifier_file import place_of_classifier, save_classifier
    from multimodal.tasks.classify.classify import classifier_of
    from multimodal.tasks.encode.features import model_digest

    labels, templates = labels_and_templates(options)
    if options.heatmap is not None:
        no_videos(files, "--heatmap")
    outputs = outputs_of(options, files, but=("images",))
    reliability = output_file(options.reliability, "--reliability", (".png",), outputs)
    if options.save_classifier:
        place_of_classifier(Path(options.save_classifier), outputs)
    results_place(options, outputs)
    data = _calibration_data(options)
    if options.heatmap is not None:
        from multimodal.tasks.inspect.heatmap import without_heat_maps

        files = without_heat_maps(files, options.heatmap)
    if not files and options.images:
        return code
    checkpoint = loaded(options, "classify")
    _check_model(options, checkpoint)
    if labels is not None:
        console.step(f"Encoding {len(labels):,} labels …")
    classifier = classifier_of(
        checkpoint, data.labels() if data and labels is None and not options.classifier else labels, templates,
        options.classifier, device=options.device, compute_type=options.compute_type,
    ).using(options.threshold, options.scores)  # fmt: skip
    if data:
        classifier, failed = _calibrated(options, classifier, data, reliability)
        code = code or failed
    if len(classifier.labels) == 1 and classifier.scores == "softmax":
        warnings.warn("--labels: one label alone gets the score 1 in every image", stacklevel=1)
    digest = model_digest(checkpoint) if options.save_classifier or options.output else ""
    plain = checkpoint if options.heatmap is not None else None
    del checkpoint  # frees its memory
    if options.save_classifier:
        save_classifier(classifier, Path(options.save_classifier), digest, options.overwrite)
    return (_classify(options, files, plain, digest, classifier, outputs) if files else 0) or code


def _check_model(options: Namespace, checkpoint: "Checkpoint") -> None:
    """Refuse flags of a CLIP for a ViT with a head, and a CLIP without labels. Raises UsageError."""
    from multimodal.tasks.classify.head import has_head, own_labels

    given = [name for name in FOR_CLIP if getattr(options, name) is not None]
    if has_head(checkpoint) and given:
        raise own_labels(checkpoint, given[0])
    if not has_head(checkpoint) and not {*LABELS, "calibrate"} & {*given}:
        raise UsageError(f"is needed: {checkpoint.source} has no head with labels of its own", argument="labels")


def _classify(
    options: Namespace, files: list[str], plain: "Checkpoint | None", digest: str, classifier: "ImageClassifier",
    outputs: Outputs,
) -> int:  # fmt: skip
    """`plain`: the checkpoint as it was loaded, for heat maps; `digest`: its `model_digest`."""
    from multimodal.tasks.encode.loaded import Items
    from multimodal.tasks.encode.reader import ImageReader

    top = options.top or (5 if options.format == "table" else None)
    rows = partial(_rows, threshold=classifier.threshold)
    draw = _drawing(options, plain, classifier, outputs)
    video = ClipOptions(**ClipOptions.among(vars(options)))
    native = None if options.native is None else (classifier.model, options.native or None)
    images = partial(classifier.batch_results, top=top), partial(classifier.clip_result, top=top)

    def work(files: list[str], add: Add, there: There = NOTHING) -> int:
        """The results of each image, as soon as they are known. An image that cannot be read is one line."""
        code = 0
        reader = ImageReader(
            classifier.preprocessing, options.batch_size, options.workers, False, video, native, done=there
        )
        progress = ImageProgress(len(files), options.output is not None)
        for file, result in reader.results(Items(files, keyed=False), *images):
            progress.step(file)
            if isinstance(result, Exception):
                code = fail(result)
            elif file not in there:
                add(_shown(result))
                code = attempt(file, partial(draw, result)) or code
        return code

    if options.output is not None:
        return append_to(options, HEADER, _settings(options, digest, classifier, top), files, rows, work)
    printed = ImageOutput(options.format, HEADER, rows, partial(_table, threshold=classifier.threshold))
    code = work(files, printed.add)
    printed.end()
    return code


def _drawing(
    options: Namespace, plain: "Checkpoint | None", classifier: "ZeroShotClassifier", outputs: Outputs
) -> Callable[[dict[str, Any]], None]:
    """Draws the heat maps of a result, where they are asked for."""
    if plain is None:
        return lambda result: None
    from multimodal.inference.prepare import prepare_for_inference
    from multimodal.tasks.encode.native import native_limit
    from multimodal.tasks.inspect.heatmap import HeatMaps

    record, most = classifier.preprocessing, options.native
    most = most if most is None else native_limit(classifier.model, most, record)
    own = plain if classifier.device.type == "cpu" else prepare_for_inference(plain, "float32", classifier.device)
    maps = HeatMaps(own.model, record, classifier.labels, classifier.weights, options.heatmap,
                    options.heatmap_top or 3, most, outputs)  # fmt: skip
    return lambda result: maps.write(result["file"], result)


def _shown(result: dict[str, Any]) -> dict[str, Any]:
    scores = [{"label": s["label"], "score": six_digits(s["score"])} for s in result["scores"]]
    return {**result, "scores": scores}


def _rows(result: dict[str, Any], threshold: float | None) -> Iterator[list]:
    """Rows of the table and CSV; with a threshold, the labels that reach it."""
    from multimodal.tasks.encode.prompts import NONE

    if result.get("answer", "") is None:
        yield [result["file"], NONE, ""]
        return
    for i, s in enumerate(result["scores"]):
        if threshold is None or i == 0 or s["score"] >= threshold:
            yield [result["file"], s["label"], s["score"]]


def _table(result: dict[str, Any], threshold: float | None) -> Iterator[str]:
    for _, label, score in _rows(result, threshold):
        if score == "":
            best = result["scores"][0]
            yield f"{'':8}  {label} (best: {printable(best['label'])} {best['score']:.4f})"
        else:
            yield f"{score:8.4f}  {printable(label)}"


def _settings(options: Namespace, digest: str, classifier: "ImageClassifier", top: int | None) -> dict[str, Any]:
    """All that the results depend on."""
    from multimodal.tasks.classify.classifier import saved_templates

    calibration = classifier.calibration
    return {
        "command": "classify", "model": digest,
        "preprocessing": classifier.preprocessing.to_dict(), "labels": classifier.labels,
        "templates": saved_templates(classifier.templates), "scores": classifier.scores,
        "calibration": calibration.to_dict() if calibration else None, "threshold": classifier.threshold, "top": top,
        "compute_type": options.compute_type, "device": options.device, "native": options.native,
        **ClipOptions.among(vars(options)),
    }  # fmt: skip


def _calibration_data(options: Namespace) -> Any:
    if options.calibrate is None:
        return None
    from multimodal.tasks.classify.calibrate import open_labelled

    names = [Path(options.classes)] if options.classes else []
    return open_labelled(options.calibrate, names, trust(options), columns(options))


def _calibrated(
    options: Namespace, classifier: "ZeroShotClassifier", data: Any, reliability: Path | None
) -> "tuple[ZeroShotClassifier, int]":
    """The classifier, and its figures on stdout, or on stderr where the results of images go there."""
    from multimodal.tasks.classify.calibrate import calibrated, reliability_figure, report

    kind = options.calibration or "temperature"
    made = calibrated(classifier, data, kind, options.batch_size, options.workers, Progress("calibrating"))
    for cause in made.broken:
        fail(cause)
    if reliability:
        title = f"{kind} fitted to {data.images.where} ({made.figures['images']} images, held out by fifths)"
        write_output(reliability, reliability_figure(made.curves, made.figures, title))
    out = sys.stderr if options.images and not options.output else sys.stdout
    for line in report(made):
        print(printable(line), file=out)
    return made.classifier, int(bool(made.broken))


def labels_and_templates(options: Namespace) -> tuple[list[str] | None, Any]:
    """Labels, None where they come of a classifier or its calibration; and templates, None for the model's own."""
    from multimodal.tasks.encode.prompts import labels_from

    templates = _templates(options.templates)
    if options.labels_file is not None:
        labels, prompts = labels_from(read_text_lines(options.labels_file, "--labels_file"), options.labels_file)
        if prompts is not None and templates is not None:
            raise UsageError(f"--templates: {options.labels_file} has the prompts of each label already")
        return labels, templates if prompts is None else prompts
    if options.labels is None:
        return None, templates
    return split_labels(options.labels), templates


def split_labels(values: list[str]) -> list[str]:
    """Labels of `--labels`: several values, or one with commas, which the shell split at its spaces if not quoted."""
    whole = len(values) == 1 or any(value.strip().startswith(",") or value.strip().endswith(",") for value in values)
    return " ".join(values).split(",") if whole else values


def _templates(value: str | None) -> str | list[str] | None:
    from multimodal.tasks.encode.prompts import TEMPLATES, templates_from

    if value is None or value == "none" or value in TEMPLATES or not Path(value).exists():
        return value
    return templates_from(read_text_lines(value, "--templates"), value)
