"""GGUF files of our decoders, read again by ours."""

import json
import math
from copy import copy
from dataclasses import replace

import pytest
import torch

from multimodal.errors import UsageError
from multimodal.export.export import export
from multimodal.export.gguf import check_gguf
from multimodal.export.refusals import differences
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig
from multimodal.tasks.text.generate import end_ids
from multimodal.tokens.chat.format import ChatFormat
from multimodal.tokens.chat.messages import read_messages
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.weights.files.gguf_file import read_gguf
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.load import load
from tests.helpers.references.hub import hub_folder
from tests.helpers.spread import thin
from tests.helpers.tiny import TEXTS, randomized
from tests.helpers.tiny_checkpoints import BYTES, IDS, checkpoint

ROWS = torch.tensor([[3, 7, 5, 2, 11, 4], [8, 6, 4, 2, 9, 20]])
TEXT = "zq's 12 <eos>\n\n"


def llama(window: int | None = None, vocabulary: int = IDS, **positions) -> TextTransformer:
    config = replace(
        TEXTS["llama"], vocabulary=vocabulary, context=64, tied=False, positions=PositionConfig("rotary", **positions),
        window=window,
    )  # fmt: skip
    attention = replace(config.stack.block.attention, width=32)  # rows of 32 numbers, as 8 bits need
    block = replace(config.stack.block, attention=attention, hidden=64)
    return randomized(TextTransformer(replace(config, stack=replace(config.stack, block=block))))


@torch.no_grad()
@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("positions", [
    {}, {"interleaved": True}, {"theta": 500.0, "scale": 0.25}, {"scale": 0.125, "turns": (1.0, 4.0, 32)},
    {"scale": 0.25, "yarn": (32.0, 1.0, 16, True), "gain": 0.1 * math.log(4) + 1},
])  # fmt: skip
def test_a_llama_and_its_vocabulary_come_back(positions, tmp_path):
    save_folder(Checkpoint(llama(**positions), BYTES), tmp_path / "model")
    for store, far in (("float32", 1e-5), ("int8", 0.5)):
        export(tmp_path / "model", tmp_path / f"{store}.gguf", to="gguf", store=store)
        read, own = load(tmp_path / f"{store}.gguf"), load(tmp_path / "model")
        assert (read.model(ROWS) - own.model(ROWS)).abs().max() <= far
        assert (
            read.required_tokenizer().batch([TEXT]).ids.tolist() == own.required_tokenizer().batch([TEXT]).ids.tolist()
        )
    sizes = [(tmp_path / f"{store}.gguf").stat().st_size for store in ("float32", "int8")]
    assert sizes[1] < sizes[0]
    fields = read_gguf(tmp_path / "float32.gguf")[1]
    widths = [fields[f"llama.attention.{part}_length"] for part in ("key", "value")]
    assert widths == [own.model.config.stack.block.attention.width // own.model.config.stack.block.attention.heads] * 2


@pytest.mark.ci
def test_pooling_and_end_of_an_embedding_model_come_back(tmp_path):
    root, config = hub_folder(tmp_path, "chatml")
    tokenizer, model = hub_tokenizer(root, config), llama(vocabulary=config["vocab_size"])
    tokenizer.puts_end = True
    for pooling in ("last", "mean"):
        save_folder(Checkpoint(model, tokenizer, card={"pooling": pooling, "normalize": True}), tmp_path / "model")
        export(tmp_path / "model", tmp_path / "model.gguf", to="gguf", overwrite=True)
        read = load(tmp_path / "model.gguf")
        assert (read.card["pooling"], read.card["normalize"], read.tokenizer.puts_end) == (pooling, True, True)
    made = Checkpoint(model, tokenizer, card={"pooling": "max"}, source="m")
    with pytest.raises(UsageError, match=r"GGUF has no pooling 'max' .one of mean, cls, last."):
        check_gguf(made, tmp_path / "m.gguf", False)


def test_tokens_that_a_chat_begins_and_ends_with_come_back(tmp_path):
    """Also a bos that texts get none of, and ends whose names llama.cpp does not know."""
    root, config = hub_folder(tmp_path, "chatml")
    tokenizer = hub_tokenizer(root, config)
    begin, ends = "<|begin|>", ("<|eot|>", "<|im_end|>")
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    chat = ChatFormat(template, eos=ends, tokens={"bos_token": begin})
    save_folder(Checkpoint(llama(vocabulary=config["vocab_size"]), tokenizer, chat=chat), tmp_path / "model")
    export(tmp_path / "model", tmp_path / "model.gguf", to="gguf")
    read, messages = load(tmp_path / "model.gguf"), read_messages([{"role": "user", "content": "Hi"}])
    ids = chat.ids(messages, [], tokenizer, "")[0]
    assert read.chat.ids(messages, [], read.tokenizer, "")[0] == ids
    assert ids[0] == tokenizer.control_names[begin]
    assert set(end_ids(read)) >= {tokenizer.control_names[name] for name in ends}


@pytest.mark.parametrize(
    ("name", "form", "split"), [("llama3", None, "llama-bpe"), ("chatml", {"type": "NFC"}, "qwen2"),
    ("chatml", None, "stablelm2"), ("byte-level", None, "gpt-2"), ("falcon", None, None)])  # fmt: skip
def test_the_split_of_words_is_the_vocabularys_own(name, form, split, tmp_path):
    """Few of the tokens that tell splits apart are in a small vocabulary."""
    root, config = hub_folder(tmp_path, name)
    made = json.loads((root / "tokenizer.json").read_text())
    made["normalizer"] = form
    made["model"] |= {"merges": made["model"]["merges"][:3], "ignore_merges": name == "llama3"}
    (root / "tokenizer.json").write_text(json.dumps(made))
    model = Checkpoint(llama(vocabulary=config["vocab_size"]), hub_tokenizer(root, config), source="m")
    if split is None:
        with pytest.raises(UsageError, match="GGUF has no vocabulary like its HubTokenizer"):
            check_gguf(model, tmp_path / "m.gguf", False)
    else:
        assert check_gguf(model, tmp_path / "m.gguf", False)[0]["tokenizer.ggml.pre"] == split


def test_a_full_disk_is_named_and_ends_of_a_search_come_back(tmp_path, monkeypatch):
    """numpy's error of a short write has no number. An end may be an ordinary token."""
    card = {"generation": {"eos_token_id": [40]}}
    save_folder(Checkpoint(llama(), BYTES, card=card), tmp_path / "model")
    export(tmp_path / "model", tmp_path / "model.gguf", to="gguf")
    assert set(end_ids(load(tmp_path / "model.gguf"))) == {BYTES.eos_id, 40}

    def full(*_: object) -> None:
        raise OSError("11008 requested and 808 written")

    monkeypatch.setattr("gguf.GGUFWriter.write_tensors_to_file", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*full\.gguf'"):
        export(tmp_path / "model", tmp_path / "full.gguf", to="gguf")
    assert not list(tmp_path.glob("full*"))


def test_a_refusal_names_what_is_lost_and_no_number_that_was_rounded():
    own = {"eps": 1e-6, "theta": 2e4, "yarn": {"factor": 2}, "width": 8}
    read = {"eps": 9.999999974752427e-07, "theta": 1e4, "yarn": None, "width": 8}
    assert differences(read, own, rounding=1e-6) == ["theta 20000.0", "yarn"]
    assert differences(read, own)[0] == "eps 1e-06"


@pytest.mark.ci
def test_what_gguf_lacks_is_refused_and_files_stay(tmp_path):
    save_folder(checkpoint("learned"), tmp_path / "model")
    with pytest.raises(UsageError, match=r"none of .* has all of its options"):
        export(tmp_path / "model", tmp_path / "x.gguf", to="gguf")
    save_folder(Checkpoint(llama(window=63), BYTES), tmp_path / "window")
    with pytest.raises(UsageError, match=r"llama\.cpp has windows for gemma2 and gemma3 \(got one of 63 tokens\)"):
        export(tmp_path / "window", tmp_path / "x.gguf", to="gguf")
    made = Checkpoint(llama(scale=0.25, yarn=(8.0, 2.0, 16, True), gain=1.1), BYTES, source="m")
    with pytest.raises(UsageError, match=r"llama\.cpp's YaRN has bounds 32 and 1, and gain 1\.139"):
        check_gguf(made, tmp_path / "x.gguf", False)
    endless = copy(BYTES)
    endless.eos_id = None
    with pytest.raises(UsageError, match=r"GGUF holds one to three tokens that end a text \(got 0\)"):
        check_gguf(Checkpoint(llama(), endless, source="m"), tmp_path / "x.gguf", False)
    (tmp_path / "x.gguf").write_text("mine")
    with pytest.raises(UsageError, match=r"x\.gguf: exists and is not as multimodal wrote it"):
        export(tmp_path / "model", tmp_path / "x.gguf", to="gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "window", "x.gguf"]
