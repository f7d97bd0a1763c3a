"""Text models: greedy and beam generation, prefill, sentence states and tokenization.

Random weights give close logits, so other rounding soon changes the text: bfloat16 and int8 must match float32 in the
prompt's logits, and in a few of GPT-2's tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.peers.text.random_models import sentence_lengths
from benchmarks.suite.cases import Candidate, Case, Options, in_kinds

PEERS = "benchmarks.peers.text."
PREPARE = PEERS + "random_models:prepare"
OURS, TRANSFORMERS, CTRANSLATE2 = PEERS + "ours:", PEERS + "transformers:", PEERS + "ctranslate2:"
LLAMA_CPP = PEERS + "llama_cpp:"
TOKENS, FEWER, PROMPT, LONG, SENTENCES = 64, 32, 16, 512, 64
ROUNDS = 5
SAME = {"float32": ("differing", 0.0)}  # other kinds share next to no T5 tokens, in any library
NEARLY = SAME | {"bfloat16": ("differing", 0.95), "int8": ("differing", 0.98)}  # int8: a token of 50
KINDS, INTEGERS = ("float32", "bfloat16", "int8"), ("float32", "int8")


class DecoderCase(NamedTuple):
    """`parameters`, and those of the `blocks` alone: in products. `kinds`: of transformers. `prefills`: the peer gives
    a prompt's logits. `tokens`, `logits`: checks."""

    title: str
    parameters: float
    blocks: float
    kinds: tuple[str, ...]
    peer: str
    module: str
    library: str
    prepare: str
    prefills: bool
    tokens: Mapping[str, tuple[str, float]]
    logits: Mapping[str, tuple[str, float]]


BLOCKS = 85.1e6  # GPT-2's, and BERT base's
DECODERS = {
    "gpt2": DecoderCase(
        "GPT-2 small", 124.4e6 - 1024 * 768, BLOCKS, KINDS[:2], "CTranslate2", CTRANSLATE2, "ctranslate2", PREPARE,
        False, NEARLY, {"float32": ("near", 1e-4), "bfloat16": ("cosine", 1e-2), "int8": ("cosine", 5e-2)}),
    # 30 layers of such weights enlarge what rounding changes
    "smollm2": DecoderCase(
        "SmolLM2-135M", 134.5e6, 106.2e6, KINDS[:1], "llama.cpp", LLAMA_CPP, "llama-cpp-python", LLAMA_CPP + "prepare",
        True, SAME, {"float32": ("near", 5e-4), "bfloat16": ("cosine", 2e-2), "int8": ("cosine", 0.2)}),
}  # fmt: skip
VOCABULARIES = {
    "gpt2": ("GPT-2's vocabulary", ("tiktoken",)),
    "bpe": ("byte-level BPE of 8,000", ("tokenizers", "tokenizers in batches")),
    "wordpiece": ("WordPiece of 8,000", ("tokenizers", "tokenizers in batches")),
}


def cases(options: Options) -> list[Case]:
    return [
        *(one for family in DECODERS
          for one in (*(decoding(family, batch, options) for batch in (1, 8)), prefill(family, options))),
        translating(options, 1, TOKENS), translating(options, 4, FEWER), sentences(options),
        *(tokenizing(name, options) for name in VOCABULARIES),
    ]  # fmt: skip


def decoding(family: str, batch: int, options: Options) -> Case:
    tokens = 4 if options.tiny else TOKENS if batch == 1 else FEWER
    own, settings = DECODERS[family], {"tokens": tokens}
    return Case(
        "text", f"{own.title}, {tokens} tokens, batch {batch}", "token", tokens * batch,
        (*in_kinds("ours", OURS + "writer", settings, kinds=KINDS),
         *in_kinds("transformers", TRANSFORMERS + "writer", settings | {"family": family}, "transformers", own.kinds),
         *in_kinds(own.peer, own.module + "decoder", settings, own.library, INTEGERS)),
        reference="transformers float32", checks=own.tokens if not options.tiny else SAME, prepare=own.prepare,
        settings=prepared(family, [PROMPT] * batch, options),
        operations=None if options.tiny else 2 * own.parameters * (tokens + PROMPT) * batch,
        bytes=None if options.tiny else 4 * own.parameters * tokens, rounds=ROUNDS,
    )  # fmt: skip


def prefill(family: str, options: Options) -> Case:
    length, own = 32 if options.tiny else LONG, DECODERS[family]
    peer = in_kinds(own.peer, own.module + "prefill", {}, own.library, INTEGERS) if own.prefills else ()
    return Case(
        "text", f"{own.title}, prompt of {length}", "token", length,
        (*in_kinds("ours", OURS + "prefill", {}, kinds=KINDS),
         *in_kinds("transformers", TRANSFORMERS + "prefill", {"family": family}, "transformers", own.kinds), *peer),
        reference="transformers float32", checks=own.logits, prepare=own.prepare,
        settings=prepared(family, [length], options), rounds=ROUNDS,
        operations=None if options.tiny else 2 * own.blocks * length,
    )  # fmt: skip


def prepared(family: str, lengths: list[int], options: Options) -> dict[str, Any]:
    return {"family": family, "lengths": lengths, "kinds": INTEGERS, "tiny": options.tiny}


def translating(options: Options, beams: int, tokens: int) -> Case:
    """The source has as many ids as tokens are generated."""
    tokens = 4 if options.tiny else tokens
    settings = {"tokens": tokens, "beams": beams}
    greedy = beams == 1
    kinds = KINDS[:2] if greedy else KINDS[:1]
    return Case(
        "text", f"T5 small, {tokens} tokens" + ("" if greedy else f", beam {beams}"), "token", tokens,
        (*in_kinds("ours", OURS + "writer", settings, kinds=(*kinds, "int8")),
         *in_kinds("transformers", TRANSFORMERS + "writer", settings | {"family": "t5"}, "transformers", kinds),
         *in_kinds("CTranslate2", CTRANSLATE2 + "translator", settings, "ctranslate2", INTEGERS)),
        reference="transformers float32", checks=SAME, prepare=PREPARE,
        settings={"family": "t5", "lengths": [tokens], "tiny": options.tiny}, rounds=ROUNDS,
    )  # fmt: skip


def sentences(options: Options) -> Case:
    lengths = sentence_lengths(8 if options.tiny else SENTENCES)
    settings, load = {"family": "bert"}, TRANSFORMERS + "encoder"
    return Case(
        "text", f"BERT base, {len(lengths)} sentences", "sentence", len(lengths),
        (*in_kinds("ours", OURS + "encoder", {}), *in_kinds("transformers", load, settings, "transformers"),
         *in_kinds("transformers", load, settings | {"batch": 8}, "transformers", suffix=", like lengths together")),
        reference="transformers float32", checks={"float32": ("near", 1e-4), "bfloat16": ("cosine", 1e-2)},
        prepare=PREPARE, settings={"family": "bert", "lengths": lengths, "tiny": options.tiny},
        operations=None if options.tiny else 2 * BLOCKS * sum(lengths), rounds=ROUNDS,
    )  # fmt: skip


def tokenizing(name: str, options: Options) -> Case:
    """One text that is new to the tokenizer; ours caches chunks, so that a second time is faster."""
    length = 20_000 if options.tiny else 1_000_000
    title, libraries = VOCABULARIES[name]
    peers = tuple(
        Candidate(library, PEERS + f"tokenizers:{'tiktoken' if name == 'gpt2' else 'encode'}",
                  {"name": name} | ({"batch": True} if "batches" in library else {}), library.split()[0])
        for library in libraries
    )  # fmt: skip
    own = PEERS + "ours_tokenizers:tokenizer"
    again = (Candidate("ours, its words seen before", own, {"name": name, "seen": True}),)
    return Case(
        "text", f"{title}, {length:,} characters", "character", length,
        (Candidate("ours", own, {"name": name}), *(again if name != "gpt2" else ()), *peers),
        reference=libraries[0], checks={"float32": ("differing", 0.0)},
        prepare=PEERS + "tokenizers:prepare", settings={"length": length},
    )  # fmt: skip
