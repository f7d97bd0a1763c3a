"""`multimodal evaluate few-shot`: accuracy after few images a class; of a CLIP also Tip-Adapter."""

import warnings
from argparse import Namespace
from typing import TYPE_CHECKING

from multimodal.cli import flags
from multimodal.cli.evaluate import image_run
from multimodal.cli.evaluate.image_run import (
    EvaluateRun,
    classes_of,
    classifier_for,
    labelled_vectors,
    labels_of,
    train_and_test,
)
from multimodal.cli.parser import Parser
from multimodal.errors import UsageError
from multimodal.tasks.classify.options import FewShotOptions

if TYPE_CHECKING:
    from multimodal.data.datasets.image_sets import ClassNames, ImageSet
    from multimodal.tasks.classify.classifier import ZeroShotClassifier
    from multimodal.weights.folder import Checkpoint

EXAMPLES = """examples:
  multimodal evaluate few-shot test/ --train train/ --shots 1 4 16
"""


def add_flags(p: Parser) -> None:
    p.epilog = EXAMPLES
    image_run.data_flags(p)
    image_run.training_flags(p.add_argument_group("training"), FewShotOptions)
    image_run.name_flags(p.add_argument_group("classes and prompts"))
    image_run.result_flags(p, False)
    image_run.machine_flags(p)


check = flags.check_columns


def run(options: Namespace) -> int:
    from multimodal.inference.prepare import prepare_for_inference
    from multimodal.tasks.classify.classifier import saved_templates
    from multimodal.tasks.encode.features import unit_vectors
    from multimodal.tasks.evaluate.class_scores import class_scores
    from multimodal.tasks.evaluate.few_shot import FewShotVectors, few_shot

    evaluation = EvaluateRun(options)
    sets, ids = train_and_test(options)
    checkpoint = prepare_for_inference(evaluation.model("pooled"), options.compute_type, options.device)
    classifier, classes = _described(options, checkpoint, sets[0], ids)
    train, test = (labelled_vectors(evaluation.features(checkpoint, one, "pooled"), one, ids) for one in sets)
    embedded, zero = None, None
    if classifier is not None:
        vectors = [unit_vectors(checkpoint, one.vectors) for one in (train, test)]
        columns = [classes.numbers[identity] for identity in ids]
        logits = [classifier.vector_logits(one)[:, columns] for one in vectors]
        embedded = FewShotVectors(*vectors, *logits)
        zero = class_scores(ids, test.labels, logits[1]).figures()
    shots = sorted(set(options.shots))
    rows = few_shot(train, test, ids, shots, options.seeds, options.C, embedded)
    facts = {"templates": saved_templates(classifier.templates) if classifier else None, "train": options.train}
    counts = {"train_images": len(train.labels), "images": len(test.labels), "classes": len(ids)}
    return evaluation.end(facts | counts | {"seeds": options.seeds, "zeroshot": zero, "shots": rows})


def _described(
    options: Namespace, checkpoint: "Checkpoint", train: "ImageSet", ids: list[str]
) -> "tuple[ZeroShotClassifier | None, ClassNames | None]":
    """The zero-shot classifier of a CLIP; none for another model, and none, with a warning, where a class has no name
    and no names are given."""
    from multimodal.models.clip import CLIP

    if not isinstance(checkpoint.model, CLIP) or checkpoint.tokenizer is None:
        return None, None
    labels, templates = labels_of(options)
    try:
        classes = classes_of(options, train, labels)
    except UsageError as error:
        if options.labels_file or options.classes:
            raise
        warnings.warn(f"no zero-shot figure and no Tip-Adapter: {error}", stacklevel=1)
        return None, None
    return classifier_for(options, checkpoint, classes.names, templates), classes
