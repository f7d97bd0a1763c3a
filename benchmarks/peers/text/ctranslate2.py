"""CTranslate2, with transformers' folder converted by its own converter; its words are the ids' numbers."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.plain_files import rows
from benchmarks.suite.process import prepare


def convert(folder: Path, device: str, to: str) -> None:
    """Stands in for the tokenizer that the converter asks transformers for; a random model has none."""
    from ctranslate2.converters import TransformersConverter

    class Words:
        bos_token = eos_token = unk_token = pad_token = "0"

        def __init__(self, size: int):
            self.size = size

        def get_vocab(self) -> Mapping[str, int]:
            return {str(number): number for number in range(self.size)}

        def convert_ids_to_tokens(self, number: int) -> str:
            return str(number)

    class Converter(TransformersConverter):
        def load_tokenizer(self, tokenizer_class: Any, path: str, **_: Any) -> Words:
            return Words(json.loads((Path(path) / "config.json").read_text())["vocab_size"])

    Converter(str(folder / "hub")).convert(to, force=True)


def loaded(folder: Path, kind: str, library: str) -> Any:
    """A `Generator` or a `Translator` of ctranslate2."""
    import ctranslate2

    threads = int(os.environ["OMP_NUM_THREADS"])
    with tempfile.TemporaryDirectory() as place:
        # in another process: the converter keeps torch and the model in memory
        prepare("benchmarks.peers.text.ctranslate2:convert", {"to": place}, folder, "cpu")
        return getattr(ctranslate2, library)(place, compute_type=kind, intra_threads=threads, inter_threads=1)


def words(folder: Path) -> list[list[str]]:
    return [[str(number) for number in row] for row in rows(folder)]


def decoder(folder: Path, device: str, tokens: int, kind: str) -> Callable[[], list[list[int]]]:
    """Greedy, after each prompt."""
    model, prompts = loaded(folder, kind, "Generator"), words(folder)
    options = {"max_length": tokens, "min_length": tokens, "beam_size": 1, "include_prompt_in_result": False}
    return lambda: [one.sequences_ids[0] for one in model.generate_batch(prompts, **options)]


def translator(folder: Path, device: str, tokens: int, kind: str, beams: int = 1) -> Callable[[], list[list[int]]]:
    """Greedy or beam search with length penalty 1, from ids to ids."""
    model, sources = loaded(folder, kind, "Translator"), words(folder)
    options = {"max_decoding_length": tokens, "min_decoding_length": tokens, "beam_size": beams, "length_penalty": 1}
    return lambda: [[int(word) for word in one.hypotheses[0]] for one in model.translate_batch(sources, **options)]
