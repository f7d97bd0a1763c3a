"""`multimodal inspect`: attention, filters, positions, alignment and induction heads of a model."""

from argparse import Namespace

from multimodal.cli import flags
from multimodal.cli.files import output_file, outputs_of
from multimodal.cli.loading import loaded
from multimodal.cli.output import print_json, printable
from multimodal.cli.parser import Parser
from multimodal.errors import UsageError
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.inspect.options import ViewOptions

WHAT = ("attention", "filters", "positions", "distance", "alignment", "induction", "answer")
WITHOUT_INPUT = ("filters", "positions", "induction")
SEVERAL = ("attention", "distance")  # of an image model
# the views that each flag is for
NEEDED = {"answer": ("alignment", "answer"), "question": ("answer",), "source": ("alignment",),
          "target": ("alignment",), "length": ("induction",), "layer": ("attention", "alignment", "answer"),
          "head": ("attention", "alignment", "answer")}  # fmt: skip
EXAMPLES = """examples:
  multimodal inspect gpt2/ "The cat sat on the mat." --plot heads.png --layer 5
  multimodal inspect clip-vit-16 photo.jpg --plot where.png --layer all
  multimodal inspect hf-hub:timm/vit_small_patch16_224.dino clip.mp4 --size 480 --interpolation dino --plot frames.png
  multimodal inspect clip-vit-16 photos/ --what distance --plot distances.png
  multimodal inspect clip-vit-16 --what filters --plot filters.png
  multimodal inspect whisper-mini talk.flac --what alignment --plot alignment.png
  multimodal inspect stories260K/ --what induction --format json
  multimodal inspect smolvlm-256m photo.jpg clip.mp4 --what answer --question "What is this?" --plot answer.png
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s MODEL [INPUT ...] [flags]", EXAMPLES
    flags.model_argument(p)
    p.add_argument("inputs", nargs="*", metavar="INPUT", help="a text, an image file or an audio file, as the model "
                   f"takes; none for {', '.join(WITHOUT_INPUT)}; for answer any number of image, audio and video "
                   "files; for attention and distance of an image model of images, folders and videos")  # fmt: skip
    p.add_argument("--what", choices=WHAT, default="attention", help="attention: attention maps by head; filters: "
                   "principal components of the patch embedding; positions: cosine similarity of position embeddings; "
                   "distance: mean attention distance by head; alignment: cross-attention to the source; induction: "
                   "prefix-matching score by head; answer: where the answer to a question looked (default: attention)"
                   )  # fmt: skip
    p.add_argument("--plot", metavar="PNG", help="write a figure")
    add_option_flags(p, ViewOptions)
    p.add_argument("--question", metavar="TEXT", help="about all inputs, for --what answer")
    p.add_argument("--answer", metavar="TEXT", help="decoder output to align or explain (default: greedy decoding)")
    p.add_argument("--from", dest="source", metavar="LANGUAGE", help="language of the input, for translators and "
                   "multilingual Whisper models")  # fmt: skip
    p.add_argument("--to", dest="target", metavar="LANGUAGE", help="language of the output, for translators")
    flags.results(p, "table", "json", default=None, help="the numbers (on stdout: table, none with --plot)")


def check(p: Parser, options: Namespace) -> None:
    """Refuse contradictory flags."""
    what, spelled = options.what, {"source": "from", "target": "to"}
    for name, needed in NEEDED.items():
        if getattr(options, name, None) is not None and what not in needed:
            p.error(f"--{spelled.get(name, name)}: is for --what {' or '.join(needed)} (--what {what})")
    if what == "answer":
        if options.question is None:
            p.error("--what answer: needs --question")
        return
    if not options.inputs and what not in WITHOUT_INPUT:
        p.error(f"--what {what}: needs INPUT: a text, an image file or an audio file")
    if options.inputs and what in WITHOUT_INPUT:
        p.error(f"--what {what}: takes no INPUT (got {options.inputs[0][:40]!r})")
    if len(options.inputs) > 1 and what not in SEVERAL:
        p.error(f"--what {what}: takes one INPUT (got {len(options.inputs)}: quote a text)")


def run(options: Namespace) -> int:
    from multimodal.system.outputs import write_output
    from multimodal.tasks.inspect.alignment import AlignmentRequest
    from multimodal.tasks.inspect.answer import AnswerRequest
    from multimodal.tasks.inspect.answer_view import answer_view
    from multimodal.tasks.inspect.image_views import images_view
    from multimodal.tasks.inspect.maps import is_image_model
    from multimodal.tasks.inspect.views import view

    file = output_file(options.plot, "--plot", (".png",), outputs_of(options))
    checkpoint = loaded(options)
    given = ViewOptions.among(vars(options))
    chosen, images = ViewOptions(**given), options.what in SEVERAL and is_image_model(checkpoint.model)
    if not images and (idle := given.keys() & {"size", "interpolation"}):
        raise UsageError(f"--{min(idle)}: is for --what {' and '.join(SEVERAL)} of an image model")
    if options.what == "answer":
        seen = answer_view(checkpoint, AnswerRequest(options.inputs, options.question, options.answer), chosen)
    elif images:
        seen = images_view(checkpoint, options.what, options.inputs, chosen)
    elif len(options.inputs) > 1:
        raise UsageError(f"--what {options.what}: a model of images takes several, this one takes one INPUT "
                         f"(got {len(options.inputs)}: quote a text)")  # fmt: skip
    else:
        one = next(iter(options.inputs), None)
        request = None if one is None else AlignmentRequest(one, options.answer, options.source, options.target)
        seen = view(checkpoint, options.what, request, chosen)
    if options.format == "json":
        print_json(seen.record, indent=None)
    elif options.format == "table" or file is None:
        for line in seen.lines:
            print(printable(line))
    if file is not None:
        try:
            write_output(file, seen.draw())
        except OSError as error:
            raise UsageError(f"--plot {options.plot}: cannot be written ({error.strerror})") from None
    return 0
