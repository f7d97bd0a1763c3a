"""Rules of the code base: small files and folders, imports that run downwards, a light import, no unsafe loading."""

import ast
import collections
import graphlib
import importlib.metadata
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PACKAGE, RECIPES, BENCHMARKS, TESTS = (
    sorted((ROOT / folder).rglob("*.py")) for folder in ("multimodal", "recipes", "benchmarks", "tests")
)
SOURCES = {str(path.relative_to(ROOT)): path for path in PACKAGE + RECIPES}
# what the package and the recipes never import: a recipe is a script, which imports the package alone
OUTSIDE = {"recipes", "tests", "benchmarks", *(path.stem for path in RECIPES)}
# the rooms from the ground up: a file imports from its own room and from those before it
ROOMS = ("errors", "system", "tokens", "blocks", "models", "decoding", "weights", "inference", "data", "tasks", "train",
         "serve", "cli")  # fmt: skip
# within tasks; those of one level do not know each other
LEVELS = {"figures": 0, "encode": 1, "classify": 2, "caption": 2, "text": 2, "retrieve": 2, "transcribe": 2,
          "evaluate": 3, "inspect": 4}  # fmt: skip


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """Full names of a file's imports, inside functions too; `from a import b` gives `a.b`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path.name}:{node.name}", node.end_lineno - node.lineno + 1


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_files_are_small():
    sizes = {str(path.relative_to(ROOT)): lines(path) for path in PACKAGE + RECIPES + BENCHMARKS}
    assert {name: size for name, size in sizes.items() if size > 400} == {}
    assert statistics.median(sizes[name] for name in SOURCES if sizes[name]) <= 150


def test_functions_are_small():
    sizes = [item for path in PACKAGE + RECIPES + BENCHMARKS for item in functions(path)]
    assert [(name, size) for name, size in sizes if size > 60] == []
    assert statistics.median(size for _, size in sizes) <= 12


def test_a_class_name_means_one_thing():
    homes = collections.defaultdict(list)
    for path in PACKAGE + RECIPES + BENCHMARKS:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def module(path: Path) -> str:
    """Full name of the module in a file of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def graph() -> dict[str, set[str]]:
    """Imports of each module of the package, in functions and under TYPE_CHECKING too."""
    known = {module(path) for path in PACKAGE}
    found = {}
    for path in PACKAGE:
        names = [name for name in imported(path) if name.split(".")[0] == "multimodal"]
        found[module(path)] = {name if name in known else name.rpartition(".")[0] for name in names} - {module(path)}
    return found


def room(name: str) -> str:
    return name.split(".")[1]


def test_imports_make_no_circle():
    modules = graph()
    graphlib.TopologicalSorter(modules).prepare()  # raises CycleError, which names the circle
    rooms = {room(name) for name in modules if name.count(".") > 0}
    arrows = {(room(a), room(b)) for a, targets in modules.items() for b in targets if "." in a and "." in b}
    crossing = sum(room(a) != room(b) for a, targets in modules.items() for b in targets if "." in a and "." in b)
    print(f"\n{len(modules)} modules in {len(rooms)} rooms; {len([a for a in arrows if a[0] != a[1]])} pairs of rooms, "
          f"{crossing} imports between rooms, 0 circles")  # fmt: skip


def test_imports_run_downwards():
    for name, targets in graph().items():
        for target in targets - {"multimodal"}:
            own, other = name.split(".")[1:], target.split(".")[1:]
            if name in ("multimodal", "multimodal.__main__"):
                continue
            assert ROOMS.index(other[0]) <= ROOMS.index(own[0]), f"{name} imports {target}"
            if own[0] == other[0] == "tasks" and own[1] != other[1]:
                assert LEVELS[other[1]] < LEVELS[own[1]], f"{name} imports {target}"


def test_nothing_imports_recipes_or_tests():
    for name, path in SOURCES.items():
        wrong = [target for target in imported(path) if target.split(".")[0] in OUTSIDE]
        assert not wrong, f"{name} imports {wrong[0]}"


def test_folders_are_small():
    for folder in {path.parent for path in PACKAGE + TESTS + RECIPES}:
        entries = [path for path in folder.iterdir() if not path.name.startswith("__") and path.stem != "conftest"]
        assert len(entries) <= 15, f"{folder.relative_to(ROOT)}: {len(entries)} entries"


def test_the_front_door_is_light():
    program = (
        "import sys, time; start = time.process_time(); import multimodal; print(time.process_time() - start);"
        "print(*sorted(m for m in ('torch', 'torchvision', 'timm', 'open_clip', 'numpy') if m in sys.modules))"
    )
    seconds = []
    for _ in range(3):  # the best of three
        run = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
        )
        first, heavy = run.stdout.split("\n")[:2]
        assert heavy == ""
        seconds.append(float(first))
    assert min(seconds) < 0.3


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_runs_code_from_data(name):
    names = set(imported(SOURCES[name]))
    names |= {ast.unparse(node) for node in ast.walk(tree(SOURCES[name])) if isinstance(node, ast.Attribute)}
    unsafe = {n for n in names if n.split(".")[0] in {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}}
    assert unsafe == set()
    assert names.isdisjoint({"torch.load", "torch.jit.load", "torch.package.PackageImporter"}), f"{name}: read_archive"
    for node in ast.walk(tree(SOURCES[name])):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in ("eval", "exec", "compile", "__import__"), f"{name}:{node.lineno}: {called}"
        options = {option.arg: ast.unparse(option.value) for option in node.keywords}
        assert options.get("allow_pickle", "False") == "False", f"{name}:{node.lineno}: allow_pickle"
        assert options.get("shell", "False") == "False", f"{name}:{node.lineno}: shell"


def plain(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", distribution)[0]).lower()


def test_every_import_is_declared():
    declared = {plain(line) for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]}
    homes = importlib.metadata.packages_distributions()
    for name, path in SOURCES.items():
        for target in imported(path):
            module = target.split(".")[0]
            if module in sys.stdlib_module_names or module == "multimodal":
                continue
            found = {plain(home) for home in homes.get(module, [module])}
            assert found & declared, f"{name} imports {module}, which pyproject.toml does not declare"
