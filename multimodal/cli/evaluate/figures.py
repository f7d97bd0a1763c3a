"""Figures of one or more sets, as a table or as JSON."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from multimodal.cli import flags
from multimodal.cli.files import output_file, outputs_of
from multimodal.cli.output import fail, print_record
from multimodal.cli.parser import Parser
from multimodal.errors import MultimodalError

if TYPE_CHECKING:
    from multimodal.tasks.report.page import Section


class SetFigures(NamedTuple):
    """Figures of one set. `broken`: items left out, each with its cause. `examples`: more sections of the report."""

    figures: dict[str, Any]
    broken: Sequence[str] = ()
    examples: "Sequence[Section]" = ()


Evaluate = Callable[[str], SetFigures]


def output_flags(p: Parser) -> None:
    flags.results(p, "table", "json")
    p.add_argument("--report", metavar="FILE", help="write figures, model and versions: .md or .html")


def print_figures(options: Namespace, model: str, evaluate: Evaluate) -> int:
    """Print the figures that `evaluate` gives for each of `options.data`, and write the report. A set that cannot be
    evaluated is one line on stderr; the others go on."""
    from multimodal.tasks.report.page import Section, aligned, facts_section, write_page

    report = output_file(options.report, "--report", (".md", ".html"), outputs_of(options))
    code, sets, sections = 0, {}, []
    for name in options.data:
        try:
            figures, broken, examples = evaluate(name)
        except MultimodalError as error:
            code = fail(error)
            continue
        for cause in broken:
            code = fail(cause)
        sets[name] = figures | ({"left_out": list(broken)} if broken else {})
        sections += [Section(name, [("figure", "value"), *rows(figures)]), *examples]
    if not sets:
        return code
    lines = (line for name, figures in sets.items() for line in (name, *aligned(rows(figures))))
    print_record(options.format, {"task": options.kind, "model": model, "sets": sets}, lines)
    if report is not None:
        write_page(report, f"Evaluation: {options.kind}", [*sections, facts_section({"model": model})])
    return code


def rows(figures: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested figures as names and values; lists, such as scores by class, are for JSON alone."""
    flat = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            flat += rows(value, f"{prefix}{name} ")
        elif not isinstance(value, list):
            flat.append((prefix + name, value))
    return flat
