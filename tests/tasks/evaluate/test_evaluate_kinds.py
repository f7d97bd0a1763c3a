"""`multimodal evaluate lm|translation|classification|noise` and `asr --whole_recordings`."""

import gzip
import json
import math
from pathlib import Path

import pytest
import sacrebleu
import torch
import torch.nn.functional as F

from multimodal.blocks.stack import transformer
from multimodal.data.datasets.tables import Columns, read_table
from multimodal.errors import UsageError
from multimodal.models.tabular import FTTransformer, TabularConfig, ft_stack
from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT, ViTConfig
from multimodal.tasks.evaluate.classification import evaluate_classifier
from multimodal.tasks.text.translate import translate
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.characters import CharacterTokenizer
from multimodal.tokens.text.tokenizer import TextCut
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.train.objectives.text.heads import with_head
from multimodal.train.objectives.text.language import LanguageModelSettings, language_config
from multimodal.train.objectives.text.translation import translator
from multimodal.weights.folder import Checkpoint, load_folder, save_folder
from tests.helpers.commands import Page, one_line, run
from tests.helpers.data import sets
from tests.helpers.data.audio_files import first_words
from tests.helpers.spread import thin
from tests.helpers.tiny import TEXTS, randomized

SENTENCES = ["a dog runs", "a cat sleeps", "two dogs run"]


def figures(capsys, *arguments: object) -> dict:
    code, out, err = run(capsys, "evaluate", *arguments, "--format", "json", "--quiet")
    assert (code, err) == (0, "")
    return json.loads(out)["sets"]


@pytest.fixture
def language_model(tmp_path: Path) -> Path:
    tokenizer = CharacterTokenizer.train(SENTENCES)
    config = language_config(LanguageModelSettings(width=16, layers=1, heads=2, context=8), tokenizer.vocab_size)
    save_folder(Checkpoint(randomized(TextTransformer(config)), tokenizer), tmp_path / "lm")
    return tmp_path / "lm"


def test_perplexity_and_bits_per_byte_of_a_language_model(capsys, language_model, tmp_path):
    (tmp_path / "text.txt").write_text("a cat", encoding="utf-8")
    (made,) = figures(capsys, "lm", tmp_path / "text.txt", "-m", language_model).values()
    checkpoint = load_folder(language_model)
    ids = torch.tensor([[checkpoint.tokenizer.bos_id, *checkpoint.tokenizer.encode("a cat")]])
    ids = torch.cat([ids, torch.tensor([[checkpoint.tokenizer.eos_id]])], 1)
    with torch.no_grad():
        nats = F.cross_entropy(checkpoint.model(ids[:, :-1])[0], ids[0, 1:], reduction="sum").item()
    assert made["loss"] == pytest.approx(nats / 6, rel=1e-5)
    assert made["perplexity"] == pytest.approx(math.exp(nats / 6), rel=1e-5)
    assert made["bits_per_byte"] == pytest.approx(nats / 5 / math.log(2), rel=1e-5)


def test_files_that_cannot_be_scored_are_named_and_the_others_go_on(capsys, language_model, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "odd.txt").write_text("ß")
    (tmp_path / "text.txt").write_text("a cat\n".replace("\n", ""))
    names = [str(tmp_path / f"{name}.txt") for name in ("empty", "odd", "text")]
    code, out, err = run(capsys, "evaluate", "lm", *names, "-m", language_model, "-q", "--report", tmp_path / "r.md")
    assert code == 1
    assert [line.startswith("multimodal: error: ") for line in err.splitlines()] == [True, True]
    assert out.startswith(f"{tmp_path}/text.txt\nloss")
    assert "perplexity" in (tmp_path / "r.md").read_text()


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(("flags", "message"), [
    (["lm", "text.txt", "-m", "clip-vit-16"], "expected a causal language model, got clip"),
    (["lm", "text.txt", "-m", "lm", "--stride", "9"], "stride must be at most the context of 8 tokens (got 9)"),
    (["translation", "text.txt", "--references", "more.txt", "-m", "lm"], "expected 1 lines as in text.txt (got 2)"),
    (["classification", "text.txt", "-m", "lm"], "a text classifier or a tabular model, got text"),
    (["noise", "-m", "asr-conformer-en"], "expected a Whisper model, got joint_conformer"),
    (["asr", "text.txt", "--whole_recordings", "--vad_filter"], "--vad_filter: does not apply to --whole_recordings"),
    (["asr", "text.txt", "--whole_recordings", "--normalizer", "none", "--keep_marks"], "keep_marks: is for"),
])  # fmt: skip
def test_models_and_data_that_do_not_fit_are_one_line(capsys, language_model, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a cat")
    Path("more.txt").write_text("a\nb\n")
    code, out, err = run(capsys, "evaluate", *flags)
    assert (code, out) == (1, "")
    assert message in one_line(err)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::multimodal.tokens.text.tokenizer.TextCut")  # random weights do not end
def test_bleu_and_chrf_are_sacrebleus_of_the_translations(capsys, tmp_path):
    tokenizer = BytePairTokenizer.train(SENTENCES * 2, 280, languages=["en", "de"])
    made = Checkpoint(randomized(translator(tokenizer, 16, (1, 1), 2, 32, 32, 0.0)), tokenizer)
    save_folder(made, tmp_path / "translator")
    (tmp_path / "test.en.gz").write_bytes(gzip.compress("\n".join(SENTENCES).encode()))
    hypotheses = translate(SENTENCES, made, "en", "de", beam_size=2, max_new_tokens=None)
    references = [f"{text} x y z" for text in hypotheses]
    (tmp_path / "test.de").write_text("\n".join(references) + "\n", encoding="utf-8")
    flags = ["--references", tmp_path / "test.de", "--from", "en", "--to", "de", "--beam_size", 2]
    (found,) = figures(capsys, "translation", tmp_path / "test.en.gz", "-m", tmp_path / "translator", *flags).values()
    assert (found["texts"], found["bleu_tokenizer"]) == (3, "13a")
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score, abs=0.01)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score, abs=0.01)


def test_accuracy_of_an_image_classifier(capsys, tmp_path):
    data = sets.squares(tmp_path / "val", 3)
    (data / "red_square" / "broken.png").write_bytes(b"no image")
    labels = [f"{name}_square" for name in sets.COLOURS]
    stack = transformer(16, 1, 2, 32)
    model = ViT(ViTConfig((16, 16), 8, stack, pool="mean", class_token=False, classes=4))
    torch.nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor([0.0, 1.0, 2.0, 3.0])  # always the last class
    record = Preprocessing((16, 16), "shortest", "bilinear", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
    save_folder(Checkpoint(model, preprocessing=record, card={"labels": labels}), tmp_path / "vit")
    code, out, err = run(capsys, "evaluate", "classification", data, "-m", tmp_path / "vit", "--format", "json",
                         "--report", tmp_path / "r.html")  # fmt: skip
    assert code == 1
    page = Page.of(tmp_path / "r.html")
    assert "Most confident mistakes (9 of 9)" in page.text
    assert (page.tags.count("figure"), page.tags.count("img")) == (9, 9)
    assert err.count("broken.png") == err.count("not a readable image") > 0
    (found,) = json.loads(out)["sets"].values()
    assert (found["images"], found["acc1"]) == (12, 0.25)
    assert [row["recall"] for row in found["per_class"]] == [0, 0, 0, 1]
    rows = [f"val/{path.parent.name}/{path.name},{path.parent.name}" for path in data.rglob("[0-9].png")]
    (tmp_path / "list.csv").write_text("\n".join(["photo,breed", *rows]))
    (listed,) = figures(
        capsys, "classification", tmp_path / "list.csv", "-m", tmp_path / "vit", "--columns", "photo", "breed"
    ).values()
    assert listed["per_class"] == found["per_class"]


def test_accuracy_of_a_text_classifier(capsys, tmp_path):
    tokenizer = WordPieceTokenizer.train(SENTENCES, 60, context=24)
    encoder = TextTransformer(TEXTS["learned"].__class__(**vars(TEXTS["learned"]) | {"vocabulary": 60}))
    model, _ = with_head(Checkpoint(encoder, tokenizer), 0.0, classes=2)
    torch.nn.init.zeros_(model.classes.weight)
    model.classes.bias.data = torch.tensor([1.0, 0.0])
    save_folder(Checkpoint(model, tokenizer, card={"labels": ["no", "yes"]}), tmp_path / "texts")
    (tmp_path / "rows.tsv").write_text("a dog runs\tno\na cat sleeps\tno\ntwo dogs run\tyes\n")
    report = tmp_path / "r.html"
    (found,) = figures(
        capsys, "classification", tmp_path / "rows.tsv", "-m", tmp_path / "texts", "--report", report
    ).values()
    assert "two dogs run" in Page.of(report).text
    with pytest.raises(UsageError, match=r"columns must be text and label \(got text\)"):
        evaluate_classifier(load_folder(tmp_path / "texts"), str(tmp_path / "rows.tsv"), columns=["text"])
    (tmp_path / "long.tsv").write_text(f"{'a dog runs ' * 20}\tno\na cat sleeps\tno\ntwo dogs run\tyes\n")
    with pytest.warns(TextCut, match=r"long\.tsv: 1 of 3 texts are cut to \d+ tokens"):
        evaluate_classifier(load_folder(tmp_path / "texts"), str(tmp_path / "long.tsv"))
    tokenizer.context = 4  # as a folder's `model_max_length`
    with pytest.warns(TextCut, match=r"rows\.tsv: \d of 3 texts are cut to 4 tokens"):
        evaluate_classifier(Checkpoint(model, tokenizer, card={"labels": ["no", "yes"]}), str(tmp_path / "rows.tsv"))
    several = Checkpoint(model, tokenizer, card={"labels": ["no", "yes"], "scores": "sigmoid"})
    with pytest.raises(UsageError, match="expected a classifier of one label an item, got one of several"):
        evaluate_classifier(several, str(tmp_path / "rows.tsv"))
    assert (found["texts"], found["acc1"]) == (3, pytest.approx(2 / 3))
    assert not [name for name in found if "images" in name]


def test_errors_of_a_tabular_model(capsys, tmp_path):
    (tmp_path / "table.csv").write_text("x,y\n1,0.5\n2,1.5\n3,2.5\n")
    columns = Columns.of(read_table(tmp_path / "table.csv"), "y", "number")
    model = FTTransformer(TabularConfig(1, (), 4, 1, ft_stack(8, 1, 2, 0.0, 0.0)))
    model.quantiles.copy_(torch.linspace(1, 3, 4)[None])
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)  # predicts its shift
    model.shift.fill_(1.5)
    save_folder(Checkpoint(model, card={"table": columns.card()}), tmp_path / "tabular")
    (found,) = figures(capsys, "classification", tmp_path / "table.csv", "-m", tmp_path / "tabular").values()
    assert found["rmse"] == pytest.approx(math.sqrt(2 / 3), rel=1e-5)
    assert found["mae"] == pytest.approx(2 / 3, rel=1e-5)
    (tmp_path / "bare.csv").write_text("0.5,1\n1.5,2\n2.5,3\n")
    (same,) = figures(
        capsys, "classification", tmp_path / "bare.csv", "-m", tmp_path / "tabular", "--columns", "y", "x"
    ).values()
    assert same == found


@pytest.mark.ci
def test_whole_recordings_are_measured_with_each_decoder(capsys, tmp_path):
    (tmp_path / "speech.wav").write_bytes(first_words())
    text = "a young boy in a red shirt is playing with a ball on the beach"
    rows = [{"audio_filepath": "speech.wav", "text": text}]
    (found,) = figures(capsys, "asr", sets.lines(tmp_path / "a.jsonl", rows), "--whole_recordings").values()
    assert found.keys() >= {"greedy", "ctc", "attention", "joint"}
    assert found["joint"]["wer"] < 0.2
