"""CoCa's training: exact accumulation, what a CLIP gives it, and what a run learns and leaves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.testing import assert_close

from multimodal import load
from multimodal.blocks.stack import transformer
from multimodal.cli.main import main as multimodal
from multimodal.data.datasets.captions import DRAWS, CaptionAugmentSettings, CaptionExample
from multimodal.data.loader import finished
from multimodal.errors import CheckpointError
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.coca import CoCa
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViT, ViTConfig
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.train.objectives.captioning import DecoderSettings
from multimodal.train.objectives.coca import CollateCoCa, ContrastiveCaptioning, coca
from multimodal.train.objectives.contrastive import Pairs
from multimodal.train.recipe_cli import start
from multimodal.weights.folder import Checkpoint, save_folder
from tests.helpers.data.contrast import EXACT, gradient, matching_loss
from tests.helpers.spread import thin
from tests.helpers.tiny import CLIPS, COCA, VOCABULARY, randomized
from tests.helpers.tiny_run import assert_same_states

pytestmark = pytest.mark.usefixtures("blank_figures")
RECORD = Preprocessing((32, 32), "shortest", "bilinear", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
SAID = {"red": "a red wall", "blue": "the deep blue sea", "lime": "a field of green grass"}
NEW = ("image_pool.", "decoder.", "words.", "text_class")


def examples(texts: list[list[int]]) -> list[CaptionExample]:
    noise = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (len(texts), 12, 8, 3), generator=noise, dtype=torch.uint8)
    draws = torch.rand(len(texts), DRAWS, generator=noise)
    return [
        CaptionExample(*own) for own in zip(pixels, ([1, *ids, VOCABULARY - 1] for ids in texts), draws, strict=True)
    ]


def collate(rows: list[CaptionExample]) -> Pairs:
    record = Preprocessing((8, 12), "shortest", "bilinear", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
    batch = finished(CollateCoCa(COCA.pad_id, record, CaptionAugmentSettings())(rows))
    return batch._replace(images=batch.images.double())


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_accumulation_is_exact_and_the_loss_is_that_of_the_paper(kind):
    model = randomized(CoCa(replace(COCA, loss=kind))).double()
    objective = ContrastiveCaptioning(model, 0.1)
    rows = examples([[5], [3, 4, 5, 6, 7], [8, 9], [5], [2, 3, 4, 11, 12, 13, 14], [9, 8, 7]])
    loss, whole = gradient(objective, [collate(rows)])
    assert len(whole) == len(list(model.parameters()))
    assert all(grad.abs().max() > 0 for name, grad in whole.items() if not name.endswith("key.bias"))

    batch = collate(rows)
    images, texts, captions = model.outputs(batch.images, batch.ids)
    same = torch.eye(6, dtype=torch.bool)
    same[0, 3] = same[3, 0] = True  # one text under both
    if kind == "softmax":
        contrast = matching_loss(model.logits(images, texts), same)
        wanted = [F.cross_entropy(own[: len(row.ids) - 1], torch.tensor(row.ids[1:]), reduction="none",
                                  label_smoothing=0.1) for own, row in zip(captions, rows, strict=True)]  # fmt: skip
        assert loss == pytest.approx((contrast + 2 * torch.cat(wanted).mean()).item(), abs=1e-6)
    for sizes in ((3, 3), (1, 4, 1)):
        parts = [rows[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
        again, found = gradient(objective, [collate(part) for part in parts])
        assert again == pytest.approx(loss, abs=1e-6)
        for name, expected in whole.items():
            assert_close(found[name], expected, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def clip() -> CLIP:
    torch.manual_seed(0)
    stack = transformer(32, 2, 4, 64)
    image = ViTConfig((32, 32), 16, stack, "mean", False)
    return CLIP(CLIPConfig(image, TextConfig(300, 16, stack, causal=True), 24, "softmax", "eos", eos_id=2)).eval()


def test_a_coca_begins_with_the_towers_of_its_clip():
    known = clip()
    made, own = coca(known, 0, DecoderSettings(layers=1, queries=5)).eval(), known.state_dict()
    for name, weights in made.state_dict().items():
        source = name.replace("image_pool.source_norm", "image.stack.norm").replace("text_norm", "text.stack.norm")
        if source in own and name != "image_project.weight":  # whose width is another
            assert torch.equal(weights, own[source]), name
        else:
            assert name.startswith((*NEW, "image_project.")), name
    images, ids = torch.randn(2, 3, 32, 32), torch.tensor([[1, 9, 2], [1, 8, 2]])
    assert_close(made.image_pool.source_norm(made.image.tokens(images)), known.image.tokens(images))
    seen = made.text_norm(made.text.stack(made.text.stem(ids), mask=made._mask(ids, 3)))
    assert_close(seen, known.text.states(ids))
    with pytest.raises(CheckpointError, match="expected a causal text tower"):
        coca(CLIP(CLIPS["sigmoid"]), 0, DecoderSettings())


@pytest.fixture
def data(tmp_path) -> Path:
    """Four images a colour with a caption, a folder of labelled ones, and a CLIP."""
    lines = []
    for colour, text in SAID.items():
        for number in range(4):
            Image.new("RGB", (40 + number, 44), colour).save(tmp_path / f"{colour}{number}.png")
            lines.append({"file_name": f"{colour}{number}.png", "captions": [text]})
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "classes" / "plain_white").mkdir(parents=True)
    Image.new("RGB", (40, 40), "white").save(tmp_path / "classes" / "plain_white" / "0.png")
    tokenizer = BytePairTokenizer.train([*SAID.values(), "a photo of a plain white"] * 2, 300, lowercase=True)
    model = clip()
    model = CLIP(replace(model.config, text=replace(model.config.text, vocabulary=tokenizer.vocab_size)))
    save_folder(Checkpoint(model, tokenizer, RECORD, "", {"templates": ["{}"]}), tmp_path / "clip")
    save_folder(Checkpoint(ViT(model.config.image), None, RECORD), tmp_path / "vit")
    return tmp_path


@pytest.fixture
def recipe(load_recipe):
    train_captioner = load_recipe("train_captioner")
    return lambda *args: start(train_captioner.main, [str(arg) for arg in args])


def flags(data: Path, run: str, **changes) -> list[str]:
    values = {
        "family": "coca", "data": data / "said.jsonl", "val": data / "said.jsonl", "init": data / "clip",
        "run": data / run, "out": data / f"{run}-out", "steps": 40, "labelled": data / "classes", "batch": 12,
        "batch_labelled": 1, "layers": 1, "queries": 5, "dropout": 0, "smoothing": 0, "rate": 5e-3, "warmup": 5,
        "average": 0.8, "evaluate_every": 40, "log_every": 5, "threads": torch.get_num_threads(),
    }  # fmt: skip
    return [part for name, value in (values | changes).items() for part in (f"--{name}", str(value))]


@pytest.mark.ci
def test_a_run_learns_to_contrast_and_to_caption(recipe, data, capsys):
    recipe(*flags(data, "run"))
    rows = [json.loads(line) for line in (data / "run" / "metrics.jsonl").read_text().splitlines()]
    for name, share in (("contrast", 0.5), ("captions", 0.2)):
        losses = [row[name] for row in rows if name in row]
        assert losses[-1] < share * losses[0], name
    before, after = load(data / "clip").model.state_dict(), load(data / "run-out").model.state_dict()
    shared = [name for name in before.keys() & after.keys() if before[name].shape == after[name].shape]
    changed = {name for name in shared if not torch.allclose(before[name], after[name], atol=2e-3)}
    assert {"image.embed.weight", "image.stack.blocks.0.attention.query.weight", "text.embed.weight",
            "text.stack.blocks.0.attention.query.weight", "logit_scale"} <= changed  # fmt: skip
    images, labels = [str(data / f"{colour}0.png") for colour in SAID], list(SAID.values())

    def rows_of(*args: str) -> list[dict]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            multimodal([*args, "--model", str(data / "run-out"), "--format", "jsonl"])
        assert end.value.code == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [row["caption"] for row in rows_of("caption", *images)] == labels
    named = rows_of("classify", *images, "--labels", *labels)
    assert [row["scores"][0]["label"] for row in named] == labels
    assert load(data / "run-out").card["templates"] == ["{}"]


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(recipe, data):
    for run, changes in (("whole", {}), ("part", {"steps": 2}), ("part", {"resume": "True"})):
        common = {"steps": 4, "schedule": "wsd", "warmup": 0, "dropout": 0.1, "drop_path": 0.1, "accumulate": 2}
        recipe(*(arg for arg in flags(data, run, **(common | changes)) if arg != "True"))
    assert_same_states(data / "whole", data / "part", 4)


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"sentences": "texts.gz"}, "--sentences: has no part in --family coca"),
        ({"width": "64"}, "--width: has no part in --family coca"),
        ({"family": "captioner"}, "--queries: has no part in --family captioner"),
        ({"init": "vit"}, "vit: checkpoint has no tokenizer"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(recipe, data, capsys, changes, line):
    changes = {name: data / value if name == "init" else value for name, value in changes.items()}
    with pytest.raises(SystemExit) as end:
        recipe(*flags(data, "none", **changes))
    assert end.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("train_captioner.py: error: ")
    assert line in last
