"""`multimodal ask`: questions about images, audio and video."""

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal.cli import flags
from multimodal.cli.console import console
from multimodal.cli.loading import loaded
from multimodal.cli.output import fail, plain, print_json, six_digits
from multimodal.cli.parser import Parser
from multimodal.decoding.options import DecodingOptions
from multimodal.errors import MultimodalError, UsageError
from multimodal.system.files import shown
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.text.options import GenerateOptions
from multimodal.tokens.video.options import VideoOptions

if TYPE_CHECKING:
    from multimodal.tasks.ask.asker import Asker

EXAMPLES = """examples:
  multimodal ask photo.jpg "What is this?" --model llava/
  multimodal ask talk.mp3 page.png "Compare them." "Which is longer?" -m model/ --format json
  multimodal ask clip.mp4 "What happens?" -m model/ --every_s 2
  multimodal ask photo.jpg --chat -m model/
An argument is an input if it is a file or has the ending of an image, audio or video file; every other argument is a
question about all inputs.
"""
NAMES = (*DecodingOptions.declared, "min_p")


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s [INPUT ...] [QUESTION ...] [flags]", EXAMPLES
    p.add_argument("items", nargs="+", metavar="INPUT|QUESTION", help="files, then questions about them")
    g = p.add_argument_group("results")
    flags.results(g, "text", "json")
    g.add_argument("--stream", action="store_true", help="print the answer as it is written (one question)")
    g.add_argument("--chat", action="store_true", help="afterwards, read further questions from stdin until it ends")
    add_option_flags(p.add_argument_group("answers"), GenerateOptions, NAMES)
    add_option_flags(p.add_argument_group("videos"), VideoOptions)
    flags.model_and_machine(p, "ask")


def check(p: Parser, options: Namespace) -> None:
    """Refuse contradictory flags."""
    if options.stream and options.format == "json":
        p.error("--stream: not with --format json")
    if options.chat and options.format == "json":
        p.error("--chat: not with --format json")


def run(options: Namespace) -> int:
    from multimodal.tasks.ask.asker import Asker

    options.inputs = [one for one in options.items if _is_input(one)]
    questions = [one for one in options.items if not _is_input(one)]
    if not questions and not options.chat:
        raise UsageError(f"expected a question beside the inputs (got {shown(options.items)})")
    if missing := [one for one in options.inputs if not os.path.exists(one)]:
        raise UsageError(f"{missing[0]}: no such file")
    chosen = {**GenerateOptions.among(vars(options)), **VideoOptions.among(vars(options))}
    asker = Asker(loaded(options), device=options.device, compute_type=options.compute_type, **chosen)
    if options.chat:
        return _chat(asker, questions, options.inputs)
    if options.stream:
        if len(questions) > 1:
            raise UsageError(f"is for one question (got {len(questions)})", argument="stream")
        for piece in asker.stream(questions[0], *options.inputs):
            print(plain(piece), end="", flush=True)
        print()
        return 0
    return _answers(asker, questions, options)


def _is_input(argument: str) -> bool:
    """Return True for a file, or a name that ends as one does."""
    from multimodal.tokens.audio.reading import SUFFIXES
    from multimodal.tokens.image.reading import SUFFIXES as IMAGES

    return os.path.exists(argument) or Path(argument).suffix.lower() in SUFFIXES | IMAGES


def _answers(asker: "Asker", questions: list[str], options: Namespace) -> int:
    code, records = 0, []
    found = asker.many((question, options.inputs) for question in questions)
    for question, answers in zip(questions, found, strict=True):
        if isinstance(answers, MultimodalError):
            code, best = fail(answers), None
        else:
            best = answers[0]
        records.append(_record(question, best))
        if options.format != "json" and best is not None:
            print(plain(best.text.strip()), flush=True)
    if options.format == "json":
        print_json({"inputs": options.inputs, "answers": records})
    return code


def _record(question: str, best: Any) -> dict[str, Any]:
    if best is None:
        return {"question": question, "answer": None}
    told = {"answer": best.text.strip(), "logprob": six_digits(best.logprob), "tokens": best.tokens}
    return {"question": question, **told, "stopped": best.stopped}


def _chat(asker: "Asker", first: list[str], inputs: list[str]) -> int:
    """A question and its answer in turn; a turn that fails is one line, and the conversation goes on."""
    code, talk, questions = 0, asker.conversation(), iter(first)
    while True:
        if (question := next(questions, None)) is None:
            if sys.stdin is not None and sys.stdin.isatty():
                console.note("your question (end with Ctrl-D):")
            if sys.stdin is None or not (line := sys.stdin.readline()):  # None: closed by the caller
                return code
            question = line.strip()
        if not question:
            continue
        try:
            print(plain(talk.ask(question, *inputs)), flush=True)
            inputs = []
        except MultimodalError as error:
            code = fail(error)
