"""`multimodal generate`: continue a text, or answer it, with a language model checkpoint."""

import argparse
import sys
import warnings
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from multimodal.cli import flags
from multimodal.cli.console import Progress
from multimodal.cli.files import check_texts, decoded, text_lines
from multimodal.cli.loading import loaded
from multimodal.cli.output import fail, plain, print_json, printable, six_digits
from multimodal.cli.parser import Parser, boolean
from multimodal.decoding.options import DecodingOptions
from multimodal.errors import TextError
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.text.options import GenerateOptions, PromptOptions, prompt_options

if TYPE_CHECKING:
    from multimodal.tasks.text.choices import Choice
    from multimodal.tasks.text.examples import Demonstration
    from multimodal.tasks.text.generate import Continuation, TextWriter

EXAMPLES = """examples:
  multimodal generate "A man in a" --max_new_tokens 12
  multimodal generate "Once upon a time" -m gpt2/ --top_p 0.9 --num_return 3 --seed 1
  multimodal generate --file prompts.txt -m t5-small/ --beam_size 4 --format json
  multimodal generate "Why is the sky blue?" -m qwen3/ --chat --system "Answer in one sentence."
  multimodal generate "a dull film" -m gpt2/ --examples films.tsv --choices good bad
An example stands before the prompt as "Input: …", a line "Output: …" and an empty line, and the prompt as "Input: …"
and a line "Output:"; the answer then ends at an empty line.
"""
# what --choices has no part for
SEARCH = [name for name in (*DecodingOptions.declared, "min_p", "num_return", "stop") if name != "length_penalty"]


def add_flags(p: Parser) -> None:
    p.usage = "%(prog)s (TEXT [TEXT ...] | --prompt TEXT | --file FILE) [flags]"
    p.epilog = EXAMPLES
    p.add_argument("texts", nargs="*", metavar="TEXT", help="prompts, or - for the lines of stdin")
    p.add_argument("--prompt", metavar="TEXT", help="a single prompt, which may be empty")
    p.add_argument("--file", metavar="FILE", help="one prompt per line (UTF-8); a line of .jsonl or .csv is a prompt "
                   "as it stands; - reads stdin")  # fmt: skip
    p.add_argument("--examples", metavar="FILE", help='.jsonl with "input" and "output", or .tsv of two columns: pairs '
                   "to put before each prompt; if not all fit, the first ones")  # fmt: skip
    p.add_argument("--choices", nargs="+", metavar="TEXT", help="choose the answer among these texts by the score "
                   "log-probability / tokens^length_penalty")  # fmt: skip
    flags.results(p, "text", "json", help="text: only the continuations; several are one per line, with line breaks as "
                  "\\n")  # fmt: skip
    p.add_argument("--stream", type=boolean, nargs="?", const=True, metavar="BOOL", help="print tokens as they come "
                   "(default: for one text on a terminal)")  # fmt: skip
    _decoding(p.add_argument_group("text"))
    g = flags.model_and_machine(p, "generate")
    add_option_flags(g, GenerateOptions, ["batch_size"])


def _decoding(g: argparse._ArgumentGroup) -> None:
    names = [name for name in PromptOptions.declared if name not in ("stop", "batch_size")]
    add_option_flags(g, PromptOptions, names)
    g.add_argument("--stop", nargs="+", metavar="TEXT", default=argparse.SUPPRESS, help=GenerateOptions.stop.help)


def check(p: Parser, options: Namespace) -> None:
    """Refuse contradictory flags."""
    if sum([bool(options.texts), options.prompt is not None, options.file is not None]) != 1:
        p.error("give one of TEXT, --prompt and --file")
    check_texts(p, options.texts)
    if options.choices and (given := [name for name in SEARCH if name in options]):
        p.error(f"--{given[0]}: has no part in a choice of --choices")
    several = len(options.texts) > 1 or options.texts == ["-"] or options.file is not None
    if options.stream and (several or options.choices or options.format == "json"):
        p.error("--stream: is for the text of one prompt (not for several, --choices or --format json)")


def run(options: Namespace) -> int:
    from multimodal.tasks.encode.search_defaults import search_defaults, warn_of_search
    from multimodal.tasks.text.choices import checked_choices
    from multimodal.tasks.text.examples import STOP, read_examples
    from multimodal.tasks.text.generate import TextWriter, prepared

    chosen = PromptOptions.among(vars(options))
    examples = read_examples(options.examples, "--examples") if options.examples is not None else []
    if examples:
        chosen["stop"] = [*chosen.get("stop", ()), STOP]
    choices = checked_choices(options.choices) if options.choices else None
    PromptOptions(**chosen)  # refuses bad values before the model is loaded
    lines = (
        [("prompt", options.prompt)] if options.prompt is not None else list(text_lines(options.texts, options.file))
    )
    checkpoint = prepared(loaded(options, "generate"), options.compute_type, options.device)
    settings = prompt_options(chosen if choices else search_defaults(checkpoint, chosen, GenerateOptions))
    if "seed" in chosen and not settings.temperature:
        warnings.warn("--seed: has no effect without drawing (--temperature, --top_k, --top_p, --min_p)", stacklevel=1)
    if not choices:
        warn_of_search(checkpoint, chosen, GenerateOptions)
    write = TextWriter(checkpoint, settings)
    asked = _Asked(write, examples, lone=len(lines) == 1)
    if choices:
        return _choices(options, asked, lines, choices)
    if _streams(options, settings, len(lines)):
        return _stream(asked, *lines[0])
    return _texts(options, asked, lines)


def _streams(options: Namespace, settings: GenerateOptions, lines: int) -> bool:
    if options.stream is not None:
        return options.stream
    alone = lines == 1 and settings.beam_size == 1 and settings.num_return == 1
    return alone and options.format == "text" and sys.stdout.isatty()


class _Asked:
    """Prompt of a line."""

    def __init__(self, write: "TextWriter", examples: "list[Demonstration]", lone: bool):
        self.write, self.examples, self.lone = write, examples, lone

    def text(self, name: str, line: str | bytes) -> str:
        """The prompt with its examples. Raises TextError."""
        text = decoded(line, f"{name}: ")
        if not self.examples:
            return text
        from multimodal.tasks.text.examples import with_examples

        text, left = with_examples(text, self.examples, self.write.fits)
        if left:
            context = self.write.context
            warnings.warn(f"{self.name(name)}: {left} of {len(self.examples)} examples are left out, as the context of "
                          f"{context} tokens has no room for them", stacklevel=3)  # fmt: skip
        return text

    def name(self, name: str) -> str:
        return "prompt" if self.lone else name


def _stream(asked: _Asked, name: str, line: str | bytes) -> int:
    for part in asked.write.stream(asked.text(name, line)):
        print(plain(part), end="", flush=True)
    print()
    return 0


def _texts(options: Namespace, asked: _Asked, lines: list[tuple[str, str | bytes]]) -> int:
    from multimodal.tasks.encode.attempts import in_parts_of, item_error

    code, records, shown = 0, [], Progress("prompts")
    for first in range(0, len(lines), asked.write.options.batch_size):
        part, rows = lines[first : first + asked.write.options.batch_size], []
        for name, line in part:
            try:
                rows.append(asked.write.ids(asked.text(name, line), asked.name(name)))
            except TextError as error:
                code, _ = fail(error), rows.append(None)
        found = iter(in_parts_of(asked.write, [row for row in rows if row is not None]))
        for (name, line), row in zip(part, rows, strict=True):
            made = [] if row is None else next(found)
            if isinstance(made, Exception):
                code, made = fail(item_error(made, asked.name(name), TextError)), []
            records.append(_record(line, row, made))
            if options.format == "text":
                _print(made, len(lines) == 1)
        shown(first + len(part), len(lines))
    if options.format == "json":
        print_json(records)
    return code


def _print(made: "list[Continuation]", lone: bool) -> None:
    """A line a text, and an empty one for a prompt that is broken; one text alone as it is."""
    if lone and len(made) == 1:
        print(plain(made[0].text))
    else:
        texts = [printable(one.text) for one in made] or [""] * (not lone)
        print("".join(f"{text}\n" for text in texts), end="", flush=True)


def _record(line: str | bytes, row: list[int] | None, made: "list[Continuation]") -> dict[str, Any]:
    prompt = line.decode(errors="replace") if isinstance(line, bytes) else line
    told = {"prompt": prompt, "prompt_tokens": None if row is None else len(row)}
    return told | {"texts": [{**one._asdict(), **_rounded(one)} for one in made]}


def _choices(options: Namespace, asked: _Asked, lines: list[tuple[str, str | bytes]], choices: list[str]) -> int:
    from multimodal.tasks.text.choices import scored

    code, records, shown = 0, [], Progress("prompts")
    for done, (name, line) in enumerate(lines, 1):
        try:
            found = scored(asked.write, asked.text(name, line), choices, asked.name(name))
        except TextError as error:
            code, found = fail(error), []
        prompt = line.decode(errors="replace") if isinstance(line, bytes) else line
        records.append({"prompt": prompt, "choices": [{**one._asdict(), **_rounded(one)} for one in found]})
        if options.format == "text":
            told = f"{printable(found[0].text)}\t{found[0].score:.4f}\n" if found else "\n" * (len(lines) > 1)
            print(told, end="", flush=True)
        shown(done, len(lines))
    if options.format == "json":
        print_json(records)
    return code


def _rounded(one: "Continuation | Choice") -> dict[str, float]:
    return {name: six_digits(getattr(one, name)) for name in ("score", "logprob")}
