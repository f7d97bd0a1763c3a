"""llama.cpp through llama-cpp-python, with transformers' Llama folder as a GGUF file without a vocabulary."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.plain_files import rows

TYPES = {"float32": "F32", "float16": "F16", "int8": "Q8_0"}


def prepare(folder: Path, device: str, kinds: Sequence[str] = (), **settings: Any) -> None:
    """The files of `random_models`, and `folder/KIND.gguf`."""
    from benchmarks.peers.text import random_models

    random_models.prepare(folder, device, **settings)
    for kind in kinds:
        convert(folder / "hub", folder / f"{kind}.gguf", kind)


def convert(hub: Path, to: Path, kind: str) -> None:
    """As llama.cpp's converter and `llama-quantize` write it."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((hub / "config.json").read_text())
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    out = gguf.GGUFWriter(to, "llama")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(keys)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(float(config["rope_parameters"]["rope_theta"]))
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, array in load_file(hub / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # rotary halves become neighbours
            count = heads if "q_proj" in name else keys
            array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        number = gguf.GGMLQuantizationType[TYPES[kind] if array.ndim == 2 else "F32"]
        theirs = names.get_name(name, try_suffixes=(".weight",))
        out.add_tensor(theirs, gguf.quants.quantize(array, number), raw_dtype=number)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


class Llama:
    """A model, and the logits of its last tokens."""

    def __init__(self, folder: Path, kind: str, context: int, sequences: int):
        import llama_cpp

        self.library, threads = llama_cpp, int(os.environ["OMP_NUM_THREADS"])
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.quiet, None)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.n_threads = context * sequences, sequences, threads
        options.n_batch = options.n_ubatch = context * sequences
        options.n_threads_batch = threads
        if kind == "float32":  # keys and values are float16 by default
            options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
            options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds more
        file = str(folder / f"{kind}.gguf").encode()
        self.model = llama_cpp.llama_model_load_from_file(file, llama_cpp.llama_model_default_params())
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.batch = llama_cpp.llama_batch_init(context * sequences, 0, sequences)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def clear(self) -> None:
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), False)

    def feed(self, texts: Sequence[Sequence[int]], start: int) -> list[int]:
        """Places of the logits after each text, whose first token is at position `start`."""
        at, last = 0, []
        for sequence, text in enumerate(texts):
            for position, token in enumerate(text, start):
                self.batch.token[at], self.batch.pos[at] = token, position
                self.batch.n_seq_id[at], self.batch.seq_id[at][0] = 1, sequence
                self.batch.logits[at] = position == start + len(text) - 1
                at += 1
            last.append(at - 1)
        self.batch.n_tokens = at
        if code := self.library.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode returned {code}")
        return last


def decoder(folder: Path, device: str, tokens: int, kind: str) -> Callable[[], list[list[int]]]:
    """Greedy, after each prompt."""
    prompts = rows(folder)
    session = Llama(folder, kind, len(prompts[0]) + tokens, len(prompts))
    choose = session.library.llama_sampler_init_greedy()

    def run() -> list[list[int]]:
        session.clear()
        new, start, found = prompts, 0, [[] for _ in prompts]
        for _ in range(tokens):
            places = session.feed(new, start)
            start += len(new[0])
            new = [[session.library.llama_sampler_sample(choose, session.context, place)] for place in places]
            for row, (token,) in zip(found, new, strict=True):
                row.append(token)
        return found

    return run


def prefill(folder: Path, device: str, kind: str) -> Callable[[], Any]:
    """Logits after a prompt, with keys and values cached."""
    import numpy as np

    (prompt,) = rows(folder)
    session = Llama(folder, kind, len(prompt), 1)

    def run() -> np.ndarray:
        session.clear()
        (place,) = session.feed([prompt], 0)
        logits = session.library.llama_get_logits_ith(session.context, place)
        return np.ctypeslib.as_array(logits, (session.vocabulary,))[None].copy()

    return run
