"""`multimodal export`: a model in the format of another program."""

from argparse import Namespace

from multimodal.cli import flags
from multimodal.cli.parser import Parser
from multimodal.errors import UsageError
from multimodal.export.options import ExportOptions
from multimodal.system.options import add_flags as add_option_flags

EXAMPLES = """examples:
  multimodal export clip-vit-16 --to onnx clip-onnx/              # graphs, tokenizer and a client of 80 lines
  multimodal export gpt-mini --to onnx gpt-onnx/ --store int8     # a quarter of the size
  multimodal export gpt-mini --to hf gpt-hf/                      # transformers loads it
"""


def add_flags(p: Parser) -> None:
    p.epilog = EXAMPLES
    flags.model_argument(p)
    p.add_argument("target", metavar="DST", help="a new folder; for gguf a file")
    add_option_flags(p, ExportOptions, [name for name in ExportOptions.declared if name != "overwrite"])
    p.add_argument("--overwrite", action="store_true", help=ExportOptions.declared["overwrite"].help)


def run(options: Namespace) -> int:
    from multimodal.export.export import export  # slow

    try:
        made = export(
            options.model, options.target, options.architecture, options.preprocessing,
            **ExportOptions.among(vars(options)),
        )  # fmt: skip
    except OSError as error:
        raise UsageError(f"{error.filename or options.target}: cannot be used ({error.strerror or error})") from None
    print(f"{options.target}: {made['format']}, {made['kind']}, {', '.join(made['files'])}")
    return 0
