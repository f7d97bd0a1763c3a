"""Jinja's sandbox, in which nothing becomes large: each operation's operands are weighed before it runs."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import cache, wraps
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from jinja2 import Template

MOST_SIZE = 1 << 20  # elements that one operation may take, and the largest number
MOST_TEXT = 1 << 26  # characters of a conversation, and of what one operation may take or make
# functions whose results grow with the product of what they take
MULTIPLYING = {"replace", "join", "indent", "wordwrap", "expandtabs", "translate", "tojson", "xmlattr"}


@cache
def compiled(template: str) -> "Template":
    """Raises jinja2's TemplateError, also when it is rendered."""
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
        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" or (operator == "%" and isinstance(left, str)):
                raise SecurityError(f"{operator} is not allowed here")
            check(operator, (left, right))
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            args = tuple(map(_listed, args))
            owner = getattr(function, "__self__", None)
            check(getattr(function, "__name__", ""), (owner, *args, *kwargs.values()))
            return super().call(context, function, *args, **kwargs)

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            if super().wrap_str_format(value) is None:
                return None
            raise SecurityError("str.format is not allowed here")

    def refuse(message: str) -> None:
        raise TemplateError(str(message))

    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"],
                   finalize=_weighed)  # fmt: skip
    made.filters = {name: _guarded(name, function) for name, function in made.filters.items() if name != "format"}
    made.filters["tojson"] = _guarded("tojson", _json)
    made.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    del made.globals["lipsum"]  # text of any length
    made.concat = _joined  # type: ignore[method-assign]
    program = made.from_string(template)
    program.root_render_func.__globals__.update(concat=_joined, str_join=_joined, markup_join=_joined)  # of ~, blocks
    return program


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_listed, args))
        check(name, (*args, *kwargs.values()))
        return function(*args, **kwargs)

    return guarded


def _listed(value: Any) -> Any:
    """Turn an iterator into a list, which can be weighed."""
    return list(islice(value, MOST_SIZE + 1)) if isinstance(value, Iterator) else value


def check(name: str, operands: Iterable[Any]) -> None:
    """Raise SecurityError if the operation `name` takes or could make something large."""
    from jinja2.exceptions import SecurityError

    operands = list(operands)
    counts = [x for x in operands if isinstance(x, int)]
    numbers = [x for x in counts if abs(x) > MOST_SIZE]
    held = [x for x in operands if isinstance(x, str | list | tuple | Mapping)]
    if numbers and (held or name not in ("+", "*")):
        raise SecurityError(f"the number {numbers[0]} is larger than {MOST_SIZE}")
    if sum(x.bit_length() for x in counts) > MOST_SIZE:
        raise SecurityError(f"{name} makes a number of more than {MOST_SIZE} bits")
    if name == "*" and any(len(one) * count > MOST_SIZE for one in held for count in counts):
        raise SecurityError(f"* makes more than {MOST_SIZE} elements")
    weights = [_weight(x) for x in held]
    if name in MULTIPLYING and held:
        weights = [prod(max(abs(x), 1) for x in [*weights, *counts])]
    if sum(weights) > MOST_TEXT:
        raise SecurityError(f"{name or 'a call'} makes more than {MOST_TEXT} characters")


def _weight(value: Any) -> int:
    """Characters of all texts in a value, with those that occur twice, and a few for each element. Raises SecurityError
    for more than `MOST_SIZE` elements."""
    from jinja2.exceptions import SecurityError

    found, elements, left = 0, 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            found += len(one)
            continue
        found, elements = found + 1, elements + 1
        if isinstance(one, list | tuple):
            elements += len(one)
        if elements > MOST_SIZE:
            raise SecurityError(f"more than {MOST_SIZE} elements")
        if isinstance(one, list | tuple):
            left += one
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
    return found


def _weighed(value: Any) -> Any:
    check("output", [value])
    return value


def _joined(parts: Iterable[Any]) -> str:
    from jinja2.exceptions import SecurityError

    texts, total = [], 0
    for part in parts:
        texts.append(str(_weighed(part)))
        total += len(texts[-1])
        if total > MOST_TEXT:
            raise SecurityError(f"made more than {MOST_TEXT} characters")
    return "".join(texts)


def _json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **other: Any) -> str:
    """As transformers renders it: without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **other)
