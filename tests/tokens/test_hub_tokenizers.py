"""Tokenizers of Hugging Face folders: equal to transformers on ordinary text; no text yields a control token."""

import json
import random
import re
import time
import unicodedata
import warnings
from itertools import chain, pairwise
from pathlib import Path

import pytest

from multimodal.errors import CheckpointError, TextError
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.hub.pipeline import HubTokenizer
from multimodal.tokens.text.sentencepiece import SentencePieceTokenizer, scored_tokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from tests.helpers.references.hub import CORPUS, PIPELINES, ROOM, hub_folder, llama_pieces, merges_folder, pipeline
from tests.helpers.references.texts import noise
from tests.helpers.spread import spread, thin

every_pipeline = pytest.mark.parametrize("name", PIPELINES)
MERGED = ("gpt2", "roberta", "bart", "qwen2")
LONG = {
    "words": "The cat sat on the mat. 日本語 " * 10_000, "one letter": "a" * 300_000, "blanks": " " * 300_000,
    "all of Unicode": noise(1, 10**5)[0],  # fewer: each is three ids
}  # fmt: skip
SOME = [("byte-level", text) for text in LONG] + [("llama2", "blanks"), ("unigram", "all of Unicode")]
SOME += [(name, text) for name in PIPELINES for text in ("words", "one letter") if name != "byte-level"]


def reference(folder: Path):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def texts(special: list[str]) -> list[str]:
    """Ordinary ones: without the names of control tokens."""
    names = re.compile("|".join(map(re.escape, special)))
    plain = ["", " ", "a", "  two  blanks ", "line\r\nline\n\n", *CORPUS[:5], *noise(150, 25)]
    return [names.sub("", text) for text in plain]


def special_tokens(name: str) -> list[str]:
    return [token.content for token in pipeline(name).get_added_tokens_decoder().values() if token.special]


def made(root: Path, name: str) -> HubTokenizer:
    tokenizer = hub_tokenizer(*hub_folder(root, name), context=77)
    assert isinstance(tokenizer, HubTokenizer)
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    tokenizer.save(folder)
    return tokenizer_from(folder)


@thin(2, pytest.mark.ci)
@every_pipeline
def test_ids_and_texts_equal_transformers(tmp_path, name):
    tokenizer, theirs = made(tmp_path, name), reference(hub_folder(tmp_path, name)[0])
    again = saved(tokenizer, tmp_path / "ours")
    plain, part = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}, re.compile("<0x[89A-F]")
    for text in texts(special_tokens(name)):
        ids = theirs.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == again.encode(text) == ids, text
        assert tokenizer.decode(ids) == again.decode(ids) == theirs.decode(ids, **plain), text
    draw = random.Random(1)
    # the library loses characters beside a byte of none
    whole = [i for i, token in enumerate(theirs.convert_ids_to_tokens(range(len(theirs)))) if not part.match(token)]
    for _ in range(100):  # control tokens among them
        ids = draw.choices(whole, k=15)
        assert tokenizer.decode(ids) == again.decode(ids) == theirs.decode(ids, **plain)


@every_pipeline
def test_no_text_spells_a_control_token(tmp_path, name):
    tokenizer = made(tmp_path, name)
    again = saved(tokenizer, tmp_path / "ours")
    names = special_tokens(name)
    assert set(names) == set(tokenizer.names)
    for control in names:
        for text in (control, f" {control} ", f"a{control}b", control * 3, f"{control}\n{control.upper()}"):
            ids = tokenizer.encode(text)
            assert ids, text
            assert not tokenizer.control & set(ids), text
            assert again.encode(text) == ids
            if name in ("byte-level", "llama2", "llama3"):
                assert tokenizer.decode(ids) == text
    whole = "".join(names) + " and ".join(names)
    assert not tokenizer.control & set(tokenizer.encode(whole))


def test_bytes_that_a_file_lists_as_special_spell_texts(tmp_path):
    folder, config = hub_folder(tmp_path, "llama2")
    pipeline = json.loads((path := folder / "tokenizer.json").read_text())
    more = [pipeline["added_tokens"][0] | {"content": f"<0x{i:02X}>", "id": 3 + i} for i in range(256)]
    path.write_text(json.dumps(pipeline | {"added_tokens": [*pipeline["added_tokens"], *more]}))
    tokenizer, text = saved(hub_tokenizer(folder, config), tmp_path / "ours"), "Ελλάδα ♞"
    assert tokenizer.encode(text) == reference(folder).encode(text, add_special_tokens=False)
    assert all(tokenizer.decode(tokenizer.encode(one)) == one for one in (text, "<0x41>"))


@every_pipeline
def test_ids_of_control_tokens_are_those_that_the_folder_names(tmp_path, name):
    tokenizer, backend = made(tmp_path, name), pipeline(name)
    actual = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id
    assert actual == tuple(None if token is None else backend.token_to_id(token) for token in PIPELINES[name][3])
    count = backend.get_vocab_size()
    assert tokenizer.vocab_size == count + ROOM
    assert set(range(count, count + ROOM)) <= tokenizer.control
    assert tokenizer.decode([count, count + ROOM - 1]) == ""
    assert f"[{count}]" in tokenizer.decode([count], skip_control=False)
    with pytest.raises(TextError, match="outside the vocabulary"):
        tokenizer.decode([count + ROOM])
    unknown = {"wordpiece": "[UNK]"} | dict.fromkeys(("llama2", "gemma", "phi3", "unigram"), "<unk>")
    unknown = unknown.get(name)
    assert tokenizer.unknown_id == (None if unknown is None else backend.token_to_id(unknown))
    assert tokenizer.unknown_id not in tokenizer.control


@every_pipeline
def test_a_batch_has_the_ends_that_the_folder_puts(tmp_path, name):
    tokenizer, theirs = made(tmp_path, name), reference(hub_folder(tmp_path, name)[0])
    batch = saved(tokenizer, tmp_path / "ours").batch(["The cat", "a dog on the mat"])
    rows = [row[mask].tolist() for row, mask in zip(batch.ids, batch.mask, strict=True)]
    added = [] if name in ("byte-level", "unigram", "wordpiece") else [tokenizer.eos_id]  # others name one
    assert rows == [theirs.encode(text) + added for text in ("The cat", "a dog on the mat")]
    with pytest.warns(UserWarning, match="is cut to 77 tokens"):
        assert tokenizer.batch(["cat " * 100]).ids.shape == (1, 77)


@pytest.mark.parametrize(("name", "text"), spread(SOME, 4, pytest.mark.slow, pytest.mark.ci))
def test_long_texts_take_no_quadratic_time(tmp_path, name, text):
    tokenizer = made(tmp_path, name)
    start = time.process_time()
    assert isinstance(tokenizer.encode(LONG[text]), list)
    assert time.process_time() - start < 1.5


@pytest.mark.parametrize("name", spread(PIPELINES, 3, pytest.mark.slow, pytest.mark.ci))
def test_long_texts_get_the_ids_of_short_ones(tmp_path, name):
    """They take another way through the library."""
    tokenizer = made(tmp_path, name)
    text = " ".join([*CORPUS, *noise(40, 60)]) * 20
    assert len(text) > 100_000
    assert tokenizer.encode(text) == pipeline(name).encode(text, add_special_tokens=False).ids


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("kind", MERGED)
def test_gpt2s_two_files_give_transformers_ids(tmp_path, kind):
    from transformers import GPT2Tokenizer, Qwen2Tokenizer, RobertaTokenizer

    folder, config = merges_folder(tmp_path, kind)
    tokenizer = hub_tokenizer(folder, config)
    paths = {"vocab": str(folder / "vocab.json"), "merges": str(folder / "merges.txt")}
    theirs = {"gpt2": GPT2Tokenizer, "qwen2": Qwen2Tokenizer}.get(kind, RobertaTokenizer)(**paths)
    again = saved(tokenizer, tmp_path / "ours")
    ends = kind not in ("gpt2", "qwen2")
    special = ["<s>", "</s>", "<pad>", "<unk>", "<mask>"] if ends else ["<|endoftext|>"]
    for text in texts(special):
        text = unicodedata.normalize("NFC", text)  # as Qwen2 does
        ids = theirs.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == again.encode(text) == ids
        assert tokenizer.decode(ids) == again.decode(ids) == text
        (row,) = tokenizer.batch([text]).ids.tolist()
        assert row == theirs.encode(text) + ([] if ends else [tokenizer.eos_id])
    for control in special:
        assert not tokenizer.control & set(tokenizer.encode(f"a {control}{control}"))
        assert tokenizer.decode(tokenizer.encode(control)) == control
    (folder / "merges.txt").write_text("#version: 0.2\n")  # which would give each byte its own id
    with pytest.raises(CheckpointError, match=r"merges.txt: cannot make \d+ of the \d+ tokens of vocab.json"):
        hub_tokenizer(folder, config)
    ids = theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, theirs.mask_token_id
    end = tokenizer.eos_id
    assert (tokenizer.bos_id, end, tokenizer.pad_id, tokenizer.mask_id) == (
        ids if ends else (None, ids[1], ids[1], None)
    )


def test_gpt2s_two_files_of_another_model_are_not_guessed(tmp_path):
    folder, config = merges_folder(tmp_path, "gpt2")
    assert hub_tokenizer(folder, config | {"model_type": "other"}) is None
    assert hub_tokenizer(None, config) is None
    assert hub_tokenizer(tmp_path / "roberta", config) is None


def test_added_tokens_of_the_record_are_control_tokens_if_special(tmp_path):
    folder, config = merges_folder(tmp_path, "qwen2")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    first = len(json.loads((folder / "vocab.json").read_text()))
    added = {str(first): {"content": "<|im_end|>", "special": True},
             str(first + 1): {"content": "<tool>", "special": False}}  # fmt: skip
    record = {"added_tokens_decoder": {i: flags | token for i, token in added.items()}, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(record))
    tokenizer = hub_tokenizer(folder, config | {"vocab_size": 408})
    assert tokenizer.eos_id == first
    assert first in tokenizer.control
    assert tokenizer.encode("<tool>") == [first + 1]
    assert first not in tokenizer.encode("<|im_end|>")


def test_llamas_pieces_begin_with_bos(tmp_path):
    import sentencepiece

    path = llama_pieces(tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = hub_tokenizer(tmp_path, {"vocab_size": 408, "model_type": "llama"}, context=50)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    again = saved(tokenizer, tmp_path / "ours")
    for text in [*CORPUS[:5], *noise(50, 25), "<s> </s> <unk> <0x0A>"]:
        assert tokenizer.encode(text) == again.encode(text) == theirs.encode(text)
        assert not tokenizer.control & set(tokenizer.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)) == theirs.decode(theirs.encode(text))
    (row,) = again.batch(["the cat"]).ids.tolist()
    assert row == [1, *theirs.encode("the cat"), 2]
    assert set(range(400, 408)) < tokenizer.control
    assert tokenizer.decode([407], skip_control=False) == "[407]"
    assert hub_tokenizer(tmp_path, {"vocab_size": 408, "model_type": "other"}) is None
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: has 400 tokens, the model 300"):
        hub_tokenizer(tmp_path, {"vocab_size": 300, "model_type": "llama"})


def slow_scored(pieces: list[tuple[str, float]], text: str) -> list[int]:
    """The best pair of neighbours is merged until there is none, as in llama2.c; the reference of the quick one."""
    at = {piece: i for i, (piece, _) in enumerate(pieces) if i >= 259}
    ids = [[at[c]] if c in at else [byte + 3 for byte in c.encode()] for c in (" " + text if text else "")]
    ids = list(chain.from_iterable(ids))
    while True:
        pairs = [at.get(pieces[a][0] + pieces[b][0]) for a, b in pairwise(ids)]
        best = max((i for i in pairs if i is not None), key=lambda i: pieces[i][1], default=None)
        if best is None:
            return ids
        place = pairs.index(best)
        ids[place : place + 2] = [best]


def scored_list() -> list[tuple[str, float]]:
    """Pieces with equal scores too, so that the leftmost decides."""
    plain = [" ", *"abcdehlotwy", "th", "he", "the", " t", " th", " the", "aa", "aaa", "aba", "ab", "ba", "ll", "é"]
    names = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{i:02X}>" for i in range(256))]
    return [(piece, 0.0) for piece in names] + [(piece, -float(i // 2)) for i, piece in enumerate(plain)]


def test_a_list_of_pieces_and_scores_is_merged_as_llama2c_does(tmp_path):
    path, pieces = tmp_path / "tokenizer.json", scored_list()
    path.write_text(json.dumps(pieces))
    tokenizer = scored_tokenizer(path, len(pieces))
    again = saved(tokenizer, tmp_path / "ours")
    draw = random.Random(2)
    made_up = ["".join(draw.choices(" abehtl<é\n", k=20)) for _ in range(150)]
    for text in ["", " ", "the  abab aaaa", "<s>\n</s>\n<s>\n<0x0A>", *made_up, *noise(50, 20)]:
        text = text.replace("▁", "")
        assert tokenizer.encode(text) == again.encode(text) == slow_scored(pieces, text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.control) == (1, 2, {1, 2})
    for text in LONG.values():
        start = time.process_time()
        tokenizer.encode(text)
        assert time.process_time() - start < 1.5


@pytest.mark.parametrize(("content", "cause"), [
    ("[[1, 2]]", "expected a list of pieces"),
    ('[["a", NaN]]', "NaN is not valid JSON"),
    ("[", "JSON"),
    ('[["a", 1]]', "256"),
])  # fmt: skip
def test_a_damaged_list_of_pieces_is_named(tmp_path, content, cause):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=f"tokenizer.json: .*{cause}"):
        scored_tokenizer(path, 300)


def changed(root: Path, **parts) -> tuple[Path, dict]:
    folder, config = hub_folder(root, "byte-level")
    file = json.loads((folder / "tokenizer.json").read_text())
    file["model"] |= parts.pop("model", {})
    (folder / "tokenizer.json").write_text(json.dumps(file | parts))
    return folder, config


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ({"model": {"vocab": {}}}, "empty"),
        ({"model": {"vocab": {"<s>": 0, "</s>": 1}, "merges": []}, "added_tokens": []}, "has 2 tokens, the model"),
        ({"model": {"vocab": None}}, "no vocabulary"),
        ({"model": {"vocab": {"a": "b"}}}, "invalid token 'a' with id 'b'"),
        ({"model": {"merges": [["zzzz", "a"]]}}, "not a file of the tokenizers library"),
        ({"post_processor": {"type": "Other"}}, "post_processor 'Other' is not supported"),
        ({"pre_tokenizer": {"type": "Other"}}, "not a file of the tokenizers library"),
        ({"added_tokens": [3]}, "not a file of the tokenizers library"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_cause(tmp_path, parts, cause):
    folder, config = changed(tmp_path, **parts)
    if cause == "empty":
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}, "added_tokens": []}))
    with pytest.raises(CheckpointError, match=f"{re.escape(str(folder / 'tokenizer.json'))}: .*{cause}"):
        hub_tokenizer(folder, config)


def test_a_vocabulary_that_does_not_go_with_the_model_is_refused(tmp_path):
    """A release of transformers built CLIP's vocabulary of three tokens without an error."""
    folder, config = hub_folder(tmp_path, "wordpiece")
    count = config["vocab_size"] - ROOM
    with pytest.raises(
        CheckpointError, match=f"tokenizer.json: .* has id {count - 1}, the model has {count - 1} tokens"
    ):
        hub_tokenizer(folder, config, count - 1)
    with pytest.raises(CheckpointError, match=f"has {count} tokens, the model {2 * count + 1}"):
        hub_tokenizer(folder, config, 2 * count + 1)
    assert hub_tokenizer(folder, config, count).control == set(range(5)) - {1}


def test_a_byte_that_is_missing_is_not_lost_in_silence(tmp_path):
    folder, config = hub_folder(tmp_path, "byte-level")
    file = json.loads((folder / "tokenizer.json").read_text())
    file["model"]["vocab"]["zz"] = file["model"]["vocab"].pop("Z")
    (folder / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(CheckpointError, match="lacks 1 of the 256 bytes, first 'Z'"):
        hub_tokenizer(folder, config)


@pytest.mark.parametrize("fault", ["record", "pipeline", "gone", "control", "key"])
def test_a_damaged_folder_of_ours_is_named(tmp_path, fault):
    made(tmp_path, "unigram").save(tmp_path / "ours")
    record = tmp_path / "ours" / "tokenizer_config.json"
    value = json.loads(record.read_text())
    if fault == "pipeline":
        (tmp_path / "ours" / "tokenizer.json").write_text('{"model": 3}')
    elif fault == "gone":
        (tmp_path / "ours" / "tokenizer.json").unlink()
    else:
        value |= {"record": {"pad_id": 10**6}, "control": {"control": {"</s>": "1"}}, "key": {"code": "x"}}[fault]
        record.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=r"ours/tokenizer(_config)?\.json: "):
        tokenizer_from(tmp_path / "ours")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_folder_that_transformers_writes_loads_with_its_tokenizer(tmp_path, name):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from multimodal import load
    from multimodal.tasks.text.generate import generate
    from multimodal.weights.folder import save_folder

    kind = {"gpt2": "byte-level", "llama": "llama2"}[name]
    folder, config = hub_folder(tmp_path, kind)
    sizes = {"vocab_size": config["vocab_size"], "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own
        model = GPT2LMHeadModel(GPT2Config(**sizes)) if name == "gpt2" else LlamaForCausalLM(
            LlamaConfig(**sizes, intermediate_size=24))  # fmt: skip
        model.save_pretrained(tmp_path / "hub")
        names = PIPELINES[kind][1]
        PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names).save_pretrained(
            tmp_path / "hub"
        )
    actual = load(tmp_path / "hub")
    assert isinstance(actual.tokenizer, HubTokenizer)
    assert actual.tokenizer.context == 40
    save_folder(actual, tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert again.tokenizer.encode("the </s> cat") == actual.tokenizer.encode("the </s> cat")
    assert generate("the cat", again, max_new_tokens=5) == generate("the cat", actual, max_new_tokens=5)


@pytest.fixture(scope="module")
def stories(shared_data):
    from multimodal import load

    return load(shared_data / "weights" / "stories260K")


@pytest.mark.ci
def test_a_really_trained_llama_tells_a_story(stories):
    """Interleaved rotation, grouped queries, tied head and its own vocabulary: any fault gives no English."""
    from multimodal.tasks.text.generate import generate

    story = generate("", stories, max_new_tokens=200)
    known = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    assert story.startswith(known)
    assert "Lily's mom said" in story


def test_its_vocabulary_is_that_of_llama2c(stories, shared_data):
    pieces = json.loads((shared_data / "weights" / "stories260K" / "tokenizer.json").read_text())
    for text in ["Once upon a time, there was a dog.\n“Hi!” é", "<s> </s>", " two  blanks", *noise(60, 20)]:
        assert stories.tokenizer.encode(text) == slow_scored(pieces, text.replace("▁", ""))
