"""The house's own rules: small rooms, imports that run downwards, a light front door, no unsafe loading."""

import ast
import importlib.metadata
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "multimodal").rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").rglob("*.py"))
SOURCES = {str(path.relative_to(ROOT)): path for path in PACKAGE + RECIPES}
COMMANDS = ("classify", "transcribe", "stream", "caption", "search", "evaluate", "evaluate_asr", "evaluate_pictures",
            "evaluate_captions", "generate", "encode", "translate", "inspect")  # fmt: skip
# from the ground up: a module may import its own floor and those before it
FLOORS = [
    {"errors", "assets", "memory", "signals"},
    {"tokens"},
    {"blocks"},
    {"models"},
    {"presets", "presets_text", "heads", "ctc", "ctc_prefix", "rules", "search", "beams", "fusion", "ngram", "graphs"},
    {"weights"},
    {"train"},
    {"tasks"},
    {
        *("", "__main__", "cli", "cli_machine"),  # "": the package's own public names
        *("commands", "commands_shared", "commands_pictures", "commands_progress"),
        *(f"{kind}_{name}" for kind in ("cli", "commands") for name in COMMANDS),
    },
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, inside functions too; `from a import b` gives `a.b`."""
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
    sizes = {path.name: lines(path) for path in PACKAGE}
    assert {name: size for name, size in sizes.items() if size > 400} == {}
    assert statistics.median(size for size in sizes.values() if size) <= 150
    assert lines(ROOT / "multimodal" / "blocks" / "attention.py") <= 120


def test_functions_are_small():
    sizes = [item for path in PACKAGE for item in functions(path)]
    assert [(name, size) for name, size in sizes if size > 60] == []
    assert statistics.median(size for _, size in sizes) <= 12


def room(name: str) -> str:
    """`multimodal.blocks.masks.causal` → `blocks`; a public name of the package itself → ``."""
    part = name.split(".")[1] if "." in name else ""
    return part if part in FLOOR else ""


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("multimodal")])
def test_imports_run_downwards(name):
    parts = SOURCES[name].relative_to(ROOT / "multimodal").with_suffix("").parts
    own = "" if parts == ("__init__",) else parts[0]
    assert own in FLOOR, f"{name} has no floor: give it one in this test"
    for target in imported(SOURCES[name]):
        assert target.split(".")[0] not in ("recipes", "tests"), f"{name} imports {target}"
        if target.split(".")[0] == "multimodal" and target != "multimodal.__version__":
            assert FLOOR[room(target)] <= FLOOR[own], f"{name} imports {target}"


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
    own = {"multimodal", "recipes", *(path.stem for path in RECIPES)}
    for name, path in SOURCES.items():
        for target in imported(path):
            module = target.split(".")[0]
            if module in sys.stdlib_module_names or module in own:
                continue
            found = {plain(home) for home in homes.get(module, [module])}
            assert found & declared, f"{name} imports {module}, which pyproject.toml does not declare"
