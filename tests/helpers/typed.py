"""Run-time type checks: every function and dataclass of the package checks its arguments and results while tests run.

jaxtyping's own import hook builds all checks at import, ten seconds for each test process, and opens a shape context in
every call. Here a check is built at the first call, only array annotations pay for the shape context, and a call passes
at once whose arguments and result have types, dtypes and shapes that passed before.
"""

import ast
import contextlib
import enum
import functools
import inspect
import marshal
import sys
import threading
import zlib
from collections.abc import Callable, Collection, Hashable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, get_args

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


def check_arrays(target: Callable) -> Callable:
    """A function's check in a shape context of its own; skipped for arguments and results like some that passed."""
    check, returned = CHECK(target), threading.local()
    check_result: Callable | None = None
    passed: dict[Hashable, set[Hashable]] = {}  # results by arguments

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal check_result
        given = tuple(map(mark, args))
        if kwargs:
            given = (*given, tuple(kwargs), *map(mark, kwargs.values()))
        try:
            results = passed.get(given)
        except TypeError:  # not hashable
            with jaxtyped("context"):  # one size for each axis name within a call
                return check(*args, **kwargs)
        if results is not None:
            result = target(*args, **kwargs)
            made = mark(result)
            try:
                known = made in results
            except TypeError:
                known = False
            if known:
                return result
            if check_result is None:
                check_result = CHECK(functools.wraps(target)(lambda *_, **__: returned.value))
            returned.value = result
            with jaxtyped("context"):
                check_result(*args, **kwargs)
            returned.value = None  # else the result would live on
        else:
            with jaxtyped("context"):
                result = check(*args, **kwargs)
            made, results = mark(result), set()
        with contextlib.suppress(TypeError):  # not hashable
            results.add(made)
            passed[given] = results
        return result

    return call


def checked(target: Any) -> Any:
    """Wrap a function or dataclass with checks that are built at its first call."""
    if inspect.isclass(target):
        target.__init__ = checked(target.__init__)
        return target
    check: Callable | None = None

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal check
        if (torch := sys.modules.get("torch")) is not None and torch.compiler.is_compiling():
            return target(*args, **kwargs)  # a check would fix every size of an exported graph
        if check is None:
            target.__annotations__.update(resolved(target))
            arrays = any(has_arrays(annotation) for annotation in target.__annotations__.values())
            check = check_arrays(target) if arrays else CHECK(target)
        return check(*args, **kwargs)

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
