"""Heat maps: relevance equals explicit attention, points at the object, and is drawn on the right pixels."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from multimodal.blocks.attention import Attention
from multimodal.blocks.capture import attention_weights
from multimodal.blocks.stack import transformer
from multimodal.errors import ImageError, UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.vit import ViTConfig
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.figures import heat, overlay
from multimodal.tasks.inspect.heatmap import HeatMaps, file_name, relevance, without_heat_maps
from multimodal.tokens.image.preprocessing import Preprocessing, preprocess
from multimodal.tokens.image.reading import read_image
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load
from tests.helpers.commands import run
from tests.helpers.paths import SHARED_DATA
from tests.helpers.tiny import CLIPS, VITS, made, randomized, text

CALTECH = SHARED_DATA / "vision" / "caltech101" / "val"
PLAIN = Preprocessing((16, 16), "squash", "bilinear", (0.0,) * 3, (1.0,) * 3, 0, 1.0)
RGB = torch.eye(8)[:3]  # texts "red", "green", "blue" for `colour_clip`


def clip(name: str) -> CLIP:
    """Any tiny ViT as the image tower of a CLIP."""
    return randomized(CLIP(replace(CLIPS["softmax"], image=replace(VITS[name], classes=0))))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def explicit(module: Attention, kept: list[dict[str, Tensor]]):
    """The attention's forward with weights that autograd sees."""

    def forward(x: Tensor, source: Tensor | None = None, mask: Tensor | None = None, **_: None) -> Tensor:
        source = x if source is None else source
        query, key, value = module.split(module.query(x)), module.split(module.key(source)), module.value(source)
        weights = attention_weights(query, key, mask, module.scale)
        mixed = weights @ module.split(value)
        kept.append({"weights": weights, "mixed": mixed, "values": module.split(value)})
        return module.out(mixed.transpose(1, 2).flatten(2))

    return forward


@pytest.mark.parametrize("name", ["token", "mean", "map", "registers-mean"])
def test_relevance_is_gradient_weighted_attention(name, monkeypatch):
    model, images, texts = clip(name), noise(2, 3, 8, 20), F.normalize(noise(4, 6, seed=1), dim=-1)
    found = relevance(model, images, texts)
    kept: list[dict[str, Tensor]] = []
    for module in model.image.modules():
        if isinstance(module, Attention):
            monkeypatch.setattr(module, "forward", explicit(module, kept))
    tokens = model.image.tokens(images)
    z = F.normalize(model.image_project(model.image.pooled(tokens)), dim=-1)
    scores = z @ texts.T
    for text_number in range(4):
        others = [i for i in range(4) if i != text_number]
        shares = (model.logit_scale.exp() * scores[:, others]).softmax(-1).detach()
        score = (scores[:, text_number] - (shares * scores[:, others]).sum(1)).sum()
        expected = torch.zeros(2, tokens.shape[1])
        for one in kept:
            by_weights, by_mixed = torch.autograd.grad(score, [one["weights"], one["mixed"]], retain_graph=True)
            assert_close(by_weights, by_mixed @ one["values"].mT, atol=1e-6, rtol=1e-4)  # G Vᵀ
            expected += (one["weights"] * by_weights).sum((1, 2))
        if name != "map":
            expected += (tokens * torch.autograd.grad(score, tokens, retain_graph=True)[0]).sum(-1)
        assert_close(found[:, text_number].flatten(1), expected[:, -10:], atol=1e-6, rtol=1e-3)
    assert found.shape == (2, 4, 2, 5)
    assert found.abs().min() > 0
    assert_close(relevance(model, images, texts, [2, 0]), found[:, [2, 0]], atol=1e-6, rtol=1e-3)


def test_outputs_stay_the_same_to_the_bit():
    model, images = clip("map"), noise(2, 3, 8, 12)
    with torch.inference_mode():
        before, texts = model.encode_image(images), F.normalize(noise(3, 6), dim=-1)
        maps = relevance(model, images, texts)  # of inference tensors, in inference mode
        assert torch.equal(model.encode_image(images), before)
    assert not maps.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_close(relevance(model.requires_grad_(False), images, texts), maps, atol=1e-6, rtol=1e-3)


def colour_clip(pool: str) -> CLIP:
    """Sees the mean colour of a patch; its class token or query attends to all patches alike."""
    image = ViTConfig((16, 16), 4, transformer(8, 1, 1, 8), pool, pool == "token")
    model = CLIP(CLIPConfig(image, text(), 8, "softmax", "eos")).eval()
    with torch.no_grad():
        for name, parameter in model.image.named_parameters():
            parameter.fill_(1.0 if "norm.weight" in name else 0.0)
        model.image.embed.weight[:3] = torch.eye(3)[:, :, None, None] / 16
        for part in model.image.modules():
            if isinstance(part, Attention):
                part.value.weight.copy_(torch.eye(8))
                part.out.weight.copy_(torch.eye(8))
        model.image_project.weight.copy_(torch.eye(8))
    return model


def quilt(rows: list[list[str]], side: int = 8) -> Image.Image:
    image = Image.new("RGB", (side * len(rows[0]), side * len(rows)))
    for y, row in enumerate(rows):
        for x, colour in enumerate(row):
            image.paste(colour, (x * side, y * side, (x + 1) * side, (y + 1) * side))
    return image


@pytest.mark.parametrize("pool", ["token", "mean", "map"])
def test_map_points_at_what_the_text_names(pool):
    model = colour_clip(pool)
    for rows in ([["red", "lime"], ["blue", "red"]], [["blue", "red", "lime", "lime"]], [["lime"], ["red"], ["blue"]]):
        image = quilt(rows)
        pixels = preprocess(image, PLAIN.replace(size=(image.height, image.width)))
        maps = relevance(model, pixels[None], RGB)[0]
        for one, colour in zip(maps, ("red", "lime", "blue"), strict=True):
            there = torch.tensor([[name == colour for name in row] for row in rows])
            there = there.repeat_interleave(2, 0).repeat_interleave(2, 1)  # patches of 4 pixels
            assert one[there].min() > max(0.0, 2 * one[~there].max())


@pytest.mark.ci
@pytest.mark.skipif(not CALTECH.exists(), reason="needs shared/data/vision/caltech101")
def test_shipped_model_points_at_two_real_objects_side_by_side():
    checkpoint, pick = load("clip-vit-16"), random.Random(0)
    names = sorted(folder.name for folder in CALTECH.iterdir())
    classifier = ZeroShotClassifier(checkpoint, [name.replace("_", " ") for name in names])
    labelled = [(number, path) for number, name in enumerate(names) for path in sorted((CALTECH / name).iterdir())[:1]]
    images = [read_image(path).resize((96, 96)) for _, path in labelled]
    pixels = torch.stack([preprocess(image, checkpoint.preprocessing) for image in images])
    best = classifier.probabilities(pixels).argmax(1).tolist()
    known = [(number, half) for (number, _), half, top in zip(labelled, pixels, best, strict=True) if top == number]
    right = total = 0
    while total < 40:
        (one, left), (other, rest) = pick.sample(known, 2)
        if one != other:
            both = torch.cat([left, rest], 2)[None]  # 6 x 12 patches
            sides = relevance(checkpoint.model, both, classifier.weights, [one, other])[0].unflatten(2, (2, 6))
            right += int((sides.sum((1, 3)).argmax(1) == torch.tensor([0, 1])).sum())
            total += 2
    assert right / total > 0.9


RECORDS = {
    "shortest": ("shortest", (32, 32), 1.0), "crop": ("shortest", (32, 32), 0.8), "squash": ("squash", (32, 48), 1.0),
    "longest": ("longest", (32, 32), 1.0), "longest, oblong": ("longest", (32, 48), 1.0),
    "shortest, oblong": ("shortest", (48, 32), 1.0),
}  # fmt: skip


@pytest.mark.parametrize("size", [(200, 90), (70, 161), (64, 64)])
@pytest.mark.parametrize("name", RECORDS)
def test_heat_lies_on_the_pixels_that_the_patch_came_from(name, size):
    resize, seen, crop = RECORDS[name]
    record, (width, height), patch = PLAIN.replace(resize=resize, size=seen, crop=crop), size, 8
    rows, columns = seen[0] // patch, seen[1] // patch
    empty = preprocess(Image.new("RGB", size), record)
    covered = ~np.isnan(heat(torch.ones(rows, columns), size, size, record, patch))
    assert (covered == covered.any(1)[:, None] & covered.any(0)).all()  # one box
    found = 0
    for x, y in [(0, 0), (width // 2, height // 2), (width - 9, height - 9), (width // 4, height // 3)]:
        image = Image.new("RGB", size)
        image.paste("white", (x, y, x + 9, y + 9))
        change = (preprocess(image, record) - empty).abs().sum(0)
        inside = covered[y : y + 9, x : x + 9]
        assert (change.max() > 0.05) == inside.any()
        if not inside.all():
            continue
        change = F.avg_pool2d(change[None, None, : rows * patch, : columns * patch], patch)[0, 0]
        hot = heat(change / change.max(), size, size, record, patch)
        found += 1
        far = [abs(a - b) for a, b in zip(np.unravel_index(np.nanargmax(hot), hot.shape), (y + 4, x + 4), strict=True)]
        drawn = max(height / rows, width / columns) * max(1.0, width / height, height / width)  # pixels of a patch
        assert max(far) <= drawn
    assert found


def test_maps_of_an_earlier_call_are_no_images(tmp_path):
    files = [str(tmp_path / name) for name in (file_name("läßt 猫.png"), "photo.png", "a-b.heatmap.png")]
    elsewhere = str(tmp_path / "more" / file_name("photo.png"))
    assert without_heat_maps([*files, elsewhere], tmp_path) == [*files[1:], elsewhere]
    assert without_heat_maps([*files, elsewhere], tmp_path / "more") == files


def test_a_patch_is_hottest_in_its_middle_and_ends_at_the_next_ones():
    one = torch.zeros(4, 4)
    one[1, 2], one[3, 0] = 2.0, -5.0
    hot = heat(one, (160, 160), (160, 160), PLAIN, 4)  # patches of 40 pixels
    assert np.unravel_index(hot.argmax(), hot.shape) in [(y, x) for y in (59, 60) for x in (99, 100)]
    assert hot.max() > 0.97
    assert hot.min() == 0.0
    assert hot[60, 60] < 0.02
    assert hot[60, 80] == pytest.approx(0.5, abs=0.03)
    nothing = heat(-torch.ones(4, 4), (30, 20), (30, 20), PLAIN, 4)
    assert nothing.shape == (20, 30)
    assert not nothing.any()


def test_image_is_clear_where_it_is_cold_and_grey_where_it_was_cropped():
    image = Image.new("RGB", (480, 320), (40, 160, 40))
    relevances = torch.zeros(4, 4)
    relevances[:, 3] = 1.0
    record = PLAIN.replace(resize="shortest")
    drawn = np.asarray(overlay(image, relevances, record, 4)).astype(int)
    assert drawn.shape == (320, 480, 3)
    assert (drawn[:, 80:200] == (40, 160, 40)).all()
    assert (drawn[:, :80] == drawn[:, :80, :1]).all()
    assert (drawn[:, 400:] == drawn[:, 400:, :1]).all()
    assert (drawn[:, 390, 0] > drawn[:, 390, 1] + 40).all()  # red
    captioned = np.asarray(overlay(image, relevances, record, 4, "0.91  ラベル $x_1$"))
    assert (captioned[:320] == drawn).all()
    assert (captioned[320:] < 100).any()
    assert overlay(Image.new("RGB", (9000, 30)), relevances, record, 4).size == (1600, 5)
    turned = Image.new("P", (640, 320))
    turned.getexif()[0x0112] = 6
    assert overlay(turned, relevances, record, 4).size == (320, 640)
    assert overlay(Image.new("RGB", (20, 10)), relevances, record, 4).size == (320, 160)


@pytest.fixture
def maps(tmp_path: Path) -> HeatMaps:
    return HeatMaps(colour_clip("token"), PLAIN, ["red", "green", "blue"], RGB, tmp_path / "new" / "maps", top=2)


def result(*labels: str) -> dict:
    return {"scores": [{"label": label, "score": 0.5} for label in labels]}


def test_turned_photograph_is_drawn_upright_with_the_heat_on_it(tmp_path, maps):
    exif = Image.Exif()
    exif[0x0112] = 6  # the file's left is the image's top
    path = tmp_path / "turned.jpg"
    quilt([["lime", "blue"], ["lime", "blue"]], 200).resize((400, 300)).save(path, exif=exif)
    sheet = np.asarray(Image.open(maps.write(path, result("green", "blue")))).astype(int)
    assert sheet.shape[1] == 3 * 304  # the image and two maps
    plain, green, blue = sheet.reshape(-1, 3, 304, 3).transpose(1, 0, 2, 3)[:, :, :300]
    assert max(abs(plain[50, 150] - (0, 255, 0)).max(), abs(plain[350, 150] - (0, 0, 255)).max()) < 30
    assert (plain[400:] < 100).any()  # its name
    lower, upper = abs(green[250:390] - (0, 0, 255)), abs(blue[10:150] - (0, 255, 0))
    assert max(lower.max(), upper.max()) < 60  # as they were
    assert min(abs(green[50, 150] - (0, 255, 0)).max(), abs(blue[350, 150] - (0, 0, 255)).max()) > 100


def test_files_have_names_of_their_own(tmp_path, maps):
    images = [tmp_path / name for name in ("one/photo.png", "two/photo.png", "one/läßt 猫.png", "one/..a?b.png")]
    for image in images:
        image.parent.mkdir(exist_ok=True)
        quilt([["red", "blue"]]).save(image)
    paths = [maps.write(image, result("red", "blue")) for image in images]
    assert len(set(paths)) == 4
    assert sorted(maps.folder.iterdir()) == sorted(paths)  # nothing else is left there
    assert not any(path.name.startswith(".") for path in paths)
    assert "läßt_猫" in paths[2].name
    assert len(file_name("x/" + "é" * 300 + ".png").encode()) < 100
    assert file_name("/\udc80.png").startswith("_-")
    assert maps.write(images[0], result("red")) == paths[0]


def test_what_cannot_be_done_is_refused(tmp_path, maps):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r".*file.*: cannot be written \(File exists\)"):
        HeatMaps(maps.model, PLAIN, ["a"], RGB[:1], tmp_path / "file")
    with pytest.raises(UsageError, match="cannot be written"):
        HeatMaps(maps.model, PLAIN, ["a"], RGB[:1], tmp_path / "file" / "inside")
    with pytest.raises(UsageError, match="expected a CLIP model, got VisionEncoderDecoder"):
        relevance(made("captioner"), noise(1, 3, 8, 12), RGB)
    with pytest.raises(UsageError, match="expected a CLIP model, got CoCa"):
        relevance(made("coca"), noise(1, 3, 8, 12), RGB)
    unpooled = CLIP(replace(CLIPS["softmax"], image=replace(VITS["token"], pool="none", classes=0)))
    with pytest.raises(UsageError, match="got 'none'"):
        relevance(unpooled, noise(1, 3, 8, 12), RGB)
    packed = prepare_for_inference(Checkpoint(clip("token"), source="here")).model
    with pytest.raises(UsageError, match="not prepared for inference"):
        relevance(packed, noise(1, 3, 8, 12), noise(2, 6))
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8")
    with pytest.raises(ImageError, match=r"broken\.jpg"):
        maps.write(tmp_path / "broken.jpg", result("red"))


@pytest.mark.ci
def test_command_draws_and_prints_the_same_scores(tmp_path, capsys):
    for number, name in enumerate(("left", "right")):
        (tmp_path / "in" / name).mkdir(parents=True)
        quilt([["red", "blue", "lime"]], 40 + 9 * number).save(tmp_path / "in" / name / "image.png")
    common = ["classify", tmp_path / "in", "--labels", "panda", "a/lamp", "fish", "--format", "csv"]
    plain = run(capsys, *common)
    for extra, files in (
        (["--heatmap", tmp_path / "maps"], 2),
        (["--heatmap", tmp_path / "two", "--heatmap_top", 1], 2),
    ):
        assert run(capsys, *common, *extra) == plain
        assert len(list((extra[1]).iterdir())) == files
    assert plain[0] == 0
    code, out, err = run(capsys, *common, "--native", "--heatmap", tmp_path / "in" / "left" / "image.png")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "image.png: cannot be written" in err
    assert run(capsys, *common, "--heatmap_top", 2)[0] == 2
    code, out, _ = run(capsys, *common, "--native", 50, "--heatmap", tmp_path / "native")
    assert code == 0
    assert out != plain[1]
    drawn = np.asarray(Image.open(next((tmp_path / "native").iterdir()))).astype(int)
    edge = drawn[40:70, :2].mean((0, 1))
    assert abs(edge[0] - edge[1]) > 20  # the model saw a wide image up to its sides: they are not grey
