"""`multimodal evaluate zeroshot`: accuracy of a CLIP among the names of classes."""

from argparse import Namespace

from multimodal.cli import flags
from multimodal.cli.evaluate import image_run
from multimodal.cli.evaluate.image_run import EvaluateRun, classes_of, classifier_for, known_classes, labels_of
from multimodal.cli.files import columns, trust
from multimodal.cli.parser import Parser, count
from multimodal.errors import UsageError

EXAMPLES = """examples:
  multimodal evaluate zeroshot photos/ --report report.html           # a folder per class
  multimodal evaluate zeroshot test.csv --labels_file names.txt --templates clip80 --confusion confusion.png
"""


def add_flags(p: Parser) -> None:
    p.epilog = EXAMPLES
    image_run.data_flags(p)
    g = p.add_argument_group("classes and prompts")
    image_run.name_flags(g)
    g.add_argument("--classifier", metavar="FILE", help="labels, vectors and calibration of a file that multimodal "
                   "classify --save_classifier wrote with the same model")  # fmt: skip
    g.add_argument("--hypernyms", type=count, metavar="N", help="describe each class also by its N nearest hypernyms "
                   "in --classes, which helps where the model has not seen its name (default: name alone)")  # fmt: skip
    image_run.result_flags(p)
    image_run.machine_flags(p)


check = flags.check_columns


def run(options: Namespace) -> int:
    from multimodal.data.datasets.image_sets import labelled, listed_classes, open_images
    from multimodal.tasks.classify.classifier import saved_templates
    from multimodal.tasks.evaluate.reports.images import class_record
    from multimodal.tasks.evaluate.reports.mistakes import image_mistakes
    from multimodal.tasks.evaluate.zero_shot import described, zero_shot_scores

    evaluation = EvaluateRun(options)
    images = labelled(open_images(options.data, options.limit, trust(options), columns(options)))
    checkpoint = evaluation.model("embedding")
    labels, templates = labels_of(options)
    if options.hypernyms and (options.classifier or labels is not None):
        given = "--classifier" if options.classifier else "--labels_file"
        raise UsageError(f"--hypernyms: those of --classes describe its names, not the labels of {given}")
    if options.classifier:
        if labels is not None or templates is not None:
            raise UsageError("--classifier: has labels and templates, which are not given beside it")
        classifier = classifier_for(options, checkpoint, None, None, options.classifier)
        classes = listed_classes(images, known_classes(options), classifier.labels, options.classifier, by_place=False)
    else:
        classes = classes_of(options, images, labels)
        classifier = classifier_for(options, checkpoint, classes.names, templates)
        classifier = described(classifier, classes.above, options.hypernyms) if options.hypernyms else classifier
    found = evaluation.features(classifier.checkpoint, images, "embedding")
    scores = zero_shot_scores(classifier, images, found, classes.numbers)
    facts = {"templates": saved_templates(classifier.templates), "hypernyms": options.hypernyms,
             "classifier": options.classifier}  # fmt: skip
    return evaluation.end(facts | class_record(scores), scores, image_mistakes(scores, images.source, found.keys))
