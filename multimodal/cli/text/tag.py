"""`multimodal tag`: find the entities in texts."""

from argparse import Namespace

from multimodal.cli import flags
from multimodal.cli.files import check_texts, decoded, text_lines
from multimodal.cli.loading import loaded
from multimodal.cli.output import fail, print_json, printable
from multimodal.cli.parser import Parser
from multimodal.errors import TextError
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.text.options import TagOptions

EXAMPLES = """examples:
  multimodal tag "Angela Merkel visited New York." --model bert-base-ner
  multimodal tag --file articles.txt --model my-tagger/ --merge first --format json -o entities.json
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s (TEXT [TEXT ...] | --file FILE) --model MODEL [flags]", EXAMPLES
    p.add_argument("texts", nargs="*", metavar="TEXT", help="texts, or - for the lines of stdin")
    p.add_argument("--file", metavar="FILE", help="one text per line (UTF-8); a line of .jsonl or .csv is a text as it "
                   "stands; - reads stdin")  # fmt: skip
    add_option_flags(p, TagOptions, defaults=True)
    flags.results(p, "table", "json")
    flags.model_and_machine(p, "tag")


def check(p: Parser, options: Namespace) -> None:
    if bool(options.texts) == (options.file is not None):
        p.error("give one of TEXT and --file")
    check_texts(p, options.texts)


def run(options: Namespace) -> int:
    from multimodal.tasks.text.tag import Tagger

    given = list(text_lines(options.texts, options.file))
    tagger = Tagger(loaded(options, "tag"), device=options.device, compute_type=options.compute_type,
                    **TagOptions.among(vars(options)))  # fmt: skip
    records, code, table = [], 0, options.format == "table"
    for number, (name, text) in enumerate(given, 1):
        try:
            (entities,) = tagger(text := decoded(text))
        except TextError as error:
            code = fail(f"{name}: {str(error).removeprefix('text 1: ')}")
            print(end="\n" * table)  # keeps its place
            continue
        records.append({"line": number, "text": text, "entities": [one._asdict() for one in entities]})
        if table:
            print(printable(text))
            for one in entities:
                print(f"  {one.score:.4f}  {printable(one.label)}  {printable(text[one.start : one.end])}")
    if not table:
        print_json(records)
    return code
