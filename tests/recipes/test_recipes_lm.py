"""The recipes of language models, of pixels and of distillation: they learn, resume, and name what they cannot use."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from multimodal import load
from multimodal.data.batching import stack_fields
from multimodal.data.datasets.text import PrepareTokens, TextCorpus, Windows
from multimodal.data.loader import generator
from multimodal.data.sources import open_source
from multimodal.errors import UsageError
from multimodal.models.text import TextTransformer
from multimodal.tasks.evaluate.perplexity import losses_by_place
from multimodal.tasks.text.generate import generate
from multimodal.tokens.text.characters import CharacterTokenizer
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.train.objectives.pixels import (
    FlippedImages,
    ImagesInMemory,
    Palette,
    PixelRows,
    after,
    bits,
    marginal_bits,
    middle_features,
)
from multimodal.train.objectives.text.distillation import Distillation, student_config, student_of
from multimodal.train.objectives.text.language import Language, LanguageModelSettings, gpt2_weights, language_config
from multimodal.train.objectives.text.masked import CollateMasked, MaskedExample
from multimodal.train.recipe_cli import parse, start
from multimodal.weights.folder import Checkpoint, load_folder, save_folder
from tests.helpers import tiny
from tests.helpers.data import sets
from tests.helpers.spread import thin
from tests.helpers.tiny_run import assert_same_states

SAID = "the cat sat on the mat. a dog ran to the cat. "
SMALL = {"width": 16, "heads": 2, "layers": 1, "context": 24, "batch": 2, "threads": 1, "log_every": 2, "average": 0.5,
         "warmup": 2, "evaluate_every": 4, "samples": 1, "sample_tokens": 5}  # fmt: skip


@pytest.fixture
def recipe(load_recipe):
    return load_recipe("train_lm")


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join([SAID * 3] * 20))
    return path


def flags(values: dict) -> list[str]:
    given = {name: value for name, value in values.items() if value is not None}
    return [part for name, value in given.items() for part in (f"--{name}", *([] if value == "" else [str(value)]))]


def run(recipe, text: Path, name: str = "run", **changes):
    folder = text.parent
    values = {"data": text, "run": folder / name, "out": folder / f"{name}-out", "steps": 6} | SMALL | changes
    return start(recipe.main, flags(values))


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ci
def test_learns_a_text_and_ships_a_model_that_says_it(recipe, text):
    run(recipe, text, steps=60, width=32, batch=8, rate=2e-2, precision="float32", evaluate_every=30, prompt="the cat")
    rows = metrics(text.parent / "run")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[0] == pytest.approx(math.log(18), abs=0.4)
    assert losses[-1] < 0.7
    made = load(text.parent / "run-out")
    assert made.card["validation"]["nats_per_character"] < 0.8
    assert isinstance(made.tokenizer, CharacterTokenizer)
    assert generate("the", made, max_new_tokens=4) in (" cat", " mat")
    report = (text.parent / "run" / "report" / "report.md").read_text()
    assert "temperature 0.8: the cat" in report
    assert "text.txt: sha256:" in report


@pytest.mark.parametrize("changes", [
    {"objective": "prefix", "documents": "lines", "tokenizer": "bytes", "context": 40},
    {"documents": "blank", "tokenizer": "bpe", "vocabulary": 270, "val": True, "positions": "alibi"},
    {"objective": "prefix", "positions": "bucket", "gated": "", "activation": "silu", "norm": "rms", "kv_heads": 1},
])  # fmt: skip
def test_kinds_of_data_objective_and_model_run(recipe, text, changes):
    if changes.get("val"):
        text.write_text(text.read_text().replace("\n", "\n\n"))
    run(recipe, text, **changes | ({"val": text} if changes.get("val") else {}))
    last = metrics(text.parent / "run")[-1]
    assert math.isfinite(last["eval/loss"])
    assert last["eval/bits_per_byte"] == pytest.approx(last["eval/nats_per_character"] / math.log(2))  # ASCII
    card = load(text.parent / "run-out").card["validation"]
    assert card["stride"] == {"prefix": 20 if "context" in changes else 12}.get(changes.get("objective"), 24)


def test_a_resumed_run_equals_an_unbroken_one_and_keeps_the_best(recipe, text):
    for name, changes in (("whole", {}), ("part", {"steps": 4}), ("part", {"resume": ""})):
        run(recipe, text, name, **({"steps": 8, "schedule": "wsd", "warmup": 0, "dropout": 0.1} | changes))
    assert_same_states(text.parent / "whole", text.parent / "part", 8)
    cards = [load_folder(text.parent / f"{name}-out").card for name in ("whole", "part")]
    assert cards[0] == cards[1]


@pytest.mark.ci
def test_a_mixture_resumes_to_the_same_run_and_reports_its_epochs(recipe, text, caplog):
    (other := text.with_name("other.txt")).write_text(SAID * 40)
    mixed = {"steps": 8, "schedule": "wsd", "warmup": 0}
    for name, changes in (("whole", {}), ("part", {"steps": 4}), ("part", {"resume": ""})):
        values = {"run": text.parent / name, "out": text.parent / f"{name}-out"} | SMALL | mixed | changes
        start(recipe.main, ["--data", str(text), str(other), "--weights", "3", "1", *flags(values)])
    assert_same_states(text.parent / "whole", text.parent / "part", 8)
    rows = (len(SAID) * 3 + 1) * 20 * 0.9 // 24
    assert any(re.match(rf"text.txt: {rows:.0f} rows, weight 0.750, 0.\d+ epochs", line) for line in caplog.messages)
    assert "weight 0.750" in (text.parent / "part" / "report" / "report.md").read_text()


def test_a_resumed_run_does_not_replace_its_best_by_worse(recipe, text):
    run(recipe, text)
    args = {"data": text, "run": text.parent / "run", "out": text.parent / "out", "steps": 9, "resume": ""} | SMALL
    settings = parse(recipe.LanguageModelRun, "train_lm.py", None, flags(args))
    tokenizer = load_folder(text.parent / "run" / "best").tokenizer
    net = TextTransformer(language_config(settings.model, tokenizer.vocab_size)).eval()
    judge = recipe.validation(settings, tokenizer, TextCorpus.of([SAID], tokenizer), net)
    assert -judge.load().card["validation"]["loss"] == judge.most  # which loading measures
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=3.0)
    judge(net, 9)
    assert judge.load().card["validation"]["step"] == 6


@pytest.mark.ci
def test_induction_heads_are_scored_and_plotted(recipe, text, drawn):
    run(recipe, text, induction="", repeat=0.5, heads=4)
    rows = [json.loads(line) for line in (text.parent / "run" / "induction.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 6]
    scores = torch.tensor(rows[-1]["scores"])
    assert scores.shape == (1, 4)
    assert ((scores >= 0) & (scores <= 1)).all()
    assert metrics(text.parent / "run")[-1]["eval/induction"] == pytest.approx(scores.max().item())
    assert (text.parent / "run" / "report" / "induction.png").stat().st_size > 10_000
    assert "prefix matching" in (text.parent / "run" / "report" / "report.md").read_text()


def test_the_prompt_of_a_prefix_model_is_seen_by_all(recipe):
    net, ids = tiny.made("text-rotary"), [0, 3, 4, 5]
    tokenizer = CharacterTokenizer("abcdefghijklmnopqrstuv")
    found = {}
    for objective in ("causal", "prefix"):
        s = recipe.LanguageModelRun(
            (Path("none"),), Path("out"), objective=objective, prompt="cde", samples=200, sample_tokens=1,
            model=LanguageModelSettings(**{name: SMALL[name] for name in ("width", "heads", "layers", "context")}),
        )  # fmt: skip
        first = [line[-1] for line in recipe.samples(s, net, tokenizer, ids)]
        mask = None if objective == "causal" else torch.ones(4, 4, dtype=torch.bool)
        chances = (net.logits(net.states(torch.tensor([ids]), mask=mask))[0, -1] / 0.8).softmax(-1)
        found[objective] = first, chances
        often = torch.tensor([first.count(character) / 200 for character in tokenizer.characters])
        assert (often - chances[1:]).abs().max() < 0.12
    assert (found["causal"][1] - found["prefix"][1]).abs().max() > 0.2


def test_what_places_cost_is_what_the_windows_cost():
    net = tiny.made("text-rotary")
    corpus = TextCorpus.of(["abcde" * 9], CharacterTokenizer("abcde"))
    nats = losses_by_place(net, corpus, 8, batch=2)
    rows = corpus.ids.long()[: 5 * 8 + 1]
    logits = net(rows[:40].view(5, 8))
    wanted = F.cross_entropy(logits.transpose(1, 2), rows[1:41].view(5, 8), reduction="none").mean(0)
    assert torch.allclose(nats, wanted, atol=1e-5)


def test_a_repeated_row_says_its_begin_again_after_a_random_number_of_tokens():
    piece = [torch.arange(25)]
    periods = set()
    for number in range(40):
        row = PrepareTokens(24, repeat=1.0)(piece, generator(number))
        period = int(row.ids.max()) + 1
        assert row.ids.tolist() == [i % period for i in range(24)]
        assert row.targets.tolist() == [(i + 1) % period for i in range(24)]
        periods.add(period)
    assert 3 <= min(periods) < 6 < 10 < max(periods) <= 12
    assert torch.equal(PrepareTokens(24)(piece, generator(0)).ids, torch.arange(24))


@thin(5, pytest.mark.ci)
@pytest.mark.parametrize(("changes", "code", "line"), [
    ({"data": "none.txt"}, 1, "none.txt: cannot be read"), ({"prompt": "ß"}, 1, "'ß' is not in this vocabulary"),
    ({"context": 4000}, 1, "tokens of text do not fill more than one context of 4000"),
    ({"batch": 4000}, 1, "are fewer than a batch of 4000 x 24"),
    ({"tokenizer": "nowhere"}, 1, "nowhere: neither a folder, a shipped model nor a vocabulary"),
    ({"preset": "vit_b16"}, 1, "--preset vit_b16: expected a causal language model"),
    ({"tokenizer": "bpe", "vocabulary": 9}, 1, "vocab_size: must be at least 259"),
    ({"vocabulary": 0}, 2, "--vocabulary must be an integer of at least 1 (got 0)"),
    ({"stride": 25}, 2, "--stride must be at most the context (24) (got 25)"),
    ({"induction": "", "objective": "prefix"}, 2, "--induction must be off with a prefix (got True)"),
    ({"prompt": "x" * 30, "tokenizer": "bytes"}, 1, "--prompt: has 31 tokens, which leave no room in a --context 24"),
    ({"hold": 0}, 2, "--hold must be a number in (0, 1) (got 0.0)"), ({"weights": 0}, 2, "weights [0.0]: sum to 0"),
    ({"epochs": -1}, 2, "--epochs must be 0 or more each (got [-1.0])"),
    ({"weights": 1, "temperature": 5}, 2, "--temperature cannot be given with weights"),
    ({"context": 12, "induction": ""}, 1, "--context 12: induction needs 20 or more"),
])  # fmt: skip
def test_what_cannot_be_used_is_said_in_one_line(recipe, text, capsys, changes, code, line):
    with pytest.raises(SystemExit, match=str(code)):
        run(recipe, text, **changes)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("train_lm.py: error: ")
    assert line in last


# pixels


def test_a_palette_holds_the_colours_of_few_and_means_of_many():
    red, blue = torch.tensor([250, 0, 0]), torch.tensor([0, 10, 200])
    pixels = torch.stack([red, blue])[torch.randint(0, 2, (3, 4, 4))].to(torch.uint8)
    few = Palette.of(pixels, 5)
    assert sorted(few.colours.tolist()) == [[0, 10, 200], [250, 0, 0]]
    assert torch.equal(few.pixels(few.ids(pixels)), pixels)
    noise = torch.randint(0, 5, pixels.shape, generator=torch.Generator().manual_seed(0))
    many = Palette.of(pixels + noise.to(torch.uint8), 2)
    assert sorted(many.colours.tolist())[0] == pytest.approx([2, 12, 202], abs=1.5)
    with pytest.raises(UsageError, match="colours must be 2 or more"):
        Palette.of(pixels, 1)


def test_bits_are_of_colours_and_baselines_by_hand():
    ids = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 2]])
    net = TextTransformer(language_config(LanguageModelSettings(width=8, layers=2, heads=2, context=4), 4)).eval()
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    assert bits(net, ids, begin=3, batch=1) == pytest.approx(2.0)  # of four tokens each is as probable
    wanted = -(math.log2(4 / 7) + 2 * math.log2(2 / 7) - math.log2(7)) / 4
    assert marginal_bits(ids[:1], ids[1:], 3) == pytest.approx(wanted)
    net = tiny.made("text-learned")
    states: list[torch.Tensor] = []
    net.states(after(ids, 3)[:, :-1], states=states)
    assert torch.allclose(middle_features(net, ids, 3, 1, batch=1), states[1].mean(1), atol=1e-6)


def test_mirrored_rows_are_those_of_the_mirrored_image():
    ids = torch.arange(9).view(1, 9)
    rows = [FlippedImages(PrepareTokens(9))(PixelRows(ids, 9).read(0), generator(n)) for n in range(20)]
    found = {tuple(row.targets.tolist()) for row in rows}
    assert found == {tuple(range(9)), (2, 1, 0, 5, 4, 3, 8, 7, 6)}
    assert {int(row.ids[0]) for row in rows} == {9}


def test_pixels_recipe_learns_completes_and_probes(load_recipe, tmp_path, caplog):
    train_igpt = load_recipe("train_igpt")
    data = sets.squares(tmp_path / "squares")
    (data / "red_square" / "broken.png").write_bytes(b"no image")
    values = {"data": data, "run": tmp_path / "run", "out": tmp_path / "out", "steps": 30, "side": 6, "colours": 8,
              "batch": 8, "width": 16, "heads": 2, "layers": 2, "sheet": 2, "completions": 2, "threads": 1,
              "rate": 1e-2, "warmup": 3, "average": 0.5, "evaluate_every": 30, "probe_c": 1.0}  # fmt: skip
    figures = start(train_igpt.main, flags(values))
    assert figures["bits"] < figures["bits_marginal"] <= figures["bits_uniform"] + 0.2
    assert figures["probe_of_pixels"] == 1.0
    assert "broken.png" in caplog.text
    made = load_folder(tmp_path / "out")
    assert made.card["side"] == 6
    assert made.model.config.vocabulary == len(made.card["palette"]) + 1
    with Image.open(tmp_path / "run" / "report" / "completions.png") as sheet:
        assert sheet.size == (4 * 8 * 4, 2 * 8 * 4)
    ids = Palette(torch.tensor(made.card["palette"])).ids(ImagesInMemory.read(open_source(data), 6).pixels[:2])
    done = train_igpt.completed(made.model, ids, len(made.card["palette"]), 3, 0)
    assert torch.equal(done[:, :, :18], ids[:, None, :18].expand(-1, 3, -1))
    assert int(done.max()) < len(made.card["palette"])
    with pytest.raises(SystemExit) as end:
        start(train_igpt.main, flags(values | {"context": 9}))
    assert end.value.code == 2


# distillation


def deep(causal: bool = True) -> TextTransformer:
    config = tiny.TEXTS["learned"] if causal else replace(tiny.ENCODER, classes=0, pool=None, context=16)
    return tiny.randomized(TextTransformer(replace(config, stack=replace(config.stack, layers=4))))


def batch_of(causal: bool):
    ids = torch.randint(0, tiny.VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))
    if causal:
        return stack_fields([PrepareTokens(8)([row], generator(0)) for row in ids])
    chosen = torch.arange(9) % 4 == 1
    rows = []
    for row, size in zip(ids, (9, 5, 7), strict=True):
        row, marked = row[:size], chosen[:size]
        rows.append(MaskedExample(row, marked, row[marked], torch.zeros(int(marked.sum())), torch.zeros_like(row), -1))
    return CollateMasked(0, 64)(rows)


def test_a_student_begins_with_every_second_layer():
    teacher = deep()
    student = student_of(teacher, 2)
    ids = torch.randint(0, tiny.VOCABULARY, (2, 6))
    for number, own in enumerate((0, 2)):
        assert torch.equal(student.stack.blocks[number].feed.up.weight, teacher.stack.blocks[own].feed.up.weight)
    del teacher.stack.blocks[3], teacher.stack.blocks[1]
    teacher.stack.config = replace(teacher.stack.config, layers=2)
    assert torch.equal(student.eval()(ids), teacher(ids))
    with pytest.raises(UsageError, match="layers must be 1 or more, and fewer than the teacher's 2"):
        student_config(tiny.TEXTS["learned"], 2)
    with pytest.raises(UsageError, match="shares its weights"):
        student_config(replace(teacher.config, stack=replace(teacher.config.stack, shared=1)), 1)


@pytest.mark.parametrize("causal", [True, False])
def test_what_a_student_is_told_is_that_of_the_formulas(causal):
    teacher, student, batch = deep(causal), tiny.randomized(student_of(deep(causal), 2), 1), batch_of(causal)
    objective = Distillation(student, teacher, temperature=3.0).train()
    assert not teacher.training
    terms, counts = objective(batch), objective.counts(batch)
    valid = None if causal else torch.arange(batch.ids.shape[1]) < batch.lengths[:, None]
    real = torch.ones_like(batch.ids, dtype=torch.bool) if causal else valid
    student.eval()
    known, own = (net.states(batch.ids, valid=valid)[real] for net in (teacher, student))
    p, q = ((net.logits(x[None])[0] / 3).softmax(-1) for net, x in ((teacher, known), (student, own)))
    assert terms["soft"].item() == pytest.approx(9 * (p * (p / q).log()).sum().item(), rel=1e-3)
    assert terms["cosine"].item() == pytest.approx((1 - F.cosine_similarity(known, own)).sum().item(), rel=1e-4)
    logits = student.logits(own[None])[0]
    wanted = (logits, batch.targets.flatten()) if causal else (logits[batch.chosen[real]], batch.targets)
    assert terms["task"].item() == pytest.approx(F.cross_entropy(*wanted, reduction="sum").item(), rel=1e-4)
    tokens = int(real.sum())
    assert counts == {"soft": tokens, "task": len(wanted[1]), "cosine": tokens}
    sum(terms.values()).backward()
    assert all(p.grad is None for p in teacher.parameters())
    same = Distillation(deep(causal), deep(causal))(batch)
    assert same["soft"].item() == pytest.approx(0, abs=1e-3)
    assert same["cosine"].item() == pytest.approx(0, abs=1e-3)


@pytest.fixture
def distil(load_recipe):
    return load_recipe("distil")


def distilled(distil, text: Path, teacher: Path, **changes):
    folder = text.parent
    values = {"teacher": teacher, "data": text, "run": folder / "run", "out": folder / "out", "steps": 4, "batch": 2,
              "threads": 1, "warmup": 1, "evaluate_every": 4, "precision": "float32"} | changes  # fmt: skip
    return start(distil.main, flags(values))


@pytest.mark.ci
def test_distil_learns_from_its_teacher(distil, text):
    torch.manual_seed(0)
    tokenizer = CharacterTokenizer.train([text.read_text()])
    settings = LanguageModelSettings(width=16, layers=2, heads=2, context=24)
    net = TextTransformer(language_config(settings, tokenizer.vocab_size))
    gpt2_weights(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-2)
    source, prepare = Windows(TextCorpus.of([text.read_text()], tokenizer), 24), PrepareTokens(24)
    for number in range(80):
        batch = stack_fields([prepare(source.read(17 * number + 5 * row), generator(0)) for row in range(4)])
        loss = Language(net)(batch)["loss"] / 96
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_folder(Checkpoint(net, tokenizer), text.parent / "teacher")
    found = distilled(distil, text, text.parent / "teacher", steps=20, rate=1e-2)
    assert found["student"]["loss"] < min(found["student before"]["loss"], found["alone"]["loss"])
    made = load_folder(text.parent / "out")
    assert made.model.config.stack.layers == 1
    assert made.card["figures"]["student"] == found["student"]
    report = (text.parent / "run" / "student" / "report" / "report.md").read_text()
    assert "\nalone: perplexity" in report
    assert {"soft", "task", "cosine"} <= set().union(*metrics(text.parent / "run" / "student"))


def test_distil_takes_a_masked_teacher(distil, text):
    tokenizer = WordPieceTokenizer.train([SAID] * 5, 80, context=16)
    text.write_text("\n".join([SAID.replace(". ", ". A ")] * 20))  # one document
    config = replace(tiny.ENCODER, vocabulary=tokenizer.vocab_size, segments=0, classes=0, pool=None, context=16)
    save_folder(Checkpoint(tiny.randomized(TextTransformer(config)), tokenizer), text.parent / "teacher")
    found = distilled(distil, text, text.parent / "teacher")
    assert all(math.isfinite(own["perplexity"]) for own in found.values())


def test_distil_names_what_is_no_teacher(distil, text, capsys):
    save_folder(Checkpoint(tiny.made("vit-mean")), text.parent / "vit")
    save_folder(Checkpoint(deep()), text.parent / "bare")
    for name, line in (("vit", "is a vit that predicts no tokens"), ("bare", "has no tokenizer")):
        with pytest.raises(SystemExit) as end:
            distilled(distil, text, text.parent / name)
        assert end.value.code == 1
        assert line in capsys.readouterr().err.splitlines()[-1]
