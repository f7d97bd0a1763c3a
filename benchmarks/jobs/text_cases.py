"""Text models: greedy and beam generation, prefill, sentence states and tokenization.

Random weights give close logits, so other rounding soon changes the text: bfloat16 and int8 must match float32 in the
prompt's logits, and in a few of GPT-2's tokens."""

from benchmarks.peers.text.random_models import sentence_lengths
from benchmarks.suite.cases import Candidate, Case, Options, in_kinds

PEERS = "benchmarks.peers.text."
PREPARE = PEERS + "random_models:prepare"
OURS, TRANSFORMERS, CTRANSLATE2 = PEERS + "ours:", PEERS + "transformers:", PEERS + "ctranslate2:"
LLAMA_CPP, LLAMA_CPP_LIBRARY = PEERS + "llama_cpp:", "llama-cpp-python"
PARAMETERS = {
    "gpt2": 124.4e6 - 1024 * 768,
    "blocks": 85.1e6,
    "smollm2": 134.5e6,
}  # in products; BERT base's blocks equal GPT-2's
TOKENS, FEWER, PROMPT, LONG, SENTENCES = 64, 32, 16, 512, 64
ROUNDS = 5
SAME = {"float32": ("differing", 0.0)}  # other kinds share next to no T5 tokens, in any library
NEARLY = SAME | {"bfloat16": ("differing", 0.95), "int8": ("differing", 0.98)}  # int8: a token of 50
KINDS = ("float32", "bfloat16", "int8")
VOCABULARIES = {
    "gpt2": ("GPT-2's vocabulary", ("tiktoken",)),
    "bpe": ("byte-level BPE of 8,000", ("tokenizers", "tokenizers in batches")),
    "wordpiece": ("WordPiece of 8,000", ("tokenizers", "tokenizers in batches")),
}


def cases(options: Options) -> list[Case]:
    return [
        *(decoding(batch, options) for batch in (1, 8)), prefill(options), translating(options, 1, TOKENS),
        translating(options, 4, FEWER), *(small_llama(batch, options) for batch in (1, 8)), small_llama_prompt(options),
        sentences(options), *(tokenizing(name, options) for name in VOCABULARIES),
    ]  # fmt: skip


def decoding(batch: int, options: Options) -> Case:
    tokens = 4 if options.tiny else TOKENS if batch == 1 else FEWER
    settings = {"tokens": tokens}
    return Case(
        "text", f"GPT-2 small, {tokens} tokens, batch {batch}", "token", tokens * batch,
        (*in_kinds("ours", OURS + "writer", settings, kinds=KINDS),
         *in_kinds("transformers", TRANSFORMERS + "writer", settings | {"family": "gpt2"}, "transformers"),
         *in_kinds("CTranslate2", CTRANSLATE2 + "decoder", settings, "ctranslate2", ("float32", "int8"))),
        reference="transformers float32", checks=SAME if options.tiny else NEARLY, prepare=PREPARE,
        settings={"family": "gpt2", "lengths": [PROMPT] * batch, "tiny": options.tiny},
        operations=None if options.tiny else 2 * PARAMETERS["gpt2"] * (tokens + PROMPT) * batch,
        bytes=None if options.tiny else 4 * PARAMETERS["gpt2"] * tokens, rounds=ROUNDS,
    )  # fmt: skip


def prefill(options: Options) -> Case:
    length = 32 if options.tiny else LONG
    return Case(
        "text", f"GPT-2 small, prompt of {length}", "token", length,
        (*in_kinds("ours", OURS + "prefill", {}, kinds=KINDS),
         *in_kinds("transformers", TRANSFORMERS + "prefill", {"family": "gpt2"}, "transformers")),
        reference="transformers float32",
        checks={"float32": ("near", 1e-4), "bfloat16": ("cosine", 1e-2), "int8": ("cosine", 5e-2)}, prepare=PREPARE,
        settings={"family": "gpt2", "lengths": [length], "tiny": options.tiny},
        operations=None if options.tiny else 2 * PARAMETERS["blocks"] * length, rounds=ROUNDS,
    )  # fmt: skip


def small_llama(batch: int, options: Options) -> Case:
    tokens = 4 if options.tiny else TOKENS if batch == 1 else FEWER
    settings = {"tokens": tokens}
    return Case(
        "text", f"SmolLM2-135M, {tokens} tokens, batch {batch}", "token", tokens * batch,
        (*in_kinds("ours", OURS + "writer", settings, kinds=KINDS),
         *in_kinds("transformers", TRANSFORMERS + "writer", settings | {"family": "smollm2"}, "transformers",
                   ("float32",)),
         *in_kinds("llama.cpp", LLAMA_CPP + "writer", settings, LLAMA_CPP_LIBRARY, ("float32", "int8"))),
        reference="transformers float32", checks=SAME, prepare=LLAMA_CPP + "prepare",
        settings={"family": "smollm2", "lengths": [PROMPT] * batch, "kinds": ["float32", "int8"], "tiny": options.tiny},
        operations=None if options.tiny else 2 * PARAMETERS["smollm2"] * (tokens + PROMPT) * batch,
        bytes=None if options.tiny else 4 * PARAMETERS["smollm2"] * tokens, rounds=ROUNDS,
    )  # fmt: skip


def small_llama_prompt(options: Options) -> Case:
    length = 32 if options.tiny else LONG  # 30 layers of such weights enlarge what rounding changes
    return Case(
        "text", f"SmolLM2-135M, prompt of {length}", "token", length,
        (*in_kinds("ours", OURS + "prefill", {}, kinds=KINDS),
         *in_kinds("transformers", TRANSFORMERS + "prefill", {"family": "smollm2"}, "transformers", ("float32",)),
         *in_kinds("llama.cpp", LLAMA_CPP + "prefill", {}, LLAMA_CPP_LIBRARY, ("float32", "int8"))),
        reference="transformers float32",
        checks={"float32": ("near", 5e-4), "bfloat16": ("cosine", 2e-2), "int8": ("cosine", 0.2)},
        prepare=LLAMA_CPP + "prepare", rounds=ROUNDS,
        settings={"family": "smollm2", "lengths": [length], "kinds": ["float32", "int8"], "tiny": options.tiny},
    )  # fmt: skip


def translating(options: Options, beams: int, tokens: int) -> Case:
    """The source has as many ids as tokens are generated."""
    tokens = 4 if options.tiny else tokens
    settings = {"tokens": tokens, "beams": beams}
    greedy = beams == 1
    kinds = KINDS if greedy else KINDS[:1]
    return Case(
        "text", f"T5 small, {tokens} tokens" + ("" if greedy else f", beam {beams}"), "token", tokens,
        (*in_kinds("ours", OURS + "writer", settings, kinds=kinds),
         *in_kinds("transformers", TRANSFORMERS + "writer", settings | {"family": "t5"}, "transformers", kinds[:2]),
         *in_kinds("CTranslate2", CTRANSLATE2 + "translator", settings, "ctranslate2", kinds[::2])),
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
        operations=None if options.tiny else 2 * PARAMETERS["blocks"] * sum(lengths), rounds=ROUNDS,
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
