"""`multimodal embed`: vectors of texts beside transformers' states, pooled as sentence-transformers does it."""

import csv
import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.models.clip import CLIP
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.tasks.text.embed import embed
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.sentencepiece import ByteTokenizer
from multimodal.tokens.text.tokenizer import TextCut
from multimodal.weights.encode import text_features
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.load import load
from tests.helpers.commands import one_line, run
from tests.helpers.data.wordpieces import SIZES
from tests.helpers.folders import write_image
from tests.helpers.references.causal import SIZES as CAUSAL
from tests.helpers.references.encoders import bert_folder
from tests.helpers.references.hub import hub_folder, pipeline
from tests.helpers.references.vision import randomized
from tests.helpers.spread import thin
from tests.helpers.tiny import TEXT_TO_TEXT
from tests.helpers.tiny import made as tiny
from tests.helpers.tiny import randomized as random_weights

TEXTS = ["the dog at the sea.", "sea", "a b c d e f g h i", "dogs", "the dog at the sea.", "at the sea"] * 3


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("bert"))


def pooled(folder: Path, pooling: str) -> torch.Tensor:
    """The reference, a text at a time; the mean as in sentence-transformers' Pooling."""
    from transformers import AutoTokenizer, BertModel

    tokenizer, model = AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder).eval()
    rows = []
    with torch.inference_mode():
        for text in TEXTS:
            batch = tokenizer(text, return_tensors="pt")
            made = model(**batch)
            states, mask = made.last_hidden_state, batch["attention_mask"][..., None].float()
            mean = (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            kinds = {"mean": mean, "cls": states[:, 0], "last": states[:, -1], "pooler": made.pooler_output,
                     "max": states.amax(1)}  # fmt: skip
            rows.append(kinds[pooling][0])
    return torch.stack(rows)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("pooling", ["mean", "max", "cls", "last", "pooler"])
def test_vectors_equal_transformers_in_the_order_of_the_texts(bert, pooling):
    checkpoint, theirs = load(bert), pooled(bert, pooling)
    mine = embed(TEXTS, checkpoint, pooling)
    assert mine.shape == theirs.shape
    assert (mine - theirs).abs().max() < 1e-5
    unit = embed(TEXTS, checkpoint, pooling, normalize=True)
    assert (unit - torch.nn.functional.normalize(theirs, dim=-1)).abs().max() < 1e-5


@pytest.mark.parametrize("tokens", [None, 4, 30])
def test_a_vector_does_not_depend_on_its_batch(bert, tokens):
    checkpoint = load(bert)
    alone = torch.cat([embed([text], checkpoint) for text in TEXTS])
    assert (embed(TEXTS, checkpoint, batch_tokens=tokens) - alone).abs().max() < 1e-5
    turned = embed(TEXTS[::-1], checkpoint, batch_tokens=tokens).flip(0)
    assert (turned - alone).abs().max() < 1e-5


def trained() -> BytePairTokenizer:
    return BytePairTokenizer.train(["the dog at the sea", "a dog"], 258 + 6)


def text_model(kind: str) -> Checkpoint:
    """A decoder, or an encoder-decoder, with a vocabulary of bytes."""
    tokenizer = trained()
    if kind == "text":
        config = replace(tiny("text-rotary").config, vocabulary=tokenizer.vocab_size, context=40)
        return Checkpoint(random_weights(TextTransformer(config)), tokenizer)
    both = replace(TEXT_TO_TEXT, decoder=replace(TEXT_TO_TEXT.decoder, vocabulary=ByteTokenizer.vocab_size, context=40),
                   encoder=replace(TEXT_TO_TEXT.encoder, context=40))  # fmt: skip
    return Checkpoint(random_weights(EncoderDecoder(both)), ByteTokenizer())


@torch.inference_mode()
def test_causal_models_take_the_last_token_and_no_eos():
    checkpoint = text_model("text")
    found = embed(TEXTS, checkpoint)
    for text, vector in zip(TEXTS, found, strict=True):
        start = [] if checkpoint.tokenizer.bos_id is None else [checkpoint.tokenizer.bos_id]
        ids = torch.tensor([start + checkpoint.tokenizer.encode(text)])
        assert (checkpoint.model.states(ids)[0, -1] - vector).abs().max() < 1e-5
    with pytest.raises(UsageError, match=r"pooling 'cls': model .* has no first token that attends to the text"):
        embed(TEXTS, checkpoint, "cls")


@torch.inference_mode()
def test_the_encoder_of_an_encoder_decoder_gives_its_mean():
    checkpoint = text_model("text-to-text")
    found = embed(TEXTS, checkpoint)
    for text, vector in zip(TEXTS, found, strict=True):
        ids = torch.tensor([[*checkpoint.tokenizer.encode(text), checkpoint.tokenizer.eos_id]])
        assert (checkpoint.model.encode(ids)[0].mean(0) - vector).abs().max() < 1e-5
    translating = replace(checkpoint, tokenizer=ByteTokenizer())
    translating.tokenizer.language_ids = {"en": 3}
    with pytest.raises(UsageError, match="embed does not support translators"):
        embed(TEXTS, translating)


def test_a_clip_has_its_own_vectors():
    config = tiny("clip-softmax").config
    tokenizer = trained()
    text = replace(config.text, vocabulary=tokenizer.vocab_size, context=40)
    model = random_weights(CLIP(replace(config, text=text, eos_id=tokenizer.eos_id)))
    checkpoint = Checkpoint(model, tokenizer)
    assert (embed(TEXTS, checkpoint) - text_features(model, tokenizer, TEXTS)).abs().max() < 1e-6
    with pytest.raises(UsageError, match="CLIP models have their own pooling"):
        embed(TEXTS, checkpoint, "mean")


def test_what_cannot_be_used_is_refused(bert):
    checkpoint = load(bert)
    for texts, cause in (
        ([], "expected at least one"),
        ("dog", "a list"),
        (["a", " "], "is empty"),
        (["\ud800"], "lone"),
    ):
        with pytest.raises(TextError, match=cause):
            embed(texts, checkpoint)
    with pytest.raises(UsageError, match=r"pooling must be one of .*'most'"):
        embed(["a"], checkpoint, "most")
    with pytest.raises(UsageError, match="has no pooler"):
        embed(["a"], Checkpoint(tiny("text-detector"), ByteTokenizer()), "pooler")
    with pytest.raises(UsageError, match="expected a model with a text encoder, got vit"):
        embed(["a"], Checkpoint(tiny("vit-token")))
    with pytest.raises(CheckpointError, match="checkpoint has no tokenizer"):
        embed(["a"], replace(checkpoint, tokenizer=None))
    with pytest.warns(TextCut, match="is cut to 24 tokens, 11 lost; 1 more of 3 texts were cut too"):
        made = embed(["a " * 33, "a", "b " * 33], checkpoint)
    assert (made[0] - embed(["a " * 22], checkpoint)[0]).abs().max() < 1e-6


def test_a_causal_embedder_reads_the_end_that_its_tokenizer_puts(tmp_path):
    """Qwen3-Embedding: no prefix of names, no head, and the last token's state, which is the end's."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3Model

    root, config = hub_folder(tmp_path, "chatml")
    end = pipeline("chatml").token_to_id("<|endoftext|>")
    made = json.loads((root / "tokenizer.json").read_text())
    name = "<|endoftext|>"
    put = {
        "type": "TemplateProcessing", "pair": [],
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": name, "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [end], "tokens": [name]}},
    }  # fmt: skip
    (root / "tokenizer.json").write_text(json.dumps(made | {"post_processor": put}))
    torch.manual_seed(0)
    model = randomized(Qwen3Model(Qwen3Config(**CAUSAL | {"vocab_size": config["vocab_size"], "head_dim": 8})))
    model.save_pretrained(root)
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    checkpoint = load(root)
    assert checkpoint.model.config.tied is None
    names = AutoTokenizer.from_pretrained(root)
    for text in ("The cat sat", "a dog"):
        ids = [*names(text, add_special_tokens=False).input_ids, end]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).last_hidden_state[0, -1]
        assert (embed([text, "and another one"], checkpoint)[0] - expected).abs().max() < 1e-5


def test_command_for_texts(capsys, bert):
    code, out, err = run(capsys, "embed", *TEXTS, "-m", bert)
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [row["text"] for row in rows] == TEXTS
    assert [row["line"] for row in rows] == list(range(1, len(TEXTS) + 1))
    assert torch.equal(torch.tensor([row["vector"] for row in rows]), embed(TEXTS, load(bert))) or np.allclose(
        [row["vector"] for row in rows], pooled(bert, "mean"), atol=1e-5
    )


def test_command_for_a_file_with_broken_lines(capsys, bert, tmp_path):
    """Each gets one line, the others are done, and each vector stays at the line of its text."""
    file = tmp_path / "texts.txt"
    lines = [b"the dog\r", b"", b"sea \xff", b"at the sea", b"  ", b"dogs"]
    file.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines) + b"\n")
    good = {1: "the dog", 4: "at the sea", 6: "dogs"}
    expected = embed(list(good.values()), load(bert), "cls", normalize=True).numpy()
    for ending in ("npy", "jsonl", "csv"):
        output = tmp_path / "new" / f"vectors.{ending}"
        code, out, err = run(capsys, "embed", "--file", file, "-o", output, "-m", bert, "--pooling", "cls",
                             "--normalize")  # fmt: skip
        assert code == 1
        assert [line.split(f"{file}, ")[1][:7] for line in err.splitlines()] == ["line 2:", "line 3:", "line 5:"]
        assert "is not UTF-8 text (byte 4 of the line is 0xff)" in err
        assert out == f"{output}: 3 vectors of 24\n"
    made = np.load(tmp_path / "new" / "vectors.npy")
    assert made.dtype == np.float32
    assert made.shape == (6, 24)
    assert np.isnan(made[[1, 2, 4]]).all()
    assert np.abs(made[[0, 3, 5]] - expected).max() < 1e-6
    rows = [json.loads(line) for line in (tmp_path / "new" / "vectors.jsonl").read_text().splitlines()]
    assert {row["line"]: row["text"] for row in rows} == good
    assert np.abs(np.array([row["vector"] for row in rows]) - expected).max() < 1e-6
    table = list(csv.reader((tmp_path / "new" / "vectors.csv").read_text().splitlines()))
    assert table[0] == ["line", "text", *map(str, range(1, 25))]
    assert {int(row[0]): row[1] for row in table[1:]} == good
    assert np.abs(np.array([row[2:] for row in table[1:]], float) - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("arguments", "code", "cause"),
    [
        ([], 2, "give one of TEXT, --file, --images"),
        (["a", "--file", "x"], 2, "give one of TEXT, --file, --images"),
        (["a", "-"], 2, "-: stands alone"),
        (["a", __file__], 2, "test_embed.py: is a file, which --images or --file read"),
        (["a", "--threads", "9" * 30], 2, "--threads: must be an integer in [0, 1024]"),
        (["--file", "none.txt"], 1, "--file none.txt: cannot be read (No such file or directory)"),
        (["--file", "."], 1, "--file .: not a regular file"),
        (["-"], 1, "standard input: has no line"),
        (["--file", ""], 2, "an empty name"),
        (["a", "-o", "v.txt"], 2, "--output v.txt: must end in .jsonl, .csv or .npy"),
        (["a", "--batch_tokens", "0"], 2, "--batch_tokens"),
        (["  "], 1, "text 1: is empty"),
        (["\udcff"], 1, "text 1: text '\\udcff' has a lone surrogate"),
    ],
)
def test_wrong_flags_and_texts_are_one_line(capsys, bert, tmp_path, monkeypatch, arguments, code, cause):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    found, out, err = run(capsys, "embed", *arguments, "-m", bert)
    assert (found, out) == (code, "")
    assert cause in (one_line(err) if code == 1 else err)
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_command_for_the_lines_of_the_standard_input(capsys, bert, monkeypatch):
    for arguments in (["-"], ["--file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the dog\r\nat the sea\n")))
        code, out, err = run(capsys, "embed", *arguments, "-m", bert)
        assert (code, err) == (0, "")
        assert out == run(capsys, "embed", "the dog", "at the sea", "-m", bert)[1]


def test_our_own_folder_embeds_alike(capsys, bert, tmp_path):
    save_folder(load(bert), tmp_path / "ours")
    assert (embed(TEXTS, load(tmp_path / "ours")) - embed(TEXTS, load(bert))).abs().max() < 1e-6
    code, out, _ = run(capsys, "embed", "dog", "-m", tmp_path / "ours", "--pooling", "pooler")
    assert code == 0
    assert len(json.loads(out)["vector"]) == SIZES["hidden_size"]


@pytest.mark.ci
def test_command_for_images(capsys, tmp_path):
    """A broken image gets one line, the others are done, and each vector stays at the place of its image."""
    for name in ("a", "c"):
        write_image(tmp_path / f"{name}.png", "red")
    (tmp_path / "b.png").write_text("broken")
    expected = load("clip-vit-16").encode_image([tmp_path / "a.png"])[0].numpy()
    for ending in ("npy", "jsonl", "csv"):
        output = tmp_path / f"vectors.{ending}"
        code, out, err = run(capsys, "embed", "--images", tmp_path, "-o", output, "--quiet")
        assert (code, out) == (1, f"{output}: 2 vectors of {len(expected)}\n")
        assert err.startswith(f"multimodal: error: {tmp_path / 'b.png'}: not a readable image")
        assert len(err.splitlines()) == 1
    made = np.load(tmp_path / "vectors.npy")
    np.testing.assert_allclose(made[[0, 2]], [expected, expected], atol=1e-5)
    assert np.isnan(made[1]).all()
    rows = [json.loads(line) for line in (tmp_path / "vectors.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == [str(tmp_path / f"{name}.png") for name in "ac"]
    assert (tmp_path / "vectors.csv").read_text().startswith("file,1,2,3,")
    (tmp_path / "b.png").rename(os.fsdecode(bytes(tmp_path / "b") + b"\xff.png"))  # a name that is not UTF-8
    write_image(os.fsdecode(bytes(tmp_path / "b") + b"\xff.png"), "blue")
    for ending, name in (("jsonl", b"b\\udcff.png"), ("csv", b"b\xff.png")):
        output = tmp_path / f"vectors.{ending}"
        code, _, err = run(capsys, "embed", "--images", tmp_path, "-o", output, "--quiet", "--overwrite")
        assert (code, err, name in output.read_bytes()) == (0, "", True)
    assert run(capsys, "embed", "--images", tmp_path / "none.png")[0] == 1
    code, _, err = run(capsys, "embed", "a", "--images", tmp_path)
    assert (code, "give one of TEXT, --file, --images" in err) == (2, True)
