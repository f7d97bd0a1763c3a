"""Completion scripts, run in their shells."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.commands import run

ASKED = {
    "multimodal tran": {"transcribe", "translate"}, "multimodal evaluate zer": {"zeroshot"},
    "multimodal evaluate zeroshot --form": {"--format"}, "multimodal evaluate zeroshot --format j": {"json"},
    "multimodal classify --model clip-vit-b-": {"clip-vit-b-32", "clip-vit-b-16"},
}  # fmt: skip
BASH = """source "$0"
COMP_WORDS=({0}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_multimodal; echo "${{COMPREPLY[@]}}"
"""


def script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    code, out, err = run(capsys, "completion", shell)
    assert (code, err) == (0, "")
    path = folder / "script"
    path.write_text(out)
    return path


def printed(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_bash_completes(tmp_path, capsys):
    path = script("bash", tmp_path, capsys)
    for line, expected in ASKED.items():
        assert set(printed("bash", "-c", BASH.format(line), path).split()) == expected


def test_fish_completes(tmp_path, capsys):
    path = script("fish", tmp_path, capsys)
    for line, expected in ASKED.items():
        found = printed("fish", "-c", f"source {path}; complete -C '{line}'").splitlines()
        assert {one.split("\t")[0] for one in found} >= expected


def test_zsh_takes_the_script(tmp_path, capsys):
    path = script("zsh", tmp_path, capsys)
    text = 'autoload -Uz compinit; compinit -u -D; source "$0"; echo ${+functions[_shtab_multimodal]}'
    assert printed("zsh", "-f", "-c", text, path) == "1\n"
