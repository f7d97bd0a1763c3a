"""`multimodal answer`: answer a question from a text, or choose its answer."""

from argparse import Namespace

from multimodal.cli import flags
from multimodal.cli.loading import loaded
from multimodal.cli.output import print_record
from multimodal.cli.parser import Parser
from multimodal.system.files import read_text_lines
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.text.options import AnswerOptions

EXAMPLES = """examples:
  multimodal answer "Who wrote it?" --context "The report was written by Ada Lovelace." --model distilbert-squad
  multimodal answer "When did it rain?" --file report.txt --model my-reader/ --null --top_k 3 --format json
  multimodal answer "The sun is" --choices hot cold --model my-chooser/
"""


def add_flags(p: Parser) -> None:
    p.usage = "%(prog)s QUESTION (--context TEXT | --file FILE | --choices TEXT TEXT [TEXT ...]) --model MODEL [flags]"
    p.epilog = EXAMPLES
    p.add_argument("question", metavar="QUESTION")
    p.add_argument("--context", metavar="TEXT", help="the text that answers it")
    p.add_argument("--file", metavar="FILE", help="the same in a file (UTF-8)")
    p.add_argument("--choices", nargs="+", metavar="TEXT", help="the answers to choose from, with a multiple-choice "
                   "model")  # fmt: skip
    add_option_flags(p, AnswerOptions)
    flags.results(p, "table", "json")
    flags.model_and_machine(p, "answer")


def check(p: Parser, options: Namespace) -> None:
    if [options.context, options.file, options.choices].count(None) != 2:
        p.error("give one of --context, --file and --choices")
    if options.choices is not None:
        p.refuse(options, AnswerOptions.declared, "is for --context and --file")


def run(options: Namespace) -> int:
    from multimodal.tasks.text.answer import Answerer

    context = options.context if options.file is None else "\n".join(read_text_lines(options.file, "--file"))
    answerer = Answerer(loaded(options, "answer"), device=options.device, compute_type=options.compute_type,
                        **AnswerOptions.among(vars(options)))  # fmt: skip
    found = (
        answerer.choose(options.question, options.choices) if options.choices else answerer(options.question, context)
    )
    lines = (f"{one.score:.4f}  {one.text or '(no answer)'}" for one in found)
    print_record(options.format, {"question": options.question, "answers": [one._asdict() for one in found]}, lines)
    return 0
