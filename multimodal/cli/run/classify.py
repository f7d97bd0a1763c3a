"""What `multimodal classify` does with its flags."""

import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch

from multimodal.cli.images import Add, Bar, Printed, append_to, found, results_place
from multimodal.cli.output import fail, printable
from multimodal.cli.shared import Progress, output_file, outputs_of, read_lines, trust
from multimodal.errors import ImageError, UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.system.outputs import Outputs, write_output
from multimodal.tasks.classify.classifier import ZeroShotClassifier, saved_templates
from multimodal.tasks.classify.classifier_file import place_of_classifier, save_classifier
from multimodal.tasks.classify.classify import classifier_of
from multimodal.tasks.encode.attempts import in_parts, item_error
from multimodal.tasks.encode.features import model_digest
from multimodal.tasks.encode.images import batches
from multimodal.tasks.encode.native import native_batches, tokens_of
from multimodal.tasks.encode.prompts import NONE, TEMPLATES, labels_from, templates_from
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

HEADER = ["file", "label", "score"]


def classify(options: Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    labels, templates = labels_and_templates(options)
    files, code = found(options.images)
    outputs = outputs_of(options, files, but=("images",))
    reliability = output_file(options.reliability, "--reliability", (".png",), outputs)
    if options.save_classifier:
        place_of_classifier(Path(options.save_classifier), outputs)
    results_place(options, outputs)
    data = _calibration_data(options)
    if options.heatmap is not None:
        from multimodal.tasks.inspect.heatmap import without_maps

        files = without_maps(files, options.heatmap)
    if not files and options.images:
        return code
    checkpoint = load(options.model, options.architecture, options.preprocessing)
    classifier = classifier_of(
        checkpoint, data.labels() if data and labels is None and not options.classifier else labels, templates,
        options.classifier, device=options.device, compute_type=options.compute_type,
    ).using(options.threshold, options.scores)  # fmt: skip
    if data:
        classifier, failed = _calibrated(options, classifier, data, reliability)
        code = code or failed
    if len(classifier.labels) == 1 and classifier.scores == "softmax":
        warnings.warn("--labels: one label alone gets the score 1 in every picture", stacklevel=1)
    digest = model_digest(checkpoint) if options.save_classifier or options.output else ""
    plain = checkpoint if options.heatmap is not None else None
    del checkpoint  # its memory is of no more use
    if options.save_classifier:
        save_classifier(classifier, Path(options.save_classifier), digest, options.overwrite)
    return (_run(options, files, plain, digest, classifier, outputs) if files else 0) or code


def _run(
    options: Namespace, files: list[str], plain: Checkpoint | None, digest: str, classifier: ZeroShotClassifier,
    outputs: Outputs,
) -> int:  # fmt: skip
    """`plain`: the checkpoint as it was loaded, for heat maps; `digest`: its `model_digest`."""
    top = options.top or (5 if options.format == "table" else None)
    rows = partial(_rows, threshold=classifier.threshold)
    draw = _drawing(options, plain, classifier, outputs)

    def work(files: list[str], add: Add, there: Set[str] = frozenset()) -> int:
        """The results of each picture, as soon as they are known. A picture that cannot be read is one line."""
        code = 0
        with Bar(len(files), options.output is not None) as bar:
            for batch in _batches(options, classifier, files):
                for _, error in batch.refused:
                    code = bar.failed(error)
                results = in_parts(partial(_results, classifier, batch, top), len(batch.read))
                for file, result in zip(batch.read, results, strict=True):
                    if isinstance(result, Exception):
                        code = bar.failed(item_error(result, file, ImageError))
                    elif file not in there:
                        add(_shown(result))
                        code = bar.attempt(file, partial(draw, result)) or code
                bar.step(len(batch.read) + len(batch.refused))
        return code

    if options.output is not None:
        return append_to(options, HEADER, _settings(options, digest, classifier, top), files, rows, work)
    printed = Printed(options.format, HEADER, rows, partial(_table, threshold=classifier.threshold))
    code = work(files, printed.add)
    printed.end()
    return code


def _results(classifier: ZeroShotClassifier, batch: Any, top: int | None, part: slice) -> list[dict[str, Any]]:
    return classifier.results_of(batch.read[part], batch.pixels[part], top)


def _batches(options: Namespace, classifier: ZeroShotClassifier, files: list[str]) -> Iterator[Any]:
    record, size = classifier.preprocessing, options.batch_size
    if options.native is None:
        return batches(files, record, size, options.workers)
    return native_batches(classifier.model, files, record, options.native or None, size, options.workers)


def _drawing(
    options: Namespace, plain: Checkpoint | None, classifier: ZeroShotClassifier, outputs: Outputs
) -> Callable[[dict[str, Any]], None]:
    """Draws the heat maps of a result, where they are asked for."""
    if plain is None:
        return lambda result: None
    from multimodal.tasks.inspect.heatmap import HeatMaps

    most = None if options.native is None else tokens_of(classifier.model, options.native or None)
    if classifier.device.type != "cpu":
        plain = prepare_for_inference(plain, "float32", classifier.device)
    maps = HeatMaps(plain.model, classifier.preprocessing, classifier.labels, classifier.weights, options.heatmap,
                    options.heatmap_top or 3, most, outputs)  # fmt: skip
    return lambda result: maps.write(result["file"], result)


def _shown(result: dict[str, Any]) -> dict[str, Any]:
    """Six digits, which is what float32 has."""
    scores = [{"label": s["label"], "score": float(f"{s['score']:.6g}")} for s in result["scores"]]
    return {**result, "scores": scores}


def _rows(result: dict[str, Any], threshold: float | None) -> Iterator[list]:
    """Of the table and CSV; with a threshold the labels that reach it."""
    if result.get("answer", "") is None:
        yield [result["file"], NONE, ""]
        return
    for number, s in enumerate(result["scores"]):
        if threshold is None or number == 0 or s["score"] >= threshold:
            yield [result["file"], s["label"], s["score"]]


def _table(result: dict[str, Any], threshold: float | None) -> Iterator[str]:
    for _, label, score in _rows(result, threshold):
        if score == "":
            best = result["scores"][0]
            yield f"{'':8}  {label} (best: {printable(best['label'])} {best['score']:.4f})"
        else:
            yield f"{score:8.4f}  {printable(label)}"


def _settings(options: Namespace, digest: str, classifier: ZeroShotClassifier, top: int | None) -> dict[str, Any]:
    """All that the results depend on."""
    calibration = classifier.calibration
    return {
        "command": "classify", "model": digest,
        "preprocessing": classifier.preprocessing.to_dict(), "labels": classifier.labels,
        "templates": saved_templates(classifier.templates), "scores": classifier.scores,
        "calibration": calibration.to_dict() if calibration else None, "threshold": classifier.threshold, "top": top,
        "compute_type": options.compute_type, "device": options.device, "native": options.native,
    }  # fmt: skip


def _calibration_data(options: Namespace) -> Any:
    if options.calibrate is None:
        return None
    from multimodal.tasks.classify.calibrate import open_labelled

    return open_labelled(options.calibrate, [Path(options.classes)] if options.classes else [], trust(options))


def _calibrated(
    options: Namespace, classifier: ZeroShotClassifier, data: Any, reliability: Path | None
) -> tuple[ZeroShotClassifier, int]:
    """The classifier, and its figures on stdout, or on stderr where the results of pictures go there."""
    from multimodal.tasks.classify.calibrate import calibrated, reliability_figure, report

    kind, shown = options.calibration or "temperature", Progress("calibrating")
    made = calibrated(classifier, data, kind, options.batch_size, options.workers, shown)
    shown.clear()
    for cause in made.broken:
        fail(cause)
    if reliability:
        title = f"{kind} fitted to {data.pictures.where} ({made.figures['pictures']} pictures, held out by fifths)"
        write_output(reliability, reliability_figure(made.curves, made.figures, title))
    out = sys.stderr if options.images and not options.output else sys.stdout
    for line in report(made):
        print(printable(line), file=out)
    return made.classifier, int(bool(made.broken))


def labels_and_templates(options: Namespace) -> tuple[list[str] | None, Any]:
    """Labels, None where they come of a classifier or its calibration; and templates, None for the model's own."""
    templates = _templates(options.templates)
    if options.labels_file is not None:
        labels, prompts = labels_from(read_lines(options.labels_file, "--labels_file"), options.labels_file)
        if prompts is not None and templates is not None:
            raise UsageError(f"--templates: {options.labels_file} has the prompts of each label already")
        return labels, templates if prompts is None else prompts
    if options.labels is None:
        return None, templates
    return options.labels[0].split(",") if len(options.labels) == 1 else options.labels, templates


def _templates(value: str | None) -> str | list[str] | None:
    if value is None or value == "none" or value in TEMPLATES or not Path(value).exists():
        return value
    return templates_from(read_lines(value, "--templates"), value)
