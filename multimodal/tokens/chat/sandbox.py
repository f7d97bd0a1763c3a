"""Jinja's sandbox, in which nothing becomes large: each operation's operands are weighed before it runs, and what all
of them take and make is charged to the rendering's budget."""

import json
from collections.abc import Callable, Iterable, Iterator, MappingView, Sequence
from datetime import datetime
from functools import cache, partial, wraps
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from multimodal.tokens.chat.budget import LISTS, MOST_SIZE, OPERATION, TEXTS, charge, size, weight
from multimodal.tokens.chat.user_text import UserText, joined, own, printed, tracked

if TYPE_CHECKING:
    from jinja2 import Template

MOST_BITS = 1024  # of a number
MOST_TEXT = 1 << 26  # characters of a conversation, and of what one operation may take or make
# functions whose results grow with the product of what they take
MULTIPLYING = {"replace", "join", "indent", "wordwrap", "expandtabs", "translate", "tojson", "xmlattr"}
# filters and methods that take a value without its elements, or these without what they hold
CONSTANT = {"length", "first", "last", "default", "d", "get", "items", "keys", "values"}
SHALLOW = {"list", "map", "select", "selectattr", "reject", "rejectattr", "batch", "slice"}
SPECIAL = {*MULTIPLYING, *CONSTANT, "*", "sum"}
COMPARING = {"in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan", "ge",
             ">=", "lower", "upper"}  # fmt: skip
# whose results do not grow with a number
EXACT = {*COMPARING, "+", "%", "compared", "output", "string", "int", "float", "abs", "default", "d"}
USUAL = frozenset({str, UserText, int, bool, float, type(None), list, tuple, dict})
UNREAD = (Iterator, MappingView, range)


@cache
def compiled(template: str) -> "Template":
    """Raises jinja2's TemplateError, also when it is rendered."""
    from jinja2 import nodes, pass_context
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension
    from jinja2.runtime import Macro
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

        def _parse(self, *source: Any) -> nodes.Template:
            return _with_charges(super()._parse(*source))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" or (operator == "%" and isinstance(left, str)):
                raise SecurityError(f"{operator} is not allowed here")
            check(operator, (left, right))
            return _charged(super().call_binop(context, operator, left, right))

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            if isinstance(function, Macro):
                return super().call(context, function, *args, **kwargs)
            args = tuple(map(_listed, args))
            owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
            check(name, (owner, *args, *kwargs.values()))
            return _charged(tracked(name, function, args, kwargs, partial(super().call, context)))

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            if super().wrap_str_format(value) is None:
                return None
            raise SecurityError("str.format is not allowed here")

    def refuse(message: str) -> None:
        raise TemplateError(str(message))

    # without its optimizer, which computes constants once and writes them out
    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"],
                   optimized=False, finalize=pass_context(_output))  # fmt: skip
    _guard(made)
    made.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    del made.globals["lipsum"]  # text of any length
    made.concat = _joined  # type: ignore[method-assign]
    program = made.from_string(template)
    program.root_render_func.__globals__.update(concat=_joined, str_join=_joined, markup_join=_joined)  # of ~, blocks
    return program


def _guard(made: Any) -> None:
    """Let filters and tests check and charge what they take and make."""
    from jinja2 import pass_eval_context

    made.filters = {name: _guarded(name, function) for name, function in made.filters.items() if name != "format"}
    made.filters |= {
        "tojson": _guarded("tojson", _json), "join": _guarded("join", pass_eval_context(_join)), "made": _charged,
        "compared": _compared, "count": made.filters["length"], "safe": made.filters["string"],
    }  # fmt: skip
    made.tests = {
        name: _guarded(name, function) if name in COMPARING else function for name, function in made.tests.items()
    }


def _with_charges(template: Any) -> Any:
    """A parsed template whose lists, slices and comparisons, which Jinja leaves to Python, pass through filters."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    def filtered(node: nodes.Node, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def short(node: nodes.Node) -> bool:
        return isinstance(node, nodes.Const) and len(str(node.value)) <= OPERATION

    class Charges(NodeTransformer):
        def visit(self, node: Any, *args: Any) -> Any:
            self.generic_visit(node)
            if isinstance(node, nodes.Compare | nodes.Operand) and not short(node.expr):
                node.expr = filtered(node.expr, "compared")
            copied = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
            made = isinstance(node, nodes.List | nodes.Dict | nodes.Tuple) and getattr(node, "ctx", "load") == "load"
            return filtered(node, "made") if copied or made else node

    return Charges().visit(template)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_listed, args))
        check(name, (*args, *kwargs.values()))
        return _charged(tracked(name, function, args, kwargs))

    return guarded


def _listed(value: Any) -> Any:
    """Turn what has no weight before it is read into a list."""
    if type(value) in USUAL:
        return value
    return list(islice(value, MOST_SIZE + 1)) if isinstance(value, UNREAD) else value


def _compared(value: Any) -> Any:
    value = _listed(value)
    check("compared", (value,))
    return value


def _charged(value: Any) -> Any:
    """Charge what an operation has made: an iterator (which stays one, as it is true) as it is read."""
    if type(value) not in USUAL and isinstance(value, Iterator):
        return map(_charged, value)
    if work := size(value):
        charge(work)
    return value


def check(name: str, operands: Sequence[Any]) -> None:
    """Raise SecurityError if the operation `name` takes or could make something large."""
    work = OPERATION
    for one in operands:
        if type(one) is str or type(one) is UserText:
            work += len(one)
        elif one is not None and one is not True and one is not False:
            work = MOST_TEXT
    if work < MOST_TEXT and name not in SPECIAL:  # texts alone, almost always
        charge(work)
    else:
        _check(name, operands)


def _check(name: str, operands: Sequence[Any]) -> None:
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    # the number that tojson writes repeats nothing
    counts = [x for x in operands[name == "tojson" :] if isinstance(x, int)]
    numbers = [x for x in counts if abs(x) > MOST_SIZE]
    held = [x for x in operands if isinstance(x, (*TEXTS, *LISTS, Namespace, MappingView))]
    if numbers and name not in EXACT and (held or name != "*"):
        raise SecurityError(f"the number {numbers[0]} is larger than {MOST_SIZE}")
    if sum(x.bit_length() for x in counts) > MOST_BITS:
        raise SecurityError(f"{name} makes a number of more than {MOST_BITS} bits")
    if name == "*" and any(len(one) * count > MOST_SIZE for one in held for count in counts):
        raise SecurityError(f"* makes more than {MOST_SIZE} elements")
    weigh = size if name in SHALLOW else weight
    weights = [weigh(x) for x in held if name not in CONSTANT]
    work = OPERATION + sum(weights)
    if name in MULTIPLYING and held:
        weights = [prod(max(abs(x), 1) for x in [*weights, *counts])]
    elif name == "sum" and len(held) > 1:  # from a list, which is copied with each that is added
        weights = [sum(weights) ** 2]
    if sum(weights) > MOST_TEXT:
        raise SecurityError(f"{name or 'a call'} makes more than {MOST_TEXT} characters")
    charge(work)


def _output(context: Any, value: Any) -> Any:
    check("output", (value,))
    return printed(value)


def _joined(parts: Iterable[Any]) -> str:
    from jinja2.exceptions import SecurityError

    texts, total = list[str](), 0
    for part in parts:
        check("output", (part,))
        texts.append(str(printed(part)))
        total += len(texts[-1])
        if total > MOST_TEXT:
            raise SecurityError(f"made more than {MOST_TEXT} characters")
    return joined(texts)


def _join(context: Any, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    """Jinja's, which keeps apart who wrote what."""
    from jinja2.filters import make_attrgetter

    value = value if attribute is None else map(make_attrgetter(context.environment, attribute), value)
    return own(str(d)).join([str(printed(one)) for one in value])


def _json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **other: Any) -> str:
    """As transformers renders it: without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **other)
