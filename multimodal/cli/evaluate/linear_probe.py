"""`multimodal evaluate linear-probe`: accuracy of logistic regression on frozen features."""

from argparse import Namespace

from multimodal.cli import flags
from multimodal.cli.evaluate import image_run
from multimodal.cli.evaluate.image_run import EvaluateRun, labelled_vectors, train_and_test
from multimodal.cli.parser import Parser
from multimodal.tasks.classify.options import ProbeOptions

EXAMPLES = """examples:
  multimodal evaluate linear-probe test/ --train train/ --report report.html
  multimodal evaluate linear-probe test/ --train train/ --model siglip-base --C 0.3
"""


def add_flags(p: Parser) -> None:
    p.epilog = EXAMPLES
    image_run.data_flags(p)
    image_run.training_flags(p.add_argument_group("training"), ProbeOptions)
    image_run.result_flags(p)
    image_run.machine_flags(p)


check = flags.check_columns


def run(options: Namespace) -> int:
    from multimodal.data.datasets.class_names import names_of
    from multimodal.inference.prepare import prepare_for_inference
    from multimodal.tasks.evaluate.linear_probe import linear_probe
    from multimodal.tasks.evaluate.reports.images import class_record
    from multimodal.tasks.evaluate.reports.mistakes import image_mistakes

    evaluation = EvaluateRun(options)
    sets, ids = train_and_test(options)
    checkpoint = prepare_for_inference(evaluation.model("pooled"), options.compute_type, options.device)
    found = [evaluation.features(checkpoint, one, "pooled") for one in sets]
    train, test = (labelled_vectors(part, one, ids) for part, one in zip(found, sets, strict=True))
    names = names_of(ids, [], [*options.train, *options.data])
    probe = linear_probe(train, test, names, options.C, options.seed, options.max_iterations)
    facts = {
        "train": options.train, "train_images": len(train.labels), "c": probe.c, "iterations": probe.iterations,
        "converged": probe.converged, "sweep": [vars(fit) for fit in probe.sweep],
    }  # fmt: skip
    mistakes = image_mistakes(probe.scores, sets[1].source, found[1].keys)
    return evaluation.end(class_record(probe.scores) | facts, probe.scores, mistakes)
