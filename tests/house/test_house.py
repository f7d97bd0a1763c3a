"""Rules of the code base: small files and folders, imports that run downwards, a light import, no unsafe loading, plain
prose."""

import ast
import builtins
import collections
import graphlib
import importlib.metadata
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.house.sources import BENCHMARKS, PACKAGE, RECIPES, TESTS, Source, source
from tests.house.words import FILES, FIRST, found_phrases

# what the package and the recipes never import: a recipe is a script, which imports the package alone
OUTSIDE = {"recipes", "tests", "benchmarks", *(path.stem for path in RECIPES)}
# the rooms from the ground up: a file imports from its own room and from those before it
ROOMS = ("errors", "system", "tokens", "blocks", "models", "decoding", "weights", "inference", "data", "tasks",
         "export", "train", "serve", "cli")  # fmt: skip
# within tasks; those of one level do not know each other
LEVELS = {"figures": 0, "report": 0, "encode": 1, "classify": 2, "caption": 2, "text": 2, "retrieve": 2,
          "transcribe": 2, "ask": 3, "evaluate": 4, "inspect": 5}  # fmt: skip


def sources() -> dict[str, Source]:
    return {source(path).name: source(path) for path in PACKAGE + RECIPES}


def test_files_are_small():
    sizes = {source(path).name: len(source(path).lines) for path in PACKAGE + RECIPES + BENCHMARKS + TESTS}
    assert {name: size for name, size in sizes.items() if size > 400} == {}
    assert statistics.median(sizes[name] for name in sources() if sizes[name]) <= 150


def test_functions_are_small():
    sizes = [item for path in PACKAGE + RECIPES + BENCHMARKS for item in source(path).functions]
    assert [(name, size) for name, size in sizes if size > 60] == []
    assert statistics.median(size for _, size in sizes) <= 12


def test_every_name_is_bound():
    """ruff cannot tell undefined names from jaxtyping's shapes, such as the F of "B M F"."""
    known = {*dir(builtins), "__file__"}
    unknown = {}
    for path in PACKAGE + RECIPES + BENCHMARKS + TESTS:
        names = {name.partition(".")[0] for name in source(path).names}
        if lost := names - source(path).bound - known - {""}:
            unknown[source(path).name] = lost
    assert unknown == {}


def test_a_class_name_means_one_thing():
    homes = collections.defaultdict(list)
    for path in PACKAGE + RECIPES + BENCHMARKS:
        for name in source(path).classes:
            homes[name].append(source(path).name)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def module(path: Path) -> str:
    """Full name of the module in a file of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def graph() -> dict[str, set[str]]:
    """Imports of each module of the package, in functions and under TYPE_CHECKING too."""
    known = {module(path) for path in PACKAGE}
    found = {}
    for path in PACKAGE:
        names = [name for name in source(path).imports if name.split(".")[0] == "multimodal"]
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
    for name, file in sources().items():
        wrong = [target for target in file.imports if target.split(".")[0] in OUTSIDE]
        assert not wrong, f"{name} imports {wrong[0]}"


def test_imports_are_absolute():
    relative = {name: [target for target in file.imports if target.startswith(".")] for name, file in sources().items()}
    assert {name: targets for name, targets in relative.items() if targets} == {}


def test_folders_are_small():
    for folder in {path.parent for path in PACKAGE + TESTS + RECIPES}:
        files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        entries = {path.parts[0] for path in files if "__pycache__" not in path.parts}
        entries = [name for name in entries if not name.startswith("__") and name != "conftest.py"]
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


@pytest.mark.slow
def test_the_garbage_collector_spares_the_time_of_a_command():
    program = (
        "import atexit, gc, sys; from multimodal.cli.main import main; "
        "sys.argv[1:] = ['generate', 'a', '-m', 'gpt-mini', '--max_new_tokens', '1'];"
        "atexit.register(lambda: print(gc.get_freeze_count() > 100_000, gc.get_threshold()[0] > 5_000));"
        "main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert run.stdout.splitlines()[-1] == "True True"


def test_nothing_runs_code_from_data():
    for name, file in sources().items():
        names = file.names.union(file.imports)
        pickles = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
        assert {used for used in names if used.split(".")[0] in pickles} == set(), name
        loaders = {"torch.load", "torch.jit.load", "torch.package.PackageImporter"}
        assert names.isdisjoint(loaders), f"{name}: read_archive"
        for call in file.calls:
            where = f"{name}:{call.line}"
            assert call.name not in ("eval", "exec", "compile", "__import__"), f"{where}: {call.name}"
            for option in call.options.keys() & {"allow_pickle", "shell"}:
                assert ast.unparse(call.options[option]) == "False", f"{where}: {option}"


def plain(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", distribution)[0]).lower()


def test_every_import_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {plain(line) for line in project["dependencies"]}
    extras = {"recipes/": "ray", "multimodal/serve/": "serve", "multimodal/cli/system/serve.py": "serve",
              "multimodal/export/": "export", "multimodal/export/ctranslate2.py": "ctranslate2"}  # fmt: skip
    homes = importlib.metadata.packages_distributions()
    for name, file in sources().items():
        for target in file.imports:
            module = target.split(".")[0]
            if module in sys.stdlib_module_names or module in ("multimodal", "compression"):
                continue  # compression: of the standard library from Python 3.14 on
            found = {plain(home) for home in homes.get(module, [module])}
            own = [extra for place, extra in extras.items() if name.startswith(place)]
            known = declared | {plain(line) for extra in own for line in project["optional-dependencies"][extra]}
            assert found & known, f"{name} imports {module}, which pyproject.toml does not declare"


def test_the_prose_is_plain():
    found = [*found_phrases()]
    assert not found, "\n".join(found)


def test_a_docstring_begins_with_a_noun_or_an_imperative():
    found = [f"{file.name}: {line}" for file in map(source, FILES) for line in file.docstrings if FIRST.match(line)]
    assert not found, "\n".join(found)
