"""Help of every command: two screens, examples, rare flags apart."""

import shlex
from collections.abc import Iterator

import pytest

from multimodal.cli import main
from multimodal.cli.parser import RARE, Parser
from multimodal.weights.hub.listing import list_models
from tests.helpers.spread import thin

COLUMNS, LINES = 100, 100


def commands(p: Parser) -> Iterator[Parser]:
    """Every command that runs, loaded."""
    p.load()
    if p.run is not None:
        yield p
    for action in p._actions:
        if isinstance(action.choices, dict):
            for command in action.choices.values():
                yield from commands(command)


ALL = {" ".join(p.prog.split()[1:]): p for p in commands(main.parser())}


@pytest.mark.parametrize("name", ALL)
def test_help_fits_two_screens_and_ends_with_examples(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    text, command = ALL[name].format_help(), ALL[name]
    assert len(text.splitlines()) <= LINES
    *_, examples = text.partition("\nexamples:\n")
    assert f"multimodal {name}" in examples
    command.full = True
    whole = command.format_help()
    command.full = False
    for flag, action in command._option_string_actions.items():
        assert f"{flag} " in f"{whole} ".replace("\n", " ").replace(",", " ")
        if action.dest in RARE:
            assert f"  {flag}" not in text


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", ALL)
def test_examples_are_taken(name):
    """Each example passes the parser and the checks of its command; a model is a path or has a known name."""
    models = list_models()
    known = {*models["shipped"], *models["sizes"], *(model["name"] for model in models["public"])}
    lines = [line.partition("#")[0].strip() for line in ALL[name].epilog.splitlines()]
    taken = [line.rpartition("| ")[2].partition(" > ")[0] for line in lines if "multimodal " in line]
    assert taken
    for line in taken:
        words = shlex.split(line[line.index("multimodal ") :])
        options = main.parser().parse_args(words[1:])
        named = {getattr(options, "model", None), *(getattr(options, "models", None) or ())} - {None}
        assert {model for model in named if "/" not in model} <= known, line


def test_words_are_one_vocabulary():
    """`--format` says what and `--output` where, `--device` defaults to auto, and each command has the common flags."""
    assert len(ALL) > 20
    for name, command in ALL.items():
        flags = command._option_string_actions
        assert {"--quiet", "--verbose", "--help-all"} <= flags.keys(), name
        if "--device" in flags:
            assert "(default: auto)" in flags["--device"].help, name
        for flag in flags.keys() & {"--output_dir", "--output_format"}:
            assert (name, flags[flag] in (flags["--output"], flags["--format"])) == ("transcribe", True)
        if "--output" in flags:
            assert flags["--output"].metavar in ("FILE", "FOLDER", "FILE|FOLDER", "DIR"), name
            assert "-o" in flags, name
        if "--max_tokens" in flags:
            assert flags["--max_tokens"] is flags["--max_new_tokens"], name
