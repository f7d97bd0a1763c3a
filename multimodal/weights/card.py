"""A checkpoint's card: free facts for people, and the few that the program uses, which are checked."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multimodal.system.records import from_record
from multimodal.tokens.text.tokenizer import Tokenizer

OF_ONE = ("name", "summary", "figures", "command", "training_note", "storage")  # facts of one checkpoint alone


# of a generation_config.json, what changes the text of a search without sampling, with the values that do not; the two
# of OLD do not change transformers' search, but ours, and stand in an older config.json without being asked for
SEARCH = {
    "num_beams": (), "length_penalty": (1.0,), "early_stopping": (False,), "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,), "min_length": (0,), "min_new_tokens": (0,), "max_length": (), "max_new_tokens": (),
    "encoder_repetition_penalty": (1.0,), "encoder_no_repeat_ngram_size": (0,), "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],), "bad_words_ids": ([],), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "sequence_bias": ({},), "exponential_decay_length_penalty": (), "num_return_sequences": (1,), "stop_strings": ([],),
    "num_beam_groups": (1,), "guidance_scale": (1,),
}  # fmt: skip
OLD = {"num_beams": (1,), "max_length": (20,)}
# what changes no such text: sampling, caches, outputs, drafts of assisted generation, and ids under their own names
HARMLESS = re.compile(
    r"_.*|transformers_version|trust_remote_code|do_sample|temperature|top_[kph]|min_p|typical_p|(epsilon|eta)_cutoff"
    r"|use_cache|cache_.*|return_.*|output_.*|(disable_)?compile(_config)?|low_memory|prefill_chunk_size"
    r"|remove_invalid_values|(num_)?assistant_.*|is_assistant|(assistant|target)_lookbehind|prompt_lookup_.*"
    r"|max_matching_ngram_size|(?!forced_).*_token_id"
)


def searched(told: Mapping[str, Any], old: bool = False) -> dict[str, Any]:
    """Settings of a generation_config.json, or of an `old` folder's config.json, that change a search, or may. An old
    file has others beside them."""
    known = SEARCH | OLD if old else SEARCH
    asked = {name: told[name] for name, neutral in known.items() if told.get(name) not in (None, *neutral)}
    if old:
        return asked
    others = {name: value for name, value in told.items() if name not in known and not HARMLESS.fullmatch(name)}
    return asked | {name: value for name, value in others.items() if value}


def further_ends(told: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, list[int]]:
    """Ids that end a generated text by a generation_config.json, else config.json, and that the tokenizer does not have
    for it, since texts may have them."""
    if tokenizer is None:
        return {}
    ids, own = told.get("eos_token_id"), {tokenizer.eos_id, *tokenizer.end_ids}
    more = [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int and i not in own]
    return {"eos_token_id": more} if (more := [i for i in more if 0 <= i < tokenizer.vocab_size]) else {}


@dataclass(frozen=True)
class CardFacts:
    """Facts that the program uses. The tasks check the options of `transcribe`, `caption` and `ask`."""

    name: str = ""
    generation: dict[str, Any] | None = None
    summary: str = ""
    format: str = ""
    preprocessing_from: str = ""
    templates: str | list[str] | dict[str, list[str]] = ""
    labels: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    language: str | None = None
    pooling: str = ""
    normalize: bool = False
    prompts: dict[str, str] | None = None
    prompt: str | None = None
    similarity: str = ""
    translation: dict[str, str | None] | None = None
    translations: dict[str, str] | None = None
    transcribe: dict[str, Any] | None = None
    caption: dict[str, Any] | None = None
    ask: dict[str, Any] | None = None
    table: dict[str, Any] | None = None
    alignment_heads: tuple[tuple[int, int], ...] | None = None


def check_card(card: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the card. Raises CheckpointError with `where` and the key for a fact of the wrong type."""
    from_record(CardFacts, card, where, others=True)
    return card


def inherited(card: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that stay true of a model trained further: all but those of one checkpoint and its language model."""
    kept = {name: value for name, value in card.items() if name not in OF_ONE}
    if "transcribe" in kept:  # its language model knows other texts
        own = {name: value for name, value in kept["transcribe"].items() if not name.startswith("lm")}
        kept["transcribe"] = own
    return kept
