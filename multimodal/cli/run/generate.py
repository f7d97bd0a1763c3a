"""What `multimodal generate` does with its flags (`cli_generate.py`)."""

import sys
import warnings
from argparse import Namespace
from typing import Any

import torch

from multimodal.cli.output import fail, printable
from multimodal.cli.shared import Progress, print_json, text_lines
from multimodal.errors import TextError, UsageError
from multimodal.tasks.encode.attempts import in_parts, item_error
from multimodal.tasks.text import choices as generate_choices
from multimodal.tasks.text.examples import STOP, Example, read_examples, with_examples
from multimodal.tasks.text.generate import Continuation, TextWriter, prepared
from multimodal.tasks.text.options import GenerateOptions, options_for
from multimodal.weights.load import load

OPTIONS = GenerateOptions.__dataclass_fields__


def generate(options: Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    chosen = {name: value for name, value in vars(options).items() if name in OPTIONS}
    examples = read_examples(options.examples, "--examples") if options.examples is not None else []
    if examples:
        chosen.setdefault("stop", [STOP])
    settings, choices = options_for(chosen), generate_choices.checked(options.choices) if options.choices else None
    if "seed" in chosen and not settings.temperature:
        warnings.warn("--seed: has no effect without drawing (--temperature, --top_k, --top_p, --min_p)", stacklevel=1)
    lines = (
        [("prompt", options.prompt)] if options.prompt is not None else list(text_lines(options.texts, options.file))
    )
    if not lines:
        raise UsageError(f"{options.file or 'standard input'}: has no line, so there is no prompt")
    checkpoint = prepared(load(options.model, options.architecture), options.compute_type, options.device)
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
    """What the model is asked for a line."""

    def __init__(self, write: TextWriter, examples: list[Example], lone: bool):
        self.write, self.examples, self.lone = write, examples, lone

    def text(self, name: str, line: str | bytes) -> str:
        """The prompt with its examples. Raises TextError."""
        if isinstance(line, bytes):
            raise TextError(f"{name}: is not UTF-8 text")
        if not self.examples:
            return line
        text, left = with_examples(line, self.examples, self.write.fits)
        if left:
            context = self.write.context
            warnings.warn(f"{self.name(name)}: {left} of {len(self.examples)} examples are left out, as the context of "
                          f"{context} tokens has no room for them", stacklevel=3)  # fmt: skip
        return text

    def name(self, name: str) -> str:
        return "prompt" if self.lone else name


def _stream(asked: _Asked, name: str, line: str | bytes) -> int:
    for part in asked.write.stream(asked.text(name, line)):
        print(_plain(part), end="", flush=True)
    print()
    return 0


def _texts(options: Namespace, asked: _Asked, lines: list[tuple[str, str | bytes]]) -> int:
    code, records, shown = 0, [], Progress("prompts")
    for first in range(0, len(lines), options.batch_size):
        part, rows = lines[first : first + options.batch_size], []
        for name, line in part:
            try:
                rows.append(asked.write.ids(asked.text(name, line), asked.name(name)))
            except TextError as error:
                code, _ = fail(error), rows.append(None)
        found = iter(_continued(asked.write, [row for row in rows if row is not None]))
        for (name, line), row in zip(part, rows, strict=True):
            made = [] if row is None else next(found)
            if isinstance(made, Exception):
                code, made = fail(item_error(made, asked.name(name), TextError)), []
            records.append(_record(line, row, made))
            if options.format == "text":
                _print(made, len(lines) == 1)
        shown(first + len(part), len(lines))
    shown.clear()
    if options.format == "json":
        print_json(records)
    return code


def _continued(write: TextWriter, rows: list[list[int]]) -> list[list[Continuation] | Exception]:
    return in_parts(lambda part: write(rows[part]), len(rows))


def _print(made: list[Continuation], lone: bool) -> None:
    """A line a text, and an empty one for a prompt that is broken; one text alone as it is."""
    if lone and len(made) == 1:
        print(_plain(made[0].text))
    else:
        texts = [printable(one.text) for one in made] or [""] * (not lone)
        print("".join(f"{text}\n" for text in texts), end="", flush=True)


def _record(line: str | bytes, row: list[int] | None, made: list[Continuation]) -> dict[str, Any]:
    prompt = line.decode(errors="replace") if isinstance(line, bytes) else line
    told = {"prompt": prompt, "prompt_tokens": None if row is None else len(row)}
    return told | {"texts": [{**one._asdict(), **_rounded(one)} for one in made]}


def _choices(options: Namespace, asked: _Asked, lines: list[tuple[str, str | bytes]], choices: list[str]) -> int:
    code, records, shown = 0, [], Progress("prompts")
    for number, (name, line) in enumerate(lines, 1):
        try:
            found = generate_choices.scored(asked.write, asked.text(name, line), choices, asked.name(name))
        except TextError as error:
            code, found = fail(error), []
        prompt = line.decode(errors="replace") if isinstance(line, bytes) else line
        records.append({"prompt": prompt, "choices": [{**one._asdict(), **_rounded(one)} for one in found]})
        if options.format == "text":
            told = f"{printable(found[0].text)}\t{found[0].score:.4f}\n" if found else "\n" * (len(lines) > 1)
            print(told, end="", flush=True)
        shown(number, len(lines))
    shown.clear()
    if options.format == "json":
        print_json(records)
    return code


def _rounded(one: Continuation | generate_choices.Choice) -> dict[str, float]:
    """Six digits, which is what float32 has."""
    return {name: float(f"{getattr(one, name):.6g}") for name in ("score", "logprob")}


def _plain(text: str) -> str:
    """Line breaks and tabs as they are; what else would steer a terminal as escapes."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)
