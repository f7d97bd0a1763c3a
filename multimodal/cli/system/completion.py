"""`multimodal completion`: a script that completes commands, flags and names in a shell."""

import argparse
from argparse import Namespace

from multimodal.cli.main import parser
from multimodal.cli.parser import PATHS, Parser
from multimodal.system.assets import shipped

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = """examples:
  multimodal completion bash > ~/.local/share/bash-completion/completions/multimodal
  multimodal completion zsh > ~/.zfunc/_multimodal            # with fpath+=~/.zfunc before compinit in ~/.zshrc
  multimodal completion fish > ~/.config/fish/completions/multimodal.fish
"""


def add_flags(p: Parser) -> None:
    p.epilog = EXAMPLES
    p.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


def run(options: Namespace) -> int:
    import shtab  # slow: not for --help

    from multimodal.weights.hub.registry import MODELS

    top = parser()
    names = [*shipped(), *(model.name for model in MODELS)]
    _complete(top, names, {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY})
    print(shtab.complete(top, options.shell))
    return 0


def _complete(p: argparse.ArgumentParser, names: list[str], places: dict[str, dict[str, str]]) -> None:
    """Load the flags of every command, and say which take a path or the name of a model."""
    if isinstance(p, Parser):
        p.load()
    for action in p._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete(command, names, places)
        elif action.metavar in ("MODEL", "NAME") and action.dest in ("model", "clip_model", "names"):
            action.choices = names
        elif action.metavar in ("DIR", "FOLDER", "INDEX"):
            action.complete = places["DIR"]
        elif action.metavar in PATHS or action.metavar == "AUDIO":
            action.complete = places["FILE"]
