"""`multimodal evaluate retrieval|linear-probe|few-shot`."""

import json

import pytest

from multimodal.models.vit import ViT
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.weights.folder import Checkpoint, save_folder
from tests.helpers.commands import evaluated, one_line, run
from tests.helpers.data.sets import lines, squares
from tests.helpers.references.vision import timm_case


def test_retrieval_gives_both_ways_and_the_hardest_queries(capsys, models, captions, tmp_path):
    made = evaluated(capsys, "retrieval", captions, "-m", models / "clip", "--report", tmp_path / "r.md")
    assert (made["images"], made["texts"]) == (12, 24)
    for way in ("image_to_text", "text_to_image"):
        assert made[way].keys() == {"recall@1", "recall@5", "recall@10", "median_rank", "mean_reciprocal_rank"}
        assert 0 <= made[way]["recall@1"] <= made[way]["recall@5"] <= made[way]["recall@10"] <= 1
    report = (tmp_path / "r.md").read_text()
    assert "## Images whose texts are found last" in report
    assert "## Texts whose images are found last" in report
    code, out, _ = run(capsys, "evaluate", "retrieval", captions, "-m", models / "clip")
    assert code == 0
    assert "image to text" in out


@pytest.mark.ci
def test_retrieval_takes_a_line_for_each_text_as_one_image(capsys, models, captions):
    rows = [json.loads(line) for line in captions.read_text().splitlines()]
    singly = [{"file_name": row["file_name"], "text": text} for row in rows for text in row["captions"]]
    path = lines(captions.parent / "singly.jsonl", singly)
    made, same = (evaluated(capsys, "retrieval", one, "-m", models / "clip") for one in (path, captions))
    assert {key: made[key] for key in ("images", "texts", "image_to_text", "text_to_image")} == {
        key: same[key] for key in ("images", "texts", "image_to_text", "text_to_image")
    }
    few = evaluated(capsys, "retrieval", path, "-m", models / "clip", "--limit", 5)
    assert (few["images"], few["texts"]) == (5, 10)


@pytest.mark.ci
def test_linear_probe_learns_colours_of_a_clip_and_of_a_vit(capsys, models, images, tmp_path):
    train = squares(tmp_path / "train", 10)
    made = evaluated(capsys, "linear-probe", images, "--train", train, "-m", models / "clip")
    assert made["acc1"] > 0.9
    assert (made["train_images"], made["images"], made["classes"]) == (40, 24, 4)
    assert made["converged"] is True
    assert [fit["c"] for fit in made["sweep"]] == sorted(fit["c"] for fit in made["sweep"])
    case = timm_case("vit_tiny_patch16_224", (32, 32))
    record = Preprocessing((32, 32), "shortest", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
    vit = case.family.load(case.tensors, case.config, "tiny").model
    assert isinstance(vit, ViT)
    save_folder(Checkpoint(vit, None, record), tmp_path / "vit")
    made = evaluated(capsys, "linear-probe", images, "--train", train, "-m", tmp_path / "vit", "--C", "1")
    assert made["acc1"] > 0.9
    assert (made["c"], made["sweep"]) == (1.0, [])
    few = evaluated(capsys, "few-shot", images, "--train", train, "-m", tmp_path / "vit", "--shots", 1, 4)
    assert few["zeroshot"] is None
    assert few["shots"][1].keys() == {"shots", "linear_probe"}


@pytest.mark.ci
@pytest.mark.filterwarnings("always:10 shots")
def test_few_shot_of_a_clip(capsys, models, images, tmp_path):
    train = squares(tmp_path / "train", 10)
    common = ["few-shot", images, "--train", train, "-m", models / "clip", "--shots", "4", "1", "--seeds", "2"]
    made = evaluated(capsys, *common)
    assert [row["shots"] for row in made["shots"]] == [1, 4]
    assert made["zeroshot"]["acc1"] == evaluated(capsys, "zeroshot", images, "-m", models / "clip")["acc1"]
    assert made["shots"][1]["linear_probe"]["acc1_mean"] > 0.8
    assert made["shots"][1]["tip_adapter"]["acc1_mean"] >= made["zeroshot"]["acc1"]
    code, out, _ = run(capsys, "evaluate", *common, "--report", tmp_path / "r.md")
    assert code == 0
    assert " ± " in out
    assert "## Shots" in (tmp_path / "r.md").read_text()
    code, out, err = run(capsys, "evaluate", *common[:6], "--shots", "10", "--C", "1", "--seeds", "1")
    assert code == 0
    assert "10 shots: no Tip-Adapter" in err
    assert [line.split()[0] for line in out.splitlines()[-3:-1]] == ["0", "10"]


def test_captions_that_are_empty_are_left_out(capsys, models, captions, tmp_path):
    rows = [json.loads(line) for line in captions.read_text().splitlines()]
    rows[2]["captions"] = ["a square", " "]
    path = lines(captions.parent / "some.jsonl", rows)
    code, out, err = run(capsys, "evaluate", "retrieval", path, "-m", models / "clip", "--format", "json")
    assert code == 1
    assert json.loads(out)["images"] == 11
    assert "a caption is empty" in one_line(err)
