"""The chat template in a Hugging Face folder."""

from pathlib import Path

from multimodal.errors import CheckpointError
from multimodal.system.files import optional_json
from multimodal.tokens.text.tokenizer import RECORD

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
