"""Python files of the checkout, each parsed once, as the house rules read them."""

import ast
import functools
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.paths import ROOT

PACKAGE, RECIPES, BENCHMARKS, TESTS = (
    sorted((ROOT / folder).rglob("*.py")) for folder in ("multimodal", "recipes", "benchmarks", "tests")
)

KINDS = {  # of nodes that `Source.add` reads
    ast.Constant, ast.Attribute, ast.Name, ast.Call, ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef,
    ast.AsyncFunctionDef, ast.arg, ast.alias, ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.Module,
}  # fmt: skip


@dataclass
class Call:
    name: str  # full, as written; the part behind a call or an index alone
    options: dict[str, ast.expr]
    line: int


@dataclass
class Source:
    """Definitions, imports, calls and texts of a file; lists are in no special order."""

    path: Path
    text: str
    imports: list[str] = field(
        default_factory=list
    )  # in functions too; `from a import b` gives `a.b`, `from .a` `.a.b`
    functions: list[tuple[str, int]] = field(default_factory=list)  # with their lines
    classes: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)  # with their attributes, as `torch.load`
    calls: list[Call] = field(default_factory=list)
    strings: list[tuple[int, str]] = field(default_factory=list)  # line, and text on one line
    docstrings: list[str] = field(default_factory=list)  # their first lines
    bound: set[str] = field(default_factory=set)  # names that the file gives to something, anywhere in it

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def comments(self) -> Iterator[tuple[int, str]]:
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string

    def add(self, node: ast.AST) -> None:
        match node:
            case ast.Constant(value=str(text)) if " " in text:
                self.strings.append((node.lineno, " ".join(text.split())))
            case ast.Attribute() | ast.Name():
                self.names.add(dotted(node))
            case ast.Call():
                options = {option.arg: option.value for option in node.keywords}
                self.calls.append(Call(dotted(node.func), options, node.lineno))
            case ast.Import():
                self.imports += [alias.name for alias in node.names]
            case ast.ImportFrom():
                self.imports += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
            case ast.ClassDef():
                self.classes.append(node.name)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.functions.append((f"{self.path.name}:{node.name}", node.end_lineno - node.lineno + 1))
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                self.bound.add(name)
            case ast.alias(name=name, asname=other):
                self.bound.add((other or name).partition(".")[0])
            case (
                ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name))
                | ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name)
            ):  # fmt: skip
                self.bound.add(name)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            self.docstrings += (ast.get_docstring(node) or "").splitlines()[:1]


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@functools.cache
def source(path: Path) -> Source:
    made = Source(path, path.read_text(encoding="utf-8"))
    for node in ast.walk(ast.parse(made.text)):
        if type(node) in KINDS:
            made.add(node)
    return made
