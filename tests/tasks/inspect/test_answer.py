"""Attention of an answer: shares sum to 1, rows of every connector lead back to patches and seconds."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal.blocks.connector import Connector, ConnectorConfig
from multimodal.errors import UsageError
from multimodal.models.any_to_text import AnyToText
from multimodal.tasks.ask.media import Medium
from multimodal.tasks.inspect import answer
from multimodal.tasks.inspect.answer import AnswerRequest, answer_map
from multimodal.tasks.inspect.answer_places import connector_shares, patch_grid, places
from multimodal.tasks.inspect.options import ViewOptions
from multimodal.tokens.image.preprocessing import Preprocessing, Tiling
from multimodal.tokens.image.tiles import tiled
from multimodal.weights.folder import save_folder
from tests.helpers.commands import one_line, run
from tests.helpers.data.video_files import ramp, video
from tests.helpers.spread import thin
from tests.helpers.tiny import ANYS, WIDTH, randomized, stack
from tests.tasks.ask.conftest import checkpoint

RED = Image.new("RGB", (12, 8), "red")
SOUND = (16000, np.sin(np.arange(24000) / 7).astype(np.float32))
HALF = (0.5, 0.5, 0.5)


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", ["any", "any-conformer", "any-crossing"])
def test_shares_of_all_media_sum_to_1(name, tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(video(ramp(10), sound=1.0))
    found = answer_map(checkpoint(name), AnswerRequest([RED, SOUND, path], "what?", "a dog"), ViewOptions())
    assert sum(one.share for one in found.seen).numpy() == pytest.approx(1, abs=1e-5)
    assert [len(one.maps) for one in found.seen] == [len("a dog") + 1] * len(found.seen)
    assert all(one.maps.sum(-1).numpy() == pytest.approx(1, abs=1e-5) for one in found.seen)
    image, sound = found.seen[:2]
    assert (image.name, image.keys.grid, sound.name) == ("image", (2, 3), "audio")
    assert sound.weights.shape[1] * sound.keys.step == pytest.approx(1.5, abs=0.1)
    frames = [one for one in found.seen if "clip.mp4 @" in one.name]
    assert len(frames) == 10 if name != "any" else frames
    assert (found.seen[-1].name == "text") == (name != "any-crossing")


def test_maps_are_of_their_inputs_where_the_template_writes_them_in_another_order():
    made, parts = checkpoint("any"), "for p in m.content %}"
    template = made.chat.template.replace(parts, "for p in m.content | sort(attribute='type') %}")
    assert template != made.chat.template
    made = replace(made, chat=replace(made.chat, template=template))
    image, sound, _ = answer_map(made, AnswerRequest([RED, SOUND], "what?", "a dog"), ViewOptions()).seen
    assert (image.name, image.maps.shape[1:], sound.name) == ("image", (6,), "audio")
    assert sound.maps.shape[1] > 6


def test_an_attention_made_by_hand_gives_its_map(monkeypatch):
    made = checkpoint("any")
    given: dict[str, int] = {}

    def row_of_one(writer, prompt, ids):
        """Every head attends to the fifth row of the image."""
        place = [i for i, token in enumerate(prompt.ids) if token == writer.network.config.placeholders[0]][4]
        weights = torch.zeros(2, 2, len(ids), len(prompt.ids) + len(ids) - 1)
        weights[..., place] = 1
        given["row"] = place
        return weights

    monkeypatch.setattr(answer, "captured", row_of_one)
    image, text = answer_map(made, AnswerRequest([RED], "what?", "x"), ViewOptions(layer=1)).seen
    assert image.share.tolist() == [1, 1]
    assert image.maps.unflatten(1, image.keys.grid)[0].tolist() == [[0, 0, 0], [0, 1, 0]]
    assert text.share.tolist() == [0, 0]


def config(**more) -> ConnectorConfig:
    return ConnectorConfig(WIDTH, WIDTH, **more)


@pytest.mark.parametrize(
    ("made", "row", "expected"),
    [
        (config(), 3, {3: 1.0}),
        (config(pool=2), 1, {2: 0.5, 3: 0.5}),
        (config(shuffle=2), 1, {2: 0.25, 3: 0.25, 6: 0.25, 7: 0.25}),  # of 4 x 4 patches
        (config(stack=3), 5, {15: 1.0}),  # the last row is mostly padding
        (config(pool=2, stack=2), 0, dict.fromkeys(range(4), 0.25)),
    ],
)
def test_rows_of_a_connector_lead_back_to_its_states(made, row, expected):
    shares = connector_shares(Connector(made), torch.zeros(16, WIDTH), (4, 4))
    assert len(shares) == made.count(16, (4, 4))
    assert {i: round(float(share), 6) for i, share in enumerate(shares[row]) if share} == expected


def test_a_single_state_makes_no_row_of_two():
    connector = Connector(config(pool=2, norm=True))
    assert connector_shares(connector, torch.zeros(1, WIDTH)).shape == (0, 1)
    assert connector(torch.zeros(1, 1, WIDTH)).shape == (1, 0, WIDTH)


def test_the_shares_of_a_resampler_are_its_attention():
    torch.manual_seed(0)
    connector = randomized(Connector(config(resampler=stack(source_width=WIDTH), queries=3)))
    shares = connector_shares(connector, torch.randn(16, WIDTH))
    assert shares.shape == (3, 16)
    assert shares.sum(1).numpy() == pytest.approx(1, abs=1e-5)
    assert shares.std() > 1e-3


def test_tiles_and_overview_are_one_map_over_the_image():
    model = randomized(AnyToText(ANYS["any-image"]))  # a tile of 2 x 2 patches is one row
    record = Preprocessing((8, 8), "squash", "bicubic", HALF, HALF, 0, 1.0, tiling=Tiling("split", longest=16))
    image = Image.new("RGB", (40, 40))
    tile = tiled(image, record)
    assert tile.grid == (2, 2)
    weights = torch.zeros(2, 5)
    weights[0, 2] = 1  # the lower left tile
    weights[1, 4] = 1  # the overview
    (seen,) = places(record, model, "a.png", None, Medium("image", tile.pixels, tile=tile, shown=(image,)), weights)
    tiles, overview = seen.maps.unflatten(1, seen.keys.grid)
    assert tiles[2:, :2].tolist() == [[0.25, 0.25]] * 2
    assert tiles.sum() == 1
    assert torch.allclose(overview, torch.tensor(1 / 16))


def test_an_image_that_idefics_sees_whole_is_stretched_to_its_tile():
    model = randomized(AnyToText(ANYS["any-image"]))
    record = Preprocessing((8, 8), "squash", "bicubic", HALF, HALF, 0, 1.0, tiling=Tiling("whole", longest=16))
    image = Image.new("RGB", (40, 30))
    medium = Medium("image", (tile := tiled(image, record)).pixels, tile=tile, shown=(image,))
    (seen,) = places(record, model, "a.png", None, medium, torch.ones(1, 1))
    assert (seen.keys.grid, seen.image.size, seen.record.resize) == ((2, 2), (40, 30), "squash")
    assert seen.maps.tolist() == [[0.25] * 4]


def test_newlines_of_a_video_have_no_place():
    whole = replace(ANYS["any"], image_newline=True, image=replace(ANYS["any"].image, image=(16, 16)))
    model = randomized(AnyToText(whole))
    pixels = torch.zeros(2, 3, 16, 16)
    side = patch_grid(model, pixels)[0]
    rows = 2 * (-(-side // 2)) ** 2 + 1
    medium = Medium("video", pixels, shown=(RED, RED), times=(0.0, 2.5))
    record = Preprocessing((16, 16), "squash", "bicubic", HALF, HALF, 0, 1.0)
    seen = places(record, model, "a.mp4", None, medium, torch.full((1, rows), 1 / rows))
    assert [one.name for one in seen] == ["a.mp4 @ 0 s", "a.mp4 @ 2.5 s"]
    assert sum(float(one.share) for one in seen) == pytest.approx(1 - 1 / rows)


@pytest.mark.ci
def test_the_command(capsys, tmp_path):
    save_folder(checkpoint("any"), tmp_path / "any")
    RED.save(tmp_path / "a.png")
    arguments = ("inspect", tmp_path / "any", tmp_path / "a.png", "--what", "answer", "--question", "what?", "-q")
    code, out, err = run(capsys, *arguments, "--answer", "x", "--format", "json", "--plot", tmp_path / "where.png")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert record["tokens"][0] == "x"
    assert [one["input"] for one in record["seen"]] == [str(tmp_path / "a.png"), "text"]
    assert np.asarray(record["seen"][0]["maps"]).shape == (2, 2, 3)
    with Image.open(tmp_path / "where.png") as figure:
        assert min(figure.size) > 200
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert f"{tmp_path / 'a.png'}: most at row " in out
    code, _, err = run(capsys, "inspect", tmp_path / "any", "--what", "answer")
    assert code == 2
    assert "needs --question" in err
    code, _, err = run(capsys, "inspect", "clip-vit-16", tmp_path / "a.png", "--what", "answer", "--question", "what?")
    assert code == 1
    assert "expected an any-to-text model, got clip" in one_line(err)


def test_a_model_that_attends_to_its_inputs_alone_needs_one():
    with pytest.raises(UsageError, match="expected an INPUT"):
        answer_map(checkpoint("any-crossing"), AnswerRequest([], "what?", "x"), ViewOptions())
