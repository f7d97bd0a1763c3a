"""Labels and prompts of zero-shot classification (Radford et al. 2021, section 3.1.4)."""

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from multimodal.errors import TextError, UsageError
from multimodal.system.assets import open_clip_file
from multimodal.system.files import parse_json, shown
from multimodal.tokens.text.tokenizer import TextCut, Tokenizer, texts_of

TEMPLATES = {"clip80": "OPENAI_IMAGENET_TEMPLATES", "clip7": "SIMPLE_IMAGENET_TEMPLATES"}
NONE = "none of these"
Templates = str | Sequence[str] | Mapping[str, Sequence[str]]  # name of a set, prompts with {}, or label → prompts
_SHOWN = 40  # characters of a label in a message


def checked_labels(labels: Any) -> list[str]:
    """Strip labels. Raises TextError for no labels, an empty or a repeated one."""
    clean = [label.strip() for label in texts_of(labels, "labels")]
    if not clean:
        raise TextError("labels: expected at least one")
    seen: set[str] = set()
    for number, label in enumerate(clean, 1):
        if not label:
            raise TextError(f"labels: number {number} of {len(clean)} is empty")
        if label in seen:
            raise TextError(f"labels: {label!r} is repeated")
        seen.add(label)
    return clean


def prompts_of(labels: Sequence[str], templates: Templates) -> list[list[str]]:
    """Prompts of each label. Raises UsageError, TextError."""
    if not isinstance(templates, Mapping):
        functions = prompt_functions(templates)
        return [[prompt(label) for prompt in functions] for label in labels]
    names = texts_of(templates.keys(), "templates")
    by_label = {name.strip(): templates[name] for name in names}
    found = []
    for label in labels:
        prompts = texts_of(by_label.get(label, ()), f"prompts of label {label!r}")
        if not prompts:
            raise TextError(f"prompts of label {label!r}: expected at least one text")
        found.append([prompt.replace("{}", label) for prompt in prompts])
    return found


def prompt_functions(templates: Sequence[str] | str) -> list[Callable[[str], str]]:
    """Functions from a label to a prompt. Raises UsageError for an unknown set or a template without {}."""
    if isinstance(templates, str) and "{}" not in templates:
        if templates == "none":
            return [lambda label: label]
        if templates not in TEMPLATES:
            known = ", ".join(("none", *TEMPLATES))
            raise UsageError(f"{templates}: unknown (one of {known}, or prompts with {{}})", argument="templates")
        return list(getattr(open_clip_prompts(), TEMPLATES[templates]))
    several = texts_of([templates] if isinstance(templates, str) else templates, "templates", UsageError)
    plain = [template.replace("{c}", "{}") for template in several]  # CLIP_benchmark writes {c}
    for template in plain:
        if template.count("{}") != 1:
            raise UsageError(f"template {template!r}: expected {{}} exactly once")
    if not plain:
        raise UsageError("templates: expected at least one")
    return [lambda label, t=template: t.replace("{}", label) for template in plain]


def check_texts(labels: Sequence[str], prompts: Sequence[Sequence[str]], tokenizer: Tokenizer) -> None:
    """Warn of labels that tokenize alike, as by lower case, spaces or SigLIP's canonical text. Raises TextError for a
    prompt without tokens."""
    first: dict[tuple[int, ...], int] = {}
    same = []
    for number, (label, texts) in enumerate(zip(labels, prompts, strict=True)):
        ids = tuple(tokenizer.encode(texts[0]))
        if not ids:
            raise TextError(f"label {label!r}: prompt {texts[0]!r} has no tokens in this model")
        other = first.setdefault(ids, number)
        if other != number and _ids(texts, tokenizer) == _ids(prompts[other], tokenizer):
            same.append((labels[other], label))
    if same:
        more = f" ({len(same) - 1} more pairs)" if len(same) > 1 else ""
        warnings.warn(
            f"labels {same[0][0][:_SHOWN]!r} and {same[0][1][:_SHOWN]!r} tokenize alike{more}: "
            "they share one score, which lowers both where scores sum to 1", stacklevel=4,
        )  # fmt: skip


def warn_cut(labels: Sequence[str], prompts: Sequence[Sequence[str]], tokenizer: Tokenizer, context: int) -> None:
    """Warn of labels with prompts longer than `context` tokens."""
    room = context - sum(map(len, tokenizer.frame))
    lost = {
        label: [len(ids) - room for ids in _ids(texts, tokenizer)] for label, texts in zip(labels, prompts, strict=True)
    }
    cut = [label for label, most in lost.items() if max(most) > 0]
    if cut:
        some, more = lost[cut[0]], f" (and those of {len(cut) - 1} more labels)" if len(cut) > 1 else ""
        many = f"{sum(n > 0 for n in some)} of its {len(some)} prompts are" if len(some) > 1 else "its prompt is"
        warnings.warn(
            f"label {cut[0][:_SHOWN]!r}: {many} cut to {context} tokens, {max(some)} lost{more}", TextCut, stacklevel=4
        )


def labels_from(lines: Sequence[str], where: str) -> tuple[list[str], dict[str, list[str]] | None]:
    """Labels of a text file (one per line) or a `.json` file (a list, or an object of label → prompts, which are the
    second value). Raises UsageError."""
    if Path(where).suffix.lower() != ".json":
        found = [line.strip() for line in lines if line.strip()]
        if any("\t" in label for label in found):
            raise UsageError(f"{where}: expected one label per line, got tabs", argument="labels_file")
        return _checked(found, checked_labels, where, "labels_file"), None
    value = _json(lines, where, "labels_file")
    if isinstance(value, list):
        return _checked(value, checked_labels, where, "labels_file"), None
    prompts = {label: [texts] if isinstance(texts, str) else texts for label, texts in value.items()}
    for label, texts in prompts.items():
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t.strip() for t in texts):
            raise UsageError(f"{where}: {label!r}: expected a list of texts ({shown(texts)})", argument="labels_file")
    return _checked(list(prompts), checked_labels, where, "labels_file"), prompts


def templates_from(lines: Sequence[str], where: str) -> list[str]:
    """Templates of a text file (one per line) or a `.json` file (a list, or CLIP_benchmark's object with one list).
    Raises UsageError."""
    if Path(where).suffix.lower() != ".json":
        return _checked([line for line in lines if line.strip()], prompt_functions, where, "templates")
    value = _json(lines, where, "templates")
    if isinstance(value, dict):
        if len(value) != 1:
            raise UsageError(f"{where}: expected one list, got {', '.join(value)[:80] or 'none'}", argument="templates")
        (value,) = value.values()
    if not isinstance(value, list) or not all(isinstance(template, str) for template in value):
        raise UsageError(f"{where}: expected a list of texts ({shown(value)})", argument="templates")
    return _checked(value, prompt_functions, where, "templates")


def _checked(values: list[Any], check: Callable, where: str, argument: str) -> list[str]:
    """Values that pass `check`, whose errors get the prefix `where`."""
    try:
        check(values)
    except (TextError, UsageError) as error:
        raise UsageError(f"{where}: {error}", argument=argument) from None
    return values


def _json(lines: Sequence[str], where: str, argument: str) -> Any:
    try:
        value = parse_json("\n".join(lines), where, UsageError)
    except UsageError as error:
        raise UsageError(error, argument=argument) from None
    if not isinstance(value, list | dict):
        raise UsageError(f"{where}: expected a list or an object ({shown(value)})", argument=argument)
    return value


def _ids(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in texts]


def open_clip_prompts() -> Any:
    """OpenCLIP's prompt module, without the seconds of importing the package."""
    path = open_clip_file("zero_shot_metadata.py")
    spec = importlib.util.spec_from_file_location("_open_clip_zero_shot_metadata", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
