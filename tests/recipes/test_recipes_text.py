"""The recipes for texts and tables on tiny data: what they learn, leave, resume to the bit, and say what is wrong."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from multimodal.blocks.masks import causal
from multimodal.blocks.stack import transformer
from multimodal.data.datasets.labelled_texts import ClassBatch
from multimodal.data.datasets.tables import read_table
from multimodal.data.datasets.text import texts_in
from multimodal.errors import DataError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.tasks.evaluate.classification import class_logits, predictions
from multimodal.tasks.transcribe.conformer.decode import language_model, search_tokenizer
from multimodal.tokens.text.hub.recognizers import LetterTokenizer
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.train.objectives.finetune.text import AnnotatedTexts, text_job
from multimodal.train.objectives.text.denoising import sentinels
from multimodal.train.objectives.text.heads import with_head
from multimodal.train.recipe_cli import start
from multimodal.weights.convert import convert
from multimodal.weights.folder import Checkpoint, load_folder, save_folder
from multimodal.weights.load import families, load
from tests.helpers.references.speech import case
from tests.helpers.spread import spread, thin
from tests.helpers.tiny import TEXTS, VOCABULARY, randomized
from tests.helpers.tiny_run import assert_same_states

SENTENCES = [
    "A cat sat on the mat .",
    "The dog ran to the sea .",
    "One bird sang in a tree .",
    "Two men ate fish .",
]
SIZES = {"width": 32, "layers": 1, "heads": 2, "context": 24, "dropout": 0.0, "vocabulary": 90, "budget": 400}
LOOP = {"precision": "float32", "warmup": 5, "log_every": 1, "evaluate_every": 50, "threads": 1}


@pytest.fixture
def recipes(load_recipe):
    names = {"mlm": "train_mlm", "seq2seq": "train_seq2seq", "text": "finetune_text", "table": "finetune_table"}
    return {name: load_recipe(file) for name, file in names.items()}


@pytest.fixture
def data(tmp_path) -> Path:
    """Running text, sentences with their kind, a table of numbers and one of classes."""
    documents = [" ".join(SENTENCES[i:] + SENTENCES[:i]) for i in range(4)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents * 2), encoding="utf-8")
    rows = [f"{text} {word}\t{int(word == 'good')}" for text in SENTENCES for word in ("good", "bad")] * 4
    (tmp_path / "rows.tsv").write_text("\n".join(rows), encoding="utf-8")
    table = ["x,kind,y,name"]
    for i in range(60):
        x, kind = math.sin(7.0 * i), i % 2
        table.append(f"{x:.3f},{'ab'[kind]},{2 * x + 3 * kind:.3f},{'low' if x < 0 else 'high'}")
    (tmp_path / "table.csv").write_text("\n".join(table), encoding="utf-8")
    return tmp_path


def run(recipe, home: Path, run: str, **changes):
    values = LOOP | {"run": home / run, "out": home / f"{run}-out"} | changes
    flags = []
    for name, value in values.items():
        if value is not None and value is not False:
            flags += [f"--{name}"] + ([] if value is True else [str(part) for part in _each(value)])
    return start(recipe.main, flags)


def _each(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def mlm(recipes, data: Path, folder: str, **changes):
    text = data / "text.txt"
    return run(
        recipes["mlm"], data, folder, **(SIZES | {"data": text, "val": text, "rate": 5e-3, "steps": 4} | changes)
    )


@pytest.mark.ci
def test_an_encoder_learns_the_text_and_fills_its_masks(recipes, data):
    figures = mlm(recipes, data, "mlm", steps=150, rate=1e-2, optimizer="adamw")
    assert figures["accuracy"] > 0.6
    assert figures["perplexity"] == pytest.approx(math.exp(figures["masked"]))
    made = load_folder(data / "mlm-out")
    assert made.kind == "text"
    assert made.card["objective"] == "mlm"
    ids = made.tokenizer.batch(["The dog ran to the sea."]).ids
    place = (ids[0] == made.tokenizer.encode("dog")[0]).nonzero()[0]
    ids[0, place] = made.tokenizer.mask_id
    assert made.tokenizer.decode(made.model(ids)[0, place].argmax(-1).tolist()) == "dog"
    assert "## Examples" in (data / "mlm" / "report" / "report.md").read_text()


def test_a_resumed_run_equals_an_unbroken_one(recipes, data):
    for folder, changes in (("whole", {}), ("part", {"steps": 3}), ("part", {"resume": True})):
        options = {"steps": 6, "dropout": 0.2, "schedule": "wsd", "pairs": "next", "ways": 2, "average": 0.5,
                   "warmup": 0}  # fmt: skip
        mlm(recipes, data, folder, **(options | changes))
    assert_same_states(data / "whole", data / "part", 6)
    rows = [json.loads(line) for line in (data / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["next"] == pytest.approx(math.log(2), abs=0.1)
    model = load_folder(data / "whole-out").model
    assert (model.config.segments, model.config.pool, model.config.classes) == (2, "tanh", 2)


@pytest.mark.ci
def test_albert_learns_with_one_block_and_goes_to_transformers(recipes, data):
    from safetensors.torch import load_file
    from transformers import AlbertConfig, AlbertForPreTraining

    options = {"pairs": "order", "embed_width": 8, "shared_layers": True, "layers": 3, "rate": 1e-2, "steps": 30}
    figures = mlm(recipes, data, "albert", **options)
    assert 0 <= figures["order_accuracy"] <= 1
    made = load_folder(data / "albert-out")
    config = made.model.config
    assert (config.embed_width, config.stack.shared, config.stack.layers, len(made.model.stack.blocks)) == (8, 1, 3, 1)
    convert(data / "albert-out", data / "albert.safetensors", to="albert")
    theirs = AlbertForPreTraining(AlbertConfig(
        vocab_size=config.vocabulary, embedding_size=8, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=24, hidden_act="gelu")).eval()  # fmt: skip
    theirs.load_state_dict(load_file(data / "albert.safetensors"), strict=False)
    ids = made.tokenizer.batch(["the dog ran to the sea"]).ids
    with torch.no_grad():
        mine = made.model.logits(made.model.states(ids))
        assert torch.allclose(theirs(ids).prediction_logits, mine, atol=1e-5)


@pytest.mark.parametrize("unit", spread(["spans", "pmi"], 2, pytest.mark.slow, pytest.mark.ci))
def test_spans_and_collocations_are_masked_and_their_boundaries_learned(recipes, data, unit):
    options = {"unit": unit, "often": 2, "share": 0.3, "boundary": unit == "spans"}
    figures = mlm(recipes, data, unit, steps=40, rate=1e-2, **options)
    assert figures["accuracy"] > 0.1
    assert load_folder(data / f"{unit}-out").kind == "text"
    rows = [json.loads(line) for line in (data / unit / "metrics.jsonl").read_text().splitlines()]
    assert ("boundary" in rows[0]) == (unit == "spans")


@pytest.mark.ci
def test_electra_leaves_its_discriminator(recipes, data):
    figures = mlm(recipes, data, "electra", objective="electra", steps=25, rate=5e-3)
    assert figures["auc"] > 0.6
    made = load_folder(data / "electra-out")
    assert made.model.config.detect
    assert made.model.config.tied is None
    assert made.card["objective"] == "electra"


@pytest.mark.ci
def test_an_encoder_decoder_restores_its_spans(recipes, data):
    text, sizes = data / "text.txt", {**SIZES, "encoder_layers": 1, "decoder_layers": 1, "context": 32}
    del sizes["layers"]
    figures = run(recipes["seq2seq"], data, "t5", **(sizes | {"data": text, "val": text, "steps": 50, "rate": 1e-2,
                                                             "sentinels": 8, "average": 0.9}))  # fmt: skip
    assert figures["text"] < 2.5
    made = load_folder(data / "t5-out")
    assert made.kind == "text_to_text"
    assert set(sentinels(made.tokenizer, 8)) <= made.tokenizer.control
    assert " → " in (data / "t5" / "report" / "report.md").read_text()
    figures = run(recipes["seq2seq"], data, "bart", **(sizes | {"data": text, "val": text, "steps": 2, "style": "bart",
                                                               "objective": "bart", "share": 0.3}))  # fmt: skip
    assert figures["loss"] > 3


@pytest.mark.ci
def test_a_classifier_learns_its_labels_and_says_them(recipes, data):
    mlm(recipes, data, "mlm", lines=data / "rows.tsv")
    rows = data / "rows.tsv"
    figures = run(recipes["text"], data, "good", model=data / "mlm-out", data=rows, val=rows, steps=40, rate=5e-3,
                  budget=400, average=0.8)  # fmt: skip
    assert figures[f"from {data / 'mlm-out'}"]["accuracy"] == 1
    assert figures["bag of words"]["accuracy"] == 1
    made = load_folder(data / "good-out")
    assert made.card["labels"] == ["0", "1"]
    assert (made.model.config.classes, made.model.config.pool, made.model.config.tied) == (2, "tanh", None)
    again = run(recipes["text"], data, "other", model=data / "mlm-out", data=rows, val=rows, steps=1, random=True)
    assert again["from random"]["accuracy"] < 1


@pytest.mark.parametrize("labels", [["0", "1"], ["1", "0"]])
def test_a_head_of_the_same_labels_is_kept(tmp_path, labels):
    tokenizer = WordPieceTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc"], VOCABULARY, 2, 3)
    known, _ = with_head(Checkpoint(randomized(TextTransformer(TEXTS["learned"])), tokenizer), 0.0, classes=2)
    rows = tmp_path / "rows.tsv"
    rows.write_text("a b\t0\nb c\t1\n" * 4)
    job = text_job(Checkpoint(known, tokenizer, card={"labels": labels}), AnnotatedTexts(rows, rows))
    kept = torch.equal(job.objective.model.classes.weight, known.classes.weight)
    assert kept == (labels == ["0", "1"])


@torch.no_grad()
def test_of_a_causal_model_the_last_token_tells():
    tokenizer = WordPieceTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc"], VOCABULARY, 2, 3)
    known = randomized(TextTransformer(TEXTS["learned"]))
    model, fresh = with_head(Checkpoint(known, tokenizer), 0.0, classes=3)
    assert fresh == ["classes"]
    assert torch.equal(model.embed.weight, known.embed.weight)
    torch.nn.init.normal_(model.classes.weight)
    ids = torch.tensor([[2, 5, 6, 3, 0, 0], [2, 7, 5, 6, 6, 3]])
    again, fresh = with_head(Checkpoint(model, tokenizer), 0.0, classes=3, keep=True)
    assert torch.equal(again.classes.weight, model.classes.weight)
    assert fresh == ["classes"]  # which a frozen model trains all the same
    other, _ = with_head(Checkpoint(model, tokenizer), 0.0, classes=2, keep=True)
    assert other.classes.out_features == 2
    found = class_logits(model.eval(), ClassBatch(ids, torch.tensor([4, 6]), torch.tensor([0, 1])))
    for row, length in enumerate((4, 6)):
        states = known.states(ids[row : row + 1, :length], mask=causal(length, length))
        assert torch.allclose(found[row], model.classes(states[0, -1]), atol=1e-5)


@pytest.mark.parametrize(
    ("target", "figure"), spread([("name", "accuracy"), ("y", "rmse")], 2, pytest.mark.slow, pytest.mark.ci)
)
def test_a_table_is_learned_and_its_model_can_be_used(recipes, data, target, figure):
    table = data / "table.csv"
    figures = run(recipes["table"], data, "table", data=table, target=target, steps=40, batch=16, width=16, layers=1,
                  heads=2, quantiles=10, trees=20, rate=1e-2, evaluate_every=20, average=0.8)  # fmt: skip
    own = figures["ft_transformer"]
    assert own["rmse"] < 1.2 if figure == "rmse" else own["accuracy"] > 0.8
    assert figure in figures["gradient_boosting"]
    made = load_folder(data / "table-out")
    assert made.kind == "tabular"
    found = predictions(made, read_table(table))
    assert len(found) == 60
    assert isinstance(found[0], float) if figure == "rmse" else set(found[0]) == {"high", "low"}
    assert made.card["validation"]["step"] in (20, 40, 60)


@thin(5, pytest.mark.ci)
@pytest.mark.parametrize(
    ("recipe", "flags", "line"),
    [
        ("mlm", {"data": "none.txt"}, "none.txt: cannot be read"),
        ("mlm", {"data": "empty.txt"}, "empty.txt: holds no text (1 characters)"),
        ("mlm", {"objective": "electra", "pairs": "next"}, "--pairs: has no part in ELECTRA's objective"),
        ("mlm", {"pairs": "order", "boundary": True}, "--boundary must be off with --pairs (got True) (see"),
        ("mlm", {"width": 31}, "--width must be a multiple of heads (2) (got 31) (see"),
        ("mlm", {"embed_width": 64}, "--embed_width must be 1 to 32, the model's width (got 64) (see"),
        ("mlm", {"unit": "pmi", "often": 999}, "--often 999: no group of words occurs so often"),
        ("mlm", {"tokenizer": "bytes"}, "--tokenizer has no mask_id"),
        ("text", {"columns": ("sentence", "mood")}, "rows.tsv: has no column sentence"),
        ("text", {"val": "other.tsv"}, "other.tsv: label '7' is not among the training texts' labels (0, 1)"),
        ("text", {"val": "empty.txt"}, "empty.txt: holds no text (1 characters)"),
        ("text", {"val": "ragged.tsv"}, "ragged.tsv: line 2 has 1 columns, not 2"),
        ("table", {"target": "price"}, "table.csv: lacks the column price (x, kind, y, name)"),
        ("table", {"test": "short.csv"}, "test part: lacks the column x"),
        ("table", {"test": "no_y.csv"}, "no_y.csv: lacks the column y (x, kind)"),
        ("table", {"precision": "bfloat16"}, "or float16 for tables (got bfloat16) (see"),
        ("table", {"width": 15}, "--width must be a multiple of heads (2) (got 15) (see"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(recipes, data, capsys, monkeypatch, recipe, flags, line):
    monkeypatch.chdir(data)
    Path("empty.txt").write_text("\n")
    Path("other.tsv").write_text("a film\t7\n")
    Path("ragged.tsv").write_text("a film\t1\nanother one\n")
    Path("short.csv").write_text("kind,y,name\na,1,low\n")
    Path("no_y.csv").write_text("x,kind\n1,a\n")
    if recipe == "text":
        tokenizer = WordPieceTokenizer.train(SENTENCES, 90, context=24)
        config = replace(TEXTS["learned"], vocabulary=tokenizer.vocab_size)
        save_folder(Checkpoint(TextTransformer(config), tokenizer), Path("encoder"))
    text = {"data": "text.txt", "val": "text.txt", **SIZES}
    rows = {"model": "encoder", "data": "rows.tsv", "val": "rows.tsv"}
    table = {"data": "table.csv", "target": "y", "width": 16, "heads": 2}
    with pytest.raises(SystemExit) as end:
        run(recipes[recipe], data, "bad", **({"mlm": text, "text": rows, "table": table}[recipe] | flags), steps=1)
    assert end.value.code == (2 if line.endswith("(see") else 1)
    last = capsys.readouterr().err.splitlines()[-1]
    assert ".py: error: " in last
    assert line in last


@pytest.mark.ci
def test_a_language_model_of_transcripts_fits_the_beams_of_the_recognizer(load_recipe, tmp_path):
    """Texts of manifests and files, as a recognizer writes them, in its tokens."""
    rows = [json.dumps({"audio_filepath": "a.wav", "text": text}) for text in ("The cat, it's HERE.", "... !", "two")]
    (tmp_path / "said.jsonl").write_text("\n".join(rows))
    (tmp_path / "text.txt").write_text("A dog ran.\n\nTwo men ate fish.\n" * 8)
    lm = load_recipe("train_lm")
    assert lm.transcripts(texts_in(tmp_path / "said.jsonl", "lines")) == [" the cat it's here", " two"]
    files = {"data": tmp_path / "said.jsonl", "val": tmp_path / "said.jsonl"}
    sizes = {"width": 16, "heads": 2, "layers": 1, "context": 24, "batch": 2, "steps": 2, "sample_tokens": 4}
    made = case("wav2vec2")
    model = families()[made.family].load(made.tensors, made.config, "file").model
    letters = LetterTokenizer(["<s>", "</s>", "<unk>", "|", "E", "T", "A", "O"], "|", ["<s>", "</s>"], "<unk>")
    save_folder(Checkpoint(model, letters), tmp_path / "letters")  # which has no end of a text
    for place, name in (("lm", "asr-conformer-en"), ("lm2", str(tmp_path / "letters"))):
        run(lm, tmp_path, place, tokenizer=name, documents="lines", plain=True, **files, **sizes)
        tokenizer = search_tokenizer(load(name))
        assert callable(language_model(str(tmp_path / f"{place}-out"), tokenizer, torch.device("cpu")))
    run(lm, tmp_path, "characters", documents="lines", plain=True, **files, **sizes)  # none of which is a line break
    (tmp_path / "said.jsonl").write_text('{"audio_filepath": "a.wav"}')
    with pytest.raises(DataError, match=r"said.jsonl: line 1: expected a column text, .* \(got audio_filepath\)"):
        texts_in(tmp_path / "said.jsonl")


def test_the_mean_of_two_models_has_the_mean_of_their_weights(load_recipe, tmp_path, capsys):
    average, models = load_recipe("average"), {}
    for name, seed in (("a", 0), ("b", 1)):
        stack = transformer(16, 1, 2, 32, dropout=0.1 * seed, drop_path=0.1 * seed)
        model = randomized(TextTransformer(TextConfig(20, 8, stack, causal=True, stem_dropout=0.1 * seed)), seed)
        save_folder(Checkpoint(model, card={"licence": "free", "name": name, "figures": {"loss": 1}}), tmp_path / name)
        models[name] = model.state_dict()
    flags = ["--models", str(tmp_path / "a"), str(tmp_path / "b"), "--store", "float32", "--out"]
    start(average.main, [*flags, str(tmp_path / "mean")])
    start(average.main, [*flags, str(tmp_path / "more"), "--weights", "3", "1"])
    mean, more = (load(tmp_path / name) for name in ("mean", "more"))
    for name, own in mean.model.state_dict().items():
        assert torch.allclose(own, (models["a"][name] + models["b"][name]) / 2)
        assert torch.allclose(more.model.state_dict()[name], 0.75 * models["a"][name] + 0.25 * models["b"][name])
    assert mean.card == {"licence": "free", "mean_of": {str(tmp_path / "a"): 0.5, str(tmp_path / "b"): 0.5}}
    save_folder(Checkpoint(TextTransformer(TextConfig(20, 8, transformer(16, 2, 2, 32), causal=True))), tmp_path / "c")
    for changed, message in (
        (["--models", str(tmp_path / "a"), str(tmp_path / "c")], "its configuration differs from that of"),
        (["--models", str(tmp_path / "a")], "expected two models or more"),
        ([*flags[:3], "--weights", "1"], "expected 2 numbers of 0 or more"),
    ):
        with pytest.raises(SystemExit):
            start(average.main, [*changed, "--out", str(tmp_path / "d")])
        assert message in capsys.readouterr().err
