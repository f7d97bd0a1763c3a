"""A failure that nobody foresaw, in one item of a batch: it is that item's, and all others are done."""

import json

import numpy as np
import pytest
import torch

from multimodal.errors import AudioError, CheckpointError, ImageError
from multimodal.tasks.encode.attempts import in_parts, item_error
from multimodal.tasks.transcribe import sessions
from multimodal.tasks.transcribe.transcribe import transcribe_many
from multimodal.tokens.image import arrays
from multimodal.weights.load import load
from tests.helpers.commands import run
from tests.helpers.data.sets import wav
from tests.helpers.folders import every_kind, write_image
from tests.helpers.spread import thin

FAILURES = [MemoryError(), RuntimeError("can't allocate memory: you tried to allocate 12 bytes"), ZeroDivisionError()]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    return every_kind(tmp_path_factory.mktemp("kinds"))


def test_in_parts_asks_for_all_then_for_halves():
    asked = []

    def work(part: slice) -> list[int]:
        asked.append((part.start, part.stop))
        if part.stop - part.start > 2:
            raise RuntimeError("CUDA out of memory")
        if part.start <= 5 < part.stop:
            raise MemoryError
        return list(range(part.start, part.stop))

    made = in_parts(work, 7)
    assert [one if isinstance(one, int) else type(one) for one in made] == [0, 1, 2, 3, 4, MemoryError, 6]
    assert asked[0] == (0, 7)
    assert in_parts(work, 0) == []


def test_a_fault_of_the_model_is_no_items():
    def work(part: slice) -> list:
        raise CheckpointError("not finite")

    with pytest.raises(CheckpointError):
        in_parts(work, 8)


@pytest.mark.parametrize(
    ("error", "text"), [
        (MemoryError(), "a.wav: not enough memory"), (OSError(5, "Input/output error"), "a.wav: Input/output error"),
        (np.exceptions.AxisError("axis 3"), "a.wav: AxisError: axis 3"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes. Error code 12"),
         "a.wav: not enough memory (99 bytes asked for at once)"),
    ],
)  # fmt: skip
def test_what_an_items_error_says(error, text):
    made = item_error(error, "a.wav", AudioError)
    assert (str(made), made.__cause__) == (text, error)
    assert item_error(made, "b", ImageError) is made


@pytest.fixture
def clips(tmp_path):
    for name in ("good", "bad", "good2"):
        (tmp_path / f"{name}.wav").write_bytes(wav(0.5))
    return [tmp_path / f"{name}.wav" for name in ("good", "bad", "good2")]


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("failure", FAILURES, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("batch", [1, 8])
def test_one_recording_that_cannot_be_opened_leaves_the_others(failure, batch, clips, models, monkeypatch, capsys):
    """`transcribe good.flac srmax.wav good2.flac -o outs` of the issue, whatever the second one raises."""
    survey = sessions.survey

    def failing(recording, *rest, **more):
        if "bad" in recording.name:
            raise failure
        return survey(recording, *rest, **more)

    monkeypatch.setattr(sessions, "survey", failing)
    out = clips[0].parent / "outs"
    code, _, err = run(
        capsys, "transcribe", *clips, "-m", models / "asr", "-o", out, "-f", "txt", "--batch_size", batch
    )
    assert (code, sorted(path.name for path in out.iterdir())) == (1, ["good.txt", "good2.txt"])
    assert [line.startswith(f"multimodal: error: {clips[1]}: ") for line in err.splitlines()] == [True]


@pytest.mark.parametrize("alone", [False, True])
def test_a_batch_of_windows_that_is_too_large_is_made_one_by_one(alone, clips, models, monkeypatch):
    """`alone`: one of the windows is too large by itself."""
    serve, sources = sessions.decode_windows, list(0.1 * torch.randn(3, 8000))
    wanted = [one for _, one in transcribe_many(sources, models / "asr", vad_filter=False)]

    singly = []

    def small(requests, **more):
        singly.extend(requests if len(requests) == 1 else [])
        if len(requests) > 1 or (alone and len(singly) == 2):
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return serve(requests, **more)

    monkeypatch.setattr(sessions, "decode_windows", small)
    made = [one for _, one in transcribe_many(sources, models / "asr", vad_filter=False)]
    assert [made[0]["text"], made[2]["text"]] == [wanted[0]["text"], wanted[2]["text"]]
    assert (str(made[1]) == "<samples>: not enough memory (20.00 GiB asked for at once)") == alone


def test_what_is_done_is_on_disk_before_the_next_is_read(models, tmp_path, monkeypatch, capsys):
    """With batches of 1: the second recording finds the first one's transcript."""
    files = [tmp_path / f"{name}.wav" for name in "abc"]
    for file in files:
        file.write_bytes(wav(0.5))
    survey, seen = sessions.survey, []

    def watching(recording, *rest, **more):
        seen.append(sorted(path.stem for path in tmp_path.glob("*.txt")))
        return survey(recording, *rest, **more)

    monkeypatch.setattr(sessions, "survey", watching)
    words = ["-o", tmp_path, "-f", "txt", "--batch_size", 1]
    assert run(capsys, "transcribe", *files, "-m", models / "asr", *words)[0] == 0
    assert seen == [[], ["a"], ["a", "b"]]


def test_an_error_of_the_callers_own_function_is_raised(models):
    def failing(*_):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        list(transcribe_many([0.1 * torch.randn(8000)], models / "asr", on_progress=failing, vad_filter=False))


@pytest.fixture
def images(tmp_path, monkeypatch):
    """Three images, of which reading the second one runs out of memory."""
    files = [tmp_path / f"{name}.png" for name in ("a", "bad", "c")]
    for file in files:
        write_image(file)
    read = arrays.read_image

    def failing(image):
        if "bad" in str(image):
            raise MemoryError
        return read(image)

    monkeypatch.setattr(arrays, "read_image", failing)
    return files


IMAGE_COMMANDS = {
    "classify": ["-m", "{clip}", "--labels", "a,b", "-o", "out.csv"], "caption": ["-m", "{captioner}", "-o", "out.csv"],
    "index": ["-m", "{clip}", "-o", "index"],
}  # fmt: skip


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("command", IMAGE_COMMANDS)
def test_one_image_without_memory_leaves_the_others(command, images, kinds, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [word.format(clip=kinds / "clip", captioner=kinds / "captioner") for word in IMAGE_COMMANDS[command]]
    code, out, err = run(capsys, command, *images, *words)
    assert (code, err.splitlines()[0]) == (1, f"multimodal: error: {images[1]}: not enough memory")
    if command == "index":
        assert "2 images" in out
    else:
        text = (tmp_path / "out.csv").read_text()
        assert [str(image) in text for image in images] == [True, False, True]


def test_an_index_leaves_out_a_vector_that_is_not_finite(kinds, tmp_path, monkeypatch):
    from multimodal.tasks.retrieve import build

    files = [tmp_path / f"{name}.png" for name in "abc"]
    for file in files:
        write_image(file)
    vectors = build._vectors

    def odd(*given):
        made = vectors(*given).clone()
        made[1] = float("nan")
        return made

    monkeypatch.setattr(build, "_vectors", torch.inference_mode()(odd))
    built = build.build(files, load(kinds / "clip"), tmp_path / "index")
    assert (built.added, [str(files[1]) in str(error) for error in built.refused]) == (2, [True])


def test_texts_whose_batch_is_too_large_are_embedded_in_parts(kinds, capsys, tmp_path, monkeypatch):
    from multimodal.tasks.text import embedder as task

    embed = task.embed

    def small(texts, *rest):
        if len(texts) > 1 or texts == ["sea"]:
            raise RuntimeError("can't allocate memory")
        return embed(texts, *rest)

    monkeypatch.setattr(task, "embed", small)
    out = tmp_path / "v.npy"
    code, _, err = run(capsys, "embed", "the dog", "sea", "at", "-m", kinds / "encoder", "-o", out)
    assert (code, err.splitlines()) == (1, ["multimodal: error: text 2: not enough memory"])
    assert np.isnan(np.load(out)).any(1).tolist() == [False, True, False]


@pytest.mark.filterwarnings("ignore")  # cut ones, as the model is random
def test_translations_whose_batch_is_too_large_are_made_in_parts(kinds, capsys, tmp_path, monkeypatch):
    from multimodal.tasks.text.translate import TranslationWriter

    whole = TranslationWriter._batch

    def small(self, rows):
        if len(rows) > 1:
            raise RuntimeError("CUDA out of memory")
        return whole(self, rows)

    (tmp_path / "in.txt").write_text("the cat\nsat on\nthe mat\n")
    words = ["translate", "--file", tmp_path / "in.txt", "-m", kinds / "translator", "--max_new_tokens", 4,
             "--from", "en", "--to", "de", "--format", "jsonl"]  # fmt: skip
    code, wanted, _ = run(capsys, *words)
    monkeypatch.setattr(TranslationWriter, "_batch", small)
    code, made, err = run(capsys, *words)
    assert code == 0, err
    texts = [[json.loads(line)["translation"] for line in out.splitlines()] for out in (wanted, made)]
    assert texts[0] == texts[1]
