"""Tokenizers of Hugging Face folders with added tokens, settings beside tokenizer.json and files of older layouts,
against transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multimodal.errors import CheckpointError
from multimodal.export.hf.files import write_tokenizer
from multimodal.models.text import TextTransformer
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.hub.pipeline import HubTokenizer
from multimodal.tokens.text.t5 import t5_tokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.tokens.text.translation import m2m100_tokenizer, marian_tokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.weights.folder import Checkpoint
from multimodal.weights.text import bart, bert, pegasus
from multimodal.weights.text.encoders import deberta
from tests.helpers import tiny
from tests.helpers.references.hub import BERT, CORPUS, PIPELINES, ROOM, hub_folder, merges_folder
from tests.helpers.references.translation import (
    ENGLISH,
    FAIRSEQ_IDS,
    T5_IDS,
    m2m100,
    marian,
    names_of,
    pieces,
    t5,
)
from tests.helpers.spread import thin

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
TEXTS = [
    "the cat",
    "The covid19 Cat",
    "a covid19covid19 dog, COVID19!",
    "naïve façades",
    "über  covid19 ",
    "<hl> cat <hl>",
]
NEW = {"covid19": {"single_word": False}, "<hl>": {"rstrip": True, "normalized": False}}
DECODER, TABLE = "added_tokens_decoder", "added_tokens.json"


def write(path: Path, **values: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


def add(folder: Path, first: int, where: str) -> None:
    if where == TABLE:
        write(folder / TABLE, **{token: first + i for i, token in enumerate(NEW)})
    else:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False) | {"normalized": True}
        tokens = {first + i: flags | {"content": token} | own for i, (token, own) in enumerate(NEW.items())}
        write(folder / "tokenizer_config.json", added_tokens_decoder=tokens)


def json_folder(root: Path, name: str, kind: str, **record: Any) -> tuple[Path, dict[str, Any]]:
    """A tokenizer.json, its record and the configuration of the model `kind`."""
    folder, config = hub_folder(root, name)
    named = dict(
        zip(("cls_token", "sep_token", "pad_token", "mask_token"), ("[CLS]", "[SEP]", "[PAD]", "[MASK]"), strict=True)
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps((named if name == "wordpiece" else PIPELINES[name][1]) | record)
    )
    return folder, config | {"model_type": kind, "max_position_embeddings": 64}


def words_folder(root: Path, kind: str, names: list[str] = BERT, **record: Any) -> tuple[Path, dict[str, Any]]:
    """A vocab.txt."""
    source, config = hub_folder(root, "wordpiece")
    vocab = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    renamed = dict(zip(BERT, names, strict=True))
    folder = root / "words"
    folder.mkdir()
    tokens = [renamed.get(token, token) for token in sorted(vocab, key=vocab.get)]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    write(folder / "tokenizer_config.json", **record)
    return folder, config | {"model_type": kind, "max_position_embeddings": 64}


def two_files(root: Path) -> tuple[Path, dict[str, Any]]:
    """RoBERTa's vocab.json and merges.txt."""
    folder, config = merges_folder(root, "roberta")
    write(folder / "tokenizer_config.json", tokenizer_class="RobertaTokenizer")
    size = len(json.loads((folder / "vocab.json").read_text())) + ROOM
    return folder, config | {"vocab_size": size, "max_position_embeddings": 64}


def same(tokenizer: Tokenizer, folder: Path, config: dict[str, Any], texts: list[str] = TEXTS) -> None:
    """Ids, texts and rows equal transformers', also after a save and in an exported folder."""
    from transformers import AutoTokenizer

    write(folder / "config.json", **config)
    theirs = AutoTokenizer.from_pretrained(folder)
    tokenizer.save(folder / "ours")
    for own in (tokenizer, tokenizer_from(folder / "ours")):
        for text in texts + CORPUS[:5]:
            ids = theirs(text).input_ids
            assert own.encode(text) == theirs(text, add_special_tokens=False).input_ids, text
            assert own.batch([text]).ids[0].tolist() == ids, text
            assert own.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    (folder / "export").mkdir()
    assert write_tokenizer(Checkpoint(TextTransformer(tiny.text(causal=False)), tokenizer), folder / "export")
    shutil.copy(folder / "config.json", folder / "export")
    exported = AutoTokenizer.from_pretrained(folder / "export")
    for text in texts + CORPUS[:5]:
        assert exported(text).input_ids == theirs(text).input_ids, text
    assert all(exported.convert_tokens_to_ids(name) == i for name, i in tokenizer.control_names.items())


def encoder(folder: Path, config: dict[str, Any]) -> Tokenizer:
    tokenizer = bert.encoder_tokenizer(folder, config)
    assert tokenizer is not None
    return tokenizer


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("where", [DECODER, TABLE])
@pytest.mark.parametrize("made", [
    lambda root: words_folder(root, "bert", tokenizer_class="BertTokenizer"),
    lambda root: json_folder(root, "wordpiece", "bert", tokenizer_class="BertTokenizer"),
    lambda root: json_folder(root, "byte-level", "roberta", tokenizer_class="PreTrainedTokenizerFast"),
    lambda root: two_files(root),
], ids=["vocab.txt", "wordpiece", "byte-level", "merges"])  # fmt: skip
def test_added_tokens_are_found_in_texts(tmp_path, made: Callable[[Path], tuple[Path, dict[str, Any]]], where):
    folder, config = made(tmp_path)
    first = config["vocab_size"] - ROOM
    config |= {"vocab_size": first + 4}
    add(folder, first, where)
    tokenizer = encoder(folder, config)
    assert first in tokenizer.encode("a covid19 cat")
    same(tokenizer, folder, config)


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(("name", "record"), [
    ("wordpiece", {"tokenizer_class": "BertTokenizer", "do_lower_case": False}),
    ("wordpiece", {"tokenizer_class": "BertTokenizerFast", "strip_accents": False}),
    ("wordpiece", {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}),
    ("wordpiece", {"do_lower_case": False}),
    ("byte-level", {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True}),
    ("byte-level", {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True}),
])  # fmt: skip
@pytest.mark.parametrize("ends", [True, False])
def test_settings_beside_tokenizer_json_override_it_for_the_classes_that_read_them(tmp_path, name, record, ends):
    folder, config = json_folder(tmp_path, name, {"wordpiece": "bert", "byte-level": "roberta"}[name], **record)
    if not ends:  # the classes put theirs, transformers' general class none
        write(folder / "tokenizer.json", post_processor=None)
    tokenizer = encoder(folder, config)
    same(tokenizer, folder, config)
    assert (tokenizer.eos_id is None) == (not ends and record.get("tokenizer_class") == "PreTrainedTokenizerFast")


def test_mpnets_vocab_txt_has_its_own_special_tokens(tmp_path):
    names = ["<pad>", "[UNK]", "<s>", "</s>", "<mask>"]
    folder, config = words_folder(tmp_path, "mpnet", names, tokenizer_class="MPNetTokenizer")
    tokenizer = encoder(folder, config)
    same(tokenizer, folder, config, TEXTS[:-1])
    assert (tokenizer.pair_ends, tokenizer.mask_id, tokenizer.unknown_id, tokenizer.pad_id) == (2, 4, 1, 0)
    write(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    with pytest.raises(CheckpointError, match=r"vocab\.txt: the vocabulary lacks \[CLS\]"):
        encoder(folder, config)


@pytest.mark.parametrize("source", ["record", "config"])
def test_another_class_with_a_vocab_txt_is_refused_by_name(tmp_path, source):
    kind = {"tokenizer_class": "BertJapaneseTokenizer"}
    folder, config = words_folder(tmp_path, "bert", **(kind if source == "record" else {}))
    with pytest.raises(CheckpointError, match=r"vocab\.txt: tokenizer_class 'BertJapaneseTokenizer' is not supported"):
        encoder(folder, config | (kind if source == "config" else {}))


def test_a_class_whose_letters_contradict_tokenizer_json_is_refused(tmp_path):
    folder, config = json_folder(
        tmp_path, "unigram", "deberta-v2", tokenizer_class="DebertaV2Tokenizer", do_lower_case=True
    )
    with pytest.raises(
        CheckpointError, match=r"do_lower_case True of tokenizer_config\.json contradicts the normalizer"
    ):
        encoder(folder, config)


@pytest.mark.parametrize("layout", ["tokenizer.json", DECODER, TABLE])
def test_t5s_added_tokens_are_found_in_texts(tmp_path, layout):
    from transformers import T5Tokenizer

    held = t5(tmp_path)
    config = {"vocab_size": held + 28, "model_type": "t5"}
    if layout == "tokenizer.json":
        made = T5Tokenizer.from_pretrained(tmp_path, extra_ids=20)
        made.add_tokens(list(NEW))
        made.save_pretrained(tmp_path)
        assert (tmp_path / "spiece.model").exists()
    else:
        add(tmp_path, held + 20, layout)
    tokenizer = t5_tokenizer(tmp_path, config)
    assert isinstance(tokenizer, HubTokenizer)
    assert held + 20 in tokenizer.encode("a covid19 cat")
    assert list(tokenizer.sentinel_ids) == [held + 19 - i for i in range(20)]
    same(tokenizer, tmp_path, config)
    with pytest.raises(CheckpointError, match=f"has id {held + 21}, the model has {held + 21} tokens"):
        t5_tokenizer(tmp_path, config | {"vocab_size": held + 21})


ALBERT_IDS = (("pad_id", 0), ("unk_id", 1), ("bos_id", -1), ("eos_id", -1))
SPECIAL = ("[CLS]", "[SEP]", "[MASK]")


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(("kind", "own", "ids", "more", "around", "record"), [
    ("xlm-roberta", "XLMRobertaTokenizer", FAIRSEQ_IDS, 2, (0, 2, 1, 3), {}),
    ("camembert", "CamembertTokenizer", FAIRSEQ_IDS, 5, (5, 6, 1, 3), {}),
    ("albert", "AlbertTokenizer", ALBERT_IDS, 0, (2, 3, 0, 1), {}),
    ("albert", "AlbertTokenizer", ALBERT_IDS, 0, (2, 3, 0, 1), {"do_lower_case": False, "keep_accents": True}),
    ("pegasus", "PegasusTokenizer", T5_IDS, 103, (None, 1, 0, 105), {}),
    ("mbart", "MBart50Tokenizer", FAIRSEQ_IDS, 54, (None, 2, 1, 3), {}),
])  # fmt: skip
def test_a_sentencepiece_model_in_another_order_of_ids_is_read(tmp_path, kind, own, ids, more, around, record):
    import transformers

    file = "spiece.model" if kind in ("albert", "pegasus") else "sentencepiece.bpe.model"
    model = pieces(tuple(ENGLISH), 60, ids, symbols=SPECIAL if kind == "albert" else ())
    (tmp_path / file).write_bytes(model)
    write(tmp_path / "tokenizer_config.json", tokenizer_class=own, **record)
    config = {"vocab_size": len(names_of(model)) + more, "model_type": kind, "max_position_embeddings": 64}
    tokenizer = (bart.tokenizer if kind in ("pegasus", "mbart") else bert.encoder_tokenizer)(tmp_path, config)
    theirs = getattr(transformers, own).from_pretrained(tmp_path)
    assert max(theirs.get_vocab().values()) < config["vocab_size"]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unknown_id) == around
    assert tokenizer.control.isdisjoint(tokenizer.encode("</s><mask>[CLS] de_DE <unk_2> <pad>"))
    texts = ["  The  ``Cat'' at the séa", "the\tdog\nsits", "ＣＡＴ ½"]
    for text in [*texts, *ENGLISH[:5]]:
        ids = theirs(text).input_ids
        assert tokenizer.encode(text) == theirs(text, add_special_tokens=False).input_ids
        assert [*tokenizer.batch([text]).ids[0]] == (ids[1:] if kind == "mbart" else ids)  # a direction names languages
    if kind == "mbart":
        codes = ("en_XX", "de_DE", "sl_SI")
        assert [tokenizer.language_ids[code] for code in codes] == theirs.convert_tokens_to_ids(codes)
    elif kind != "pegasus":
        assert tokenizer.mask_id == theirs.mask_token_id
        first, second = theirs(ENGLISH[0], ENGLISH[1])["input_ids"], tokenizer.pair(ENGLISH[0], ENGLISH[1])[0]
        assert first == second
    if kind != "mbart":
        same(tokenizer, tmp_path, config, texts)


def test_blenderbots_two_files_are_read_and_nllbs_need_tokenizer_json(tmp_path):
    from transformers import BlenderbotTokenizer

    folder, config = merges_folder(tmp_path, "roberta")
    theirs = BlenderbotTokenizer.from_pretrained(folder)
    tokenizer = pegasus.BLENDERBOT.tokenizer(folder, config | {"model_type": "blenderbot"})
    for text in TEXTS:  # transformers 5 leaves out the eos
        assert tokenizer.batch([text]).ids[0].tolist() == [*theirs(text).input_ids, tokenizer.eos_id]
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"bpe\.model: not read without vocab\.json .* or tokenizer\.json"):
        assert m2m100_tokenizer(tmp_path, {"vocab_size": 9}) is None


@pytest.mark.parametrize("kind", ["marian", "m2m100"])
def test_a_translators_added_tokens_are_found_in_texts(tmp_path, kind):
    from transformers import M2M100Tokenizer, MarianTokenizer

    size = {"marian": marian, "m2m100": m2m100}[kind](tmp_path)
    first = size - (8 if kind == "m2m100" else 0)
    write(tmp_path / TABLE, covid19=first, foo=first + 1)
    read = {"marian": marian_tokenizer, "m2m100": m2m100_tokenizer}[kind]
    tokenizer = read(tmp_path, {"vocab_size": size + 2})
    theirs = {"marian": MarianTokenizer, "m2m100": M2M100Tokenizer}[kind].from_pretrained(tmp_path)
    tokenizer.save(tmp_path / "ours")
    for own in (tokenizer, tokenizer_from(tmp_path / "ours")):
        for text in ["the covid19 cat", "foocovid19", "covid19", "the cat at sea foo"]:
            ids = theirs(text, add_special_tokens=False).input_ids
            ids = ids if kind == "marian" else theirs(text).input_ids[1:-1]
            assert own.encode(text) == [i for i in ids if i != own.eos_id], text
            assert own.decode(own.encode(text)) == theirs.decode(ids, skip_special_tokens=True)
    add(tmp_path, first, DECODER)
    with pytest.raises(CheckpointError, match="added token '<hl>': rstrip is not supported"):
        read(tmp_path, {"vocab_size": size + 2})


def test_m2m100s_files_of_another_class_are_refused_by_name(tmp_path):
    size = m2m100(tmp_path)
    write(tmp_path / "tokenizer_config.json", tokenizer_class="SMALL100Tokenizer")
    with pytest.raises(CheckpointError, match=r"expected tokenizer_class M2M100Tokenizer .got 'SMALL100Tokenizer'"):
        m2m100_tokenizer(tmp_path, {"vocab_size": size})


def test_debertas_sentencepiece_model_is_read(tmp_path):
    """Normalized as the model itself does (NFKC), which transformers 5 no longer does."""
    import sentencepiece

    names = (("pad_id", 0), ("bos_id", 1), ("eos_id", 2), ("unk_id", 3), ("pad_piece", "[PAD]"),
             ("bos_piece", "[CLS]"), ("eos_piece", "[SEP]"), ("unk_piece", "[UNK]"))  # fmt: skip
    model = pieces(tuple(ENGLISH), 60, names)
    (tmp_path / "spm.model").write_bytes(model)
    write(tmp_path / "tokenizer_config.json", do_lower_case=False, vocab_type="spm")
    read = sentencepiece.SentencePieceProcessor(model_proto=model)
    count = read.vocab_size()
    config = {"vocab_size": count + 8, "model_type": "deberta-v2", "max_position_embeddings": 64}
    tokenizer = deberta.tokenizer(tmp_path, config)
    same(tokenizer, tmp_path, config, ["the  cat ", "a dog\n at sea"])
    assert (tokenizer.mask_id, tokenizer.unknown_id, tokenizer.pad_id) == (count, 3, 0)
    for text in [*ENGLISH[:4], "ｔｈｅ ﬁ… cat", "the\u00a0cat\u200b ½"]:
        assert tokenizer.encode(text) == read.encode(text)
    write(tmp_path / "tokenizer_config.json", split_by_punct=True)
    with pytest.raises(CheckpointError, match=r"split_by_punct is not supported without tokenizer\.json"):
        deberta.tokenizer(tmp_path, config)


def test_an_added_token_of_llamas_pipeline_is_decoded_with_the_blank_that_it_takes(tmp_path):
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    folder, config = hub_folder(tmp_path, "llama2")
    theirs = Backend.from_file(str(folder / "tokenizer.json"))
    theirs.add_tokens([AddedToken("<tool>", normalized=True)])
    theirs.save(str(folder / "tokenizer.json"))
    tokenizer = hub_tokenizer(folder, config | {"vocab_size": theirs.get_vocab_size()})
    ids = theirs.encode("the cat <tool> sat", add_special_tokens=False).ids
    assert tokenizer.encode("the cat <tool> sat") == ids
    assert tokenizer.decode(ids) == theirs.decode(ids) == "the cat <tool> sat"
