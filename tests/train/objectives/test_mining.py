"""`mine_pairs.py`: margins, language pairs and what it writes."""

import pytest
import torch
from torch.nn.functional import normalize

from multimodal.train.objectives.text.translation import read_parallel

TEXTS = {
    "en": ["A dog runs on the beach.", "Two men play football.", "A woman reads a book."],
    "de": ["Zwei Männer spielen Fußball.", "", "Ein Hund rennt am Strand.", "Eine Katze schläft."],
    "fr": ["Une femme lit un livre.", "Deux hommes jouent au football."],
}


def unit(rows: int, seed: int) -> torch.Tensor:
    return normalize(torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)), dim=-1)


@pytest.fixture
def recipe(load_recipe):
    return load_recipe("mine_pairs")


def test_margins_are_the_ratio_to_both_neighbourhoods(recipe):
    a, b = (unit(rows, seed) for rows, seed in ((9, 1), (7, 2)))
    b[3] = normalize(a[5] + 0.1 * b[3], dim=-1)
    cosines = a @ b.T
    top = lambda row: row.sort(descending=True).values[:3].mean()
    margin = lambda i, j: 2 * cosines[i, j] / (top(cosines[i]) + top(cosines[:, j]))
    found = recipe.mined(a, b, neighbours=3, threshold=-9.0)
    assert (found[0].first, found[0].second) == (5, 3)
    for one in found:
        assert one.margin == pytest.approx(float(margin(one.first, one.second)), abs=1e-5)
    for side in ("first", "second"):
        used = [getattr(one, side) for one in found]
        assert len(set(used)) == len(used)
    best = max(float(margin(i, j)) for i in range(9) for j in range(7))
    assert found[0].margin == pytest.approx(best, abs=1e-5)
    assert recipe.mined(a, b, 3, best + 0.01) == []


def test_bridges_join_groups(recipe):
    languages = ["en", "de", "fr", "es", "cs"]
    pairs = recipe.language_pairs(languages, ("en,de", "fr,es", "cs"), ())
    assert pairs == [("en", "de"), ("en", "fr"), ("en", "cs"), ("fr", "es"), ("fr", "cs")]
    assert recipe.language_pairs(languages, ("en,de", "fr,es", "cs"), ("de", "es")) == [
        ("en", "de"), ("de", "es"), ("fr", "es"),
    ]  # fmt: skip
    assert len(recipe.language_pairs(languages, (), ())) == 10


def test_pairs_are_written_for_the_translator(recipe, tmp_path, caplog):
    for name, rows in TEXTS.items():
        (tmp_path / name).write_text("\n".join(rows) + "\n")
    caplog.set_level("INFO")
    texts = [f"{name}={tmp_path / name}" for name in TEXTS]
    recipe.start(recipe.main, ["--texts", *texts, "--groups", "en,de", "fr", "--out", str(tmp_path / "mined"),
                               "--threshold", "1.0", "--neighbours", "2"])  # fmt: skip
    rows = read_parallel(str(tmp_path / "mined"), [*TEXTS])
    made = {tuple(filter(None, row)) for row in zip(*rows.values(), strict=True)}
    assert {(TEXTS["en"][0], TEXTS["de"][2]), (TEXTS["en"][1], TEXTS["de"][0]), (TEXTS["en"][2], TEXTS["fr"][0]),
            (TEXTS["en"][1], TEXTS["fr"][1])} <= made  # fmt: skip
    assert all(len(row) == 2 for row in made)
    assert "mining 2 of 3 language pairs: en-de, en-fr" in caplog.text


@pytest.mark.parametrize(("flags", "says"), [
    (["--texts", "en={}/en"], "expected two languages or more"),
    (["--texts", "en={}/en", "{}/de"], "expected LANGUAGE=FILE, each language once"),
    (["--texts", "en={}/en", "de={}/none"], "none: "),
    (["--texts", "en={}/en", "de={}/empty"], "empty: has no text"),
    (["--texts", "en={}/en", "de={}/de", "--groups", "en"], "--groups en: expected each of en, de once"),
    (["--texts", "en={}/en", "de={}/de", "--bridges", "xx"], "--bridges must be one of en, de"),
    (["--texts", "en={}/en", "de={}/de", "--hide", "0.3"], "--hide needs --aligned"),
])  # fmt: skip
def test_wrong_flags_are_said_in_one_line(recipe, tmp_path, capsys, flags, says):
    for name, rows in {**TEXTS, "empty": []}.items():
        (tmp_path / name).write_text("\n".join(rows))
    with pytest.raises(SystemExit) as end:
        recipe.start(recipe.main, [flag.format(tmp_path) for flag in flags] + ["--out", str(tmp_path / "mined")])
    assert end.value.code
    assert says in capsys.readouterr().err
    assert not (tmp_path / "mined.en").exists()


def test_vectors_are_compared_in_parts(recipe, monkeypatch):
    a, b = (unit(rows, seed) for rows, seed in ((9, 1), (7, 2)))
    whole = recipe.nearest(a, b, 3)
    monkeypatch.setattr(recipe, "ROWS", 4)
    parts = recipe.nearest(a, b, 3)
    assert torch.equal(whole[1], parts[1])
    torch.testing.assert_close(whole[0], parts[0])
