"""Fine-tuning: what is frozen stays to the byte, adapters are counted and merged, each kind of checkpoint learns and
comes back as a plain one, and what does not fit is named."""

import copy
import json
import math
import shutil
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from multimodal.errors import CheckpointError, UsageError
from multimodal.models.clip import CLIP
from multimodal.models.conformer import ConformerCTC
from multimodal.models.text_config import TextConfig
from multimodal.models.whisper import Whisper, WhisperConfig, WhisperEncoderConfig
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.evaluate.scores import word_errors
from multimodal.tasks.evaluate.zero_shot import accuracy, read_named
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.whisper_small import SmallWhisperTokenizer
from multimodal.train.lora import LoraSettings, adapt, freeze, merge
from multimodal.train.objectives.classify import classifier
from multimodal.train.objectives.contrastive_model import TEMPLATES, ContrastiveModelSettings, build
from multimodal.train.objectives.finetune import speech
from multimodal.train.objectives.finetune.images import classify
from multimodal.train.objectives.finetune.job import FinetuningData
from multimodal.train.objectives.recognizer import joint_config
from multimodal.train.recipe_cli import start
from multimodal.weights.folder import Checkpoint, load_folder, save_folder
from tests.helpers import tiny
from tests.helpers.data import sets
from tests.helpers.spread import thin

RECORD = Preprocessing((16, 16), "shortest", "bilinear", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
TONES = {"low": 300, "high": 2500}


@pytest.fixture
def recipe(load_recipe):
    return load_recipe("finetune")


@pytest.fixture(scope="module")
def squares(tmp_path_factory) -> Path:
    return sets.squares(tmp_path_factory.mktemp("data") / "squares")


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    """The folder of a random CLIP."""
    texts = [template.format(f"{name} square") for template in TEMPLATES for name in sets.COLOURS]
    tokenizer = BytePairTokenizer.train(texts, 280, lowercase=True)
    torch.manual_seed(0)
    model = build(
        ContrastiveModelSettings(image=16, patch=8, width=64, layers=1, text_width=32, text_layers=1), tokenizer
    )
    card = {"licence": "free", "figures": {"top1": 0.25}, "templates": ["a {}"]}
    folder = tmp_path_factory.mktemp("begun") / "clip"
    save_folder(Checkpoint(model, tokenizer, RECORD, card=card), folder)
    return folder


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Path:
    """Eight recordings of one or two tones, each of which has a name; without a language."""
    folder, rng, rows = tmp_path_factory.mktemp("tones"), np.random.default_rng(0), []
    for number in range(8):
        words = rng.choice(list(TONES), rng.integers(1, 3)).tolist()
        times = np.arange(6400) / 16000
        sound = np.concatenate([0.3 * np.sin(2 * np.pi * TONES[word] * times) for word in words])
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes((sound * 32767).astype("<i2").tobytes())
        rows.append({"audio_filepath": f"{number}.wav", "duration": 0.4 * len(words), "text": " ".join(words)})
    return sets.lines(folder / "tones.jsonl", rows)


def run(recipe, model: object, data: Path, folder: Path, *options: str) -> dict:
    flags = ["--model", str(model), "--data", str(data), "--val", str(data), "--run", str(folder / "run")]
    flags += ["--out", str(folder / "out"), "--batch", "8", "--warmup", "2", "--precision", "float32"]
    return start(recipe.main, [*flags, "--log_every", "1", "--randaugment", "", *options])


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def changed(before: torch.nn.Module, after: torch.nn.Module, prefix: str = "") -> set[str]:
    """Names of the weights of `after` that differ from those of `before`."""
    old = before.state_dict()
    assert {prefix + name for name in after.state_dict()} <= old.keys() | {"head.weight", "head.bias"}
    return {name for name, tensor in after.state_dict().items() if not torch.equal(tensor, old[prefix + name])}


@pytest.mark.ci
def test_a_frozen_tower_learns_only_its_new_head(recipe, clip, squares, tmp_path):
    options = ["--task", "classify", "--freeze", "all", "--steps", "40", "--rate", "3e-2", "--smoothing", "0"]
    options += ["--head", "zeros"]
    figures = run(recipe, clip, squares, tmp_path, *options)
    found = losses(tmp_path)
    assert found[0] == pytest.approx(math.log(4), abs=1e-5)  # a head of zeros
    assert np.mean(found[-5:]) < 0.7 * found[0]
    assert figures["before"] == {"top1": 0.0}  # all labels tie, which is no hit
    assert figures["after"]["top1"] > 0.8
    start_, made = load_folder(clip), load_folder(tmp_path / "out")
    assert made.kind == "vit"
    assert made.preprocessing == RECORD
    assert made.card["labels"] == [f"{name}_square" for name in sets.COLOURS]
    assert made.card["licence"] == "free"
    assert "figures" not in made.card
    own = {name: t for name, t in made.model.state_dict().items() if not name.startswith("head.")}
    assert own.keys() == start_.model.image.state_dict().keys()
    assert all(torch.equal(t, start_.model.image.state_dict()[name]) for name, t in own.items())


def test_a_head_of_names_begins_with_the_zero_shot_classes(clip, squares):
    begun, images = load_folder(clip), torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    made = classify(begun, FinetuningData((str(squares),), batch=8), squares, 0)
    wanted = ZeroShotClassifier(begun, [f"{name} square" for name in sets.COLOURS]).probabilities(images)
    found = made.tuned.eval()(images).softmax(1)
    assert torch.equal(found.argsort(1), wanted.argsort(1))
    torch.testing.assert_close(found, wanted, atol=0.3, rtol=0)  # the lengths of vectors differ a little


def test_a_head_of_names_has_the_bias_of_the_projection(clip, squares):
    """As those of EVA02 and MobileCLIP have one."""
    begun, images = load_folder(clip), torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model = CLIP(replace(begun.model.config, image_bias=True)).eval()
    model.load_state_dict(begun.model.state_dict(), strict=False)
    torch.nn.init.normal_(model.image_project.bias, generator=torch.Generator().manual_seed(0))
    begun = replace(begun, model=model)
    made = classify(begun, FinetuningData((str(squares),), batch=8), squares, 0)
    wanted = ZeroShotClassifier(begun, [f"{name} square" for name in sets.COLOURS]).logits(images)
    found = made.tuned.eval()(images)
    torch.testing.assert_close(found / found.norm(dim=1, keepdim=True), wanted / wanted.norm(dim=1, keepdim=True))


def test_a_clip_of_another_tower_has_no_head(clip):
    begun = load_folder(clip)
    begun.model.image = torch.nn.Identity()  # such as a ResNet
    with pytest.raises(CheckpointError, match="expected a ViT or a CLIP with one, got a clip with Identity"):
        classifier(begun, ["a", "b"])


@pytest.mark.ci
def test_adapters_of_a_clip_resume_and_merge_into_a_plain_one(recipe, clip, squares, tmp_path):
    options = ["--lora_rank", "2", "--lora_targets", "query", "value", "--freeze", "text", "--rate", "1e-2"]
    options += ["--steps", "6", "--save_every", "3", "--lora_dropout", "0.1"]
    figures = run(recipe, clip, squares, tmp_path, *options)
    weights, found = (tmp_path / "out" / "model.safetensors").read_bytes(), losses(tmp_path)
    assert 1.5 < found[0] < 3.5  # 8 images of 4 names
    assert set(figures["before"]) == set(figures["after"]) == {"top1"}
    made = load_folder(tmp_path / "out")
    assert made.kind == "clip"
    assert made.card["templates"] == ["a {}"]
    assert made.tokenizer.encode("red square") == load_folder(clip).tokenizer.encode("red square")
    place = "image.stack.blocks.0.attention."
    assert changed(load_folder(clip).model, made.model) == {f"{place}query.weight", f"{place}value.weight"}
    shutil.rmtree(sorted((tmp_path / "run" / "states").glob("*6"))[-1])
    run(recipe, clip, squares, tmp_path, *options, "--resume")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
    assert losses(tmp_path)[-3:] == found[-3:]


@pytest.mark.ci
def test_held_out_images_are_of_the_column_s_classes(recipe, clip, squares, tmp_path):
    """The usual column of labels gives all images one class, which each model finds."""
    places = sorted(squares.glob("*/*.png"))
    rows = [{"file": str(place), "label": "red_square", "art": place.parent.name} for place in places]
    data = sets.lines(tmp_path / "list.jsonl", rows)
    options = ["--task", "match", "--label_column", "art", "--trust_paths", "--steps", "1"]
    found = run(recipe, clip, data, tmp_path, *options)["before"]
    assert found == accuracy(load_folder(clip), read_named(squares, ()))
    assert found["top1"] < 1


@pytest.mark.ci
def test_a_whole_clip_learns_templated_captions(recipe, clip, squares, tmp_path):
    figures = run(recipe, clip, squares, tmp_path, "--steps", "30", "--rate", "3e-3", "--freeze", "logit_scale")
    found = losses(tmp_path)
    assert np.mean(found[-5:]) < found[0] - 0.15
    assert figures["after"]["top1"] > 0.7
    assert "logit_scale" not in changed(load_folder(clip).model, load_folder(tmp_path / "out").model)


@pytest.mark.ci
def test_a_recognizer_goes_on_with_its_tokenizer(recipe, manifest, tmp_path, caplog):
    tokenizer = BytePairTokenizer.train([" low high", " high low"], 270, lowercase=True)
    torch.manual_seed(0)
    model = ConformerCTC(joint_config(tokenizer.vocab_size, 32, 2, 1, 20, 0.0))
    card = {"language": "en", "transcribe": {"lm": "asr-lm-en", "lm_weight": 0.5, "vad_threshold": 0.35}}
    save_folder(Checkpoint(model, tokenizer, card=card), tmp_path / "begun")
    options = ["--steps", "8", "--rate", "3e-3", "--freeze", "encoder.blocks.0", "decoder", "--frames", "400"]
    figures = run(recipe, tmp_path / "begun", manifest, tmp_path, *options)
    assert losses(tmp_path)[-1] < 0.7 * losses(tmp_path)[0]
    assert {"wer", "cer"} <= set(figures["before"])
    assert "too short" not in caplog.text
    made = load_folder(tmp_path / "out")
    assert made.card["language"] == "en"
    assert made.card["transcribe"] == {"vad_threshold": 0.35}  # its language model knows other texts
    names = changed(model, made.model)
    assert "ctc.weight" in names
    assert not any(name.startswith(("encoder.blocks.0.", "decoder.")) for name in names)


@pytest.mark.ci
def test_a_whisper_learns_transcripts(recipe, manifest, tmp_path, monkeypatch):
    languages = []
    monkeypatch.setattr(speech, "word_errors", lambda *texts: languages.append(texts[2]) or word_errors(*texts))
    tokenizer = SmallWhisperTokenizer.train([" low high", " high low"], 262, ["de", "en"], 51)
    torch.manual_seed(0)
    stack = tiny.transformer(16, 1, 2, 32, key_bias=False)
    words = TextConfig(tokenizer.vocab_size, 64, tiny.transformer(16, 1, 2, 32, source_width=16), True, tied=True)
    model = Whisper(WhisperConfig(WhisperEncoderConfig(80, 50, stack), words))
    save_folder(Checkpoint(model, tokenizer), tmp_path / "begun")
    options = ["--steps", "16", "--rate", "1e-2", "--freeze", "encoder", "--frames", "400", "--language", "de"]
    figures = run(recipe, tmp_path / "begun", manifest, tmp_path, *options)
    found = losses(tmp_path)
    assert found[-1] < 0.8 * found[0], found
    assert {"wer", "cer"} <= set(figures["before"]) == set(figures["after"])
    assert set(languages) == {"de"}
    made = load_folder(tmp_path / "out")
    assert made.kind == "speech_to_text"
    assert made.tokenizer.languages == ("de", "en")
    names = changed(model, made.model)
    assert names
    assert all(name.startswith("decoder.") for name in names)
    with pytest.raises(SystemExit):
        run(recipe, tmp_path / "begun", manifest, tmp_path / "other", "--language", "cs")


def test_recordings_that_do_not_fit_the_window_are_counted(manifest, caplog):
    tokenizer = SmallWhisperTokenizer.train([" low high", " high low"], 262, ["de", "en"], 31)
    words = TextConfig(tokenizer.vocab_size, 64, tiny.transformer(16, 1, 2, 32, source_width=16), True, tied=True)
    encoder = WhisperEncoderConfig(80, 30, tiny.transformer(16, 1, 2, 32, key_bias=False))  # 0.6 s
    begun = Checkpoint(Whisper(WhisperConfig(encoder, words)), tokenizer)
    speech.transcribe(begun, FinetuningData((str(manifest),), str(manifest), frames=400), manifest.parent / "cache", 0)
    pairs = sum(" " in json.loads(line)["text"] for line in manifest.read_text().splitlines())  # 0.8 s each
    assert 0 < pairs < 8
    assert f"{pairs} of 8 recordings are left out: over 0.6 s" in caplog.text
    assert f"{pairs} of 8 held-out recordings are not scored" in caplog.text


def test_texts_too_long_for_ctc_are_counted_and_other_features_refused(manifest, tmp_path, caplog, monkeypatch):
    config = joint_config(270, 32, 1, 0, 20, 0.0)
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    long = sets.lines(manifest.parent / "long.jsonl", [rows[0] | {"text": "e" * 40}, *rows[1:]])
    letters = Checkpoint(ConformerCTC(config), BytePairTokenizer.train(["a"], 260, lowercase=True))
    scored = []
    monkeypatch.setattr(speech, "ErrorRates", lambda start, texts, *_: lambda *_: scored.extend(texts) or {})
    said = sets.lines(manifest.parent / "said.jsonl", [rows[0] | {"text": "$1,000."}])
    speech.recognize(letters, FinetuningData((str(long),), str(said)), tmp_path, 0).measure(letters.model, None)
    assert scored == ["$1,000."]  # what `evaluate asr` scores; training reads "1 000"
    assert "1 of 8 recordings are too short for their texts" in caplog.text
    other = replace(config, encoder=replace(config.encoder, features="normalized"))
    begun = Checkpoint(ConformerCTC(other), BytePairTokenizer.train([" low high"], 270, lowercase=True))
    with pytest.raises(CheckpointError, match="expected an encoder of 'fixed' log-mel features, got 'normalized'"):
        speech.recognize(begun, FinetuningData((str(manifest),)), tmp_path, 0)


INPUTS = {
    "vit-token": (torch.linspace(-1, 1, 576).view(2, 3, 8, 12),),
    "clip-softmax": (torch.linspace(-1, 1, 576).view(2, 3, 8, 12), torch.tensor([[1, 2, 22], [3, 22, 0]])),
    "joint": (torch.linspace(-1, 1, 512).view(2, 32, 8), torch.tensor([32, 20]), torch.tensor([[1, 2], [3, 4]])),
    "speech-to-text": (torch.linspace(-1, 1, 320).view(2, 8, 20), torch.tensor([[1, 2], [3, 4]])),
}


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("name", INPUTS)
def test_adapters_alone_learn_and_merged_weights_give_the_same(name):
    model = tiny.made(name)
    plain = set(model.state_dict())
    linear = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".blocks." in f".{n}"]
    torch.manual_seed(0)
    adapt(model, LoraSettings(lora_rank=3, lora_targets=("query", "out", "up")))
    chosen = [m for n, m in model.named_modules() if hasattr(m, "base_layer")]
    assert 0 < len(chosen) < len(linear)
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_" in n for n in learning)
    assert sum(p.numel() for p in learning.values()) == sum(3 * (m.in_features + m.out_features) for m in chosen)
    before = [x for x in model(*INPUTS[name]) if x is not None]
    with torch.no_grad():
        for n, p in learning.items():
            if "lora_B" in n:  # zeros at first
                p.normal_(std=0.2)
    unmerged = [x for x in model(*INPUTS[name]) if x is not None]
    merged = merge(copy.deepcopy(model))
    assert set(merged.state_dict()) == plain
    assert type(merged) is type(model)
    assert not hasattr(merged, "peft_config")
    assert any(not torch.allclose(a, b) for a, b in zip(before, unmerged, strict=True))
    for a, b in zip(merged(*INPUTS[name]), unmerged, strict=False):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


def test_new_parts_learn_in_full_beside_adapters():
    model = tiny.made("vit-token")
    adapt(model, LoraSettings(freeze=("stack.blocks.0",), lora_rank=2), fresh=("head",))
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n in names if ".lora_" not in n} == {"head.weight", "head.bias"}
    assert all(n.startswith(("stack.blocks.1.", "head.")) for n in names)


def test_frozen_batch_norms_keep_their_statistics():
    model = tiny.made("conformer-batch")
    freeze(model, ["blocks.0"])
    old = copy.deepcopy(model.state_dict())
    features, lengths = torch.randn(2, 24, 16), torch.tensor([24, 24])
    model.train()
    copy.deepcopy(model)(features, lengths)  # a copy has its own
    model(features, lengths)
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t, old[n])}
    assert moved
    assert all(n.startswith("blocks.1.") for n in moved)


@pytest.mark.parametrize(("settings", "message"), [
    ({"freeze": ("imag",)}, r"freeze imag: no part of this model \(near: image"),
    ({"freeze": ("image", "stack")}, r"freeze stack: no part of this model"),
    ({"freeze": ("all",)}, r"freeze all: leaves nothing to train"),
    ({"freeze": ("image", "text"), "lora_rank": 2}, r"lora_rank 2: no layer left"),
    ({"lora_rank": 2, "lora_targets": ("q",)}, r"lora_targets q: no linear layer .* \(they are query, key, value"),
])  # fmt: skip
def test_unknown_parts_are_named(settings, message):
    with pytest.raises(UsageError, match=message):
        adapt(tiny.made("clip-softmax"), LoraSettings(**settings))


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(("options", "message"), [
    (["--task", "recognize"], "--task recognize: not for a clip, which can do match or classify"),
    (["--model", "{text}"], "text: expected a ViT, CLIP, Whisper or Conformer, got text"),
    (["--model", "none-such"], "model 'none-such': neither a path nor a known model"),
    (["--task", "classify", "--data", "{flat}"], "flat: its items have no classes"),
    (["--freeze", "tower"], "--freeze tower: no part of this model"),
    (["--model", "asr-conformer-en"], "squares: 2 of the first 2 recordings are broken"),
])  # fmt: skip
def test_what_does_not_fit_is_named_in_one_line(recipe, clip, squares, tmp_path, last_line, options, message):
    places = {"flat": tmp_path / "flat", "text": tmp_path / "text"}
    shutil.copytree(squares / "red_square", places["flat"])
    save_folder(Checkpoint(tiny.made("text-learned")), places["text"])
    assert message in last_line(
        lambda: run(recipe, clip, squares, tmp_path, "--steps", "1", *(text.format(**places) for text in options))
    )


def test_help_names_the_flags(recipe, help_text):
    shown = help_text(recipe)
    for flag in ("--model", "--freeze", "--lora_rank", "--task", "--smallest_crop", "--resume"):
        assert flag in shown
