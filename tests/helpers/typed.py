"""Run-time type checks: every function and dataclass of the package checks its arguments and results while tests run.

jaxtyping's own import hook builds all checks at import, ten seconds for each test process, and opens a shape context in
every call. Here a check is built at the first call, only array annotations pay for the shape context, and a call passes
at once whose arguments and result have types, dtypes and shapes that passed before.
"""

import ast
import contextlib
import dataclasses
import enum
import functools
import inspect
import marshal
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Collection, Generator, Hashable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from types import CodeType, ModuleType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, jaxtyped

# raises what Python does for a wrong type; an int is a float
CHECK = beartype(conf=BeartypeConf(violation_type=TypeError, is_pep484_tower=True))
NAME = "@checked"  # a name that no source can use
INNER: set[CodeType] = set()  # of functions in functions, seen before
SUM = zlib.crc32(Path(__file__).read_bytes())  # another version of this file makes other bytecode


def has_arrays(annotation: Any) -> bool:
    if inspect.isclass(annotation) and issubclass(annotation, AbstractArray):
        return True
    return any(has_arrays(part) for part in get_args(annotation))


def resolved(target: Callable) -> dict[str, Any]:
    """Quoted annotations as types; `Any` for names that are imported under TYPE_CHECKING."""
    types = {}
    for name, annotation in target.__annotations__.items():
        if isinstance(annotation, str):
            try:
                types[name] = eval(annotation, target.__globals__)
            except NameError:
                types[name] = Any
    return types


class Kind(enum.Enum):
    """The part of a value that a check can depend on."""

    TYPE = enum.auto()
    VALUE = enum.auto()  # a Literal, type[…]
    ARRAY = enum.auto()
    TUPLE = enum.auto()
    UNKNOWN = enum.auto()  # items of another collection


TYPE, VALUE, ARRAY, TUPLE, UNKNOWN = Kind  # as attributes, members take longer to find
KINDS: dict[type, Kind] = {str: VALUE, type: VALUE, bytes: TYPE, range: TYPE}


def kind_of(value: type) -> Kind:
    if issubclass(value, tuple):
        return TUPLE
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return ARRAY
    return UNKNOWN if issubclass(value, Collection) else TYPE


def mark(value: Any) -> Hashable:
    """All that a check can depend on; a list, which is not hashable, where that is not known."""
    value_type = type(value)
    kind = KINDS.get(value_type)
    if kind is None:
        kind = KINDS[value_type] = kind_of(value_type)
    if kind is TYPE:
        return value_type
    if kind is ARRAY:
        return value_type, value.dtype, value.shape
    if kind is TUPLE:
        return value_type, *map(mark, value)
    return value if kind is VALUE else []


def by_class(annotation: Any) -> bool:
    """Return True if a check depends on the class of a value alone."""
    if get_origin(annotation) in (Union, UnionType):
        return all(map(by_class, get_args(annotation)))
    if get_origin(annotation) in (Callable, Iterator, Generator):
        return True  # none of them can be looked into
    if get_origin(annotation) is not None or getattr(annotation, "_is_protocol", False):
        return False
    return annotation is None or (isinstance(annotation, type) and not has_arrays(annotation))


def by_mark(annotation: Any) -> bool:
    """Return True if a check depends on a value's class, or on which of a few strings it is."""
    if get_origin(annotation) in (Union, UnionType):
        return all(map(by_mark, get_args(annotation)))
    if get_origin(annotation) is Literal:
        return all(isinstance(value, str) for value in get_args(annotation))
    return by_class(annotation)


def key(name: str, annotation: Any) -> str:
    """The code of a value's mark. A tensor's stands in line, as calls take most of the time."""
    if by_class(annotation):
        return f"{name}.__class__"
    if has_arrays(annotation):
        inline = f"({name}.__class__, {name}.dtype, {name}.shape)"
        return f"({inline} if {name}.__class__ is checked_tensor else checked_mark({name}))"
    return f"checked_mark({name})"


def signature(target: Callable) -> tuple[list[str], str]:
    """The parameters of `target` beside `CONSTANTS`, without defaults, and the arguments that pass them on."""
    code, named = target.__code__, target.__kwdefaults__ or {}
    if any(value is FACTORY for value in [*(target.__defaults__ or ()), *named.values()]):
        return ["*args", *CONSTANTS, "**kwargs"], "*args, **kwargs"  # a default that is no value of the type
    names, count = code.co_varnames, code.co_argcount
    positional, named = names[:count], names[count : count + code.co_kwonlyargcount]
    rest = iter(names[count + code.co_kwonlyargcount :])
    more = [f"*{next(rest)}"] if code.co_flags & inspect.CO_VARARGS else []
    options = [f"**{next(rest)}"] if code.co_flags & inspect.CO_VARKEYWORDS else []
    parameters = [*positional, *(more or "*"), *named, *CONSTANTS, *options]
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    return parameters, ", ".join([*positional, *more, *(f"{name}={name}" for name in named), *options])


def fast_code(target: Callable, remembers: bool) -> str:
    """The code of a function with the parameters of `target`: it calls `target` at once for arguments that passed and a
    result like one that passed with them. It has no free variables, so that it can replace another function's code."""
    parameters, given = signature(target)
    lines = [f"def call({', '.join(parameters)}):", f" if checked_compiling(): return checked_target({given})"]
    if not remembers or parameters[0] == "*args":
        return "\n".join([*lines, f" return checked_check({given})"])
    types = dict(target.__annotations__)
    result, keys = types.pop("return", Any), ""
    for name in parameters:
        if (kind := types.get(name.lstrip("*"), Any)) is not Any:
            many = {"**": f"(*{name[2:]}, *map(checked_mark, {name[2:]}.values()))", "*": f"checked_mark({name[1:]})"}
            keys += (many[name[: name.count("*")]] if "*" in name else key(name, kind)) + ", "
    return "\n".join([
        *lines, f" checked_given = ({keys})",
        " try: checked_results = checked_passed.get(checked_given)",
        " except TypeError: checked_given = checked_results = None",  # not hashable
        f" if checked_results is None: return checked_whole(checked_given, {given})",
        f" checked_result = checked_target({given})",
        f" checked_made = {'None' if result is Any else key('checked_result', result)}",
        " try:",
        "  if checked_made in checked_results: return checked_result",
        " except TypeError: pass",
        f" return checked_other(checked_result, checked_made, checked_results, {given})",
    ])  # fmt: skip


CONSTANTS = ("checked_compiling", "checked_mark", "checked_target", "checked_tensor", "checked_passed",
             "checked_check", "checked_whole", "checked_other")  # fmt: skip
FACTORY = dataclasses._HAS_DEFAULT_FACTORY


class Checks:
    """Checks of a function; `arrays`: in a shape context of their own, which has one size for each axis name."""

    def __init__(self, target: Callable):
        target.__annotations__.update(resolved(target))
        types = target.__annotations__
        self.target, self.check, self.arrays = target, CHECK(target), any(map(has_arrays, types.values()))
        self.remembers = self.arrays or all(kind is Any or by_mark(kind) for kind in types.values())
        self.passed: dict[Hashable, set[Hashable]] = {}  # results by arguments
        self.check_result, self.returned = None, threading.local()

    def context(self) -> contextlib.AbstractContextManager:
        return jaxtyped("context") if self.arrays else contextlib.nullcontext()

    def whole(self, given: Hashable | None, /, *args: Any, **kwargs: Any) -> Any:
        with self.context():
            result = self.check(*args, **kwargs)
        if given is not None:
            annotation = self.target.__annotations__.get("return", Any)
            made = None if annotation is Any else type(result) if by_class(annotation) else mark(result)
            with contextlib.suppress(TypeError):  # not hashable
                self.passed.setdefault(given, set()).add(made)
        return result

    def other(self, result: Any, made: Hashable, results: set, /, *args: Any, **kwargs: Any) -> Any:
        """Check another result of arguments that passed."""
        returned = self.returned
        if self.check_result is None:
            self.check_result = CHECK(functools.wraps(self.target)(lambda *_, **__: returned.value))
        returned.value = result
        with self.context():
            self.check_result(*args, **kwargs)
        returned.value = None  # else the result would live on
        with contextlib.suppress(TypeError):  # not hashable
            results.add(made)
        return result

    def hasten(self, call: Callable) -> None:
        """Replace the code of `call`, which has been called before."""
        scope: dict[str, Any] = {}
        exec(fast_code(self.target, self.remembers), scope)
        torch = sys.modules["torch"]
        values = (torch.compiler.is_compiling, mark, self.target, torch.Tensor, self.passed, self.check, self.whole,
                  self.other)  # fmt: skip
        # another thread may be about to run the old code, which needs its own default
        named = call.__kwdefaults__ | (self.target.__kwdefaults__ or {})
        call.__kwdefaults__ = named | dict(zip(CONSTANTS, values, strict=True))
        call.__defaults__ = self.target.__defaults__
        names = {"co_name": self.target.__name__, "co_qualname": self.target.__qualname__}
        call.__code__ = scope["call"].__code__.replace(**names)


def checked(target: Any) -> Any:
    """Wrap a function or dataclass with checks that are built at its first call, and fast ones from the second on."""
    if inspect.isclass(target):
        target.__init__ = checked(target.__init__)
        return target
    if "checked_state" in (target.__kwdefaults__ or {}):
        return target  # inherited

    def call(*args: Any, checked_state: list, **kwargs: Any) -> Any:
        own, target, checks = checked_state
        if (torch := sys.modules.get("torch")) is not None and torch.compiler.is_compiling():
            return target(*args, **kwargs)  # a check would fix every size of an exported graph
        if checks is None:
            checks = checked_state[2] = Checks(target)
            with checks.context():
                return checks.check(*args, **kwargs)
        if torch is None:
            return checks.check(*args, **kwargs)
        checks.hasten(own())
        return own()(*args, **kwargs)

    call = functools.wraps(target)(call)
    # a weak reference, since in a circle an inner function would keep what it encloses
    call.__kwdefaults__ = {"checked_state": [weakref.ref(call), target, None]}
    return call


def checked_once(target: Any) -> Any:
    """`checked`, but of an inner function, which each call of the outer one defines again, only the first."""
    if not inspect.isclass(target) and "<locals>" in target.__qualname__:
        if target.__code__ in INNER:
            return target
        INNER.add(target.__code__)
    return checked(target)


class Decorate(ast.NodeVisitor):
    """Add `@checked` below a function's decorators and above a dataclass's."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.args.posonlyargs or node.args.args or node.args.kwonlyargs or node.args.vararg or node.returns:
            node.decorator_list.append(self.decorator(node))
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any("dataclass" in ast.dump(decorator) for decorator in node.decorator_list):
            node.decorator_list.insert(0, self.decorator(node))
        self.generic_visit(node)

    @staticmethod
    def decorator(node: ast.stmt) -> ast.Name:
        return ast.copy_location(ast.Name(NAME, ast.Load()), node)

    def generic_visit(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):  # expressions hold no definitions
                self.visit(child)


class CheckedLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile, or read the bytecode that an earlier process kept for checked modules."""
        path = self.get_filename(fullname)
        cached = cache_from_source(path, optimization="checked")
        stamp = marshal.dumps([SUM, path, *self.path_stats(path).values()])
        with contextlib.suppress(OSError):
            if (data := self.get_data(cached)).startswith(stamp):
                return marshal.loads(data[len(stamp) :])
        tree = ast.parse(self.get_data(path), path)
        Decorate().visit(tree)
        code = compile(tree, path, "exec", dont_inherit=True)
        self.set_data(cached, stamp + marshal.dumps(code))
        return code

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, NAME, checked_once)
        super().exec_module(module)


class CheckedFinder(MetaPathFinder):
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self.package:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = CheckedLoader(spec.loader.name, spec.loader.path)
        return spec


def install(package: str) -> None:
    assert package not in sys.modules, f"{package} was imported before its checks were installed"
    sys.meta_path.insert(0, CheckedFinder(package))
