"""`multimodal evaluate answers`: how well an any-to-text model answers."""

import json
from argparse import Namespace
from contextlib import suppress
from functools import partial
from typing import IO, TYPE_CHECKING

from multimodal.cli import flags
from multimodal.cli.console import Progress
from multimodal.cli.evaluate.figures import SetFigures, output_flags, print_figures
from multimodal.cli.files import output_file, outputs_of, trust
from multimodal.cli.loading import loaded
from multimodal.cli.parser import Parser
from multimodal.cli.text.ask import NAMES
from multimodal.system.options import add_flags as add_option_flags
from multimodal.system.outputs import opened_output
from multimodal.tasks.text.options import GenerateOptions
from multimodal.tokens.video.options import VideoOptions

if TYPE_CHECKING:
    from multimodal.tasks.evaluate.text.answers import AnsweredQuestion

MOST_SHOWN = 20  # answers of each task in a report
EXAMPLES = """examples:
  multimodal evaluate answers questions.jsonl --model my-model/ --report report.html
  multimodal evaluate answers clips.jsonl --without image audio
A line of the data holds "messages" as chat models take them and the "answers" that count as right, or the assistant's
message as the last; "task" groups lines, "metric" is exact, wer, cider, bleu or perplexity; "language", such as "en",
chooses the normalizer of wer and the tokenizer of bleu.
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s DATA [DATA ...] [flags]", EXAMPLES
    p.add_argument("data", nargs="+", metavar="DATA", help="JSON lines of conversations with their answers")
    p.add_argument("--without", nargs="+", default=[], metavar="KIND", choices=("image", "audio", "video"),
                   help="leave inputs out (image, audio, video), to see whether the answers used them")  # fmt: skip
    p.add_argument("--answers", metavar="FILE", help="write each question, answer and reference as JSON lines")
    flags.lists(p)
    add_option_flags(p.add_argument_group("answers"), GenerateOptions, (*NAMES, "batch_size"))
    add_option_flags(p.add_argument_group("videos"), VideoOptions)
    output_flags(p)
    flags.model_and_machine(p, "ask")


def run(options: Namespace) -> int:
    from multimodal.data.datasets.chats import open_chats
    from multimodal.tasks.ask.asker import Asker
    from multimodal.tasks.evaluate.text.answers import evaluate_answers
    from multimodal.tasks.report.page import Section

    output = output_file(options.answers, "--answers", (".jsonl",), outputs_of(options))
    chosen = {**GenerateOptions.among(vars(options)), **VideoOptions.among(vars(options))}
    checkpoint = loaded(options, "ask")
    asker = Asker(checkpoint, device=options.device, compute_type=options.compute_type, **chosen)

    def evaluate(file: IO[bytes] | None, name: str) -> SetFigures:
        keep = lambda row: file is None or file.write(f"{json.dumps(_record(row), ensure_ascii=False)}\n".encode())
        shown = Progress(f"{name}: questions")
        found = evaluate_answers(open_chats(name, trust(options)), asker, options.without, shown, keep)
        figures = found.figures()
        examples = [
            Section(f"{name}: {task}", lines=[
                f"{row.question} {row.answer!r} (expected {' | '.join(map(repr, row.references))})"
                for row in found.rows if row.task == task
            ][:MOST_SHOWN])
            for task in figures
        ]  # fmt: skip
        return SetFigures(figures, found.broken, examples)

    if output is None:
        return print_figures(options, checkpoint.source, partial(evaluate, None))
    code = 0
    with suppress(_NothingWrittenError), opened_output(output, "place") as file:  # also what came before a stop
        code = print_figures(options, checkpoint.source, partial(evaluate, file))
        if not file.tell():
            raise _NothingWrittenError
    return code


class _NothingWrittenError(Exception):
    pass


def _record(row: "AnsweredQuestion") -> dict:
    return {"item": row.name, "task": row.task, "question": row.question, "answer": row.answer,
            "references": list(row.references),
            **({"right": row.right} if row.metric == "exact" else {})}  # fmt: skip
