"""The chat format of a Hugging Face folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.system.files import optional_json
from multimodal.tokens.chat.format import ChatFormat
from multimodal.tokens.text.hub.files import SPECIAL
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer

MOST_TEMPLATE = 1 << 18  # characters; the longest in use have about 20,000
TEMPLATE = "chat_template.jinja"
# files that may hold the template, in transformers' order: of a model of texts, and of one of media, which has a
# processor
TOKENIZER = (TEMPLATE, RECORD, "chat_template.json")
PROCESSOR = ("processor_config.json", "chat_template.json", TEMPLATE, RECORD)


def chat_template(folder: Path | None, files: Sequence[str] = TOKENIZER) -> str | None:
    """Jinja source in the first of `files` that has one, whose lists name one `default`; None without. It is not
    executed here. Raises CheckpointError for a file that is no text, or too long."""
    for path in (folder / name for name in files if folder is not None):
        source = _text(path) if path.name == TEMPLATE else optional_json(path).get("chat_template")
        if isinstance(source, list):
            named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
            source = named.get("default")
        if source is None:
            continue
        if not isinstance(source, str) or len(source) > MOST_TEMPLATE:
            raise CheckpointError(f"{path}: expected a chat template of at most {MOST_TEMPLATE} characters")
        return source
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as text ({error})") from None


def media_tokens(folder: Path | None, markers: Mapping[str, str]) -> dict[str, str]:
    """Names of control tokens that stand for media, in the folder's files or else in `markers` (kind: name)."""
    records = [optional_json(folder / name) for name in (RECORD, PROCESSOR[0])] if folder else []
    return {kind: next(filter(None, (_name(one.get(f"{kind}_token")) for one in records)), name)
            for kind, name in markers.items()}  # fmt: skip


def chat_format(folder: Path | None, tokenizer: Tokenizer | None, **markers: str) -> ChatFormat | None:
    """The folder's template with the tokens of its media (see `media_tokens`), those that it may read, and those that
    end an answer; None without a template or a tokenizer. Raises CheckpointError."""
    template = chat_template(folder, PROCESSOR if markers else TOKENIZER)
    if tokenizer is None or template is None:
        return None
    ends = optional_json(folder / "generation_config.json").get("eos_token_id")
    names = {i: name for name, i in tokenizer.control_names.items()}
    eos = tuple(names[i] for i in (ends if isinstance(ends, list) else [ends]) if i in names)
    return ChatFormat(template, eos=eos, tokens=_tokens(folder, tokenizer, names), **media_tokens(folder, markers))


def _tokens(folder: Path, tokenizer: Tokenizer, names: Mapping[int, str]) -> dict[str, str]:
    """Names of special tokens in the folder's two files; bos and eos that they do not mention are the tokenizer's, as
    transformers' classes have defaults."""
    bos = tokenizer.named_bos_id if tokenizer.bos_id is None else tokenizer.bos_id
    own = {key: names[i] for key, i in (("bos_token", bos), ("eos_token", tokenizer.eos_id)) if i in names}
    record, more = (
        {key: _name(value) for key, value in optional_json(folder / file).items() if key.endswith("_token")}
        for file in (RECORD, SPECIAL)
    )
    more = {key: value for key, value in more.items() if record.get(key) is None}
    return {key: value for key, value in (own | record | more).items() if value is not None}


def _name(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
