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

WHAT = ("attention", "filters", "positions", "distance", "alignment", "induction")
WITHOUT_INPUT = ("filters", "positions", "induction")
EXAMPLES = """examples:
  multimodal inspect gpt2/ "The cat sat on the mat." --plot heads.png --layer 5
  multimodal inspect clip-vit-16 photo.jpg --plot where.png --layer all
  multimodal inspect clip-vit-16 --what filters --plot filters.png
  multimodal inspect whisper-mini talk.flac --what alignment --plot alignment.png
  multimodal inspect stories260K/ --what induction --format json
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s MODEL [INPUT] [flags]", EXAMPLES
    flags.model_argument(p)
    p.add_argument("input", nargs="?", metavar="INPUT", help="a text, an image file or an audio file, as the model "
                   f"takes; none for {', '.join(WITHOUT_INPUT)}")  # fmt: skip
    p.add_argument("--what", choices=WHAT, default="attention", help="attention: attention maps by head; filters: "
                   "principal components of the patch embedding; positions: cosine similarity of position embeddings; "
                   "distance: mean attention distance by head; alignment: cross-attention to the source; induction: "
                   "prefix-matching score by head (default: attention)")  # fmt: skip
    p.add_argument("--plot", metavar="PNG", help="write a figure")
    add_option_flags(p, ViewOptions, defaults=True)
    p.add_argument("--answer", metavar="TEXT", help="decoder output to align (default: greedy decoding)")
    p.add_argument("--from", dest="source", metavar="LANGUAGE", help="language of the input, for translators and "
                   "multilingual Whisper models")  # fmt: skip
    p.add_argument("--to", dest="target", metavar="LANGUAGE", help="language of the output, for translators")
    flags.results(p, "table", "json", default=None, help="the numbers (on stdout: table, none with --plot)")


def check(p: Parser, options: Namespace) -> None:
    """Refuse contradictory flags."""
    what, others = options.what, {"answer": "alignment", "source": "alignment", "target": "alignment",
                                  "length": "induction"}  # fmt: skip
    spelled = {"source": "from", "target": "to"}
    for name, needed in others.items():
        if getattr(options, name) is not None and what != needed:
            p.error(f"--{spelled.get(name, name)}: is for --what {needed} (--what {what})")
    for name in ("layer", "head"):
        if getattr(options, name) is not None and what not in ("attention", "alignment"):
            p.error(f"--{name}: is for --what attention or alignment (--what {what})")
    if options.input is None and what not in WITHOUT_INPUT:
        p.error(f"--what {what}: needs INPUT: a text, an image file or an audio file")
    if options.input is not None and what in WITHOUT_INPUT:
        p.error(f"--what {what}: takes no INPUT (got {options.input[:40]!r})")


def run(options: Namespace) -> int:
    from multimodal.system.outputs import write_output
    from multimodal.tasks.inspect.alignment import AlignmentRequest
    from multimodal.tasks.inspect.views import view

    file = output_file(options.plot, "--plot", (".png",), outputs_of(options))
    checkpoint = loaded(options)
    request = None
    if options.input is not None:
        request = AlignmentRequest(options.input, options.answer, options.source, options.target)
    seen = view(checkpoint, options.what, request, ViewOptions(**ViewOptions.among(vars(options))))
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
