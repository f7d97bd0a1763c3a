"""`multimodal fill-mask`, beside the fill-mask pipeline of transformers."""

import json
import string
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.tasks.text.fill_mask import fill_mask, masked_model
from multimodal.tokens.text.sentencepiece import ByteTokenizer
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load
from tests.helpers.commands import one_line, run
from tests.helpers.data.wordpieces import SIZES, WORDS, wordpiece
from tests.helpers.references.vision import randomized
from tests.helpers.spread import thin
from tests.helpers.tiny import made as tiny

TEXTS = ["the dog sits at the [MASK].", "[MASK] dogs [MASK] the sea", "[MASK]", "a[MASK]b [MASK]"]


def byte_level(lstrip: bool = True) -> object:
    """A byte-level BPE as RoBERTa's: <s> 0, <pad> 1, </s> 2, <unk> 3, <mask> last, which takes the blank before it with
    `lstrip`."""
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import RobertaTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *letters, "Ġt", "Ġd", "og", "Ġdog", "he", "Ġthe", "<mask>"]
    merges = [("Ġ", "t"), ("Ġ", "d"), ("o", "g"), ("Ġd", "og"), ("h", "e"), ("Ġt", "he")]
    mask = AddedToken("<mask>", lstrip=lstrip, special=True)
    return RobertaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, mask_token=mask)


def unigram() -> object:
    """Sentence pieces as ALBERT's."""
    from transformers import AlbertTokenizer

    pieces = [
        "<pad>",
        "<unk>",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "▁",
        "▁the",
        "▁dog",
        "s",
        "▁sea",
        "▁at",
        *string.ascii_lowercase,
    ]
    return AlbertTokenizer(vocab=[(piece, -float(i)) for i, piece in enumerate(dict.fromkeys(pieces))])


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """`bert`, `roberta` and `albert`, and `classes`, which is no language model, as transformers writes them."""
    import transformers

    root = tmp_path_factory.mktemp("encoders")
    made = {"bert": wordpiece(WORDS), "roberta": byte_level(), "albert": unigram(), "classes": wordpiece(WORDS),
            "apart": byte_level(lstrip=False)}  # fmt: skip
    roberta = {"max_position_embeddings": 26, "type_vocab_size": 1}
    more = {"roberta": roberta, "apart": roberta, "albert": {"embedding_size": 16}}
    models = {"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM", "apart": "RobertaForMaskedLM",
              "albert": "AlbertForMaskedLM", "classes": "BertForSequenceClassification"}  # fmt: skip
    torch.manual_seed(0)
    for name, model in models.items():
        sizes = SIZES | {"vocab_size": len(made[name]), "max_position_embeddings": 24} | more.get(name, {})
        kind = {"classes": "Bert"}.get(name, model.removesuffix("ForMaskedLM"))
        config = getattr(transformers, f"{kind}Config")(**sizes)
        randomized(getattr(transformers, model)(config)).save_pretrained(root / name)
        made[name].save_pretrained(root / name)
    return root


def reference(folder: Path, text: str, top_k: int) -> list[list[dict]]:
    from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

    fill = pipeline(
        "fill-mask", model=AutoModelForMaskedLM.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder), device="cpu",
    )  # fmt: skip
    found = fill(text, top_k=top_k)
    return found if isinstance(found[0], list) else [found]


def alike(one: list[dict], other: list[dict]) -> bool:
    """The same guesses, with probabilities that sums in another order may give."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a["masks"], b["masks"], strict=True)]
    near = all(
        x["token"] == y["token"] and abs(x["probability"] - y["probability"]) < 1e-6
        for a, b in pairs
        for x, y in zip(a, b, strict=True)
    )
    return near and [row["filled"] for row in one] == [row["filled"] for row in other]


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("name", ["bert", "roberta", "apart", "albert"])
def test_guesses_and_probabilities_equal_transformers(folders, name):
    checkpoint = load(folders / name)
    texts = [text.replace("[MASK]", "<mask>") if name in ("roberta", "apart") else text for text in TEXTS]
    found = fill_mask(texts, checkpoint, top_k=4)
    for text, result in zip(texts, found, strict=True):
        theirs = reference(folders / name, text, 4)
        assert len(result["masks"]) == len(theirs) == text.count("mask>") + text.count("[MASK]")
        for mine, other in zip(result["masks"], theirs, strict=True):
            assert [guess["id"] for guess in mine] == [guess["token"] for guess in other]
            assert [g["probability"] for g in mine] == pytest.approx([g["score"] for g in other], abs=1e-5)
            if name != "bert":  # which trims what stands alone
                assert [guess["token"].strip() for guess in mine] == [guess["token_str"].strip() for guess in other]


def test_a_text_is_guessed_alike_alone_and_among_others(folders):
    checkpoint = load(folders / "bert")
    together = fill_mask(TEXTS, checkpoint, 3)
    assert alike([fill_mask([text], checkpoint, 3)[0] for text in TEXTS], together)


def test_a_spelling_means_the_mask_here_alone(folders):
    checkpoint = load(folders / "bert")
    tokenizer = checkpoint.tokenizer
    assert tokenizer.mask_id not in tokenizer.encode("the [MASK] dog")
    with pytest.raises(TextError, match=r"'the <mask> dog': has no \[MASK\]"):
        fill_mask(["the <mask> dog"], checkpoint)
    (result,) = fill_mask(["[SEP] the [MASK]"], checkpoint)  # [SEP] is text
    (other,) = fill_mask(["[CLS] the [MASK]"], checkpoint)
    assert len(result["masks"]) == 1
    assert result["masks"] != other["masks"]


def test_a_piece_that_continues_a_word_is_joined_to_it(folders):
    from transformers import AutoTokenizer

    checkpoint, theirs = load(folders / "bert"), AutoTokenizer.from_pretrained(folders / "bert")
    piece = WORDS.index("##s")
    with torch.no_grad():
        checkpoint.model.tied_bias[piece] += 1000
    texts = ["the dog [MASK].", "dog[MASK] at the sea", "[MASK] at"]
    made = [one["filled"] for one in fill_mask(texts, checkpoint)]
    for text, own in zip(texts[:2], made, strict=False):
        ids = [piece if i == theirs.mask_token_id else i for i in theirs(text)["input_ids"]]
        assert own == theirs.decode(ids, skip_special_tokens=True)
    assert made[2] == "s at"


def test_command(capsys, folders):
    code, out, err = run(capsys, "fill-mask", *TEXTS[:2], "-m", folders / "bert", "--top_k", 2, "--format", "json")
    made = json.loads(out)
    assert (code, err) == (0, "")
    assert [len(row["masks"]) for row in made] == [1, 2]
    assert all(len(guesses) == 2 for row in made for guesses in row["masks"])
    best = made[0]["masks"][0][0]["token"]
    assert made[0]["filled"] == f"the dog sits at the {best}."
    code, out, err = run(capsys, "fill-mask", TEXTS[1], "-m", folders / "bert", "--top_k", 2)
    lines = out.splitlines()
    assert (code, err, len(lines)) == (0, "", 5)
    assert lines[0] == made[1]["filled"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "1", "2", "2"]
    assert float(lines[1].split()[1]) == pytest.approx(made[1]["masks"][0][0]["probability"], abs=1e-4)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "text '': is empty"),
        ("   ", "is empty"),
        ("the dog", r"text 'the dog': has no [MASK]"),
        ("[MASK] " + "dog " * 30, "has 33 tokens, the model's context is 24"),
        ("[MASK] \udcff", "lone surrogate"),
    ],
)
def test_a_broken_text_is_one_line_and_the_others_are_filled(capsys, folders, text, cause):
    code, out, err = run(capsys, "fill-mask", text, "the [MASK]", "-m", folders / "bert", "--format", "json")
    assert code == 1
    assert cause in one_line(err)
    assert [(row["line"], row["text"]) for row in json.loads(out)] == [(2, "the [MASK]")]


def test_models_that_guess_no_masks_are_refused(capsys, folders):
    code, _, err = run(capsys, "fill-mask", "a [MASK]", "-m", folders / "classes")
    assert code == 1
    assert "expected a masked language model, got text without token logits" in one_line(err)
    for name, kind in (("text-learned", "a causal one"), ("vit-token", "vit without")):
        with pytest.raises(UsageError, match=f"got {kind}"):
            masked_model(Checkpoint(tiny(name), ByteTokenizer()))
    bert = load(folders / "bert")
    with pytest.raises(CheckpointError, match="checkpoint has no tokenizer"):
        fill_mask(["a [MASK]"], replace(bert, tokenizer=None))
    with pytest.raises(CheckpointError, match="its tokenizer has no mask"):
        fill_mask(["a [MASK]"], replace(bert, tokenizer=ByteTokenizer()))
    with pytest.raises(UsageError, match=f"vocabulary size {len(WORDS)} .got {len(WORDS) + 1}"):
        fill_mask(["a [MASK]"], bert, len(WORDS) + 1)
    code, _, err = run(capsys, "fill-mask", "a [MASK]", "-m", folders / "bert", "--top_k", 1000)
    assert code == 1
    assert "(got 1000)" in one_line(err)


def test_a_vocabulary_that_is_larger_than_the_model_is_refused(folders, tmp_path):
    for path in (folders / "bert").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    wordpiece([*WORDS, "new"]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .*has id"):
        load(tmp_path)


def test_a_folder_with_vocab_txt_alone_has_berts_tokenizer(folders, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders / "bert" / name).read_bytes())
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    checkpoint, other = load(tmp_path), load(folders / "bert")
    assert isinstance(checkpoint.tokenizer, WordPieceTokenizer)
    assert (checkpoint.tokenizer.bos_id, checkpoint.tokenizer.eos_id) == (2, 3)
    assert alike(fill_mask(TEXTS, checkpoint, 2), fill_mask(TEXTS, other, 2))


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(
    ("name", "family"), [("bert", "bert"), ("roberta", "roberta"), ("albert", "albert"), ("apart", "roberta")]
)
def test_a_folder_becomes_ours_and_goes_back(capsys, folders, tmp_path, name, family):
    from safetensors.torch import load_file

    code, _, err = run(capsys, "convert", folders / name, tmp_path / "ours")
    assert (code, err) == (0, "")
    text = "the [MASK] dog" if family != "roberta" else "the <mask> dog"
    assert alike(fill_mask([text], load(tmp_path / "ours")), fill_mask([text], load(folders / name)))
    code, _, err = run(capsys, "convert", tmp_path / "ours", tmp_path / "back.safetensors", "--format", family)
    assert (code, err) == (0, "")
    made, held = load_file(tmp_path / "back.safetensors"), load_file(folders / name / "model.safetensors")
    assert all(torch.equal(made[key], value) for key, value in held.items())


@pytest.mark.parametrize("length", [None, 4, 5, 7, 10, 15])
def test_pairs_of_texts_equal_transformers(folders, length):
    """Both are too long, too."""
    from transformers import AutoTokenizer

    theirs, mine = AutoTokenizer.from_pretrained(folders / "bert"), load(folders / "bert").tokenizer
    for first, second in (("a b c", "d e f g h i"), ("a b c d e f", "g"), ("a b c d", "e f g h"), ("", "a b")):
        other = theirs(first, second, truncation=length is not None, max_length=length)
        if length is not None and len(theirs(first, second)["input_ids"]) > length:
            with pytest.warns(UserWarning, match=f"a pair of texts is cut to {length} tokens"):
                made = mine.pair(first, second, length)
        else:
            made = mine.pair(first, mine.encode(second), length)
        assert made == (other["input_ids"], other["token_type_ids"])
    roberta = load(folders / "roberta").tokenizer
    ids = AutoTokenizer.from_pretrained(folders / "roberta")("the dog", " dog")["input_ids"]
    assert roberta.pair("the dog", " dog", ends=2)[0] == ids
    with pytest.raises(TextError, match="leave no room"):
        mine.pair("a", "b", 2)
