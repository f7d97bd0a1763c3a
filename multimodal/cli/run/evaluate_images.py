"""What `multimodal evaluate zeroshot`, `retrieval`, `linear-probe` and `few-shot` do with their flags."""

import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from multimodal.cli.output import fail, printable
from multimodal.cli.run.classify import labels_and_templates
from multimodal.cli.shared import Progress, output_file, outputs_of, print_json, trust
from multimodal.data.datasets.class_names import class_names
from multimodal.data.datasets.image_sets import (
    Classes,
    PictureSet,
    captioned,
    labelled,
    listed_classes,
    named_classes,
    open_pictures,
    same_classes,
)
from multimodal.errors import CheckpointError, UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.clip import CLIP
from multimodal.tasks.classify.classifier import ZeroShotClassifier, saved_templates
from multimodal.tasks.classify.classify import classifier_of
from multimodal.tasks.encode.features import Features, Kind, encoder, model_digest, picture_features, unit_vectors
from multimodal.tasks.encode.texts import text_features
from multimodal.tasks.evaluate import few_shot as evaluate_fewshot
from multimodal.tasks.evaluate import linear_probe as evaluate_probe
from multimodal.tasks.evaluate import retrieval as evaluate_retrieval
from multimodal.tasks.evaluate.class_scores import ClassScores, class_scores
from multimodal.tasks.evaluate.image_report import FOUND_LAST, class_record, summary, write_report
from multimodal.tasks.evaluate.linear_probe import Pictures
from multimodal.tasks.evaluate.zero_shot import zero_shot_scores
from multimodal.train.objectives.classify import names_of
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


def zeroshot(options: Namespace) -> int:
    run = _Run(options)
    pictures = labelled(open_pictures(options.data, options.limit, trust(options)))
    checkpoint = run.model("embedding")
    labels, templates = _labels(options)
    if options.classifier:
        if labels is not None or templates is not None:
            raise UsageError("--classifier: has labels and templates, which are not given beside it")
        classifier = _classifier(options, checkpoint, None, None)
        classes = listed_classes(pictures, _known(options), classifier.labels, options.classifier, by_place=False)
    else:
        classes = _classes(options, pictures, labels)
        classifier = _classifier(options, checkpoint, classes.names, templates)
    found = run.features(classifier.checkpoint, pictures, "embedding")
    scores = zero_shot_scores(classifier, pictures, found, classes.numbers)
    facts = {"templates": saved_templates(classifier.templates), "classifier": options.classifier}
    return run.end(facts | class_record(scores), scores=scores)


def retrieval(options: Namespace) -> int:
    run = _Run(options)
    given = captioned(open_pictures(options.data, trust=trust(options)), options.limit)
    pictures = given.pictures
    checkpoint = run.model("embedding")
    if checkpoint.tokenizer is None:
        raise CheckpointError(f"model {checkpoint.source}: its tokenizer is not known, and is not guessed")
    checkpoint = prepare_for_inference(checkpoint, options.compute_type, options.device)
    found = run.features(checkpoint, pictures, "embedding")
    texts = [(number, text) for number, key in enumerate(found.keys) for text in given.texts[key]]
    owners, captions = zip(*texts, strict=True)
    vectors = text_features(checkpoint.model, checkpoint.tokenizer, captions).float().cpu()
    ranks = evaluate_retrieval.retrieval(found.vectors, vectors, owners)
    last = ranks.image_to_text.argsort(descending=True, stable=True)[:FOUND_LAST].tolist()
    hardest = [(pictures.source.row(found.keys[i]).name, int(ranks.image_to_text[i])) for i in last]
    return run.end(ranks.figures(), hardest=hardest)


def linear_probe(options: Namespace) -> int:
    run = _Run(options)
    sets, ids = _both(options)
    checkpoint = prepare_for_inference(run.model("pooled"), options.compute_type, options.device)
    train, test = (_pictures(run.features(checkpoint, one, "pooled"), one, ids) for one in sets)
    names = names_of(ids, [], [*options.train, *options.data])
    probe = evaluate_probe.linear_probe(train, test, names, options.C, options.seed, options.max_iterations)
    facts = {
        "train": options.train, "train_pictures": len(train.labels), "c": probe.c, "iterations": probe.iterations,
        "converged": probe.converged, "sweep": evaluate_probe.sweep_record(probe.sweep),
    }  # fmt: skip
    return run.end(class_record(probe.scores) | facts, scores=probe.scores)


def few_shot(options: Namespace) -> int:
    run = _Run(options)
    sets, ids = _both(options)
    checkpoint = prepare_for_inference(run.model("pooled"), options.compute_type, options.device)
    classifier, classes = _described(options, checkpoint, sets[0], ids)
    train, test = (_pictures(run.features(checkpoint, one, "pooled"), one, ids) for one in sets)
    embedded, zero = None, None
    if classifier is not None:
        vectors = [unit_vectors(checkpoint, one.vectors) for one in (train, test)]
        columns = [classes.numbers[identity] for identity in ids]
        logits = [classifier.vector_logits(one)[:, columns] for one in vectors]
        embedded = evaluate_fewshot.Embedded(*vectors, *logits)
        zero = class_scores(ids, test.labels, logits[1]).figures()
    shots = sorted(set(options.shots))
    rows = evaluate_fewshot.few_shot(train, test, ids, shots, options.seeds, options.C, embedded)
    facts = {"templates": saved_templates(classifier.templates) if classifier else None, "train": options.train}
    counts = {"train_pictures": len(train.labels), "pictures": len(test.labels), "classes": len(ids)}
    return run.end(facts | counts | {"seeds": options.seeds, "zeroshot": zero, "shots": rows})


@dataclass
class _Run:
    """What all kinds do before and after: files to write are checked first, results are printed last."""

    options: Namespace
    report: Path | None = None
    confusion: Path | None = None
    broken: list[str] = field(default_factory=list)
    source: str = ""  # of the model
    preprocessing: dict[str, Any] = field(default_factory=dict)
    digest: str | None = None  # of the model as it is loaded, where features are cached
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        options = self.options
        outputs = outputs_of(options)
        self.report = output_file(options.report, "--report", (".md", ".html"), outputs)
        self.confusion = output_file(getattr(options, "confusion", None), "--confusion", (".png",), outputs)
        if getattr(options, "C", None) is not None and not 0 < options.C < float("inf"):
            raise UsageError(f"--C {options.C}: is no number above 0")
        if options.threads:
            torch.set_num_threads(options.threads)

    def model(self, kind: Kind) -> Checkpoint:
        """As it is loaded. Raises UsageError for one that gives no such features."""
        options = self.options
        checkpoint = load(options.model, options.architecture, options.preprocessing)
        encoder(checkpoint, kind)
        self.source, self.preprocessing = checkpoint.source, checkpoint.preprocessing.to_dict()
        self.digest = model_digest(checkpoint) if options.features_cache else None
        return checkpoint

    def features(self, checkpoint: Checkpoint, pictures: PictureSet, kind: Kind) -> Features:
        options, shown = self.options, Progress(pictures.where)
        cache = Path(options.features_cache) if options.features_cache else None
        try:
            found = picture_features(
                checkpoint, pictures, kind, options.batch_size, options.workers, cache, shown, options.native,
                self.digest,
            )  # fmt: skip
        finally:
            shown.clear()
        new = [cause for cause in found.broken if cause not in self.broken]  # train and test may share pictures
        for cause in new:
            fail(cause)
        self.broken += new
        return found

    def end(
        self, own: dict[str, Any], scores: ClassScores | None = None, hardest: Sequence[tuple[str, int]] = ()
    ) -> int:
        options = self.options
        record = {
            "task": options.kind, "data": options.data, "limit": options.limit, "model": self.source,
            "preprocessing": self.preprocessing, "device": options.device,
            "compute_type": options.compute_type, "native": options.native, **own, "broken": len(self.broken),
            "left_out": self.broken, "seconds": round(time.perf_counter() - self.began, 2),
        }  # fmt: skip
        if options.output == "json":
            print_json(record)
        else:
            for line in summary(record):
                print(printable(line))
        sys.stdout.flush()
        picture = self._drawn(scores)
        if self.report is not None:
            write_report(record, self.report, list(hardest), picture)
        return int(bool(self.broken))

    def _drawn(self, scores: ClassScores | None) -> bytes | None:
        """The confusion matrix, in its file too."""
        html = self.report is not None and self.report.suffix.lower() == ".html"
        if scores is None or not (self.confusion or html):
            return None
        from multimodal.system.outputs import write_output
        from multimodal.tasks.evaluate.confusion_plot import plot_confusion

        name = Path(self.source).name
        picture = plot_confusion(scores, f"{name} on {', '.join(self.options.data)}: {scores.figures()['acc1']:.1%}")
        if self.confusion:
            write_output(self.confusion, picture)
        return picture


def _labels(options: Namespace) -> tuple[list[str] | None, Any]:
    return labels_and_templates(Namespace(labels=None, labels_file=options.labels_file, templates=options.templates))


def _known(options: Namespace) -> dict:
    return class_names([Path(options.classes)] if options.classes else [], options.data)


def _classes(options: Namespace, pictures: PictureSet, labels: list[str] | None) -> Classes:
    known = _known(options)
    if labels is None:
        return named_classes(pictures, known)
    return listed_classes(pictures, known, labels, f"--labels_file {options.labels_file}")


def _classifier(
    options: Namespace, checkpoint: Checkpoint, labels: list[str] | None, templates: Any
) -> ZeroShotClassifier:
    file = options.classifier if labels is None else None
    return classifier_of(
        checkpoint, labels, templates, file, device=options.device, compute_type=options.compute_type
    )  # fmt: skip


def _described(
    options: Namespace, checkpoint: Checkpoint, train: PictureSet, ids: list[str]
) -> tuple[ZeroShotClassifier | None, Classes | None]:
    """The zero-shot classifier of a CLIP; none for another model, and none, with a warning, where a class has no name
    and no names are given."""
    if not isinstance(checkpoint.model, CLIP) or checkpoint.tokenizer is None:
        return None, None
    labels, templates = _labels(options)
    try:
        classes = _classes(options, train, labels)
    except UsageError as error:
        if options.labels_file or options.classes:
            raise
        warnings.warn(f"no zero-shot figure and no Tip-Adapter: {error}", stacklevel=1)
        return None, None
    return _classifier(options, checkpoint, classes.names, templates), classes


def _both(options: Namespace) -> tuple[tuple[PictureSet, PictureSet], list[str]]:
    """Training and test pictures, and their class ids."""
    train, test = (
        open_pictures(options.train, trust=trust(options)),
        open_pictures(options.data, options.limit, trust(options)),
    )
    return (train, test), same_classes(train, test)


def _pictures(found: Features, pictures: PictureSet, ids: list[str]) -> Pictures:
    numbers = {identity: number for number, identity in enumerate(ids)}
    return Pictures(found.vectors, pictures.labels(found.keys, numbers))
