"""Labels of zero-shot classification, and the prompts that stand for each (Radford et al. 2021, section 3.1.4)."""

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from multimodal.errors import TextError, UsageError
from multimodal.system.files import parse_json, shown
from multimodal.tokens.text.tokenizer import texts_of
from multimodal.tokens.text.vocabulary import TextCut, Tokenizer

TEMPLATES = {"clip80": "OPENAI_IMAGENET_TEMPLATES", "clip7": "SIMPLE_IMAGENET_TEMPLATES"}
NONE = "none of these"
Templates = str | Sequence[str] | Mapping[str, Sequence[str]]  # a set's name, prompts with {}, or the prompts by label
_SAID = 40  # letters of a label in a message


def checked_labels(labels: Any) -> list[str]:
    """Labels without outer spaces. Raises TextError for none, an empty or a repeated one."""
    clean = [label.strip() for label in texts_of(labels, "labels")]
    if not clean:
        raise TextError("labels: there are none")
    seen: set[str] = set()
    for number, label in enumerate(clean, 1):
        if not label:
            raise TextError(f"labels: number {number} of {len(clean)} is empty")
        if label in seen:
            raise TextError(f"labels: {label!r} is there twice")
        seen.add(label)
    return clean


def prompts_of(labels: Sequence[str], templates: Templates) -> list[list[str]]:
    """The prompts of each label, at least one. Raises UsageError, TextError."""
    if not isinstance(templates, Mapping):
        functions = prompt_functions(templates)
        return [[prompt(label) for prompt in functions] for label in labels]
    names = texts_of(templates.keys(), "templates")
    given = {name.strip(): templates[name] for name in names}
    found = []
    for label in labels:
        prompts = texts_of(given.get(label, ()), f"prompts of label {label!r}")
        if not prompts:
            raise TextError(f"prompts of label {label!r}: expected at least one text")
        found.append([prompt.replace("{}", label) for prompt in prompts])
    return found


def prompt_functions(templates: Sequence[str] | str) -> list[Callable[[str], str]]:
    """Functions from a label to a prompt. Raises UsageError for an unknown set or a template without {}."""
    if isinstance(templates, str):
        if templates == "none":
            return [lambda label: label]
        if templates not in TEMPLATES:
            raise UsageError(f"--templates {templates}: unknown (one of none, {', '.join(TEMPLATES)}, or a file)")
        return list(getattr(open_clip_prompts(), TEMPLATES[templates]))
    several = texts_of(templates, "templates", UsageError)
    plain = [template.replace("{c}", "{}") for template in several]  # CLIP_benchmark writes {c}
    for template in plain:
        if template.count("{}") != 1:
            raise UsageError(f"template {template!r}: needs {{}} once, where the label goes")
    if not plain:
        raise UsageError("templates: there are none")
    return [lambda label, t=template: t.replace("{}", label) for template in plain]


def check_texts(labels: Sequence[str], prompts: Sequence[Sequence[str]], tokenizer: Tokenizer) -> None:
    """Warns where labels become the same tokens, as by lower case, spaces or SigLIP's canonical text. Raises TextError
    for a prompt of which these rules leave nothing."""
    first: dict[tuple[int, ...], int] = {}
    same = []
    for number, (label, texts) in enumerate(zip(labels, prompts, strict=True)):
        ids = tuple(tokenizer.encode(texts[0]))
        if not ids:
            raise TextError(f"label {label!r}: nothing is left of its prompt {texts[0]!r} by the rules of this model")
        other = first.setdefault(ids, number)
        if other != number and _ids(texts, tokenizer) == _ids(prompts[other], tokenizer):
            same.append((labels[other], label))
    if same:
        more = f" ({len(same) - 1} more such)" if len(same) > 1 else ""
        warnings.warn(
            f"labels {same[0][0][:_SAID]!r} and {same[0][1][:_SAID]!r} are the same text to this model{more}: they "
            "always get the same score, which takes from both where scores sum to 1", stacklevel=4,
        )  # fmt: skip


def say_cut(labels: Sequence[str], prompts: Sequence[Sequence[str]], tokenizer: Tokenizer, context: int) -> None:
    """Warns of the labels whose prompts are longer than `context` tokens."""
    room = context - (tokenizer.bos_id is not None) - (tokenizer.eos_id is not None)
    lost = {
        label: [len(ids) - room for ids in _ids(texts, tokenizer)] for label, texts in zip(labels, prompts, strict=True)
    }
    cut = [label for label, most in lost.items() if max(most) > 0]
    if cut:
        some, more = lost[cut[0]], f" (so are those of {len(cut) - 1} more labels)" if len(cut) > 1 else ""
        many = f"{sum(n > 0 for n in some)} of its {len(some)} prompts are" if len(some) > 1 else "its prompt is"
        warnings.warn(
            f"label {cut[0][:_SAID]!r}: {many} cut to {context} tokens, {max(some)} lost{more}", TextCut, stacklevel=4
        )


def labels_from(lines: Sequence[str], where: str) -> tuple[list[str], dict[str, list[str]] | None]:
    """Of a text file a label a line; of a `.json` file a list of labels, or an object of label and list of prompts,
    which are the second value. Raises UsageError."""
    if Path(where).suffix.lower() != ".json":
        found = [line.strip() for line in lines if line.strip()]
        if any("\t" in label for label in found):
            raise UsageError(f"--labels_file {where}: holds tabs; one label a line is read, no table")
        return _checked(found, checked_labels, f"--labels_file {where}"), None
    value = _json(lines, where, "--labels_file")
    if isinstance(value, list):
        return _checked(value, checked_labels, f"--labels_file {where}"), None
    prompts = {label: [texts] if isinstance(texts, str) else texts for label, texts in value.items()}
    for label, texts in prompts.items():
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t.strip() for t in texts):
            raise UsageError(f"--labels_file {where}: {label!r} needs a list of texts ({shown(texts)})")
    return _checked(list(prompts), checked_labels, f"--labels_file {where}"), prompts


def templates_from(lines: Sequence[str], where: str) -> list[str]:
    """Of a text file a template a line; of a `.json` file a list, or CLIP_benchmark's object with one list. Raises
    UsageError."""
    if Path(where).suffix.lower() != ".json":
        return _checked([line for line in lines if line.strip()], prompt_functions, f"--templates {where}")
    value = _json(lines, where, "--templates")
    if isinstance(value, dict):
        if len(value) != 1:
            raise UsageError(
                f"--templates {where}: holds lists for {', '.join(value)[:80]}; keep the one that is meant"
            )
        (value,) = value.values()
    if not isinstance(value, list) or not all(isinstance(template, str) for template in value):
        raise UsageError(f"--templates {where}: expected a list of texts ({shown(value)})")
    return _checked(value, prompt_functions, f"--templates {where}")


def _checked(values: list[Any], check: Callable, where: str) -> list[str]:
    """`where`: the flag and its file, which the refusal of `check` is to name."""
    try:
        check(values)
    except (TextError, UsageError) as error:
        raise UsageError(f"{where}: {error}") from None
    return values


def _json(lines: Sequence[str], where: str, flag: str) -> Any:
    value = parse_json("\n".join(lines), f"{flag} {where}", UsageError)
    if not isinstance(value, list | dict):
        raise UsageError(f"{flag} {where}: expected a list or an object ({shown(value)})")
    return value


def _ids(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in texts]


def open_clip_prompts() -> Any:
    """OpenCLIP's module of prompts alone: importing the whole package takes seconds."""
    package = importlib.util.find_spec("open_clip")
    path = Path(package.origin).parent / "zero_shot_metadata.py"
    spec = importlib.util.spec_from_file_location("_open_clip_zero_shot_metadata", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
