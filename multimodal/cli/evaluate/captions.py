"""`multimodal evaluate captions`: BLEU, ROUGE-L, CIDEr-D and CLIPScore of captions."""

import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal.cli import flags
from multimodal.cli.console import Progress
from multimodal.cli.files import columns, output_file, outputs_of, trust
from multimodal.cli.loading import choose_device, loaded
from multimodal.cli.output import fail, print_record
from multimodal.cli.parser import Parser
from multimodal.data.options import SubsetOptions
from multimodal.errors import UsageError
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.caption.options import CaptionBatchOptions, CaptionOptions

if TYPE_CHECKING:
    from multimodal.data.datasets.image_sets import CaptionedImages
    from multimodal.tasks.evaluate.captions import CaptionEvaluation, CaptionTexts
    from multimodal.weights.folder import Checkpoint

EXAMPLES = """examples:
  multimodal evaluate captions test.jsonl --model my-captioner/ --clip_model clip-vit-16
  multimodal evaluate captions test.jsonl --predictions captions.csv --report report.html
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s DATA [DATA ...] [--model MODEL | --predictions FILE] [flags]", EXAMPLES
    p.add_argument("data", nargs="+", metavar="DATA", help="images with reference captions: .jsonl, .csv, .tsv "
                   "(several lines may name one image) or WebDataset tars")  # fmt: skip
    add_option_flags(p, SubsetOptions, defaults=True)
    flags.lists(p, "path", "text")
    g = p.add_argument_group("captions")
    flags.model(g, "caption", lambda options: None if options.predictions is not None else "caption")
    g.add_argument("--predictions", metavar="FILE", help="score these instead: .csv or .jsonl with columns file and "
                   "caption, as multimodal caption --output writes them")  # fmt: skip
    g = p.add_argument_group("decoding (the model's card may set other defaults)")
    add_option_flags(g, CaptionOptions)
    g = p.add_argument_group("scores")
    g.add_argument("--clip_model", metavar="MODEL", help="also CLIPScore and RefCLIPScore with this CLIP, such as "
                   "clip-vit-16")  # fmt: skip
    g.add_argument("--agreement", action="store_true", help="also score the reference captions against each other")
    g.add_argument("--constant", nargs="+", metavar="DATA", help="baseline: the best single caption of DATA, given to "
                   "every image")  # fmt: skip
    g.add_argument("--report", metavar="FILE", help="write figures, worst and best captions: .md or .html")
    flags.results(g, "table", "json")
    g = p.add_argument_group("machine")
    flags.machine(g, CaptionBatchOptions)


def check(p: Parser, options: Namespace) -> None:
    if options.model is not None and options.predictions is not None:
        p.error("captions come from either --model or --predictions")
    flags.check_columns(p, options)


def run(options: Namespace) -> int:
    from multimodal.tasks.evaluate.captions import constant_caption, evaluate, open_references, record
    from multimodal.tasks.evaluate.reports.captions import write_report

    began = time.perf_counter()
    choose_device(options)
    report = output_file(options.report, "--report", (".md", ".html"), outputs_of(options))
    clip, read = _clip(options), (trust(options), columns(options))
    referenced = open_references(options.data, options.limit, 2 if options.agreement else 1, *read)
    captions, facts = _captions(options, referenced)
    found = evaluate(
        referenced, captions, clip, options.agreement, Progress(f"{options.clip_model}: images"),
        batch_size=options.batch_size, workers=options.workers,
    )  # fmt: skip
    for line in found.broken:
        fail(line)
    if options.constant:
        facts["constant"] = constant_caption(referenced, options.constant, *read)
    facts = {"task": "captions", "data": options.data, **facts, "clip_model": clip and clip.source,
             "seconds": round(time.perf_counter() - began, 2)}  # fmt: skip
    print_record(options.format, record(found, facts), _summary(found, facts.get("constant")))
    if report is not None:
        write_report(found, referenced.images.source, report, facts)
    return int(bool(found.broken))


def _clip(options: Namespace) -> "Checkpoint | None":
    """Loaded first, so that a wrong name costs nothing."""
    if options.clip_model is None:
        return None
    from multimodal.inference.prepare import prepare_for_inference
    from multimodal.tasks.encode.features import encoder
    from multimodal.weights.load import load

    checkpoint = load(options.clip_model)
    encoder(checkpoint, "embedding")
    return prepare_for_inference(checkpoint, options.compute_type, options.device)


def _captions(options: Namespace, referenced: "CaptionedImages") -> "tuple[CaptionTexts, dict[str, Any]]":
    from multimodal.tasks.evaluate.captions import read_captions, write_captions

    asked = CaptionOptions.among(vars(options))
    if options.predictions is not None:
        if asked:
            raise UsageError(f"--{next(iter(asked))}: is for a captioner, and --predictions has captions already")
        return read_captions(Path(options.predictions), referenced), {"predictions": options.predictions}
    checkpoint = loaded(options, "caption")
    found = write_captions(
        referenced, checkpoint, Progress("captions"), batch_size=options.batch_size, workers=options.workers,
        compute_type=options.compute_type, device=options.device, **asked,
    )  # fmt: skip
    return found, {"model": checkpoint.source, "options": asked}


def _summary(found: "CaptionEvaluation", constant: dict[str, Any] | None) -> Iterator[str]:
    from multimodal.tasks.evaluate.reports.captions import score_table
    from multimodal.tasks.report.page import aligned

    yield from aligned(score_table(found))
    f = found.figures()
    cut = f", {f['cut']} cut at the most tokens" if f["cut"] else ""
    yield f"(in %; {f['images']} captions, {f['distinct']} different, {f['words_per_caption']:.1f} words each{cut})"
    if found.broken:
        yield f"left out: {len(found.broken)}"
    if constant:
        yield f"best constant caption: CIDEr-D {constant['cider']:.2f} ({constant['text']})"
