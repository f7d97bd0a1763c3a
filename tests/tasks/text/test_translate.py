"""`translate`: against transformers' generate, in any batch, by the command, and what is refused."""

import io
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.inference import cuda_graphs
from multimodal.tasks.text.languages import direction, language_id
from multimodal.tasks.text.translate import TranslateOptions, TranslationWriter, Translator, translate
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.tokenizer import TextCut
from multimodal.train.objectives.text.translation import translator
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.load import load
from multimodal.weights.text import bart
from multimodal.weights.text import m2m100 as m2m100_weights
from multimodal.weights.text import marian as marian_weights
from tests.helpers.commands import one_line, run
from tests.helpers.references.seq2seq import named
from tests.helpers.references.translation import ENGLISH, GERMAN, m2m100, marian, mbart50
from tests.helpers.spread import thin

TEXTS = ["the cat sat on the mat", "a dog", "two dogs and 3 cats, at sea!", "the sea is near", "a dog"]


WRITE = {
    "m2m100": m2m100,
    "mbart": mbart50,
    "marian": lambda folder: marian(folder, source_lang="en", target_lang="de"),
    "many": lambda folder: marian(folder, (">>deu<<", ">>nds<<")),
}


def _references(root: Path) -> dict:
    """The models of transformers by the names of the folders that they are written to, with their tokenizers."""
    made = {}
    for name in WRITE:
        (root / name).mkdir()
        size = WRITE[name](root / name)
        if name == "m2m100":
            reference = named(m2m100_weights.FAMILY, "M2M100", "M2M100ForConditionalGeneration", vocab_size=size)
        elif name == "mbart":
            reference = named(bart.FAMILY, "MBart", "MBartForConditionalGeneration", vocab_size=size,
                              scale_embedding=True, decoder_start_token_id=2)  # fmt: skip
        else:
            options = {"decoder_start_token_id": size - 1, "pad_token_id": size - 1, "vocab_size": size}
            reference = named(marian_weights.FAMILY, "Marian", "MarianMTModel", ("embed_positions.weight",), **options)
            with torch.no_grad():
                reference.reference.final_logits_bias[0, -1] += 20  # the pad, which no translation has
        made[name] = reference.reference
        made[name].config.to_json_file(root / name / "config.json")
        repeats = ("embed_tokens.weight", "lm_head.weight")  # which files leave out
        repeats += () if name == "mbart" else ("embed_positions.weight",)
        kept = {key: value for key, value in reference.tensors.items() if not key.endswith(repeats)}
        save_file(kept, root / name / "model.safetensors")
    return made


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("translators")


@pytest.fixture(scope="module")
def references(root) -> dict:
    return _references(root)


@pytest.fixture(scope="module")
def own(root) -> Checkpoint:
    """As `train_translation.py` makes them, untrained."""
    tokenizer = BytePairTokenizer.train(ENGLISH + GERMAN, 300, languages=("en", "de", "fr"))
    torch.manual_seed(1)
    model = translator(tokenizer, 16, (2, 1), 2, 32, 24, 0.0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    save_folder(Checkpoint(model, tokenizer), root / "own")
    return load(root / "own")


RULES = [
    ({}, {}),
    ({"early_stopping": True, "repetition_penalty": 1.3, "no_repeat_ngram": 2},
     {"early_stopping": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}),
]  # fmt: skip


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize(("rules", "asked", "beams"), [(*RULES[0], 1), (*RULES[1], 5)])
@pytest.mark.parametrize("name", ["m2m100", "mbart", "many", "marian"])
def test_tokens_equal_transformers_generate(references, root, name, rules, asked, beams):
    reference, checkpoint = references[name], load(root / name)
    tokenizer, most = checkpoint.tokenizer, 9
    way = {"m2m100": ("de", "fr"), "mbart": ("de", "fr"), "many": (None, "nds"), "marian": ("en", "de")}[name]
    options = TranslateOptions(beam_size=beams, length_penalty=0.7, max_new_tokens=most, **rules)
    made = TranslationWriter(checkpoint, *way, options)
    before = {"m2m100": ["de"], "mbart": ["de_DE"], "many": ["nds"], "marian": []}[name]
    french = {"m2m100": "fr", "mbart": "fr_XX"}.get(name)
    forced = {"forced_bos_token_id": tokenizer.language_ids[french]} if french else {}
    found = made([made.read(text) for text in TEXTS])
    for text, one in zip(TEXTS, found, strict=True):
        ids = [*(tokenizer.language_ids[code] for code in before), *tokenizer.encode(text), tokenizer.eos_id]
        expected = reference.generate(
            input_ids=torch.tensor([ids]), num_beams=beams, max_new_tokens=most + len(forced), length_penalty=0.7,
            forced_eos_token_id=None, suppress_tokens=[tokenizer.pad_id], do_sample=False, output_scores=True,
            return_dict_in_generate=True, **{"early_stopping": False, **asked, **forced},
        )  # fmt: skip
        row = expected.sequences[0, 1:].tolist()
        assert one.text == tokenizer.decode(row), text
        assert one.finished == (tokenizer.eos_id in row)
        assert one.tokens == (row.index(tokenizer.eos_id) + 1 if one.finished else len(row)) - len(forced)
        if beams > 1:
            assert abs(one.score - expected.sequences_scores.item()) < 1e-4


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["marian", "many"])
def test_a_forced_first_token_begins_a_translation(references, root, name, beams):
    checkpoint = load(root / name)
    tokenizer, target = checkpoint.tokenizer, "nds" if name == "many" else None
    forced = tokenizer.encode("sea")[0]
    checkpoint = replace(checkpoint, card=checkpoint.card | {"generation": {"forced_bos_token_id": forced}})
    made = Translator(checkpoint, None, target, beam_size=beams, max_new_tokens=9).writer
    source = made.read(TEXTS[0])
    expected = references[name].generate(
        input_ids=torch.tensor([source.ids]), num_beams=beams, max_new_tokens=9, forced_bos_token_id=forced,
        forced_eos_token_id=None, suppress_tokens=[tokenizer.pad_id], do_sample=False, early_stopping=False,
    )[0, 1:]  # fmt: skip
    assert made([source])[0].text == tokenizer.decode(expected.tolist())
    assert expected[0] == forced


def test_a_target_language_comes_before_a_forced_first_token(references, root):
    checkpoint = load(root / "m2m100")
    asked = replace(checkpoint, card=checkpoint.card | {"generation": {"forced_bos_token_id": 5}})
    options = {"beam_size": 1, "max_new_tokens": 8}
    assert translate(TEXTS, asked, "de", "fr", **options) == translate(TEXTS, checkpoint, "de", "fr", **options)
    asked.card["generation"]["forced_bos_token_id"] = 10**6
    with pytest.raises(CheckpointError, match=r"forced_bos_token_id: expected ids from 0 to \d+ \(got 1000000\)"):
        translate(TEXTS, asked, "de", "fr", **options)


def test_a_checkpoint_chooses_beams_and_not_the_length(own):
    asked = {"num_beams": 2, "length_penalty": 0.4, "no_repeat_ngram_size": 3, "max_length": 5, "min_length": 3,
             "bad_words_ids": [[own.tokenizer.pad_id]]}  # fmt: skip
    checkpoint = replace(own, card={**own.card, "generation": asked})
    with pytest.warns(UserWarning, match="asks for min_length 3, which is not followed"):
        options = Translator(checkpoint, "en", "de", length_penalty=1.0).writer.options
    assert (options.beam_size, options.length_penalty, options.no_repeat_ngram) == (2, 1.0, 3)
    assert options.max_new_tokens is None


@pytest.mark.ci
@pytest.mark.parametrize("beams", [1, 3])
def test_a_translation_does_not_depend_on_its_batch(own, beams):
    alone = [translate([text], own, "en", "de", beam_size=beams, max_new_tokens=12)[0] for text in TEXTS]
    for size in (2, 5):
        assert translate(TEXTS, own, "en", "de", beam_size=beams, max_new_tokens=12, batch_size=size) == alone
    assert alone[1] == alone[4]
    assert len(set(alone)) > 1
    assert translate(TEXTS[0], own, "English", " GERMAN ", beam_size=beams, max_new_tokens=12) == alone[0]
    assert translate(TEXTS[0], own, "en", "fr", beam_size=beams, max_new_tokens=12) != alone[0]
    assert translate(["", TEXTS[0], " \t"], own, "en", "de", beam_size=beams, max_new_tokens=12) == ["", alone[0], ""]


@pytest.mark.parametrize("beams", [1, 3])
def test_steps_that_a_gpu_replays_translate_alike(own, beams, monkeypatch):
    alone = translate(TEXTS, own, "en", "de", beam_size=beams, max_new_tokens=12)
    monkeypatch.setattr(cuda_graphs, "REPLAYING", ("cpu", "cuda"))
    monkeypatch.setattr(cuda_graphs._Slot, "capture", lambda slot, decoder: None)
    assert translate(TEXTS, own, "en", "de", beam_size=beams, max_new_tokens=12) == alone


@pytest.fixture(autouse=True)
def _untrained(request):
    """Untrained models often do not end, which warns; one test checks it."""
    if "told" not in request.node.name:
        warnings.filterwarnings("ignore", category=TextCut)


def test_texts_beyond_the_context_are_cut_and_that_is_told_or_refused(own):
    long = " ".join(["the cat"] * 40)
    tokens = len(own.tokenizer.encode(long))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = translate(["sea", long, long + "."], own, "en", "de", beam_size=1, max_new_tokens=5)
    assert found[1] == found[2]
    assert [str(one.message) for one in told] == [
        f"text 2 was cut to the model's context, losing {tokens - 22} tokens; 1 more",
        "text 1 has a translation that was cut after 5 tokens; 2 more",
    ]
    assert all(one.category is TextCut for one in told)
    with pytest.raises(TextError, match=rf"has {tokens} tokens, the model's context leaves 22"):
        translate(["sea", long], own, "en", "de", on_long="error")
    with pytest.warns(UserWarning, match="max_new_tokens 100: the model's context leaves 22"):
        translate([""], own, "en", "de", max_new_tokens=100)


@pytest.mark.ci
def test_lines_of_a_file_stay_where_they_are_and_broken_ones_are_named(capsys, own, root, tmp_path):
    file = tmp_path / "in.txt"
    file.write_bytes(b"\xef\xbb\xbfthe cat sat\r\n\nbad \xff line\na dog\n")
    command = ("translate", "--file", file, "--from", "en", "--to", "German", "-m", root / "own", "--max_new_tokens", 8)
    code, out, err = run(capsys, *command)
    assert code == 1
    lines = err.splitlines()
    assert f"{file}, line 3: is not UTF-8 text (byte 4 of the line is 0xff)" in lines[0]
    assert out.count("\n") == 4
    expected = translate(["the cat sat", "a dog"], own, "en", "de", max_new_tokens=8)
    assert out.split("\n") == [" ".join(expected[0].split()), "", "", " ".join(expected[1].split()), ""]
    code, _, _ = run(capsys, *command, "-o", tmp_path / "out.jsonl", "--batch_size", 1)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert code == 1
    assert [record["line"] for record in records] == [1, 2, 3, 4]
    assert records[0]["translation"] == expected[0]
    assert records[1]["translation"] == ""
    assert records[2]["error"] == "not UTF-8 text"
    assert records[3].keys() == {"line", "source", "translation", "score", "tokens", "finished", "cut"}
    assert not list(tmp_path.glob("*.part"))


def test_texts_and_the_standard_input(capsys, own, root, monkeypatch):
    code, out, _ = run(capsys, "translate", "a dog", "the sea", "--from", "en", "--to", "de", "-m", root / "own",
                       "--max_new_tokens", 8)  # fmt: skip
    assert (code, out.count("\n")) == (0, 2)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a dog\nthe sea")))
    assert run(capsys, "translate", "-", "--from", "en", "--to", "de", "-m", root / "own",
               "--max_new_tokens", 8)[:2] == (code, out)  # fmt: skip


@pytest.mark.ci
def test_a_foreign_folder_translates_alike_once_converted(capsys, references, root, tmp_path):
    for name, way in (("m2m100", ("--from", "German", "--to", "fr")), ("marian", ())):
        command = ("translate", "die Katze", "sea", *way, "--max_new_tokens", 8, "--beam_size", 2, "-m")
        first = run(capsys, *command, root / name)
        assert first[0] == 0, first
        assert run(capsys, "convert", root / name, tmp_path / name)[0] == 0
        assert run(capsys, *command, tmp_path / name)[:2] == first[:2]


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(
    ("model", "flags", "cause"),
    [
        ("m2m100", ["--from", "en", "--to", "germn"], "--to 'germn': unknown to the model (near: de "
         "German"),
        ("m2m100", ["--from", "en", "--to", "germn"], "; it knows 100)"),
        ("m2m100", ["--from", "xqz", "--to", "de"], "known: 100 languages: af, am, "),
        ("m2m100", ["--to", "de"], "--from is required, the model knows 100 languages: af, "),
        ("own", ["--from", "en"], "--to is required, the model knows en, de, fr"),
        ("own", ["--from", "en", "--to", "cs"], "--to 'cs': unknown to the model (known: en, de, fr)"),
        ("marian", ["--from", "fr"], "--from 'fr': the model translates from 'en' only"),
        ("marian", ["--to", "French"], "--to 'French': the model translates to 'de' only"),
        ("many", ["--to", "xx"], "(known: deu, nds)"),
        ("own", ["--from", "en", "--to", "de", "--device", "nowhere"], "device 'nowhere': cannot be used"),
        ("own", ["--from", "en", "--to", "de", "-o", "no-such-folder/x.txt"], "no such folder"),
        ("own", ["--from", "en", "--to", "de", "-o", "/dev/null"], "/dev/null: cannot be written (not a regular file)"),
    ],
)  # fmt: skip
def test_refusals_are_one_line(capsys, references, own, root, model, flags, cause):
    code, out, err = run(capsys, "translate", "sea", *flags, "-m", root / model)
    assert (code, out) == (1, "")
    assert cause in one_line(err)


@pytest.mark.parametrize("asked", ["deu", "de", "German", "DEU"])
def test_three_letter_codes_are_languages(own, references, root, asked):
    """As many of Marian's models name theirs."""
    assert direction(own, "eng", asked)[1] == [own.tokenizer.language_ids["de"]]
    card = {"translation": {"from": "zho", "to": "deu"}}
    one = replace(load(root / "marian"), card=card)
    assert direction(one, "Chinese", asked) == direction(one, "zho", None) == ([], [])
    many = load(root / "many").tokenizer
    many.language_ids["deu"] = 7
    assert language_id(many, asked, "target") == 7


def test_what_does_not_translate_is_refused(own, references, root, tmp_path):
    from tests.helpers.tiny import made

    with pytest.raises(UsageError, match="expected an encoder-decoder of text, got text"):
        translate("sea", Checkpoint(made("text-learned"), own.tokenizer), "en", "de")
    with pytest.raises(CheckpointError, match="checkpoint has no tokenizer"):
        translate("sea", Checkpoint(own.model), "en", "de")
    with pytest.raises(UsageError, match="direction unknown"):
        translate("sea", Checkpoint(load(root / "marian").model, load(root / "marian").tokenizer))
    with pytest.raises(UsageError, match="on_long must be one of cut, error"):
        translate("sea", own, "en", "de", on_long="no")
    with pytest.raises(UsageError, match="beam_size"):
        translate("sea", own, "en", "de", beam_size=0)
    with pytest.raises(TextError, match="lone surrogate"):
        translate("a \ud800", own, "en", "de")
    broken = load(root / "own")
    with torch.no_grad():
        broken.model.decoder.embed.weight[5] = torch.nan
    with pytest.raises(CheckpointError, match="not finite"):
        translate("sea", broken, "en", "de", beam_size=1)


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ([], "names no text"),
        (["a", "--file", "b"], "name one of them"),
        (["-", "a"], "-: stands alone"),
        (["a", __file__], "test_translate.py: is a file, which --file reads"),
        (["a", "--on_long", "x"], "must be one of cut, error (got 'x')"),
        (["a", "--beam_size", "0"], "--beam_size"),
    ],
)
def test_contradictions_end_with_2(capsys, flags, cause):
    code, _, err = run(capsys, "translate", *flags, "-m", "none")
    assert code == 2
    assert cause in err
    assert err.count("\n") == 1


def test_an_empty_file_is_refused(capsys, tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    code, _, err = run(capsys, "translate", "--file", tmp_path / "empty.txt", "-m", "none")
    assert (code, "empty.txt: has no lines" in err) == (1, True)
