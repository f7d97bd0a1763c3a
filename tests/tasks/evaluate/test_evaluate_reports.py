"""Reports show what they speak of: images, neighbours, recordings."""

import resource
import shutil

import pytest
import torch
import torch.nn.functional as F

from multimodal.data.datasets.image_sets import open_images
from multimodal.tasks.evaluate.class_scores import class_scores
from multimodal.tasks.evaluate.reports.mistakes import image_mistakes, text_mistakes
from multimodal.tasks.evaluate.reports.neighbours import RetrievalItems, neighbour_sections
from multimodal.tasks.evaluate.reports.recordings import word_times
from multimodal.tasks.evaluate.retrieval import hardest, retrieval
from multimodal.tasks.evaluate.scores import normalizer
from multimodal.tasks.report.page import write_page
from tests.helpers.commands import Page, one_line, run
from tests.helpers.data.sets import lines, squares
from tests.helpers.paths import ROOT

EVIL = "<img src=x onerror=alert(1)>"
SAMPLE = ROOT / "assets" / "sample"


def test_mistakes_come_with_their_scores_the_most_certain_first():
    scores = torch.tensor([[3.0, 1, 0], [0, 9, 0], [0, 0, 2], [5, 5, 0], [torch.nan, 0, 0]])
    made = class_scores(["a", "b", "c"], torch.tensor([1, 0, 2, 0, 0]), scores)
    found = made.mistakes(9)
    assert [(one.item, one.label, one.found) for one in found[:3]] == [(1, "a", "b"), (0, "b", "a"), (3, "a", "b")]
    shares = scores.softmax(-1)
    assert found[1].label_score == pytest.approx(shares[0, 1].item())
    assert found[1].found_score == pytest.approx(shares[0, 0].item())
    assert found[3].item == 4  # a score that is no number is a mistake, and of no certainty
    assert made.mistakes(2) == found[:2]
    assert class_scores(["a", "b"], torch.tensor([0]), torch.eye(2)[:1]).mistakes(5) == []


def test_labels_in_a_caption_are_text(tmp_path):
    images = open_images(squares(tmp_path / "val", 1))
    scores = class_scores([EVIL, "green", "red", "yellow"], torch.tensor([1, 0, 2, 3]), torch.eye(4))
    write_page(tmp_path / "r.html", "a", image_mistakes(scores, images.source, images.keys))
    page = Page.of(tmp_path / "r.html")
    assert "Most confident mistakes (2 of 2)" in page.text
    assert (page.tags.count("figure"), page.tags.count("img")) == (2, 2)
    assert page.text.count(EVIL) == 2


def test_an_image_that_has_gone_by_the_report_is_one_line(tmp_path, recwarn):
    images = open_images(squares(tmp_path / "val", 1))
    scores = class_scores(images.ids, torch.tensor([1, 0, 2, 3]), torch.eye(4))
    (tmp_path / "val" / "blue_square" / "0.png").unlink()
    write_page(tmp_path / "r.html", "a", image_mistakes(scores, images.source, images.keys))
    (warning,) = recwarn
    assert "blue_square/0.png" in str(warning.message)
    page = Page.of(tmp_path / "r.html")
    assert (page.tags.count("figure"), page.tags.count("img")) == (2, 1)
    assert "cannot be shown" in page.text


def test_texts_taken_for_another_class_are_a_table():
    scores = class_scores(["bad", "good"], torch.tensor([0, 1]), torch.tensor([[0.0, 2], [0, 2]]))
    (section,) = text_mistakes(scores, ["a dull film", "a fine film"])
    assert section.table[1][:2] == ("a dull film", "bad")
    assert len(section.table) == 2


def test_the_hardest_queries_are_those_of_the_ranks_with_their_right_item():
    random = torch.Generator().manual_seed(0)
    images, texts = (F.normalize(torch.randn(n, 6, generator=random), dim=-1) for n in (20, 60))
    owners = torch.arange(60) % 20
    ranks = retrieval(images, texts, owners.tolist())
    found = hardest(images, texts, torch.arange(20), owners, 7, 3)
    assert [one.rank for one in found] == ranks.image_to_text.sort(descending=True).values[:7].tolist()
    for one in found:
        order = (texts @ images[one.query]).argsort(descending=True).tolist()
        assert [near.item for near in one.found[:3]] == order[:3]
        assert [near.right for near in one.found] == [owners[near.item] == one.query for near in one.found]
        first = one.found[-1] if one.rank > 3 else next(near for near in one.found if near.right)
        assert (first.right, first.place) == (True, one.rank)
        assert order[first.place - 1] == first.item
    assert hardest(images, images, torch.arange(20), torch.arange(20), 7, 3) == []


def test_retrieval_shows_neighbours_both_ways_and_marks_the_right_one(tmp_path):
    images = open_images(squares(tmp_path / "val", 1))
    vectors, texts = torch.eye(4), [f"{name} {EVIL}" for name in "abcd"]
    items = RetrievalItems(images.source, images.keys, vectors, texts, vectors.roll(1, 0), range(4))
    sections = list(neighbour_sections(items))
    write_page(tmp_path / "r.html", "a", sections)
    page = Page.of(tmp_path / "r.html")
    framed = [values for tag, values in page.attributes if tag == "figure" and values.get("class") == "right"]
    assert len(framed) == 4  # the right image of each text
    assert page.tags.count("figure") == 4 + 16
    assert page.text.count("✓") == 8
    assert "script" not in page.tags
    write_page(tmp_path / "r.md", "a", sections)
    assert (tmp_path / "r.md").read_text().count("(right)") == 8


def test_a_disk_that_is_full_costs_the_report_alone(capsys, models, captions, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        code, out, err = run(capsys, "evaluate", "retrieval", captions, "-m", models / "clip",
                             "--report", tmp_path / "r.html")  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    assert one_line(err) == f"multimodal: error: {tmp_path}/r.html: File too large\n"
    assert "image to text" in out
    assert list(tmp_path.iterdir()) == []


def test_words_find_their_times_though_the_normalizer_changes_them():
    spoken = [(" Mr.", 0.1), (" Quilter", 0.5), (" um", 0.9), (" can't", 1.0), (" pay", 1.5), (" twenty", 2.0),
              (" dollars", 2.5)]  # fmt: skip
    normal = normalizer("english")
    words = normal("".join(word for word, _ in spoken)).split()
    assert words == ["mister", "quilter", "can", "not", "pay", "$20"]
    assert word_times(words, spoken, normal)[:5] == [0.1, 0.5, 1.0, 1.0, 1.5]
    assert word_times(words, [], normal) == [None] * 6


@pytest.mark.ci
def test_asr_report_plays_each_wrong_utterance_and_its_words(capsys, tmp_path, monkeypatch):
    shutil.copy(SAMPLE / "speech.flac", tmp_path / "speech.flac")
    text = (SAMPLE / "speech.txt").read_text().strip()
    rows = [{"audio_filepath": "speech.flac", "text": f"zebra {text}"}]
    manifest = lines(tmp_path / "list.jsonl", rows)
    code, _, err = run(capsys, "evaluate", "asr", manifest, "-q", "--beam_size", 1, "--report", tmp_path / "r.html")
    assert (code, err) == (0, "")
    page = Page.of(tmp_path / "r.html")
    assert page.tags.count("audio") == 1
    times = [float(values["data-t"]) for tag, values in page.attributes if tag == "button"]
    assert len(times) >= 4
    assert times == sorted(times)
    assert page.tags.count("script") == 1  # ours
    monkeypatch.setattr("multimodal.tasks.evaluate.reports.recordings.LONGEST", 1.5)
    run(capsys, "evaluate", "asr", manifest, "-q", "--beam_size", 1, "--report", tmp_path / "r.html")
    page = Page.of(tmp_path / "r.html")
    assert "the first 1.5 s of " in page.text
    fewer = [float(values["data-t"]) for tag, values in page.attributes if tag == "button"]
    assert max(fewer) < 1.5
    assert 0 < len(fewer) < len(times)
