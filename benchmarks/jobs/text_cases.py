"""Text models: greedy and beam generation, prefill, sentence states and tokenization.

Random weights give close logits, so other rounding soon changes the text: bfloat16 and int8 must match float32 in the
prompt's logits, and in a twentieth of GPT-2's tokens."""

from collections.abc import Mapping
from typing import Any

from benchmarks.peers.text.random_models import sentence_lengths
from benchmarks.suite.cases import Candidate, Case, Options

PREPARE = "benchmarks.peers.text.random_models:prepare"
PARAMETERS = {"gpt2": 124.4e6 - 1024 * 768, "blocks": 85.1e6}  # in products; BERT base's blocks equal GPT-2's
TOKENS, FEWER, PROMPT, LONG, SENTENCES = 64, 32, 16, 512, 64
ROUNDS = 5
SAME = {"float32": ("differing", 0.0)}  # other kinds share next to no T5 tokens, in any library
NEARLY = SAME | {"bfloat16": ("differing", 0.95), "int8": ("differing", 0.95)}
KINDS = ("float32", "bfloat16", "int8")
VOCABULARIES = {
    "gpt2": ("GPT-2's vocabulary", ("tiktoken",)),
    "bpe": ("byte-level BPE of 8,000", ("tokenizers", "tokenizers in batches")),
    "wordpiece": ("WordPiece of 8,000", ("tokenizers", "tokenizers in batches")),
}


def cases(options: Options) -> list[Case]:
    return [
        *(decoding(batch, options) for batch in (1, 8)), prefill(options), translating(options, 1, TOKENS),
        translating(options, 4, FEWER), sentences(options), *(tokenizing(name, options) for name in VOCABULARIES),
    ]  # fmt: skip


def ours(name: str, settings: Mapping[str, Any], kinds: tuple[str, ...]) -> tuple[Candidate, ...]:
    load = f"benchmarks.peers.text.ours:{name}"
    return tuple(Candidate(f"ours {kind}", load, {**settings, "kind": kind}, kind=kind) for kind in kinds)


def theirs(
    name: str, settings: Mapping[str, Any], kinds: tuple[str, ...] = KINDS[:2], how: str = ""
) -> tuple[Candidate, ...]:
    load = f"benchmarks.peers.text.transformers:{name}"
    return tuple(Candidate(f"transformers {kind}{how}", load, {**settings, "kind": kind}, "transformers", kind)
                 for kind in kinds)  # fmt: skip


def ctranslate2(name: str, settings: Mapping[str, Any], kinds: tuple[str, ...]) -> tuple[Candidate, ...]:
    load = f"benchmarks.peers.text.ctranslate2:{name}"
    return tuple(Candidate(f"CTranslate2 {kind}", load, {**settings, "kind": kind}, "ctranslate2", kind)
                 for kind in kinds)  # fmt: skip


def decoding(batch: int, options: Options) -> Case:
    tokens = 4 if options.tiny else TOKENS if batch == 1 else FEWER
    made = {"family": "gpt2", "lengths": [PROMPT] * batch, "tiny": options.tiny}
    settings = {"tokens": tokens}
    reads = 4 * PARAMETERS["gpt2"] * tokens
    return Case(
        "text", f"GPT-2 small, {tokens} tokens, batch {batch}", "token", tokens * batch,
        (*ours("writer", settings, KINDS), *theirs("writer", settings | {"family": "gpt2"}),
         *ctranslate2("decoder", settings, ("float32", "int8"))),
        reference="transformers float32", checks=SAME if options.tiny else NEARLY, prepare=PREPARE, settings=made,
        operations=None if options.tiny else 2 * PARAMETERS["gpt2"] * (tokens + PROMPT) * batch,
        bytes=None if options.tiny else reads, rounds=ROUNDS,
    )  # fmt: skip


def prefill(options: Options) -> Case:
    length = 32 if options.tiny else LONG
    return Case(
        "text", f"GPT-2 small, prompt of {length}", "token", length,
        (*ours("prefill", {}, KINDS), *theirs("prefill", {"family": "gpt2"})),
        reference="transformers float32",
        checks={"float32": ("near", 1e-4), "bfloat16": ("cosine", 1e-2), "int8": ("cosine", 5e-2)}, prepare=PREPARE,
        settings={"family": "gpt2", "lengths": [length], "tiny": options.tiny},
        operations=None if options.tiny else 2 * PARAMETERS["blocks"] * length, rounds=ROUNDS,
    )  # fmt: skip


def translating(options: Options, beams: int, tokens: int) -> Case:
    """The source has as many ids as tokens are generated."""
    tokens = 4 if options.tiny else tokens
    settings = {"tokens": tokens, "beams": beams}
    greedy = beams == 1
    kinds = KINDS if greedy else KINDS[:1]
    return Case(
        "text", f"T5 small, {tokens} tokens" + ("" if greedy else f", beam {beams}"), "token", tokens,
        (*ours("writer", settings, kinds), *theirs("writer", settings | {"family": "t5"}, kinds[:2]),
         *ctranslate2("translator", settings, ("float32", "int8") if greedy else ("float32",))),
        reference="transformers float32", checks=SAME, prepare=PREPARE,
        settings={"family": "t5", "lengths": [tokens], "tiny": options.tiny},
        rounds=ROUNDS,
    )  # fmt: skip


def sentences(options: Options) -> Case:
    lengths = sentence_lengths(8 if options.tiny else SENTENCES)
    settings = {"family": "bert"}
    return Case(
        "text", f"BERT base, {len(lengths)} sentences", "sentence", len(lengths),
        (*ours("encoder", {}, KINDS[:2]), *theirs("encoder", settings),
         *theirs("encoder", settings | {"batch": 8}, how=", like lengths together")),
        reference="transformers float32", checks={"float32": ("near", 1e-4), "bfloat16": ("cosine", 1e-2)},
        prepare=PREPARE, settings={"family": "bert", "lengths": lengths, "tiny": options.tiny},
        operations=None if options.tiny else 2 * PARAMETERS["blocks"] * sum(lengths), rounds=ROUNDS,
    )  # fmt: skip


def tokenizing(name: str, options: Options) -> Case:
    """One text that is new to the tokenizer; ours caches chunks, so that a second time is faster."""
    length = 20_000 if options.tiny else 1_000_000
    title, libraries = VOCABULARIES[name]
    loads = {"tiktoken": "tiktoken", "tokenizers": "encode", "tokenizers in batches": "encode_batch"}
    peers = tuple(
        Candidate(library, f"benchmarks.peers.text.tokenizers:{loads[library]}", {"name": name}, library.split()[0])
        for library in libraries
    )
    own = "benchmarks.peers.text.ours_tokenizers:tokenizer"
    again = (Candidate("ours, its words seen before", own, {"name": name, "seen": True}),)
    return Case(
        "text", f"{title}, {length:,} characters", "character", length,
        (Candidate("ours", own, {"name": name}), *(again if name != "gpt2" else ()), *peers),
        reference=libraries[0], checks={"float32": ("differing", 0.0)},
        prepare="benchmarks.peers.text.tokenizers:prepare", settings={"length": length},
    )  # fmt: skip
