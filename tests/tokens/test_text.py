"""Tokenizers: equal to the references and lossless; text never yields control tokens."""

import json
import random
import time
from pathlib import Path

import pytest
import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.system.assets import asset
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.clip import CLIPTokenizer
from multimodal.tokens.text.languages import LANGUAGES, language_code
from multimodal.tokens.text.sentencepiece import ByteTokenizer, SentencePieceTokenizer, SigLIPText, canonicalize
from multimodal.tokens.text.tiktokens import GPT2Tokenizer, WhisperTokenizer
from multimodal.tokens.text.tokenizer import TextCut
from multimodal.tokens.text.vocabulary import tokenizer_from
from tests.helpers.references import texts as text_references
from tests.helpers.references.texts import noise
from tests.helpers.spread import thin

ORDINARY = [
    "a photo of a cat",
    "  Two  dogs\n\tPLAYING in the   snow. ",
    "It's 2024: they've paid $1,234.56 (50 % off!) & we'll go",
    "caf\u00e9 na\u00efve \u00dcber \u00df \u0130stanbul \u017f '\u017f \u01c5",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \u4e2d\u6587 \ud55c\uad6d\uc5b4",
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439",
    "\U0001f937\U0001f3fd\u200d\u2640\ufe0f thumbs \U0001f44d",
    "&lt;b&gt; bread &amp;amp; butter &eacute;",
    "schÃ¶n \u2018quoted\u2019 text \u2026",
    "x_y-z/w... !!! ??",
    "\u0661\u0662\u0663 \u00bd \u2167 \u00b2",
    "",
    "   ",
]
TYPED = ["<eos> <bos><pad>", "cat <end_of_text> dog", "<|endoftext|>", "<|en|><|1.00|>", "</s><unk>"]


@pytest.fixture(scope="module")
def bpe():
    corpus = ["the cat sat on the mat", "the dog sat on the log", "<eos> <pad> the <eos>", "Caf\u00e9 Caf\u00e9"]
    return BytePairTokenizer.train(corpus * 4, vocab_size=320)


@pytest.fixture(scope="module", name="open_clip_tokenizer")
def reference():
    return text_references.open_clip_tokenizer()


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    return text_references.tiny_pieces(tmp_path_factory.mktemp("pieces"))


@pytest.fixture
def every(bpe, pieces):
    whisper = [WhisperTokenizer(True), WhisperTokenizer(True, 100), WhisperTokenizer(False)]
    clip = CLIPTokenizer(context=20)
    return [bpe, clip, GPT2Tokenizer(), ByteTokenizer(), SentencePieceTokenizer(pieces), SigLIPText(pieces), *whisper]


def test_no_text_yields_a_control_id(every):
    for tokenizer in every:
        names = [tokenizer.decode([i], skip_control=False) for i in sorted(tokenizer.control)[:120]]
        for text in [*TYPED, *names]:
            assert not tokenizer.control & set(tokenizer.encode(text)), (type(tokenizer).__name__, text)


def test_saved_and_built_again_gives_the_same_ids(every, tmp_path):
    for i, tokenizer in enumerate(every):
        folder = tmp_path / str(i)
        tokenizer.save(folder)
        again = tokenizer_from(folder)
        assert again.vocab_size == tokenizer.vocab_size
        assert again.context == tokenizer.context
        for left, right in zip(again.batch(ORDINARY, 64), tokenizer.batch(ORDINARY, 64), strict=True):
            assert left == right if isinstance(left, list) else torch.equal(left, right)


def test_lossless_on_any_unicode(bpe):
    for tokenizer in [bpe, GPT2Tokenizer(), ByteTokenizer(), WhisperTokenizer(True), WhisperTokenizer(False)]:
        for text in ORDINARY + TYPED + noise(20, 100):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_ids_are_dropped_or_written_out(every):
    for tokenizer in every:
        row = tokenizer.batch(["the cat"], 16, pad_to_length=True).ids[0].tolist()
        assert tokenizer.decode(row) == "the cat"
        assert len(tokenizer.decode(row, skip_control=False)) > len("the cat")


def test_ids_and_texts_that_cannot_be_are_refused(every):
    for tokenizer in every:
        with pytest.raises(TextError, match="lone surrogate at character 2"):
            tokenizer.encode("ab\ud800")
        for wrong in (-1, tokenizer.vocab_size):
            with pytest.raises(TextError, match=f"id {wrong} is outside"):
                tokenizer.decode([wrong])


def test_batch_frames_and_pads_to_the_longest(bpe):
    batch = bpe.batch(["the cat", "the"])
    long, short = bpe.encode("the cat"), bpe.encode("the")
    assert batch.ids.tolist() == [[1, *long, 2], [1, *short, 2] + [0] * (len(long) - len(short))]
    assert batch.mask.sum(1).tolist() == [len(long) + 2, len(short) + 2]
    assert batch.cut == [0, 0]


def test_cut_text_is_reported_and_keeps_its_eos():
    with pytest.warns(TextCut, match=r"'abcdefgh' is cut to 5 tokens, 4 lost; 1 more of 3 texts"):
        batch = ByteTokenizer().batch(["ab", "abcdefgh", "abcdef"], length=5)
    assert batch.cut == [0, 4, 2]
    assert batch.ids.tolist()[1] == [100, 101, 102, 103, 1]
    assert batch.ids.tolist()[0] == [100, 101, 1, 0, 0]


def test_mask_marks_real_tokens_even_where_they_equal_padding():
    batch = CLIPTokenizer().batch(["!", "a b c"])
    assert batch.mask.tolist()[0] == [True, True, True, False, False]


@pytest.mark.parametrize(("texts", "length"), [([], None), ("one string", None), (["a"], 1), (["a"], 0)])
def test_batches_that_cannot_be_are_refused(bpe, texts, length):
    with pytest.raises(TextError):
        bpe.batch(texts, length)


def test_training_keeps_every_byte_and_the_control_ids(bpe):
    assert bpe.vocab_size > 259
    assert [bpe.decode([i], skip_control=False) for i in range(3)] == ["<pad>", "<bos>", "<eos>"]
    assert len(bpe.encode("the cat sat")) < len("the cat sat") / 2
    again = BytePairTokenizer.train(["abab abab", "abab"], 300)
    assert again.vocab_size < 300  # the texts have no more pairs: fewer ids, none made up
    assert again.decode(again.encode("\u00e9\x00")) == "\u00e9\x00"


def test_lowercase_is_kept_through_a_save(tmp_path):
    BytePairTokenizer.train(["Hello WORLD hello"] * 3, 280, lowercase=True).save(tmp_path)
    loaded = tokenizer_from(tmp_path)
    assert loaded.decode(loaded.encode("HELLO World")) == "hello world"


def test_training_refuses_what_cannot_work():
    with pytest.raises(UsageError, match="must be at least 259"):
        BytePairTokenizer.train(["text"], 258)
    for nothing in ([], ["", " "], "one string"):
        with pytest.raises(TextError):
            BytePairTokenizer.train(nothing, 300)


def damage(file, **changes):
    file["model"].update(changes.pop("model", {}))
    return {**file, **changes}


DAMAGES = {
    "no BPE model": lambda f: {**f, "model": {"type": "WordPiece"}},
    "registers control tokens": lambda f: {**f, "added_tokens": [{"id": 2, "content": "<eos>"}]},
    "is not byte-level": lambda f: {**f, "pre_tokenizer": None},
    "<eos> has id 5, not 2": lambda f: damage(f, model={"vocab": {**f["model"]["vocab"], "<eos>": 5, "#": 2}}),
    "each once": lambda f: damage(f, model={"vocab": {**f["model"]["vocab"], "zz": 9999}}),
    "lacks 1 of the 256 bytes": lambda f: damage(
        f, model={"vocab": {{"A": "AA"}.get(t, t): i for t, i in f["model"]["vocab"].items()}}
    ),
    "spells the control token <eos>": lambda f: damage(
        f, model={"merges": [["<eos", ">"]], "vocab": {**f["model"]["vocab"], "<eos": len(f["model"]["vocab"])}}
    ),
    "which the vocabulary lacks": lambda f: damage(f, model={"merges": [["Q", "Z"]]}),
    "must be a list of pairs": lambda f: damage(f, model={"merges": ["Q Z"]}),
}


@pytest.mark.parametrize("cause", DAMAGES)
def test_damaged_vocabulary_is_refused_by_name(bpe, tmp_path, cause):
    bpe.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(DAMAGES[cause](json.loads(path.read_text()))))
    with pytest.raises(CheckpointError, match=cause) as error:
        tokenizer_from(tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        ({"kind": "clip", "context": 77, "module": "os"}, "unknown key 'module'"),
        ({"kind": "clip"}, "'context' is missing"),
        ({"kind": "clip", "context": True}, "context: expected a whole number .True"),
        ({"kind": "tiger"}, "kind must be one of .*'tiger'"),
        ({"tokenizer_class": "CLIPTokenizer"}, "kind must be one of .*None"),
        ({"kind": "whisper", "multilingual": False, "languages": 100}, "languages: must be 99"),
        ({"kind": "bpe", "vocab_size": 300, "lowercase": False}, "tokenizer.json.*missing"),
    ],
)
def test_damaged_record_is_refused_by_name(tmp_path, record, cause):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=cause) as error:
        tokenizer_from(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_record_and_vocabulary_must_agree_on_the_size(bpe, tmp_path):
    bpe.save(tmp_path)
    record = {"kind": "bpe", "vocab_size": bpe.vocab_size + 1, "lowercase": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=f"has {bpe.vocab_size} tokens, tokenizer_config"):
        tokenizer_from(tmp_path)


def test_record_cannot_reach_out_of_its_folder(pieces, tmp_path):
    SentencePieceTokenizer(pieces).save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text().replace("tiny.model", "../tiny.model"))
    with pytest.raises(CheckpointError, match="must be a plain file name"):
        tokenizer_from(tmp_path)


def test_missing_and_unknown_sources(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json.*missing"):
        tokenizer_from(tmp_path)
    with pytest.raises(UsageError, match=r"clap: neither a folder.*clip"):
        tokenizer_from("clap")
    with pytest.raises(CheckpointError, match="assets/vocabularies/none"):
        asset("vocabularies", "none.tiktoken")


def test_clip_ids_equal_open_clip(open_clip_tokenizer):
    ours = CLIPTokenizer()
    for text in ORDINARY + noise(30, 12):
        assert ours.batch([text], pad_to_length=True).ids.tolist() == open_clip_tokenizer.tokenize(text).tolist(), text
    long = "photo of a very long " * 30
    with pytest.warns(TextCut, match="is cut to 77 tokens, 75 lost"):
        assert torch.equal(ours.batch([long]).ids, open_clip_tokenizer.tokenize(long))


def test_clip_reads_a_typed_control_token_as_text(open_clip_tokenizer):
    text = "cat <end_of_text> dog"
    assert 49407 in open_clip_tokenizer._tokenizer.encode(text)
    ours = CLIPTokenizer()
    assert ours.decode(ours.encode(text)) == "cat < end _ of _ text > dog"


@thin(5, pytest.mark.ci)
@pytest.mark.parametrize("alphabet", ["abcdefghijklmnopqrstuvwxyz", "a", " ", "\u00e9!", "<"])
def test_tokenizing_is_near_linear(alphabet, bpe):
    text = "".join(random.Random(0).choices(alphabet, k=100_000))
    for tokenizer in [CLIPTokenizer(), bpe, GPT2Tokenizer(), WhisperTokenizer(True), ByteTokenizer()]:
        start = time.process_time()
        tokenizer.encode(text)
        assert time.process_time() - start < 2, type(tokenizer).__name__


LEAKS = ("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # its file stays open


@pytest.mark.filterwarnings(*LEAKS)
@pytest.mark.parametrize(("multilingual", "languages"), [(True, 99), (True, 100), (False, 99)])
def test_whisper_ids_equal_openai_whisper(multilingual, languages):
    reference = pytest.importorskip("whisper.tokenizer")
    ours = WhisperTokenizer(multilingual, languages)
    theirs = reference.get_tokenizer(multilingual, num_languages=languages, language="de", task="translate")
    assert ours.vocab_size == theirs.encoding.n_vocab
    assert ours.control_ids == theirs.special_tokens
    names = "eot sot translate transcribe sot_lm sot_prev no_speech no_timestamps timestamp_begin"
    for name in names.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.non_speech_tokens() == theirs.non_speech_tokens
    assert sorted(ours.language_tokens) == sorted(theirs.all_language_tokens)
    for text in ORDINARY + noise(20, 50):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        stamped = [ours.timestamp_begin, *ids, ours.timestamp_begin + 1500]
        assert ours.decode(stamped) == theirs.decode(stamped) == text
        assert ours.decode(stamped, skip_control=False) == theirs.decode_with_timestamps(stamped)
    if multilingual:
        assert ours.sot_sequence("German", "translate") == theirs.sot_sequence
        assert ours.sot_sequence("de", "translate", False) == theirs.sot_sequence_including_notimestamps
    else:
        assert ours.sot_sequence() == theirs.sot_sequence
    assert reference.LANGUAGES == LANGUAGES
    assert {name: language_code(name) for name in reference.TO_LANGUAGE_CODE} == reference.TO_LANGUAGE_CODE
    assert [language_code(name) for name in ("Deutsch", "Français", "РУССКИЙ")] == ["de", "fr", "ru"]


def test_whisper_refuses_prompts_it_was_not_trained_on():
    with pytest.raises(UsageError, match="klingon"):
        WhisperTokenizer(True).sot_sequence("klingon")
    with pytest.raises(UsageError, match="'yue' is not one of the 99"):
        WhisperTokenizer(True).language_token("yue")
    with pytest.raises(UsageError, match="language: a multilingual Whisper model needs one"):
        WhisperTokenizer(True).sot_sequence()
    with pytest.raises(UsageError, match="English-only"):
        WhisperTokenizer(False).sot_sequence("de")
    with pytest.raises(UsageError, match="only transcribe"):
        WhisperTokenizer(False).sot_sequence(task="translate")


@pytest.mark.ci
@pytest.mark.filterwarnings(*LEAKS)
def test_long_blanks_split_as_in_the_reference():
    reference = pytest.importorskip("whisper.tokenizer").get_encoding("gpt2")
    blanks = [" " * 20_000, "\n \t\u3000" * 5_000, "\x1c " * 9_000]
    for text in [f"{a}one{b}two {a}\n{c}" for a in blanks for b in blanks for c in ("", "x")]:
        assert GPT2Tokenizer().encode(text) == reference.encode(text)
    million = GPT2Tokenizer().encode(" " * 1_200_000 + "x")  # tiktoken alone panics
    assert million == [220] * 1_199_999 + GPT2Tokenizer().encode(" x")


@pytest.mark.filterwarnings(*LEAKS)
def test_gpt2_ids_are_the_published_ones():
    tokenizer = GPT2Tokenizer()
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (50257, 50256)
    assert tokenizer.encode("Hello, my dog is cute") == [15496, 11, 616, 3290, 318, 13779]
    assert tokenizer.batch(["Hello"]).ids.tolist() == [[15496, 50256]]
    reference = pytest.importorskip("whisper.tokenizer").get_encoding("gpt2")
    for text in ORDINARY + noise(20, 50, seed=1):
        assert tokenizer.encode(text) == reference.encode(text)


def test_canonical_text_equals_the_reference(open_clip_tokenizer):
    assert canonicalize("A_photo, of  a 'CAT'!\n") == "a photo of a cat"
    for text in ORDINARY + noise(10, 50):
        assert canonicalize(text) == open_clip_tokenizer.canonicalize_text(text)


def test_siglip_pads_canonical_text_to_64_with_its_eos(pieces):
    tokenizer = SigLIPText(pieces)
    batch = tokenizer.batch(["The CAT, sat!", "a dog"])
    assert batch.ids.shape == (2, 64)
    ids = SentencePieceTokenizer(pieces).encode("the cat sat")
    assert batch.ids[0].tolist() == ids + [1] * (64 - len(ids))
    assert int(batch.mask[0].sum()) == len(ids) + 1
    with pytest.warns(TextCut):
        assert int(tokenizer.batch(["cat mat " * 60]).ids[0, -1]) == 1


def test_t5_pads_with_the_files_pad_id_and_has_no_bos(pieces):
    tokenizer = SentencePieceTokenizer(pieces)
    batch = tokenizer.batch(["the cat sat", "a"])
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, None, 1)
    assert batch.ids[0, -1] == 1
    assert batch.ids[1, -1] == 0


def test_files_that_are_no_sentencepiece_model_are_refused(pieces, tmp_path):
    (tmp_path / "bad.model").write_bytes(b"not a model at all")
    for path in (tmp_path / "bad.model", tmp_path / "absent.model"):
        with pytest.raises(CheckpointError, match=path.name):
            SentencePieceTokenizer(path)
    with pytest.raises(CheckpointError, match="add_bos"):
        SentencePieceTokenizer(pieces, add_bos=True)
    with pytest.raises(CheckpointError, match="pad id 5000"):
        SentencePieceTokenizer(pieces, pad_id=5000)
    for rules in ("normalizer_spec", "denormalizer_spec"):
        model = ModelProto.FromString(Path(pieces).read_bytes())
        charsmap = model.normalizer_spec.precompiled_charsmap + b"b" * 5000 + b"\0"
        getattr(model, rules).precompiled_charsmap = charsmap
        (tmp_path / "bad.model").write_bytes(model.SerializeToString())
        with pytest.raises(CheckpointError, match=r"bad\.model: .*5000 times as long, more than 4096"):
            SentencePieceTokenizer(tmp_path / "bad.model")


def test_byte_ids_equal_byt5():
    transformers = pytest.importorskip("transformers.models.byt5.tokenization_byt5")
    theirs = transformers.ByT5Tokenizer()
    tokenizer = ByteTokenizer()
    for text in ["Life is like a box", "\u00e9\u65e5 \U0001f44d"]:
        assert tokenizer.batch([text]).ids[0].tolist() == theirs(text).input_ids
