"""Bad input gets one line with file or flag, cause and value; the other items go on."""

import io
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from PIL import Image

from multimodal.cli.main import main
from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT
from multimodal.weights.folder import build
from tests.helpers.commands import one_line, run
from tests.helpers.paths import ROOT
from tests.helpers.processes.programs import LIMIT, forked


def test_label_files_of_other_editors_mean_the_same(capsys, models, images, tmp_path):
    """A byte order mark and CRLF are no part of a label; a label is a line, whatever Unicode calls a line break."""
    (tmp_path / "labels").write_bytes("\ufeffred\r\nblue\u2028ish\r\n\r\n".encode())
    code, out, _ = run(capsys, "classify", images / "red.png", "--labels_file", tmp_path / "labels", "-m",
                       models / "clip", "--format", "json")  # fmt: skip
    assert code == 0
    assert {s["label"] for s in json.loads(out)[0]["scores"]} == {"red", "blue\u2028ish"}


ALL_STYLES = """
import sys
from multimodal.cli.main import main
for style in ("table", "csv", "json", "jsonl"):
    try:
        main([*sys.argv[1:], "--format", style])
    except SystemExit as end:
        assert end.code == 1
"""


@pytest.mark.ci
def test_closed_stdout_is_no_fault_and_closed_stderr_does_not_go_to_stdout(models, images):
    (images / "broken.png").write_bytes(b"")
    classify = ["classify", str(images), "--labels", "a,b", "-m", str(models / "clip")]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", ALL_STYLES, *classify]
    done = subprocess.run(closed, cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (0, 4)
    assert all(line.startswith("multimodal: error: ") and "empty file" in line for line in lines)
    closed = "import os, sys\nos.close(2)\nsys.stderr = None\nfrom multimodal.cli.main import main\nmain()"
    with forked(closed, *classify, "--format", "csv") as program:
        out = program.communicate(timeout=LIMIT)[0]
    assert (program.returncode, out.count("\n"), "error" in out) == (1, 5, False)


def test_a_label_longer_than_the_model_takes_is_cut_and_said(capsys, models, images):
    with warnings.catch_warnings(action="default"):
        code, out, err = run(capsys, "classify", images / "red.png", "--labels", "word " * 300, "b", "-m",
                           models / "clip", "--templates", "none", "--format", "json")  # fmt: skip
    assert code == 0
    assert re.fullmatch(r"multimodal: warning: label 'word.+: its prompt is cut to 40 tokens, \d+ lost\n", err)
    assert sum(s["score"] for s in json.loads(out)[0]["scores"]) == pytest.approx(1, abs=1e-5)


def test_ten_thousand_labels_are_checked_at_once():
    from time import process_time

    from multimodal.tasks.encode.prompts import checked_labels

    start = process_time()
    assert len(checked_labels([f"thing {i}" for i in range(10_000)])) == 10_000
    assert process_time() - start < 0.5  # comparing each with each takes seconds


def test_outputs_survive_names_and_encodings_that_do_not_fit(models, tmp_path, monkeypatch, capsys):
    strange = os.fsdecode(b"caf\xe9-\xf0\x9f\x98\x80.png")
    Image.new("RGB", (40, 40), "red").save(tmp_path / strange)
    arguments = ["classify", str(tmp_path), "--labels", "é,b", "-m", str(models / "clip"), "--format", "json"]
    for encoding in ("ascii", "utf-8"):
        out = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert (end.value.code or 0, capsys.readouterr().err) == (0, "")
        result = json.loads(out.buffer.getvalue().decode(encoding))
        assert result[0]["file"] == str(tmp_path / strange)
        assert {s["label"] for s in result[0]["scores"]} == {"é", "b"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_stdout_is_one_line(models, images):
    program = "from multimodal.cli.main import main\nmain()"
    classify = ["classify", images, "--labels", "a,b", "-m", models / "clip"]
    with open("/dev/full", "wb") as full, forked(program, *classify, stdout=full) as going:
        err = going.communicate(timeout=LIMIT)[1]
    assert (going.returncode, err.count("\n")) == (1, 1)
    assert "No space left" in err


HEAVY = """
import sys
from contextlib import suppress
import multimodal.tokens.text.vocabulary
backends = {"tokenizers", "tiktoken", "sentencepiece", "ftfy", "regex", "open_clip", "transformers"}
assert not backends & sys.modules.keys(), backends & sys.modules.keys()
from multimodal.cli.main import main
from multimodal.errors import CheckpointError
from multimodal.weights.folder import KINDS, build
from multimodal.weights.load import families
from multimodal.weights.table import export_tensors
from tests.helpers import tiny
for kind, config in tiny.ALL.values():
    kind = KINDS[kind][0] if isinstance(kind, str) else kind
    own = build(kind, config).state_dict()
    assert not {"torch._dynamo", "sympy"} & sys.modules.keys(), config
    for family in families().values():
        if family.model is kind:
            with suppress(CheckpointError, AttributeError, RuntimeError):  # the family has no such model
                export_tensors(family.rows(config), own)
            assert "torch._dynamo" not in sys.modules, family.name
heavy = {"torchvision", "torchaudio", "timm", "open_clip", "transformers", "torch._dynamo", "sympy"}
rest = sys.argv[1:]
while rest:
    words, rest = rest[: rest.index(";")], rest[rest.index(";") + 1 :]
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, end.code
    assert not heavy & sys.modules.keys(), (words, heavy & sys.modules.keys())
    heavy.discard("torchaudio")  # 0.1 s; it aligns the words of a CTC
"""


@pytest.mark.ci
def test_own_checkpoints_need_no_heavy_package(models, images, tone, tmp_path):
    """Each of these costs seconds at every start; so does the compiler, which torch imports for some operations on the
    meta device, where models are built and foreign tensors' shapes are found."""
    classify = ["classify", images, "--labels", "a,b", "-m", models / "clip", ";"]
    transcribe = ["transcribe", tone, "-m", models / "asr", "-o", tmp_path, ";"]
    command = [sys.executable, "-c", HEAVY, *map(str, [*classify, *transcribe])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", [ViT, TextTransformer])
def test_drawing_weights_on_the_meta_device_is_possible_for_every_model(kind):
    """`build` makes a model without memory; its state must have every name and shape."""
    from tests.helpers.tiny import VIT, text

    config = VIT if kind is ViT else text(tied=True)
    assert {n: t.shape for n, t in build(kind, config).state_dict().items()} == {
        n: t.shape for n, t in kind(config).state_dict().items()
    }


@pytest.mark.parametrize("style", ["txt", "vtt", "srt", "tsv"])
def test_transcript_files_equal_openai_whispers(tmp_path, style):
    from whisper.utils import get_writer

    from multimodal.tasks.transcribe.writers import write_transcript

    texts = [" Hello, world.", "", " A --> B\tand tab ", " ünï 😀", " last"]
    times = [(0.0, 0.0005), (1.2345, 59.9996), (59.9996, 60.0), (3599.9994, 3600.0), (3661.0015, 86399.99951)]
    segments = [
        {"id": i, "start": s, "end": e, "text": t} for i, ((s, e), t) in enumerate(zip(times, texts, strict=True))
    ]
    result = {"text": "".join(texts), "segments": segments, "language": "en"}
    write_transcript(result, Path("talk.wav"), tmp_path / "ours", style)
    (tmp_path / "theirs").mkdir()
    get_writer(style, str(tmp_path / "theirs"))(result, "talk.wav")
    name = f"talk.{style}"
    assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_a_pipe_among_images_is_not_waited_for_where_their_bytes_are_hashed(capsys, models, tmp_path):
    for name in ("red", "blue"):
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40), name).save(tmp_path / "data" / name / "a.png")
    os.mkfifo(tmp_path / "data" / "red" / "pipe.png")
    for _ in range(2):
        code, out, err = run(capsys, "evaluate", "zeroshot", tmp_path / "data", "-m", models / "clip",
                             "--features_cache", tmp_path / "cache")  # fmt: skip
        assert (code, "(2 images, 2 classes)" in out) == (1, True)
        assert "pipe.png: not a regular file" in one_line(err)
