"""`multimodal translate`: translate texts with an encoder-decoder checkpoint."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal.cli import flags
from multimodal.cli.console import Progress
from multimodal.cli.files import check_texts, decoded, output_file, outputs_of, text_lines
from multimodal.cli.loading import loaded
from multimodal.cli.output import fail, print_json, six_digits
from multimodal.cli.parser import Parser
from multimodal.errors import TextError, UsageError
from multimodal.system.options import add_flags as add_option_flags
from multimodal.system.outputs import opened_output
from multimodal.tasks.text.options import TranslateOptions

if TYPE_CHECKING:
    from multimodal.tasks.text.translate import SourceText, Translation, TranslationWriter

EXAMPLES = """examples:
  multimodal translate "A dog runs." --from en --to de
  multimodal translate --file news.txt --from German --to French -m m2m100_418M/ -o nouvelles.txt
  cat news.txt | multimodal translate - -m opus-mt-en-de/ --format jsonl
"""
BATCHES = 8  # that are sorted by length together, and written once they are done


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s TEXT [TEXT ...] [flags]", EXAMPLES
    p.add_argument("texts", nargs="*", metavar="TEXT", help="texts, or - for the lines of stdin")
    p.add_argument("--file", metavar="FILE", help="one text per line (UTF-8); a line of .jsonl or .csv is a text as it "
                   "stands")  # fmt: skip
    p.add_argument("--from", dest="source", metavar="LANGUAGE", help="language of the texts: the model's code, such as "
                   "de, or the English name; not for a model of one direction")  # fmt: skip
    p.add_argument("--to", dest="target", metavar="LANGUAGE", help="language to translate into")
    p.add_argument("--output", "-o", metavar="FILE", help="default: stdout")
    flags.overwrite(p)
    p.add_argument("--format", choices=["txt", "jsonl"], help="txt: one line per text, empty if it could not be "
                   "read; jsonl: also line, score, tokens, finished, cut (default: by the ending of --output, or "
                   "txt)")  # fmt: skip
    add_option_flags(p.add_argument_group("translations"), TranslateOptions)
    flags.model_and_machine(p, "translate")


def check(p: Parser, options: Namespace) -> None:
    """Refuse contradictory flags."""
    if bool(options.texts) == (options.file is not None):
        p.error("TEXT, --file: name one of them" if options.texts else "names no text (TEXT, --file FILE, or -)")
    check_texts(p, options.texts)
    options.format = options.format or flags.by_ending(options.output, ["jsonl"], "txt") or "txt"
    flags.check_ending(p, options)


def run(options: Namespace) -> int:
    from multimodal.inference.prepare import prepare_for_inference
    from multimodal.tasks.encode.attempts import in_parts_of, item_error
    from multimodal.tasks.encode.search_defaults import warn_of_search
    from multimodal.tasks.text.translate import TranslationWriter, asked_of, warn_of_cuts

    if options.output is not None and not Path(options.output).parent.is_dir():
        raise UsageError(f"--output {options.output}: cannot be written (no such folder)")
    output = output_file(options.output, "--output", (), outputs_of(options, but=("texts", "source", "target")))
    lines = list(text_lines(options.texts, options.file))
    checkpoint = prepare_for_inference(loaded(options, "translate"), options.compute_type, options.device)
    given = TranslateOptions.among(vars(options))
    chosen = asked_of(checkpoint, given)
    translator = TranslationWriter(checkpoint, options.source, options.target, chosen)
    warn_of_search(checkpoint, given, TranslateOptions, translator.tokenizer.pad_id)
    told: list[tuple[str, SourceText, Translation]] = []
    code, size, shown = 0, BATCHES * chosen.batch_size, Progress("texts")
    with _writing(output) as write:
        for first in range(0, len(lines), size):
            part = lines[first : first + size]
            sources = [_read(translator, name, text) for name, text in part]
            code = code or int(None in sources)
            found = iter(in_parts_of(translator, [one for one in sources if one is not None]))
            for number, ((name, text), one) in enumerate(zip(part, sources, strict=True), first + 1):
                made = None if one is None else next(found)
                if isinstance(made, Exception):
                    code, one, made = fail(item_error(made, name, TextError)), None, None
                write(_record(number, text, one, made, options.format))
                if made is not None and (one.cut or not made.finished):
                    told.append((name, one, made))
            sys.stdout.flush()
            shown(min(first + size, len(lines)), len(lines))
    warn_of_cuts(told)
    return code


def _read(translator: "TranslationWriter", name: str, text: str | bytes) -> "SourceText | None":
    """None for a line that is not translated, after a message."""
    try:
        return translator.read(decoded(text))
    except TextError as error:
        fail(f"{name}: {error}")
    return None


def _record(number: int, text: str | bytes, source: "SourceText | None", made: "Translation | None", style: str) -> Any:
    if style == "txt":
        return "" if made is None else " ".join(made.text.split())
    if made is None:
        return {"line": number, "error": "not UTF-8 text" if isinstance(text, bytes) else "too long, or no Unicode"}
    facts = made._asdict() | {"score": six_digits(made.score)}
    return {"line": number, "source": text, "translation": facts.pop("text"), **facts, "cut": source.cut}


def _printed(one: Any) -> None:
    if isinstance(one, str):
        print(one)
    else:
        print_json(one, indent=None)


@contextmanager
def _writing(output: Path | None) -> Iterator[Callable[[Any], None]]:
    """Lines or records to stdout as they come, or to a file beside `output`, which takes its place at the end."""
    if output is None:
        yield _printed
        return
    with opened_output(output, "keep") as file:
        yield lambda one: file.write(
            f"{one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)}\n".encode()
        )
