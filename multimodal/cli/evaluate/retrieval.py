"""`multimodal evaluate retrieval`: recall of a CLIP between images and captions, both ways."""

from argparse import Namespace

from multimodal.cli import flags
from multimodal.cli.evaluate import image_run
from multimodal.cli.evaluate.image_run import EvaluateRun
from multimodal.cli.files import columns, trust
from multimodal.cli.parser import Parser

EXAMPLES = """examples:
  multimodal evaluate retrieval captions.jsonl --model clip-vit-b-32 --limit 1000
"""


def add_flags(p: Parser) -> None:
    p.epilog = EXAMPLES
    image_run.data_flags(p, "text")
    image_run.result_flags(p, False)
    image_run.machine_flags(p)


check = flags.check_columns


def run(options: Namespace) -> int:
    from multimodal.data.datasets.image_sets import captioned, open_images
    from multimodal.inference.prepare import prepare_for_inference
    from multimodal.tasks.evaluate.reports.neighbours import RetrievalItems, neighbour_sections
    from multimodal.tasks.evaluate.retrieval import retrieval
    from multimodal.weights.encode import text_features

    evaluation = EvaluateRun(options)
    given = captioned(open_images(options.data, None, trust(options), columns(options)), options.limit)
    images = given.images
    checkpoint = evaluation.model("embedding")
    checkpoint.required_tokenizer()
    checkpoint = prepare_for_inference(checkpoint, options.compute_type, options.device)
    found = evaluation.features(checkpoint, images, "embedding")
    texts = [(number, text) for number, key in enumerate(found.keys) for text in given.texts[key]]
    owners, captions = zip(*texts, strict=True)
    vectors = text_features(checkpoint.model, checkpoint.tokenizer, captions).float().cpu()
    ranks = retrieval(found.vectors, vectors, owners)
    items = RetrievalItems(images.source, found.keys, found.vectors, captions, vectors, owners)
    return evaluation.end(ranks.figures(), examples=[*neighbour_sections(items)] if options.report else [])
