"""`multimodal evaluate zeroshot|retrieval|linear-probe|few-shot`: parity with open_clip, outputs, and unusable data."""

import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal.data.datasets.image_sets import open_images
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.classify.classify import classifier_of
from multimodal.tasks.encode.features import image_features, model_digest
from multimodal.tasks.encode.native import native_features
from multimodal.tasks.encode.prompts import prompt_functions
from multimodal.tasks.evaluate.zero_shot import accuracy, described, read_named
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.weights.folder import Checkpoint, load_folder, save_folder
from multimodal.weights.vision import clip_openai, vit_timm
from tests.helpers.commands import Page, evaluated, one_line, run
from tests.helpers.data.sets import COLOURS, lines, shard, squares, table
from tests.helpers.paths import RECIPES
from tests.helpers.references.vision import open_clip_case, timm_case
from tests.helpers.spread import thin

TEXT = {"context_length": 77, "vocab_size": 49408, "width": 24, "heads": 3, "layers": 2}
CLASSES = ["blue square", "green square", "red square", "yellow square", "tench", "great white shark, <end_of_text>"]


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("options", [{}, {"init_logit_bias": -10.0}], ids=["softmax", "sigmoid"])
def test_logits_are_those_of_open_clips_zero_shot_classifier(options, images):
    from open_clip import build_zero_shot_classifier
    from open_clip.tokenizer import tokenize
    from open_clip.transform import PreprocessCfg, image_transform_v2

    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
    made = open_clip_case(clip_openai.FAMILY, vision=vision, text=TEXT, **options)
    checkpoint = made.family.load(made.tensors, made.config, "tiny")
    record = Preprocessing((32, 32), "shortest", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
    checkpoint = Checkpoint(checkpoint.model, checkpoint.tokenizer, record, "tiny", checkpoint.card)
    templates = prompt_functions("clip80")
    # open_clip lets "<end_of_text>" end the text; in a label it is text here, so its own class is left out there
    wanted = build_zero_shot_classifier(made.reference, tokenize, CLASSES[:5], templates)
    transform = image_transform_v2(PreprocessCfg(size=32), is_train=False)
    source = open_images(images)
    files = [source.source.read(key).media for key in source.keys]
    with torch.no_grad():
        images = torch.stack([transform(Image.open(file)) for file in files])
        expected = made.reference.logit_scale.exp() * made.reference.encode_image(images, normalize=True) @ wanted
        expected = expected + (made.reference.logit_bias if options else 0)
    classifier = ZeroShotClassifier(checkpoint, CLASSES, "clip80")
    found = image_features(checkpoint, source, batch_size=7)
    mine = classifier.vector_logits(found.vectors)
    assert found.keys == list(range(24))
    assert expected.std() > 1e-2
    torch.testing.assert_close(mine[:, :5], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(classifier.logits(images), mine, rtol=1e-5, atol=1e-5)
    fast = classifier_of(checkpoint, CLASSES, "clip80")  # what the command computes with
    again = fast.vector_logits(image_features(fast.checkpoint, source).vectors)
    torch.testing.assert_close(again[:, :5], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.ci
def test_zeroshot_json_table_report_and_confusion(capsys, models, images, tmp_path):
    made = evaluated(capsys, "zeroshot", images, "-m", models / "clip", "--report", tmp_path / "r.html",
                     "--confusion", tmp_path / "c.png")  # fmt: skip
    assert made["task"] == "zeroshot"
    assert made["data"] == [str(images)]
    assert made["model"] == str(models / "clip")
    assert made["templates"] == ["a photo of a {}"]
    assert (made["images"], made["classes"], made["acc5"], made["left_out"]) == (24, 4, None, [])
    names = ["blue square", "green square", "red square", "yellow square"]
    assert [row["class"] for row in made["per_class"]] == names
    right = sum(row["recall"] * row["images"] for row in made["per_class"])
    assert made["acc1"] == pytest.approx(right / 24)
    assert sum(row["found"] for row in made["per_class"]) == 24
    checkpoint = load_folder(models / "clip")
    classifier, source = ZeroShotClassifier(checkpoint, names), open_images(images)
    best = classifier.vector_logits(image_features(checkpoint, source).vectors).argmax(1).tolist()
    assert made["acc1"] == pytest.approx(np.mean([place == number // 6 for number, place in enumerate(best)]))
    with Image.open(tmp_path / "c.png") as image:
        assert image.size[0] > 400
    page, wrong = Page.of(tmp_path / "r.html"), 24 - round(right)
    assert page.tags.count("figure") == wrong
    assert page.tags.count("img") == wrong + 1  # the confusion matrix
    assert "yellow square" in page.text
    code, out, _ = run(capsys, "evaluate", "zeroshot", images, "-m", models / "clip", "--report", tmp_path / "r.md")
    assert code == 0
    assert f"acc1 {100 * made['acc1']:.2f} %   acc5 –" in out
    assert "## Classes" in (tmp_path / "r.md").read_text()


def test_training_and_the_command_measure_the_same_accuracy(capsys, models, images):
    made = evaluated(capsys, "zeroshot", images, "-m", models / "clip")
    figures = accuracy(load_folder(models / "clip"), read_named(images, ()))
    assert figures["top1"] == pytest.approx(made["acc1"], abs=1e-4)


@pytest.mark.ci
@pytest.mark.filterwarnings("always:.*matched to classes by order")
def test_names_of_classes_come_from_a_table_or_a_list(capsys, models, images, tmp_path):
    common = ["zeroshot", images, "-m", models / "clip"]
    rows = [{"id": f"{name}_square", "names": [f"the {name} thing"]} for name in COLOURS]
    made = evaluated(capsys, *common, "--classes", lines(tmp_path / "classes.jsonl", rows))
    assert [row["class"] for row in made["per_class"]] == [f"the {name} thing" for name in COLOURS]
    plain = evaluated(capsys, *common)
    # by name in any order, among others that have no images
    (tmp_path / "names.txt").write_text("dog\nYellow square\nred square\ngreen square\nblue_square\n")
    more = evaluated(capsys, *common, "--labels_file", tmp_path / "names.txt")
    assert (more["classes"], more["classes_with_images"], more["acc5"]) == (5, 4, 1.0)
    assert more["per_class"][0] == {**more["per_class"][0], "class": "dog", "images": 0, "recall": None}
    # by place, as torchvision numbers the folders
    (tmp_path / "names.txt").write_text("azure\nlime\ncrimson\nlemon\n")
    code, out, err = run(capsys, "evaluate", *common, "--labels_file", tmp_path / "names.txt", "--format", "json")
    assert "by order: blue_square = 'azure', green_square = 'lime', red_square = 'crimson', …" in err
    assert (code, err.count("\n")) == (0, 1)
    placed = json.loads(out)
    assert [row["class"] for row in placed["per_class"]] == ["azure", "lime", "crimson", "lemon"]
    assert [row["images"] for row in placed["per_class"]] == [6] * 4
    assert placed["acc1"] != plain["acc1"] or placed["per_class"] != plain["per_class"]
    for bad, cause in (("azure\nlime\n", "none of its 2 labels"), ("red square\na\nb\nc\n", "'blue_square'")):
        (tmp_path / "names.txt").write_text(bad)
        code, out, err = run(capsys, "evaluate", *common, "--labels_file", tmp_path / "names.txt")
        assert (code, out) == (1, "")
        assert cause in one_line(err)


@pytest.mark.ci
def test_hypernyms_describe_classes(capsys, models, images, tmp_path):
    checkpoint, above = load_folder(models / "clip"), {"tench": ("cyprinid", "fish"), "blue square": ("figure",)}
    plain = ZeroShotClassifier(checkpoint, CLASSES)
    vectors = {term: ZeroShotClassifier(checkpoint, [term]).weights[0] for term in ("cyprinid", "fish", "figure")}
    for levels, tench in ((1, vectors["cyprinid"]), (2, vectors["cyprinid"] + vectors["fish"])):
        found = described(plain, above, levels)
        named = plain.weights[4] + 0.5 * tench / tench.norm()
        torch.testing.assert_close(found.weights[4], named / named.norm())
        torch.testing.assert_close(found.weights[[1, 2, 3, 5]], plain.weights[[1, 2, 3, 5]])
        assert found.labels == plain.labels
    rows = [{"id": "red_square", "names": ["red square"], "hypernyms": ["square", "figure"]}]
    common = ["zeroshot", images, "-m", models / "clip", "--hypernyms", 2]
    made = evaluated(capsys, *common, "--classes", lines(tmp_path / "classes.jsonl", rows))
    assert (made["hypernyms"], made["classes"]) == (2, 4)
    (tmp_path / "names.txt").write_text("azure\nlime\ncrimson\nlemon\n")
    for more, cause in (([], "have none"), (["--labels_file", tmp_path / "names.txt"], "not the labels of --labels_")):
        code, out, err = run(capsys, "evaluate", *common, *more)
        assert (code, out) == (1, "")
        assert cause in one_line(err)


@pytest.mark.ci
def test_a_saved_classifier_gives_the_figures_of_its_labels(capsys, models, images, tmp_path):
    (tmp_path / "names.txt").write_text("yellow square\nred square\ngreen square\nblue square\n")
    file, common = tmp_path / "f.safetensors", ["-m", models / "clip", "--quiet"]
    code, _, err = run(capsys, "classify", "--labels_file", tmp_path / "names.txt", "--save_classifier", file, *common)
    assert (code, err) == (0, "")
    saved = evaluated(capsys, "zeroshot", images, *common, "--classifier", file)
    plain = evaluated(capsys, "zeroshot", images, *common)
    assert saved["acc1"] == plain["acc1"]
    assert saved["classifier"] == str(file)
    (images / "zebra").mkdir()
    try:
        shutil.copy(images / "red_square" / "0.png", images / "zebra")
        code, _, err = run(capsys, "evaluate", "zeroshot", images, *common, "--classifier", file)
    finally:
        shutil.rmtree(images / "zebra")
    assert code == 1
    assert "'zebra'" in one_line(err)


@pytest.mark.ci
def test_tars_lists_and_limit(capsys, models, tmp_path):
    tar = shard(tmp_path / "a.tar", range(9))
    made = evaluated(capsys, "zeroshot", tar, "-m", models / "clip", "--limit", "5")
    assert (made["images"], made["classes"]) == (5, 3)
    both = evaluated(capsys, "zeroshot", tar, tar, "-m", models / "clip")
    assert both["images"] == 18
    made = evaluated(capsys, "retrieval", table(tmp_path / "a.csv", range(4)), "-m", models / "clip")
    assert (made["images"], made["texts"]) == (4, 4)


@pytest.mark.ci
def test_broken_images_are_listed_counted_and_left_out(capsys, models, tmp_path):
    tar = shard(tmp_path / "a.tar", range(9), broken=[4])
    code, out, err = run(capsys, "evaluate", "zeroshot", tar, "-m", models / "clip", "--format", "json")
    made = json.loads(out)
    assert code == 1
    assert (made["images"], made["broken"]) == (8, 1)
    assert "a.tar!004.png: " in one_line(err)
    assert "bytes" not in made["left_out"][0].split(":")[1]
    rows = [{"file_name": "absent.png", "label": "cat"}, {"file_name": "val.png"}, {"label": "dog"}, "no json"]
    squares(tmp_path / "s", 1)
    rows += [{"file_name": f"s/{name}_square/0.png", "label": name} for name in COLOURS]
    listed = lines(tmp_path / "list.jsonl", rows)
    code, out, err = run(capsys, "evaluate", "zeroshot", listed, "-m", models / "clip")
    assert code == 1
    assert "left out as broken: 4" in out
    assert len(err.splitlines()) == 4
    for cause in ("absent.png", "no label", "line 3: no audio_filepath", "line 4: not JSON"):
        assert cause in err


@pytest.mark.ci
def test_features_are_kept_for_the_model_and_the_images(capsys, models, tmp_path, monkeypatch):
    tar, cache = shard(tmp_path / "a.tar", range(9), broken=[4]), tmp_path / "cache"
    common = ["evaluate", "zeroshot", tar, "-m", models / "clip", "--format", "json", "--features_cache", cache]
    first = run(capsys, *common)
    assert len(list(cache.iterdir())) == 1

    def never(*_: object):
        raise AssertionError("encoded again")

    with monkeypatch.context() as patch:
        patch.setattr("multimodal.models.clip.CLIP.encode_image", never)
        again = run(capsys, *common)
    told = [{name: value for name, value in json.loads(one[1]).items() if name != "seconds"} for one in (first, again)]
    assert told[0] == told[1]
    assert again[2] == first[2]  # the broken image is named again
    shard(tmp_path / "a.tar", [*range(8), 20])
    assert json.loads(run(capsys, *common)[1])["images"] == 9
    run(capsys, *common, "--compute_type", "bfloat16")
    assert len(list(cache.iterdir())) == 3
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:-4])
    code, _, err = run(capsys, *common)
    assert code == 1
    assert "cannot be read as safetensors" in one_line(err)


def test_a_digest_changes_with_every_weight(models):
    checkpoint = load_folder(models / "clip")
    before = model_digest(checkpoint)
    assert before == model_digest(load_folder(models / "clip"))
    with torch.no_grad():
        checkpoint.model.logit_scale.add_(1e-6)
    assert model_digest(checkpoint) != before


def test_native_sizes(capsys, models, images):
    made = evaluated(capsys, "zeroshot", images, "-m", models / "clip", "--native", 3)
    assert (made["native"], made["images"]) == (3, 24)
    checkpoint, source = load_folder(models / "clip"), open_images(images)
    files = [source.source.read(key).media for key in source.keys]
    wanted = native_features(checkpoint.model, files, checkpoint.preprocessing, 3)
    torch.testing.assert_close(image_features(checkpoint, source, native=3).vectors, wanted)
    pooled = native_features(checkpoint.model.image, files, checkpoint.preprocessing)
    torch.testing.assert_close(image_features(checkpoint, source, "pooled", native=0).vectors, pooled)


def test_a_table_of_classify_is_data_and_a_line_without_a_label_is_left_out(capsys, models, images, tmp_path):
    files = [path for colour in sorted(images.iterdir()) for path in sorted(colour.iterdir())]
    rows = [f"{path},{path.parent.name}" for path in files]
    (tmp_path / "a.csv").write_text("\n".join(["file,label", *rows, f"{files[0]},", ""]))
    words = ("evaluate", "zeroshot", tmp_path / "a.csv", "-m", models / "clip", "--format", "json")
    code, _, err = run(capsys, *words)
    assert (code, "--trust_paths allows it" in one_line(err)) == (1, True)
    code, out, err = run(capsys, *words, "--trust_paths")
    assert code == 1
    assert "no label" in one_line(err)
    assert json.loads(out)["images"] == 24


@pytest.mark.ci
def test_columns_of_lists_may_have_other_names(capsys, models, images):
    files = sorted(images.rglob("*.png"))
    listed = images.parent / "breeds.csv"
    listed.write_text("\n".join(["photo,breed,says", *(f"val/{f.parent.name}/{f.name},{f.parent.name},a {f.stem}"
                                                       for f in files)]))  # fmt: skip
    common, named = ["-m", models / "clip"], ["--path_column", "photo", "--label_column", "breed"]
    folder, made = (evaluated(capsys, "zeroshot", *some, *common) for some in ([images], [listed, *named]))
    assert made["per_class"] == folder["per_class"]
    made = evaluated(capsys, "linear-probe", listed, "--train", listed, "--C", "1", *named, *common)
    assert (made["images"], made["train_images"]) == (24, 24)
    assert evaluated(capsys, "retrieval", listed, *named[:2], "--text_column", "says", *common)["texts"] == 24
    code, out, _ = run(capsys, "classify", "--calibrate", listed, *named, *common)
    assert (code, "fitted to 24 images of 4 labels" in out) == (0, True)
    said = images.parent / "said.csv"
    said.write_text("\n".join(["file,caption", *(f"{f},a {f.stem}" for f in files)]))
    made = evaluated(capsys, "captions", listed, *named[:2], "--text_column", "says", "--predictions", said)
    assert (made["images"], made["bleu1"]) == (24, pytest.approx(100))
    for words in (["evaluate", "zeroshot", images, *common], ["classify", "--calibrate", images, *common]):
        code, out, err = run(capsys, *words, "--label_column", "breed")
        assert (code, out) == (2, "")
        assert "--label_column: is for lists and tars (got folders)" in err


@pytest.mark.parametrize("kind", ["zeroshot", "linear-probe", "few-shot"])
def test_data_without_labels_or_with_one_class_is_refused(capsys, models, images, tmp_path, kind):
    flat = tmp_path / "flat"
    shutil.copytree(images / "red_square", flat)
    shutil.copytree(images / "red_square", tmp_path / "one" / "red square")
    for data, cause in ((flat, "have no classes"), (tmp_path / "one", "alone")):
        train = ["--train", data] if kind != "zeroshot" else []
        code, out, err = run(capsys, "evaluate", kind, data, *train, "-m", models / "clip")
        assert (code, out) == (1, "")
        assert cause in one_line(err)


@pytest.mark.ci
def test_unusable_data_is_one_line(capsys, models, images, captions, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(images / "red_square", tmp_path / "numbers" / "0")
    shutil.copytree(images / "blue_square", tmp_path / "numbers" / "1")
    shutil.copytree(images / "red_square", tmp_path / "train" / "red_square")
    shutil.copytree(images / "blue_square", tmp_path / "train" / "sky")
    broken = shard(tmp_path / "broken.tar", range(3), broken=range(3))
    one = ["--train", tmp_path / "train"]
    for arguments, cause in (
        (["zeroshot", tmp_path / "absent"], "no such file"),
        (["zeroshot", tmp_path / "empty"], "no usable item"),
        (["zeroshot", tmp_path / "numbers"], "'0', an id that classes do not name"),
        (["linear-probe", images, *one], "'blue_square', which the training set"),
        (["retrieval", images], "no captions"),
        (["zeroshot", images, "--templates", "clip9"], "--templates clip9"),
        (["zeroshot", images, "--report", "r.txt"], "--report r.txt"),
        (["zeroshot", images, "--confusion", "c.jpg"], "must end in .png"),
        (["zeroshot", images, "--features_cache", captions], "expected a folder"),
        (["zeroshot", images, "--device", "tpu"], "tpu"),
    ):
        code, out, err = run(capsys, "evaluate", *arguments, "-m", models / "clip")
        assert (code, out) == (1, "")
        assert cause in one_line(err)
    code, out, err = run(capsys, "evaluate", "linear-probe", images, "--train", images, "--C", "0")
    assert (code, out) == (2, "")
    assert "--C: must be a number in (0, " in err
    code, out, err = run(capsys, "evaluate", "zeroshot", broken, "-m", models / "clip")
    assert (code, out) == (1, "")
    assert "no image can be read" in err.splitlines()[-1]
    code, _, err = run(capsys, "evaluate", "linear-probe", images, "-m", models / "clip")
    assert code == 2
    assert "--train" in err


@pytest.mark.ci
def test_models_that_cannot_be_evaluated_so_are_refused(capsys, models, images, captions, tmp_path):
    clip = load_folder(models / "clip")
    save_folder(Checkpoint(clip.model, clip.tokenizer), tmp_path / "bare")
    save_folder(Checkpoint(clip.model, None, clip.preprocessing), tmp_path / "mute")
    case = timm_case("vit_tiny_patch16_224", (32, 32))
    vit = vit_timm.FAMILY.load(case.tensors, case.config, "tiny").model
    save_folder(Checkpoint(vit, None, clip.preprocessing), tmp_path / "vit")
    for model, kind, data, cause in (
        (tmp_path / "bare", "zeroshot", images, "preprocessing"),
        (tmp_path / "mute", "zeroshot", images, "tokenizer"),
        (tmp_path / "mute", "retrieval", captions, "tokenizer"),
        (tmp_path / "vit", "zeroshot", images, "expected a CLIP model, got vit"),
        (models / "asr", "retrieval", captions, "expected a CLIP model"),
        (models / "asr", "linear-probe", images, "expected a CLIP or ViT model"),
    ):
        train = ["--train", images] if kind == "linear-probe" else []
        code, out, err = run(capsys, "evaluate", kind, data, *train, "-m", model)
        assert (code, out) == (1, ""), err
        assert cause in one_line(err)


def test_classes_of_one_name_count_as_one_and_this_is_said(capsys, models, images, tmp_path):
    rows = [{"id": f"{name}_square", "names": ["crane" if name in ("red", "blue") else name]} for name in COLOURS]
    names = lines(tmp_path / "classes.jsonl", rows)
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # as outside of tests
        code, out, err = run(capsys, "evaluate", "zeroshot", images, "-m", models / "clip", "--format", "json",
                             "--classes", names)  # fmt: skip
    assert code == 0
    assert json.loads(out)["classes"] == 3
    assert "blue_square and red_square are both called 'crane'" in err


def test_a_model_whose_vectors_are_not_finite_is_refused(capsys, models, images, tmp_path):
    clip = load_folder(models / "clip")
    with torch.no_grad():
        clip.model.image_project.weight.fill_(3e38)  # finite, and too large to add up
    save_folder(clip, tmp_path / "large")
    code, out, err = run(capsys, "evaluate", "zeroshot", images, "-m", tmp_path / "large")
    assert (code, out) == (1, "")
    assert "is not finite" in one_line(err)


@pytest.mark.ci
def test_known_figures_of_the_shipped_model(capsys, shared_data):
    """Caltech-101, as in the documentation; the rounding of another processor may change one image of 400."""
    data = shared_data / "vision" / "caltech101" / "val"
    made = evaluated(capsys, "zeroshot", data, "--classes", RECIPES / "data" / "classes.jsonl")
    assert (made["acc1"], made["acc5"], made["images"]) == pytest.approx((0.525, 0.7825, 400), abs=0.003)
