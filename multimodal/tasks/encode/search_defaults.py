"""Search settings of a checkpoint's generation_config.json, as defaults of our options.

As in transformers, a caller's option comes before them. Its settings of sampling are not followed."""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from multimodal.decoding.options import OFF
from multimodal.errors import CheckpointError, UsageError
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.speech.seq2seq import SpeechSeq2Seq
from multimodal.system.options import OptionSet
from multimodal.weights.folder import Checkpoint

TAKEN = {
    "num_beams": "beam_size", "length_penalty": "length_penalty", "early_stopping": "early_stopping",
    "repetition_penalty": "repetition_penalty", "no_repeat_ngram_size": "no_repeat_ngram", "stop_strings": "stop",
}  # fmt: skip
LENGTHS = {
    "max_length": "max_new_tokens", "min_length": "min_tokens", "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_tokens",
}  # fmt: skip
# which an encoder-decoder follows; a translation has no forced end, but a warning where it is cut
FORCED = ("forced_bos_token_id", "forced_eos_token_id")
# which `generate` and `ask` follow: words of one token, and of encoder-decoders the source's n-grams
BANS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
SOURCE_NGRAM = "encoder_no_repeat_ngram_size"
LIMITS = ("max_length", "max_new_tokens")  # cut a text and change no other: no warning
OWN = {"num_return_sequences": "num_return"}  # ours alone, whatever the file asks for
SAMPLED = {"temperature": 0.0, **OFF}


def search_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Settings of the file, under its own names."""
    return checkpoint.card.get("generation") or {}


def forced_token(checkpoint: Checkpoint, name: str) -> int | None:
    """The id of the file under a name of `FORCED`: of several, the one that transformers takes.

    Raises CheckpointError for an id that the model does not have."""
    if (asked := search_settings(checkpoint).get(name)) is None:
        return None
    return min(_ids(checkpoint, name, asked))


def banned_tokens(checkpoint: Checkpoint, name: str) -> list[int]:
    """Ids of the file under a name of `BANS`; none where a word has several tokens. Raises CheckpointError for ids that
    the model does not have."""
    asked = search_settings(checkpoint).get(name) or []
    if name == "bad_words_ids" and isinstance(asked, list):
        lone = all(isinstance(word, list) and len(word) == 1 for word in asked)
        asked = [word[0] for word in asked] if lone else []
    return _ids(checkpoint, name, asked) if asked else []


def source_ngram(checkpoint: Checkpoint) -> int:
    """Size of the n-grams of an encoder-decoder's source that its text may not have; 0: off. Raises CheckpointError."""
    size = search_settings(checkpoint).get(SOURCE_NGRAM, 0) if isinstance(checkpoint.model, EncoderDecoder) else 0
    if type(size) is not int or size < 0:
        told = f"expected a number of tokens (got {size!r:.40})"
        raise CheckpointError(f"{checkpoint.source}: generation_config.json: {SOURCE_NGRAM}: {told}")
    return size


def _ids(checkpoint: Checkpoint, name: str, asked: Any) -> list[int]:
    ids, config = asked if isinstance(asked, list) else [asked], checkpoint.model.config
    count = getattr(config, "decoder", config).vocabulary
    if not ids or not all(type(one) is int and 0 <= one < count for one in ids):
        told = f"expected ids from 0 to {count - 1} (got {asked!r:.40})"
        raise CheckpointError(f"{checkpoint.source}: generation_config.json: {name}: {told}")
    return ids


def search_defaults(checkpoint: Checkpoint, given: Mapping[str, Any], kind: type[OptionSet]) -> dict[str, Any]:
    """The options of `kind` that the checkpoint asks for, replaced by those `given`. Where these sample, no beams; a
    least length is at most the greatest.

    Raises CheckpointError for a value that cannot be."""
    asked, found = search_settings(checkpoint), dict[str, Any]()
    for name, own in _taken(checkpoint, kind).items():
        try:
            # a length includes the id that a decoder begins with
            found |= kind.checked({own: asked[name] - 1 if name in ("max_length", "min_length") else asked[name]})
        except (UsageError, TypeError) as error:
            raise CheckpointError(f"{checkpoint.source}: generation_config.json: {name}: {error}") from None
    if any(given.get(name, off) != off for name, off in SAMPLED.items()):
        found = {name: value for name, value in found.items() if name not in ("beam_size", "early_stopping")}
    if "min_tokens" in found:  # no end before the text is cut, as in transformers
        most = (found | given).get("max_new_tokens", kind.declared["max_new_tokens"].default)
        found["min_tokens"] = min(found["min_tokens"], most)
    return found | given


def warn_of_search(
    checkpoint: Checkpoint, given: Mapping[str, Any], kind: type[OptionSet], banned: int | None = None,
    dropped: Collection[str] = (),
) -> None:  # fmt: skip
    """Warn of what the checkpoint asks for and neither it nor an option of `given` brings. `banned`: a token that the
    search never writes. `dropped`: options that the caller does not follow."""
    asked, known = dict(search_settings(checkpoint)), {**TAKEN, **LENGTHS, **OWN}
    if asked.get("bad_words_ids") == [[banned]]:
        del asked["bad_words_ids"]
    done = {name for name, own in _taken(checkpoint, kind).items() if own not in dropped}
    done |= {*LIMITS, *(FORCED if isinstance(checkpoint.model, EncoderDecoder) else ())}
    # captions and translations have one end, and no bans
    done |= {"eos_token_id"} if "stop" in kind.declared or isinstance(checkpoint.model, SpeechSeq2Seq) else set()
    if "stop" in kind.declared:
        done |= {name for name in BANS if banned_tokens(checkpoint, name)}
        done |= {SOURCE_NGRAM} if source_ngram(checkpoint) else set()
    left = [f"{name} {asked[name]!r:.40}" for name in asked if name not in done and known.get(name) not in given]
    if left:
        told = f"its generation_config.json asks for {', '.join(left)}, which is not followed"
        warnings.warn(f"{checkpoint.source}: {told}", stacklevel=3)


def _taken(checkpoint: Checkpoint, kind: type[OptionSet]) -> dict[str, str]:
    """Our option for each name of the file that is followed; a decoder's lengths are the caller's."""
    asked = search_settings(checkpoint)
    known = {**TAKEN, **(LENGTHS if isinstance(checkpoint.model, EncoderDecoder) else {})}
    followed = [name for name in known if asked.get(name) not in (None, "never")]
    return {name: known[name] for name in followed if known[name] in kind.declared}
