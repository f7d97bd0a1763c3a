"""`multimodal evaluate linear-probe`: accuracy of logistic regression on frozen features."""

from argparse import Namespace

from multimodal.cli.evaluate import image_run
from multimodal.cli.evaluate.image_run import EvaluateRun, labelled_vectors, train_and_test
from multimodal.cli.parser import Parser, count


def add_flags(p: Parser) -> None:
    image_run.data_flags(p)
    g = p.add_argument_group("training")
    image_run.training_flags(g)
    g.add_argument("--max_iterations", type=count, default=1000, metavar="N", help="L-BFGS iterations (default: 1000)")
    g.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the held-out split (default: 0)")
    image_run.result_flags(p)
    image_run.machine_flags(p)


def run(options: Namespace) -> int:
    from multimodal.data.datasets.class_names import names_of
    from multimodal.inference.prepare import prepare_for_inference
    from multimodal.tasks.evaluate.linear_probe import linear_probe, sweep_record
    from multimodal.tasks.evaluate.reports.images import class_record

    evaluation = EvaluateRun(options)
    sets, ids = train_and_test(options)
    checkpoint = prepare_for_inference(evaluation.model("pooled"), options.compute_type, options.device)
    train, test = (labelled_vectors(evaluation.features(checkpoint, one, "pooled"), one, ids) for one in sets)
    names = names_of(ids, [], [*options.train, *options.data])
    probe = linear_probe(train, test, names, options.C, options.seed, options.max_iterations)
    facts = {
        "train": options.train, "train_images": len(train.labels), "c": probe.c, "iterations": probe.iterations,
        "converged": probe.converged, "sweep": sweep_record(probe.sweep),
    }  # fmt: skip
    return evaluation.end(class_record(probe.scores) | facts, scores=probe.scores)
