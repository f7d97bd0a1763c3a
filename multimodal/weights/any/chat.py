"""The chat format of a Hugging Face folder."""

from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.system.files import optional_json
from multimodal.tokens.chat.format import ChatFormat
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer

MOST_TEMPLATE = 1 << 18  # characters; the longest in use have about 20,000


def chat_template(folder: Path | None) -> str | None:
    """Jinja source of `chat_template.jinja`, or else of `chat_template.json` or `tokenizer_config.json`, whose lists
    name one `default`; None without them. It is not executed here. Raises CheckpointError for a file that is no text,
    or too long."""
    if folder is None:
        return None
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read as text ({error})") from None
    else:
        for path in (folder / "chat_template.json", folder / RECORD):
            source = optional_json(path).get("chat_template")
            if isinstance(source, list):
                named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
                source = named.get("default")
            if source is not None:
                break
        else:
            return None
    if not isinstance(source, str) or len(source) > MOST_TEMPLATE:
        raise CheckpointError(f"{path}: expected a chat template of at most {MOST_TEMPLATE} characters")
    return source


def chat_format(folder: Path | None, tokenizer: Tokenizer | None, **markers: str) -> ChatFormat | None:
    """The folder's template with the `markers` of its media, the tokens that it may read, and those that end an answer;
    None without a template or a tokenizer. Raises CheckpointError."""
    if tokenizer is None or (template := chat_template(folder)) is None:
        return None
    record = {key: _name(value) for key, value in optional_json(folder / RECORD).items() if key.endswith("_token")}
    ends = optional_json(folder / "generation_config.json").get("eos_token_id")
    names = {i: name for name, i in tokenizer.control_names.items()}
    eos = tuple(names[i] for i in (ends if isinstance(ends, list) else [ends]) if i in names)
    return ChatFormat(template, eos=eos, tokens={k: v for k, v in record.items() if v is not None}, **markers)


def _name(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
