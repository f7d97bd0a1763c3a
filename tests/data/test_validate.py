"""Faults that `multimodal validate` finds in damaged data, and that it finds nothing else."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from multimodal.data import validate as module
from multimodal.data.datasets.speech import SpeechCorpus
from multimodal.data.datasets.speech_windows import read_clips
from multimodal.data.sources import ListColumns, open_source
from multimodal.data.validate import fault, validate
from multimodal.tokens.image.reading import read_image
from tests.helpers.commands import run
from tests.helpers.data import sets
from tests.helpers.spread import thin


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", ["folder", "shard", "table"])
def test_broken_images_are_found_wherever_they_lie(layout, workers, tmp_path):
    values, broken = range(100), (0, 31, 32, 99)
    path = getattr(sets, layout)(tmp_path / {"folder": "x", "shard": "x.tar", "table": "x.csv"}[layout], values, broken)
    (tmp_path / "classes.jsonl").write_text(
        "\n".join(json.dumps({"id": f"class{i}", "names": ["x"]}) for i in range(3))
    )
    seen = []
    report = validate(open_source(path), workers=workers, labels=["class0", "class1", "class2"] * (layout != "table"),
                      progress=lambda *counts: seen.append(counts))  # fmt: skip
    assert (report.items, report.broken) == (100, 4)
    if layout == "table":
        assert [fault.name for fault in report.faults] == [f"{path} line {value + 2}" for value in broken]
        files = [Path(fault.detail.partition(": ")[0]).stem for fault in report.faults]
        assert files == ["000", "031", "032", "099"]
    else:
        assert sorted(fault.name[-7:-4] for fault in report.faults) == ["000", "031", "032", "099"]
    assert sum(report.causes.values()) == 4
    assert seen[-1] == (100, 100, 4)


def rows(place) -> list[tuple[dict | str, str]]:
    """A line, and the fault that is to be found in it."""
    whole, early = sets.wav(1.0), sets.wav(0.3, promised=2.0)
    for name, data in (("whole.wav", whole), ("early.wav", early), ("empty.wav", b""), ("text.wav", b"hello" * 50),
                       ("whole.flac", whole), ("a.png", sets.png(1)), ("x.dat", whole)):  # fmt: skip
        (place / name).write_bytes(data)
    good = {"audio_filepath": "whole.wav", "duration": 1.0, "text": "one"}
    return [
        (good, ""),
        (good | {"duration": 1.09}, ""),
        (good | {"duration": None}, ""),
        (good | {"duration": 1.2}, "duration differs from the audio"),
        (good | {"duration": "soon"}, "duration differs from the audio"),
        (good | {"audio_filepath": "early.wav", "duration": 2.0}, "the recording ends early"),
        (good | {"audio_filepath": "empty.wav"}, "empty file"),
        (good | {"audio_filepath": "text.wav"}, "not a readable recording"),
        (good | {"audio_filepath": "none.wav"}, "no such file"),
        (good | {"audio_filepath": "a.png", "duration": None}, ""),
        (good | {"audio_filepath": "x.dat"}, "not an image or audio file by its name"),
        (good | {"text": "  "}, "text is empty"),
        ('{"audio_filepath": "whole.wav", "text": "\\ud800"}', "text is not UTF-8"),
        ({"audio_filepath": "whole.wav"}, "no text"),
        ("{", "not JSON"),
    ]


def test_each_fault_of_a_manifest_has_its_cause(tmp_path):
    pairs = rows(tmp_path)
    source = open_source(sets.lines(tmp_path / "train.jsonl", [row for row, _ in pairs]))
    report = validate(source)
    found = iter(report.faults)
    for key, (_, cause) in enumerate(pairs):
        if cause:
            fault = next(found)
            assert (fault.name, fault.cause) == (source.name(key), cause)
            assert fault.name not in fault.detail
    assert next(found, None) is None
    assert report.sound == pytest.approx(8 + 0.0, abs=2)
    assert validate(source, kind="audio").broken == report.broken  # the image is now one, the unknown name is not


def test_damage_anywhere_is_one_cause():
    text = "a.mp3: damaged, 0.50 s replaced by silence, first at 5.43 s (got 8.00 s of 8.00 s)"
    assert fault("a.mp3", text).cause == "damaged, N s replaced by silence, first at N s"


def test_unknown_and_missing_labels(tmp_path):
    members = [("a.png", sets.png(1)), ("a.cls", b"dog"), ("b.png", sets.png(2)), ("b.cls", b"cow"),
               ("c.png", sets.png(3)), ("c.cls", b""), ("d.png", sets.png(4))]  # fmt: skip
    report = validate(open_source(sets.tar(tmp_path / "a.tar", members)), labels={"dog", "cat"})
    assert [fault.detail for fault in report.faults] == [
        "label is unknown ('cow')", *["no label (others of its source have one)"] * 2,
    ]  # fmt: skip


@pytest.mark.ci
def test_a_decoder_that_crashes_is_a_fault_of_the_item(tmp_path, monkeypatch):
    def crash(media):
        if read_image(media).getpixel((0, 0))[0] in (50, 51):
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(module, "read_image", crash)
    report = validate(open_source(sets.folder(tmp_path, range(150))), workers=2)
    assert (report.items, report.broken) == (150, 2)
    assert {fault.name[-7:-4] for fault in report.faults} == {"050", "051"}
    assert list(report.causes) == ["the decoder crashed"]


@pytest.mark.ci
def test_the_command(tmp_path, capsys, monkeypatch):
    whole, broken = sets.folder(tmp_path / "a", range(6)), sets.shard(tmp_path / "b.tar", range(6), [2])
    code, out, err = run(capsys, "validate", whole, "--workers", "1")
    assert (code, err) == (0, "")
    assert out.startswith(f"{whole}: 0 of 6 items are broken, checked in ")
    code, out, err = run(capsys, "validate", whole, broken, "--workers", "1")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert len(lines) == 4
    assert lines[1].startswith(f"{broken}!002.png: not a readable image (")
    assert lines[2].split() == ["1", "not", "a", "readable", "image"]
    assert "1 of 6 items are broken" in lines[3]
    code, out, _ = run(capsys, "validate", broken, "--format", "json", "--workers", "1")
    (report,) = json.loads(out)
    assert (code, report["items"], report["broken"], report["causes"]) == (1, 6, 1, {"not a readable image": 1})
    assert report["faults"][0]["name"].endswith("b.tar!002.png")
    (tmp_path / "classes.jsonl").write_text('{"id": "class0", "names": ["x"]}')
    code, out, _ = run(capsys, "validate", broken, "--workers", "1")
    assert "       4 label is unknown" in out
    code, _, err = run(capsys, "validate", tmp_path / "none.csv")
    assert code == 1
    assert "none.csv: no such file" in err
    assert err.count("\n") == 1
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    _, out, err = run(capsys, "validate", whole, "--workers", "1")
    assert "1 of 6, 0 broken" in err
    assert err.endswith("\r\x1b[K")


def test_columns_by_name(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(sets.png(3))
    (tmp_path / "a.csv").write_text("img,said,kind\na.png,hello,x\n")
    arguments = ("validate", tmp_path / "a.csv", "--workers", "1", "--text_column", "said", "--label_column", "kind")
    assert run(capsys, *arguments, "--path_column", "img")[0] == 0
    assert "no audio_filepath" in run(capsys, *arguments)[2]
    (tmp_path / "dog").mkdir()
    code, _, err = run(capsys, "validate", tmp_path, *arguments[2:])
    assert (code, "--text_column: is for lists and tars" in err) == (2, True)


COLUMNS = ("text", "transcription", "transcript", "sentence", "caption", "title", "raw_text", "utterance")


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("column", COLUMNS)
def test_the_recipes_read_the_columns_that_validate_reads(column, tmp_path, capsys):
    for number in range(3):
        (tmp_path / f"{number}.wav").write_bytes(sets.wav(0.5))
    lines = [f"file_name,{column},duration", *(f"{i}.wav,word {i},0.5" for i in range(3))]
    path = tmp_path / "metadata.csv"
    path.write_text("\n".join(lines) + "\n")
    options = ListColumns(text_column=column) if column == "utterance" else ListColumns()
    flag = ("--text_column", column) if column == "utterance" else ()
    code, out, _ = run(capsys, "validate", path, "--workers", "1", *flag)
    assert (code, "0 of 3 items are broken" in out, "--text_column" in out) == (0, True, False)
    for cache in (None, tmp_path / "cache"):
        corpus = SpeechCorpus([str(path)], cache, columns=options)
        assert (corpus.texts, len(corpus.lengths)) == (["word 0", "word 1", "word 2"], 3)
    assert [clip.text for clip in read_clips(path, "en", columns=options)] == ["word 0", "word 1", "word 2"]
    assert len(read_clips(path, "en", columns=options)[0].wave()) == 8000


def test_a_list_whose_texts_are_not_found_names_the_flag(tmp_path, capsys):
    (tmp_path / "a.wav").write_bytes(sets.wav(0.5))
    (tmp_path / "a.csv").write_text("file_name,utterance\na.wav,word\n")
    code, out, _ = run(capsys, "validate", tmp_path / "a.csv", "--workers", "1")
    line = "no text and no label among the columns file_name, utterance; name one with --text_column or --label_column"
    assert (code, out.splitlines()[-1]) == (0, f"{tmp_path / 'a.csv'}: {line}")


@pytest.mark.slow
def test_the_shared_sets_are_whole(shared_data):
    for data in ("vision/cifar10-test", "vision/tiny-imagenet/val-0000.tar", "vision/flickr8k-1000/test.jsonl",
                 "speech/an4/test.jsonl"):  # fmt: skip
        assert validate(open_source(shared_data / data), workers=2).broken == 0
