"""`multimodal download`: public models into the hub's cache."""

from argparse import Namespace

from multimodal.cli.output import fail, printable
from multimodal.cli.parser import Parser

EXAMPLES = """examples:
  multimodal download whisper-small clip-vit-b-32     # again after a stop: goes on from there
  multimodal download openai/whisper-base             # any repository of the Hugging Face hub
"""


def add_flags(p: Parser) -> None:
    p.epilog = EXAMPLES
    p.add_argument("names", nargs="+", metavar="NAME",
                   help="name that multimodal models lists, or hub repository OWNER/NAME; models in the cache are "
                   "checked, damaged files downloaded again")  # fmt: skip


def run(options: Namespace) -> int:
    from multimodal.errors import MultimodalError, UsageError
    from multimodal.system.assets import shipped
    from multimodal.weights.hub.download import repository_of, snapshot

    code = 0
    for name in options.names:
        if name in shipped():
            print(f"{name}: ships with multimodal")
            continue
        try:
            if (source := repository_of(name)) is None:
                from multimodal.weights.load import unknown  # slow

                raise UsageError(unknown(name))
            folder = snapshot(*source, pickled=True, check=True)
        except MultimodalError as error:
            code = fail(error)
            continue
        files = list(folder.rglob("*.*"))
        safe = any(path.suffix == ".safetensors" for path in files)
        print(printable(f"{source[0]}: {megabytes(sum(path.stat().st_size for path in files))}, checked: {folder}"))
        if not safe:
            print(f"  pickled weights: multimodal convert hf-hub:{source[0]} FOLDER, then --model FOLDER")
    return code


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e8 else f"{size / 1e6:,.0f} MB"
