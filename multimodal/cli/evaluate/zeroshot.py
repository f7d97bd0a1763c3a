"""`multimodal evaluate zeroshot`: accuracy of a CLIP among the names of classes."""

from argparse import Namespace

from multimodal.cli.evaluate import image_run
from multimodal.cli.evaluate.image_run import EvaluateRun, classes_of, classifier_for, known_classes, labels_of
from multimodal.cli.files import trust
from multimodal.cli.parser import Parser
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
    image_run.result_flags(p)
    image_run.machine_flags(p)


def run(options: Namespace) -> int:
    from multimodal.data.datasets.image_sets import labelled, listed_classes, open_images
    from multimodal.tasks.classify.classifier import saved_templates
    from multimodal.tasks.evaluate.reports.images import class_record
    from multimodal.tasks.evaluate.reports.mistakes import image_mistakes
    from multimodal.tasks.evaluate.zero_shot import zero_shot_scores

    evaluation = EvaluateRun(options)
    images = labelled(open_images(options.data, options.limit, trust(options)))
    checkpoint = evaluation.model("embedding")
    labels, templates = labels_of(options)
    if options.classifier:
        if labels is not None or templates is not None:
            raise UsageError("--classifier: has labels and templates, which are not given beside it")
        classifier = classifier_for(options, checkpoint, None, None, options.classifier)
        classes = listed_classes(images, known_classes(options), classifier.labels, options.classifier, by_place=False)
    else:
        classes = classes_of(options, images, labels)
        classifier = classifier_for(options, checkpoint, classes.names, templates)
    found = evaluation.features(classifier.checkpoint, images, "embedding")
    scores = zero_shot_scores(classifier, images, found, classes.numbers)
    facts = {"templates": saved_templates(classifier.templates), "classifier": options.classifier}
    return evaluation.end(facts | class_record(scores), scores, image_mistakes(scores, images.source, found.keys))
