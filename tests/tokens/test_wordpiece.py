"""WordPiece against transformers' BertTokenizer."""

import json
import shutil
import string

import pytest

from multimodal.errors import CheckpointError, TextError
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.tokens.text.wordpiece import WordPieceTokenizer

SPECIALS = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["two", "dog", "##s", "on", "the", "bea", "##ch", "it", "'", "##'", ".", ",", "!", "[", "]", "sep", "cafe",
         "don", "犬"]  # fmt: skip
LETTERS = [*string.ascii_lowercase, *string.digits, *(f"##{c}" for c in string.ascii_lowercase + string.digits)]
VOCABULARY = SPECIALS + list(dict.fromkeys(WORDS + LETTERS))
VOCABULARY.remove("q")
SIZE = len(VOCABULARY) + 2
TEXTS = [
    "Two dogs on the beach.", "  two\tDOGS,\n\non   the beach!  ", "Café au lait, don't it's", "犬 two犬dogs",
    "queue é€ 42", "x" * 101, "", "   ", "a-b_c/d", "İstanbul ﬁne ①", "zero\u200bwidth\x00 \ufffd soft\u00adhyphen",
    "##s ##",
]  # fmt: skip


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """transformers' tokenizer and a folder with its files, of either kind."""
    from transformers import BertTokenizer

    made = BertTokenizer(vocab={token: i for i, token in enumerate(VOCABULARY)})
    json_folder, text_folder = (tmp_path_factory.mktemp(name) for name in ("json", "text"))
    made.save_pretrained(json_folder)
    (text_folder / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCABULARY), encoding="utf-8")
    (text_folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return made, {"json": json_folder, "text": text_folder}


@pytest.fixture(params=["json", "text"])
def ours(bert, request):
    return WordPieceTokenizer.from_bert(bert[1][request.param], SIZE, SIZE - 2, 4, 20)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_equal_transformers(bert, ours, text):
    reference = bert[0]
    ids = reference(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text) == ids
    assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_a_caption_is_framed_and_control_tokens_are_not_shown(ours):
    batch = ours.batch(["two dogs"])
    assert batch.ids[0, 0] == SIZE - 2
    assert batch.ids[0, -1] == 4
    assert ours.decode(batch.ids[0].tolist()) == "two dogs"
    assert ours.decode([SIZE - 1, 0, 3, 4, 5, 2]) == ""
    assert ours.decode([SIZE - 1, 4], skip_control=False) == f"[{SIZE - 1}] [SEP]"
    with pytest.raises(TextError, match="outside the vocabulary"):
        ours.decode([SIZE])


@pytest.mark.parametrize("text", ["[SEP]", "a [CLS] [MASK][PAD] [unused0]", f"[{SIZE - 1}]"])
def test_control_tokens_in_a_text_are_text(ours, text):
    ids = ours.encode(text)
    assert not ours.control & set(ids)
    assert ours.decode(ids).replace(" ", "") == text.lower().replace(" ", "")


def test_saved_and_read_again_it_is_the_same(ours, tmp_path):
    ours.save(tmp_path)
    read = tokenizer_from(tmp_path)
    assert vars(read) | {"_backend": 0} == vars(ours) | {"_backend": 0}
    assert [read.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_case_and_accents_are_kept_where_the_files_say_so(bert, tmp_path):
    folder = shutil.copytree(bert[1]["text"], tmp_path / "cased")
    record = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(record))
    cased = WordPieceTokenizer.from_bert(folder, SIZE, 3, 4, 20)
    assert cased.encode("Two") == [2]
    assert cased.encode("cafe") != cased.encode("café")


def _damaged(folder, damage):
    file = folder / "tokenizer.json"
    record = json.loads(file.read_text())
    damage(record)
    file.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda r: r["model"].update(type="BPE"), "expected BERT's WordPiece"),
        (lambda r: r["model"]["vocab"].pop("[UNK]"), "each once"),
        (lambda r: r["model"]["vocab"].update(extra=len(VOCABULARY) + 9), "each once"),
        (lambda r: r["model"]["vocab"].update({str(i): len(VOCABULARY) + i - 10 for i in range(10, 13)}), "the model"),
        (lambda r: r.update(normalizer=None), "expected BERT's WordPiece"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(bert, tmp_path, damage, cause):
    folder = shutil.copytree(bert[1]["json"], tmp_path / "damaged")
    _damaged(folder, damage)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: .*{cause}"):
        WordPieceTokenizer.from_bert(folder, SIZE, 3, 4, 20)


@pytest.mark.parametrize(
    ("bos", "cause"), [(SIZE, "outside the vocabulary"), *((wrong, "must be an id") for wrong in (None, True, [3]))]
)
def test_control_ids_outside_the_vocabulary_are_refused(bert, bos, cause):
    with pytest.raises(CheckpointError, match=rf"vocab\.txt: .*{cause}"):
        WordPieceTokenizer.from_bert(bert[1]["text"], SIZE, bos, 4, 20)


@pytest.mark.parametrize(
    ("text", "cause"),
    [("[PAD]\n[UNK]\n[CLS]\n[SEP]\n", "lacks .MASK."), ("\n".join([*SPECIALS, "a", "a"]), "twice"), (None, "missing")],
)
def test_a_damaged_vocabulary_file_is_refused(bert, tmp_path, text, cause):
    folder = shutil.copytree(bert[1]["text"], tmp_path / "damaged")
    (folder / "vocab.txt").unlink() if text is None else (folder / "vocab.txt").write_text(text)
    with pytest.raises(CheckpointError, match=rf"vocab\.txt: .*{cause}"):
        WordPieceTokenizer.from_bert(folder, SIZE, 3, 4, 20)
