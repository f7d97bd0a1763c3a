"""Settings of the environment, and default models: of it, the user's configuration file, or as shipped."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.errors import UsageError, did_you_mean
from multimodal.system.assets import DEFAULT_MODELS

SHIPPED = "shipped"
SWITCH = dict.fromkeys(("", "1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


class DefaultModel(NamedTuple):
    """`source`: the variable or file that names it, or `SHIPPED`."""

    model: str
    source: str


def is_on(name: str) -> bool:
    """Value of a switch in the environment, which is on where it is not set. Raises UsageError for other words."""
    text = os.environ.get(name, "")
    if (word := text.strip().lower()) not in SWITCH:
        raise UsageError(f"{name}: expected 0 or 1 (got {text!r:.40})")
    return SWITCH[word]


def config_file() -> Path:
    """Path of the user's configuration file, `[classify] model = "siglip-base"`, which need not exist."""
    # without a home, as of a container's user with a number alone, "~" stays, where no file is
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "multimodal", "config.toml")


def variable(task: str) -> str:
    """Environment variable of a task's model."""
    return f"MULTIMODAL_{task.upper().replace('-', '_')}_MODEL"


def default_model(task: str) -> DefaultModel | None:
    """The environment's model of a task, else the configuration file's, else the shipped one, if there is one. Raises
    UsageError for a bad file."""
    if named := os.environ.get(variable(task)):
        return DefaultModel(named, variable(task))
    if chosen := configured().get(task):
        return DefaultModel(chosen, str(config_file()))
    return DefaultModel(shipped, SHIPPED) if (shipped := DEFAULT_MODELS[task]) else None


def required_model(task: str) -> DefaultModel:
    """Raises UsageError where the task has no default model."""
    if (found := default_model(task)) is None:
        raise UsageError(f"is required: no model ships for {task} (multimodal models lists good ones; "
                         f"{variable(task)} or {config_file()} sets a default)", argument="model")  # fmt: skip
    return found


def source_of(model: str) -> str | None:
    """The variable or file that names this default model, or None."""
    found = filter(None, map(default_model, DEFAULT_MODELS))
    return next((one.source for one in found if one.model == model and one.source != SHIPPED), None)


def configured() -> dict[str, str]:
    """Models by task of the configuration file. Raises UsageError that names the file and the key."""
    path = config_file()
    try:
        text = path.read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    import tomllib  # slow: only where the file exists

    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: is not TOML ({error})") from None
    return {task: _model(path, task, table) for task, table in tables.items()}


def _model(path: Path, task: str, table: Any) -> str:
    if task not in DEFAULT_MODELS:
        raise UsageError(f"{path}: [{task}]: unknown task{did_you_mean(task, DEFAULT_MODELS)}")
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {task}: expected a table, [{task}] (got {table!r:.40})")
    for key, value in table.items():
        if key != "model":
            raise UsageError(f"{path}: [{task}] {key}: unknown key (known: model)")
        if not isinstance(value, str) or not value:
            raise UsageError(f"{path}: [{task}] model: expected a name (got {value!r:.40})")
    if "model" not in table:
        raise UsageError(f"{path}: [{task}]: names no model")
    return table["model"]
