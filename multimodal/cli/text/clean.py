"""`multimodal clean`: clean text for language models by C4's rules, without duplicates."""

import time
from argparse import Namespace
from pathlib import Path

from multimodal.cli.console import Progress, console
from multimodal.cli.files import output_file, outputs_of
from multimodal.cli.flags import overwrite
from multimodal.cli.output import fail, print_record, printable
from multimodal.cli.parser import Parser
from multimodal.data.cleaning.options import CleanMachineOptions, CleanOptions
from multimodal.system.files import read_text_lines
from multimodal.system.options import add_flags as add_option_flags

ENDINGS = tuple(kind + packed for kind in (".txt", ".jsonl") for packed in ("", ".gz", ".zst"))
EXAMPLES = """examples:
  multimodal clean pages.jsonl.gz --output clean.jsonl.gz --explain dropped.jsonl
  multimodal clean crawl-*.txt.zst --documents blank -o clean.txt --workers 4 --memory 2000
  multimodal clean pages.jsonl -o clean.jsonl --language en --near_duplicates 0.8 --bad_words bad.txt
Rules: Raffel et al. 2020, section 2.2. Rerun to resume.
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s FILE [FILE ...] --output FILE [flags]", EXAMPLES
    p.add_argument("data", nargs="+", metavar="FILE", help="pages as text, or JSON lines (.jsonl, .ndjson, .json); "
                   "plain, .gz or .zst")  # fmt: skip
    p.add_argument("--output", "-o", required=True, metavar="FILE", help="clean pages; .txt (an empty line between "
                   "pages) or .jsonl, plain, .gz or .zst")  # fmt: skip
    p.add_argument("--explain", metavar="FILE", help="write JSON lines with the rule of each dropped line, and for a "
                   "duplicate the place of its first copy; plain, .gz or .zst")  # fmt: skip
    p.add_argument("--format", choices=["table", "json"], default="table", help="of the counts on stdout (default: "
                   "table)")  # fmt: skip
    overwrite(p)
    add_option_flags(p.add_argument_group("rules"), CleanOptions)
    add_option_flags(p.add_argument_group("machine"), CleanMachineOptions, defaults=True)


def check(p: Parser, options: Namespace) -> None:
    from multimodal.data.manifests import is_json  # slow: not for --help

    kinds = {is_json(Path(name)) for name in options.data}
    if getattr(options, "language", None) is None:
        p.refuse(options, ["language_probability"], "needs --language")
    if kinds == {True}:
        p.refuse(options, ["documents"], "is for text files")
    if kinds == {False}:
        p.refuse(options, ["text_column"], "is for JSON lines")


def run(options: Namespace) -> int:
    from multimodal.data.cleaning.clean import clean
    from multimodal.system.signals import at_stop

    outputs = outputs_of(options, but=("explain",))
    output = output_file(options.output, "--output", ENDINGS, outputs)
    explain = output_file(options.explain, "--explain", ENDINGS[3:], outputs)
    rules = CleanOptions(**CleanOptions.among(vars(options)))
    words = read_text_lines(rules.bad_words, "--bad_words") if rules.bad_words is not None else []
    files = list(dict.fromkeys(map(Path, options.data)))
    size = sum(path.stat().st_size for path in files if path.is_file())
    shown, began = Progress("MB"), time.monotonic()
    with at_stop(lambda: printable(f"multimodal: stopped; progress is in {output}.state, rerun to resume")):
        report = clean(
            files, output, rules, explain, words, options.workers, options.memory << 20,
            lambda read: shown(read >> 20, size >> 20),
        )  # fmt: skip
    code = 0
    for line in report.fault_lines():
        code = fail(line)
    print_record(options.format, report.to_dict(), report.table())
    console.note(f"{output}: written in {time.monotonic() - began:.1f} s")
    return code
