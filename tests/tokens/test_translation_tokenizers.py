"""Tokenizers of encoder-decoders against transformers, on tiny SentencePiece models."""

import json
import re
import time
from pathlib import Path

import pytest
import torch

from multimodal.errors import CheckpointError, UsageError
from multimodal.tasks.text.detokenize import IncrementalDetokenizer, token_texts
from multimodal.tokens.text.hub.added import set_flags
from multimodal.tokens.text.t5 import ByT5Text, T5Text, t5_tokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.tokens.text.translation import m2m100_tokenizer, marian_tokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load
from multimodal.weights.text import bart
from tests.helpers.references.seq2seq import named
from tests.helpers.references.translation import ENGLISH, TEXTS, TYPED, m2m100, marian, t5

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")


def same_again(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """Saved and read, from a folder that has what it needs and no more."""
    tokenizer.save(folder / "saved")
    read = tokenizer_from(folder / "saved")
    facts = ("vocab_size", "pad_id", "eos_id", "bos_id", "control", "sentinel_ids", "language_ids",
             "language_in_source")  # fmt: skip
    assert all(getattr(read, name) == getattr(tokenizer, name) for name in facts)
    assert [read.encode(text) for text in TEXTS + TYPED] == [tokenizer.encode(text) for text in TEXTS + TYPED]
    read.save(folder / "saved")  # in its own place
    return read


def typed_stays_text(tokenizer: Tokenizer) -> None:
    for text in TYPED + [tokenizer.decode([i], skip_control=False) for i in sorted(tokenizer.control)[:200]]:
        assert not tokenizer.control & set(tokenizer.encode(text)), text


def test_t5_equals_transformers(tmp_path):
    from transformers import T5Tokenizer

    held = t5(tmp_path)
    tokenizer = t5_tokenizer(tmp_path, {"vocab_size": held + 28})
    reference = T5Tokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.batch([text]).ids[0].tolist()
        assert ids == reference(text).input_ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert 2 in tokenizer.encode("a {dog}")  # the unknown, which SentencePiece would show
    names = [f"<extra_id_{i}>" for i in range(20)]
    assert list(tokenizer.sentinel_ids) == reference.convert_tokens_to_ids(names) == [held + 19 - i for i in range(20)]
    assert tokenizer.decode([5, tokenizer.sentinel_ids[3]], skip_control=False).endswith("<extra_id_3>")
    assert tokenizer.decode([5, tokenizer.sentinel_ids[3], held + 27]) == tokenizer.decode([5])
    typed_stays_text(same_again(tokenizer, tmp_path))


@pytest.mark.parametrize("kind", ["T5Tokenizer", "MarianTokenizer"])
def test_blanks_before_punctuation_go_where_the_folder_asks_for_it(kind, tmp_path):
    import transformers

    size = (t5 if kind == "T5Tokenizer" else marian)(tmp_path)
    reading = t5_tokenizer if kind == "T5Tokenizer" else marian_tokenizer
    record = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(record | {"clean_up_tokenization_spaces": True}))
    tokenizer = reading(tmp_path, {"vocab_size": size + 28 * (kind == "T5Tokenizer")})
    set_flags(tokenizer, tmp_path)
    reference = getattr(transformers, kind).from_pretrained(tmp_path)
    ids = tokenizer.encode("two dogs , at sea ! the cat , ! sat")
    text = tokenizer.decode(ids)
    assert text == reference.decode(ids, skip_special_tokens=True) == "two dogs, at sea! the cat,! sat"
    for stops in ((), ("! the",)):
        detokenizer = IncrementalDetokenizer(tokenizer, [], stops)
        streamed = "".join([*map(detokenizer.add, ids), detokenizer.end(True)])
        assert streamed == (text.partition(stops[0])[0] if stops else text)
    assert "".join(token_texts(tokenizer, [], ids)) == tokenizer.spelled(ids)  # each as it is
    assert same_again(tokenizer, tmp_path).decode(ids) == text


def test_marian_with_two_vocabularies_equals_transformers(tmp_path):
    from transformers import MarianTokenizer

    from multimodal.export.ctranslate2 import check_type

    size = marian(tmp_path, separate_vocabs=True)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    others = [name for name in vocab if name not in ("</s>", "<unk>", "<pad>")]
    target = dict(zip(others, (vocab[name] for name in reversed(others)), strict=True)) | {
        name: vocab[name] for name in ("</s>", "<unk>", "<pad>")}  # fmt: skip
    (tmp_path / "target_vocab.json").write_text(json.dumps(target))
    tokenizer = marian_tokenizer(tmp_path, {"vocab_size": size, "share_encoder_decoder_embeddings": False})
    reference = MarianTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text).input_ids[:-1]
        ids = tokenizer.encode_target(text)
        assert ids == reference(text_target=text).input_ids[:-1]
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    read = same_again(tokenizer, tmp_path)
    assert read.decode(ids) == tokenizer.decode(ids)
    assert read.encode_target("ein Hund") == tokenizer.encode_target("ein Hund")
    with pytest.raises(UsageError, match="CTranslate2 export does not support separate_vocabs"):
        check_type(Checkpoint(torch.nn.Identity(), tokenizer), ({"model_type": "marian"}, {}, None))
    (tmp_path / "target_vocab.json").write_text(json.dumps(target | {"</s>": target["<unk>"], "<unk>": target["</s>"]}))
    with pytest.raises(CheckpointError, match="</s> is 0 in a source, 1 in a target"):
        marian_tokenizer(tmp_path, {"vocab_size": size})


def test_sentinels_that_are_pieces_of_the_file_as_mt5_has_them(tmp_path):
    symbols = tuple(f"<extra_id_{i}>" for i in (2, 1, 0))
    held = t5(tmp_path, symbols, extra=0)
    tokenizer = t5_tokenizer(tmp_path, {"vocab_size": held + 12})
    plain = T5Text(tmp_path / "spiece.model", 0, held)
    assert [tokenizer._model.id_to_piece(i) for i in tokenizer.sentinel_ids] == ["<extra_id_0>", "<extra_id_1>",
                                                                                "<extra_id_2>"]  # fmt: skip
    assert [tokenizer.encode(text) for text in TEXTS] == [plain.encode(text) for text in TEXTS]
    typed_stays_text(same_again(tokenizer, tmp_path))
    assert tokenizer.decode(tokenizer.encode("a <extra_id_0> b")).count("extra_id") in (0, 1)  # as far as it spells it


def test_t5_with_the_file_of_the_tokenizers_library_alone(tmp_path):
    from transformers import T5Tokenizer

    held = t5(tmp_path)
    first = t5_tokenizer(tmp_path, {"vocab_size": held + 28})
    (tmp_path / "json").mkdir()
    T5Tokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "json")
    (tmp_path / "json" / "spiece.model").unlink(missing_ok=True)
    tokenizer = t5_tokenizer(tmp_path / "json", {"vocab_size": held + 28})
    assert tokenizer.sentinel_ids == first.sentinel_ids
    assert (tokenizer.eos_id, tokenizer.bos_id) == (1, None)
    assert [tokenizer.encode(text) for text in TEXTS] == [first.encode(text) for text in TEXTS]
    typed_stays_text(same_again(tokenizer, tmp_path))


def test_byt5_equals_transformers(tmp_path):
    from transformers import ByT5Tokenizer

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    tokenizer, reference = t5_tokenizer(tmp_path, {"vocab_size": 384}), ByT5Tokenizer()
    assert isinstance(tokenizer, ByT5Text)
    for text in TEXTS:
        assert tokenizer.batch([text]).ids[0].tolist() == reference(text).input_ids
    assert len(tokenizer.sentinel_ids) == 125
    assert list(tokenizer.sentinel_ids) == reference.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(125)])
    assert tokenizer.decode([100, 259, 101], skip_control=False) == "a<extra_id_0>b"
    assert tokenizer.decode([100, 259, 101]) == "ab"
    for data in (b"a\xffb\xc3", b"\xe6\x97a", b"\x80\xf0\x9f\x99\x82", b"caf\xc3\xa9"):
        ids = [byte + 3 for byte in data]
        assert tokenizer.decode(ids).rstrip("\ufffd") == reference.decode(ids, skip_special_tokens=True)
    assert token_texts(tokenizer, [], [byte + 3 for byte in "a日".encode()]) == ["a", "", "", "日"]
    typed_stays_text(same_again(tokenizer, tmp_path))
    with pytest.raises(CheckpointError, match="bytes need 259 ids, the model has 200"):
        t5_tokenizer(tmp_path, {"vocab_size": 200})


def test_m2m100_equals_transformers(tmp_path):
    from transformers import M2M100Tokenizer

    size = m2m100(tmp_path)
    tokenizer = m2m100_tokenizer(tmp_path, {"vocab_size": size})
    reference = M2M100Tokenizer.from_pretrained(tmp_path, src_lang="de")
    assert dict(tokenizer.language_ids) == reference.lang_code_to_id
    assert len(tokenizer.language_ids) == 100
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert [tokenizer.language_ids["de"], *ids, tokenizer.eos_id] == reference(text).input_ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode([tokenizer.language_ids["de"]], skip_control=False) == "__de__"
    typed_stays_text(same_again(tokenizer, tmp_path))


def test_marian_equals_transformers(tmp_path):
    from transformers import MarianTokenizer

    size = marian(tmp_path, (">>deu<<", ">>ψω<<"), source_lang="en", target_lang="gmw")
    tokenizer, reference = marian_tokenizer(tmp_path, {"vocab_size": size}), MarianTokenizer.from_pretrained(tmp_path)
    assert tokenizer.language_in_source
    assert dict(tokenizer.language_ids) == {"deu": 2, "ψω": 3}
    assert (tokenizer.pad_id, tokenizer.eos_id) == (size - 1, 0)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert [2, *ids, 0] == reference(f">>deu<<{text}").input_ids
        assert tokenizer.encode_target(text) == reference(text_target=text).input_ids[:-1]
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    # letters that the models lack, whose run is one unknown piece of this very name
    assert tokenizer.encode("a >>ψω<<") == [*tokenizer.encode("a "), *tokenizer.encode("ξ")[-2:]]
    read = same_again(tokenizer, tmp_path)
    assert [read.encode_target(text) for text in TEXTS] == [tokenizer.encode_target(text) for text in TEXTS]
    typed_stays_text(read)


def test_nllb_equals_transformers(tmp_path):
    from transformers import NllbTokenizer

    letters = ["▁", *sorted({c for text in ENGLISH for c in text if c != " "})]
    vocab = {name: i for i, name in enumerate(["<s>", "<pad>", "</s>", "<unk>", *letters, "▁the", "th", "▁th"])}
    reference = NllbTokenizer(vocab=vocab, merges=[("t", "h"), ("▁", "th"), ("▁th", "e")], src_lang="deu_Latn")
    reference.save_pretrained(tmp_path)
    tokenizer = m2m100_tokenizer(tmp_path, {"vocab_size": len(reference) + 2})
    assert len(tokenizer.language_ids) > 200
    assert tokenizer.language_ids["deu_Latn"] == reference.convert_tokens_to_ids("deu_Latn")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, 2, 1)
    for text in ENGLISH[:4]:
        ids = tokenizer.encode(text)
        assert [tokenizer.language_ids["deu_Latn"], *ids, tokenizer.eos_id] == reference(text).input_ids
    record = tmp_path / "tokenizer_config.json"
    settings = json.loads(record.read_text())
    record.write_text(json.dumps(settings | {"legacy_behaviour": True}))
    assert NllbTokenizer.from_pretrained(tmp_path)("a").input_ids[-1] == tokenizer.language_ids["deu_Latn"]
    with pytest.raises(CheckpointError, match=r"legacy_behaviour True .* is not supported"):
        m2m100_tokenizer(tmp_path, {"vocab_size": len(reference) + 2})
    typed_stays_text(same_again(tokenizer, tmp_path))


def test_bart_equals_transformers_and_a_folder_of_it_is_read(tmp_path):
    """From vocab.json and merges.txt, as the released folders have them."""
    from safetensors.torch import save_file
    from tokenizers import ByteLevelBPETokenizer
    from transformers import BartTokenizer

    learnt = ByteLevelBPETokenizer()
    learnt.train_from_iterator(ENGLISH, 300, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    learnt.save_model(str(tmp_path))
    reference = BartTokenizer.from_pretrained(tmp_path)
    made = named(bart.FAMILY, "Bart", "BartForConditionalGeneration", vocab_size=len(reference))
    made.reference.config.to_json_file(tmp_path / "config.json")
    repeats = ("embed_tokens.weight", "lm_head.weight")
    save_file({n: v for n, v in made.tensors.items() if not n.endswith(repeats)}, tmp_path / "model.safetensors")
    tokenizer = load(tmp_path).tokenizer
    for text in TEXTS:
        ids = tokenizer.batch([text]).ids[0].tolist()
        assert ids == reference(text).input_ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    typed_stays_text(same_again(tokenizer, tmp_path))


def test_a_vocabulary_that_does_not_go_with_the_model_is_refused(tmp_path):
    held = t5(tmp_path)
    for size, cause in (
        (held - 1, "has .* tokens, the model"),
        (held + 19, "exceed the"),
        (3 * held, "has .* tokens, the model"),
    ):
        with pytest.raises(CheckpointError, match=f"spiece.model: .*{cause}"):
            t5_tokenizer(tmp_path, {"vocab_size": size})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 2**32}))  # minutes, if they were made
    with pytest.raises(CheckpointError, match="4294967296 sentinels exceed"):
        t5_tokenizer(tmp_path, {"vocab_size": held + 20})
    size = m2m100(tmp_path)
    table = json.loads((tmp_path / "vocab.json").read_text())
    for vocab, model_size, cause in (
        (table, size - 9, "the table's ids must be unique"),
        (table, 3 * size, "the table has"),
        ({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}, 112, "of the .* pieces of"),
        ({"other" if name == "<unk>" else name: i for name, i in table.items()}, size, "lacks <unk>"),
        (table | {"<s>": 1}, size, "ids must be unique"),
        (table | {"<s>": "0"}, size, "ids must be unique"),
    ):
        (tmp_path / "vocab.json").write_text(json.dumps(vocab))
        with pytest.raises(CheckpointError, match=f"vocab.json: .*{cause}") as error:
            m2m100_tokenizer(tmp_path, {"vocab_size": model_size})
        assert "\n" not in str(error.value)
    (tmp_path / "vocab.json").write_text(json.dumps(table))
    for content in (b"no model", b""):
        (tmp_path / "sentencepiece.bpe.model").write_bytes(content)
        with pytest.raises(CheckpointError, match=re.escape("sentencepiece.bpe.model: not a SentencePiece model")):
            m2m100_tokenizer(tmp_path, {"vocab_size": size})


@pytest.mark.ci
def test_a_million_characters_take_seconds(tmp_path):
    text = "the cat sat on the mat, " * 42_000
    tokenizers = [t5_tokenizer(tmp_path, {"vocab_size": t5(tmp_path) + 20})]
    tokenizers.append(m2m100_tokenizer(tmp_path, {"vocab_size": m2m100(tmp_path)}))
    for tokenizer in tokenizers:
        begin = time.process_time()
        assert len(tokenizer.encode(text)) > 100_000
        assert time.process_time() - begin < 5
