"""Outputs: never over an input, over a foreign file with --overwrite alone, whole or not at all."""

import os
import stat
import sys
from pathlib import Path

import pytest

from multimodal.errors import UsageError
from multimodal.system import files
from multimodal.system.outputs import Outputs, is_ours, opened_output, write_output
from multimodal.tasks.transcribe import transcribe as task
from multimodal.train.recipe_cli import start
from multimodal.weights.folder import check_place, load_folder, save_folder
from tests.helpers.commands import one_line, run
from tests.helpers.data.sets import wav


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def calls(monkeypatch):
    """Record the arguments of `transcribe_many`; every transcript is `one`."""
    given = []

    def many(sources, *_, on_progress=None, on_segments=None, **__):
        for source in sources:
            given.append(source.name)
            segment = {"id": 0, "start": 0.0, "end": 1.0, "text": " one"}
            yield source, {"text": " one", "segments": [segment], "language": "en", "duration": 1.0, "damaged": []}

    monkeypatch.setattr(task, "transcribe_many", many)
    return given


@pytest.fixture
def say(capsys, models):
    return lambda *words: run(capsys, "transcribe", "-m", models / "asr", *words)


LINKS = {"itself": None, "hard link": os.link, "symbolic link": os.symlink}


@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--skip_existing"]])
@pytest.mark.parametrize("kind", LINKS)
def test_a_recording_is_never_its_own_transcript(say, here, calls, kind, more):
    """`multimodal transcribe t.txt -o . -f txt` of the issue, its links, and a good file beside it."""
    (here / "t.txt").write_bytes(wav(0.5))
    (here / "good.wav").write_bytes(wav(0.5))
    name = "t.txt"
    if LINKS[kind]:
        LINKS[kind](here / "t.txt", here / "t.flac")
        name = "t.flac"
    code, _, err = say(name, "good.wav", "-o", ".", "-f", "txt", *more)
    assert (code, "t.txt: is an input" in one_line(err)) == (1, True)
    assert (here / "t.txt").read_bytes() == wav(0.5)
    assert calls == ["good.wav"]
    assert (here / "good.txt").read_text() == "one\n"


def test_an_input_under_another_spelling_of_its_folder(say, here, calls):
    (here / "t.txt").write_bytes(wav(0.5))
    (here.parent / "link").symlink_to(here)
    code, _, err = say(here / ".." / "here" / "t.txt", "-o", here.parent / "link", "-f", "txt")
    assert (code, "is an input" in one_line(err), calls) == (1, True, [])


def test_one_files_transcript_is_not_written_over_another_input(say, here, calls):
    (here / "a.wav").write_bytes(wav(0.5))
    (here / "a.txt").write_bytes(wav(0.5))
    code, _, err = say("a.wav", "-o", ".", "-f", "txt", "--lm", "a.txt", "--overwrite")
    assert (code, "a.txt: is an input" in one_line(err)) == (1, True)
    assert (here / "a.txt").read_bytes() == wav(0.5)


def test_a_foreign_transcript_is_refused_before_the_work_and_ours_is_rewritten(say, here, calls):
    (here / "talk.wav").write_bytes(wav(0.5))
    (here / "talk.txt").write_text("my notes")
    code, _, err = say("talk.wav", "-o", ".")
    assert (code, calls) == (1, [])
    assert "talk.txt: exists and is not as multimodal wrote it; --overwrite replaces it" in one_line(err)
    assert (here / "talk.txt").read_text() == "my notes"
    assert say("talk.wav", "-o", ".", "--overwrite")[0] == 0
    assert (here / "talk.txt").read_text() == "one\n"
    assert say("talk.wav", "-o", ".")[0] == 0  # openai-whisper's users run the same command again
    (here / "talk.srt").write_text("corrected by hand")
    code, _, err = say("talk.wav", "-o", ".")
    assert (code, "talk.srt: exists and is not" in one_line(err)) == (1, True)
    assert (here / "talk.srt").read_text() == "corrected by hand"


def test_two_outputs_of_one_name(say, here, calls):
    (here / "talk.wav").write_bytes(wav(0.5))
    code, _, err = say("talk.wav", "-o", ".", "--decode_log", "talk.json")
    assert (code, "would be written over" in one_line(err)) == (1, True)


def test_a_link_at_an_output_is_refused_or_replaced_but_never_followed(tmp_path):
    (tmp_path / "elsewhere").write_text("keep")
    (tmp_path / "out.txt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="symbolic link"):
        Outputs().claim(tmp_path / "out.txt")
    write_output(Outputs(overwrite=True).claim(tmp_path / "out.txt"), b"new")
    assert ((tmp_path / "elsewhere").read_text(), (tmp_path / "out.txt").is_symlink()) == ("keep", False)


def test_a_device_is_never_replaced_by_a_file():
    with pytest.raises(UsageError, match="not a regular file"):  # root may write in /dev
        Outputs(overwrite=True).claim(Path("/dev/stdout"))


def test_what_is_ours_follows_the_file_and_ends_with_any_change(tmp_path):
    write_output(tmp_path / "a", b"one")
    assert is_ours(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert is_ours(tmp_path / "b")
    (tmp_path / "b").write_bytes(b"two")
    assert not is_ours(tmp_path / "b")
    (tmp_path / "c").write_bytes(b"one")
    assert not is_ours(tmp_path / "c")


def test_a_foreign_file_in_an_input_folder_stays(tmp_path):
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "x.png").write_bytes(b"image")
    with pytest.raises(UsageError, match="input folder"):
        Outputs([tmp_path / "data"], overwrite=True).claim(tmp_path / "data" / "deep" / "x.png")
    Outputs([tmp_path / "data"]).claim(tmp_path / "data" / "new.png")


@pytest.mark.parametrize(("stopped", "left"), [("drop", []), ("keep", [b"half"]), ("place", [b"half"])])
def test_what_is_left_of_an_output_whose_making_stops(tmp_path, stopped, left, recwarn):
    def work():
        with opened_output(tmp_path / "o.txt", stopped) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == left
    assert (tmp_path / "o.txt").exists() == (stopped == "place")
    assert [str(w.message).startswith(f"{tmp_path / 'o.txt'}: stopped") for w in recwarn] == [True] * (
        stopped == "keep"
    )


def test_permissions_are_as_the_umask_says(tmp_path, monkeypatch):
    masks, umask, before = [], os.umask, os.umask(0o027)
    monkeypatch.setattr(os, "umask", lambda mask: masks.append(mask) or umask(mask))
    try:
        write_output(tmp_path / "linux", b"")
        assert not masks  # else other threads' files would have it
        monkeypatch.setattr(Path, "read_bytes", lambda path: b"Name:\tpython\n")
        write_output(tmp_path / "else", b"")
    finally:
        umask(before)
    assert masks == [0o077, 0o027]
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("linux", "else")] == [0o640, 0o640]


TEXT_COMMANDS = {
    "translate": ["translate", "-m", "none", "--from", "en", "--to", "de"], "embed": ["embed", "-m", "none"],
}  # fmt: skip


@pytest.mark.parametrize("name", TEXT_COMMANDS)
def test_the_file_of_texts_is_never_the_output(name, capsys, here):
    own, other = (here / f"{stem}.{'csv' if name == 'embed' else 'txt'}" for stem in ("in", "out"))
    own.write_text("the cat\n")
    words = [*TEXT_COMMANDS[name], "--file", own.name]  # no model is loaded before the check
    for more in ([], ["--overwrite"]):
        code, _, err = run(capsys, *words, "-o", own.name, *more)
        assert (code, f"{own.name}: is an input" in one_line(err)) == (1, True)
    other.write_text("mine")
    code, _, err = run(capsys, *words, "-o", other.name)
    assert (code, "--overwrite replaces it" in one_line(err)) == (1, True)
    assert (own.read_text(), other.read_text()) == ("the cat\n", "mine")


def test_stdin_from_a_file_is_an_input_too(capsys, here, monkeypatch):
    (here / "in.txt").write_text("the cat\n")
    kept = os.dup(0)
    file = os.open(here / "in.txt", os.O_RDONLY)
    try:
        os.dup2(file, 0)
        code, _, err = run(capsys, "translate", "-m", "none", "-", "-o", "in.txt", "--overwrite")
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(file)
    assert (code, "is an input" in one_line(err)) == (1, True)


FIGURES = [
    ["classify", "red.png", "--labels", "a,b", "--calibrate", ".", "--reliability", "f.png"],
    ["evaluate", "zeroshot", ".", "--confusion", "f.png"], ["evaluate", "zeroshot", ".", "--report", "f.html"],
    ["evaluate", "retrieval", ".", "--report", "f.md"], ["evaluate", "asr", "list.jsonl", "--report", "f.md"],
    ["evaluate", "captions", "list.jsonl", "--report", "f.md", "-m", "none"],
    ["inspect", "none", "x", "--plot", "f.png"],
]  # fmt: skip


@pytest.mark.parametrize("words", FIGURES, ids=lambda words: " ".join(words[:2] + words[-4:]))
def test_foreign_figures_and_reports_are_refused_before_the_work(words, capsys, here):
    (here / "red.png").write_bytes(b"")
    (here / "list.jsonl").write_text("")
    name = next(word for word in words if word.startswith("f."))
    (here / name).write_text("mine")
    code, _, err = run(capsys, *words)
    assert (code, f"{name}: exists and is not as multimodal wrote it" in one_line(err)) == (1, True)
    assert (here / name).read_text() == "mine"


def test_results_are_never_appended_to_an_input(capsys, here, images):
    (here / "labels.csv").write_text("file,label,score\n")  # as our results begin
    code, _, err = run(capsys, "classify", images, "--labels_file", "labels.csv", "-o", "labels.csv", "-m", "none")
    assert code == 1
    assert "labels.csv: is an input" in err.splitlines()[-1]
    assert (here / "labels.csv").read_text() == "file,label,score\n"


def test_captions_beside_images_spare_an_image_with_that_name(capsys, here):
    from multimodal.cli.vision.caption import places_of

    for name in ("t.txt", "a.png"):
        (here / name).write_bytes(b"image")
    places, code = places_of(["t.txt", "a.png"], [], None, ".txt", Outputs(["t.txt", "a.png"], overwrite=True))
    assert (code, places) == (1, {"a.png": Path("a.txt")})
    assert "t.txt: is an input" in one_line(capsys.readouterr().err)


def test_a_folder_with_other_files_is_never_replaced_by_a_checkpoint(models, tmp_path):
    checkpoint = load_folder(models / "asr")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    for place in (tmp_path / "home", tmp_path / "home" / "thesis.tex"):
        with pytest.raises(UsageError, match="name another"):
            save_folder(checkpoint, place)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years"
    save_folder(checkpoint, tmp_path / "model")
    save_folder(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "notes").write_text("mine")
    with pytest.raises(UsageError, match="notes"):
        check_place(tmp_path / "model")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_folder_is_replaced_at_once_where_the_system_can(tmp_path, monkeypatch, at_once):
    """So that a kill between two renames leaves the old one or the new one."""
    if at_once and sys.platform != "linux":
        pytest.skip("no renameat2")
    monkeypatch.setattr(Path, "rename", None) if at_once else monkeypatch.setattr(files, "_exchange", lambda *_: False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    with files.replacing(tmp_path / "model") as made:
        (made / "new").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["model", "model/new"]


def test_an_index_folder_keeps_files_of_others(tmp_path):
    from multimodal.tasks.retrieve.store import MADE

    ours = "vectors-3.npy images-12.jsonl lines-1-200.npy ivf-1-9000.faiss vectors-1.npy.part search.part"
    assert all(map(MADE.fullmatch, ours.split()))
    others = "images-2024.zip lines-of-code.npy x.part mine.faiss vectors.npy"
    assert not any(map(MADE.fullmatch, others.split()))


def test_reports_of_recipes_too(tmp_path, load_recipe, capsys):
    train_ngram = load_recipe("train_ngram")
    run_recipe = lambda name: start(train_ngram.main, [str(tmp_path / name), "--texts", str(tmp_path / "texts.arpa")])
    (tmp_path / "texts.arpa").write_text("one two\n")
    (tmp_path / "mine.arpa").write_text("mine")
    for target, cause in (("texts.arpa", "is an input"), ("mine.arpa", "exists and is not")):
        with pytest.raises(SystemExit):
            run_recipe(target)
        assert cause in capsys.readouterr().err
    run_recipe("new.arpa")
    run_recipe("new.arpa")
    assert (tmp_path / "mine.arpa").read_text() == "mine"
    assert is_ours(tmp_path / "new.arpa")
