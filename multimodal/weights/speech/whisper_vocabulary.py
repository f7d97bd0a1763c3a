"""Whisper's released vocabularies, and whether a checkpoint's own files agree with the one of its size."""

from pathlib import Path

from multimodal.errors import CheckpointError
from multimodal.system.files import read_json, read_json_value
from multimodal.tokens.text.bytepair import byte_letters
from multimodal.tokens.text.hub.added import added_tokens
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from

# vocabulary sizes of the released models; large-v3 and later have one more language
NAMES = {51864: "whisper-en", 51865: "whisper", 51866: "whisper-v3"}


def released_tokenizer(
    size: int | None, folder: Path | None = None, listed: list[bytes] | None = None
) -> WhisperTokenizer | None:
    """The released vocabulary of this size, or None. Raises CheckpointError where the folder's own, or the tokens
    `listed` in the order of their ids, are others: a model trained with them would write wrong words."""
    if size not in NAMES:
        return None
    tokenizer = tokenizer_from(NAMES[size])
    if folder is None:
        letters = byte_letters()
        name, tokens = "vocabulary", [token.decode("latin-1").translate(letters) for token in listed or ()]
    else:
        name, tokens = _own(folder)
    ids = tokens if isinstance(tokens, dict) else {token: i for i, token in enumerate(tokens)}
    if ids and (count := tokenizer.misplaced(ids)):
        raise CheckpointError(f"{name}: {count} of {size} tokens are not those of the released vocabulary")
    return tokenizer


def _own(folder: Path) -> tuple[str, dict[str, int] | list[str]]:
    """Name and tokens, in GPT-2's letters for bytes, of the first vocabulary file of a folder."""
    if (path := folder / "tokenizer.json").is_file():
        content = read_json(path)
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        return path.name, content["model"]["vocab"] | added
    if (path := folder / "vocab.json").is_file():
        return path.name, read_json(path) | {token["content"]: token["id"] for token in added_tokens(folder)}
    if (path := folder / "vocabulary.json").is_file():  # CTranslate2's
        return path.name, read_json_value(path)
    path = folder / "vocabulary.txt"  # its older one
    return path.name, path.read_text("utf-8").split("\n") if path.is_file() else []
