"""Chat templates in Jinja, rendered in its sandbox with bounded work.

A template decides where control tokens stand; nothing that a user wrote becomes one. Texts are rendered with a
noncharacter (U+FDD0) at both ends and inside of every name of a control token, so that no name appears in them, nor
across two of them; encoding drops it (`Tokenizer.encode_template`)."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from multimodal.errors import CheckpointError
from multimodal.tokens.chat.messages import Message
from multimodal.tokens.text.tokenizer import MARK

if TYPE_CHECKING:
    from jinja2 import Template

MOST_LINES = 200_000  # executed by a template: a hundred messages take about 5,000
MOST_SIZE = 1 << 20  # characters or elements that one operation may make
MOST_TEXT = 1 << 26  # characters of a conversation


def render(
    template: str, messages: Sequence[Message], control: Iterable[str], variables: Mapping[str, Any] | None = None,
    where: str = "chat template",
) -> str:  # fmt: skip
    """The text of a conversation up to where the assistant's answer begins, with `MARK`s in what users wrote.

    `control`: names of control tokens. `variables`: what the template reads beside the messages, such as `bos_token`.
    Parts that are no text are rendered by the template as their marker. Raises CheckpointError for a template that is
    no Jinja, reads attributes that the sandbox forbids, raises, or does not end soon."""
    from jinja2.exceptions import TemplateError

    names = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True)))) if control else None
    plain = [{"role": m.role, "content": _content(m, names)} for m in messages]
    try:
        made = _compiled(template)
        with _bounded():
            text = made.render(messages=plain, add_generation_prompt=True, tools=None, **(variables or {}))
    except TemplateError as error:
        raise CheckpointError(f"{where}: {' '.join(str(error).split())[:200]}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError, MemoryError) as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise CheckpointError(f"{where}: cannot be rendered ({cause})") from None
    if len(text) > MOST_TEXT:
        raise CheckpointError(f"{where}: made {len(text)} characters, more than {MOST_TEXT}")
    return text


def _content(message: Message, names: re.Pattern[str] | None) -> str | list[dict[str, str]]:
    """A text, or parts: templates for text alone join nothing."""
    if all(part.kind == "text" for part in message.parts):
        return neutral(message.text, names)
    return [
        {"type": part.kind, "text": neutral(part.value, names)} if part.kind == "text" else {"type": part.kind}
        for part in message.parts
    ]


def neutral(text: str, names: re.Pattern[str] | None) -> str:
    """A text in which no name of a control token appears. Blanks at the ends stay outside, for templates that strip."""
    text = text.replace(MARK, "")
    inner = text.strip()
    start = text.find(inner) if inner else len(text)
    if names is not None:
        inner = names.sub(lambda found: found[0][0] + MARK + found[0][1:], inner)
    return f"{text[:start]}{MARK}{inner}{MARK}{text[start + len(text.strip()) :]}"


@cache
def _compiled(template: str) -> "Template":
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` around the assistant's answers, which training reads."""

        tags: ClassVar = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Jinja's sandbox, in which no single operation makes something large."""

        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(x) if isinstance(x, str | list | tuple) else None for x in (left, right)]
            if operator == "*" and any(size is not None for size in sizes):
                count = next((x for x in (left, right) if isinstance(x, int)), 0)
                if count * max(size or 0 for size in sizes) > MOST_SIZE:
                    raise SecurityError(f"{operator} makes more than {MOST_SIZE} elements")
            if operator == "**" or (operator == "%" and isinstance(left, str)):
                raise SecurityError(f"{operator} is not allowed here")
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            _small(args, kwargs.values())
            return super().call(context, function, *args, **kwargs)

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            if super().wrap_str_format(value) is None:
                return None
            raise SecurityError("str.format is not allowed here")

    def refuse(message: str) -> None:
        raise TemplateError(str(message))

    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    made.filters = {name: _guarded(function) for name, function in made.filters.items() if name != "format"}
    made.filters["tojson"] = _json
    made.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made.from_string(template)


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    from functools import wraps

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _small(args, kwargs.values())
        return function(*args, **kwargs)

    return guarded


def _small(*values: Iterable[Any]) -> None:
    """Raise SecurityError for a number that could be the size of something large."""
    from jinja2.exceptions import SecurityError

    for group in values:
        for value in group:
            if isinstance(value, int) and abs(value) > MOST_SIZE:
                raise SecurityError(f"the number {value} is larger than {MOST_SIZE}")


def _json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **other: Any) -> str:
    """As transformers renders it: without HTML escapes."""
    import json

    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **other)


@contextmanager
def _bounded():
    """Raise TemplateError after `MOST_LINES` lines of a template: nested loops end, but not soon."""
    from jinja2.exceptions import TemplateError

    left = MOST_LINES

    def line(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TemplateError(f"does not end within {MOST_LINES} steps")
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: line if frame.f_code.co_filename == "<template>" else None)
    try:
        yield
    finally:
        sys.settrace(before)
