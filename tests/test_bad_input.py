"""What a person gets for input that cannot be used: one line with file or flag, cause and value; the rest goes on."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import test_cli
from PIL import Image
from test_cli import one_line, run

from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT
from multimodal.weights.folder import build

models, pictures, tone = test_cli.models, test_cli.pictures, test_cli.tone  # fixtures
ROOT = Path(__file__).resolve().parents[1]


def command(*arguments: object, **options) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("environment", {})
    return subprocess.run(
        [sys.executable, "-m", "multimodal", *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True,
        timeout=120, **options,
    )  # fmt: skip


def test_label_files_of_other_editors_mean_the_same(capsys, models, pictures, tmp_path):
    """A byte order mark and CRLF are no part of a label; a label is a line, whatever Unicode calls a line break."""
    (tmp_path / "labels").write_bytes("\ufeffred\r\nblue\u2028ish\r\n\r\n".encode())
    code, out, _ = run(capsys, "classify", pictures / "red.png", "--labels_file", tmp_path / "labels", "-m",
                       models / "clip", "--format", "json")  # fmt: skip
    assert code == 0
    assert {s["label"] for s in json.loads(out)[0]["scores"]} == {"red", "blue\u2028ish"}


@pytest.mark.parametrize("style", ["table", "csv", "json", "jsonl"])
def test_a_closed_output_is_no_fault_and_closed_errors_do_not_go_to_the_output(models, pictures, style):
    (pictures / "broken.png").write_bytes(b"")
    common = [sys.executable, "-m", "multimodal", "classify", str(pictures), "--labels", "a,b", "-m",
              str(models / "clip"), "--format", style]  # fmt: skip
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *common], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, one_line(done.stderr).count("empty file")) == (1, 1)
    if style == "csv":
        done = subprocess.run(
            ["sh", "-c", 'exec "$@" 2>&-', "sh", *common], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stdout.count("\n"), "error" in done.stdout) == (1, 5, False)


def test_a_label_longer_than_the_model_takes_is_cut_and_said(capsys, models, pictures):
    with warnings.catch_warnings(action="default"):
        code, out, err = run(capsys, "classify", pictures / "red.png", "--labels", "word " * 300, "b", "-m",
                           models / "clip", "--templates", "none", "--format", "json")  # fmt: skip
    assert code == 0
    assert re.fullmatch(r"multimodal: warning: label 'word.+: its prompt is cut to 40 tokens, \d+ lost\n", err)
    assert sum(s["score"] for s in json.loads(out)[0]["scores"]) == pytest.approx(1, abs=1e-5)


def test_ten_thousand_labels_are_checked_at_once():
    from time import process_time

    from multimodal.tasks.classify.classifier import checked_labels

    start = process_time()
    assert len(checked_labels([f"thing {i}" for i in range(10_000)])) == 10_000
    assert process_time() - start < 0.5  # comparing each with each takes seconds


def test_outputs_survive_names_and_encodings_that_do_not_fit(models, tmp_path):
    strange = os.fsdecode(b"caf\xe9-\xf0\x9f\x98\x80.png")
    Image.new("RGB", (40, 40), "red").save(tmp_path / strange)
    arguments = ["classify", tmp_path, "--labels", "é,b", "-m", models / "clip", "--format", "json"]
    for encoding in ("ascii", "utf-8"):
        done = command(*arguments, environment={"PYTHONIOENCODING": encoding})
        assert (done.returncode, done.stderr) == (0, b"")
        result = json.loads(done.stdout.decode(encoding))
        assert result[0]["file"] == str(tmp_path / strange)
        assert {s["label"] for s in result[0]["scores"]} == {"é", "b"}


def test_a_closed_or_full_output_is_no_traceback(models, pictures):
    arguments = ["classify", str(pictures), "--labels", "a,b", "-m", str(models / "clip")]
    shell = f"{sys.executable} -m multimodal " + " ".join(arguments)
    closed = subprocess.run(["sh", "-c", f"{shell} >&-"], cwd=ROOT, capture_output=True, timeout=300)
    assert b"Traceback" not in closed.stderr
    if Path("/dev/full").exists():
        full = subprocess.run(["sh", "-c", f"{shell} > /dev/full"], cwd=ROOT, capture_output=True, timeout=300)
        assert full.returncode == 1
        assert full.stderr.count(b"\n") == 1
        assert b"No space left" in full.stderr


def test_own_checkpoints_need_no_heavy_package(models, pictures, tone, tmp_path):
    """Each of these costs seconds at every start."""
    script = (
        "import sys; from multimodal.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = ('torchvision', 'torchaudio', 'timm', 'open_clip', 'transformers', 'torch._dynamo', 'sympy')\n"
        "allowed = ('torchaudio',) if sys.argv[1] == 'transcribe' else ()\n"  # 0.1 s; it aligns the words of a CTC
        "print('HEAVY', [name for name in heavy if name in sys.modules and name not in allowed])"
    )
    classify = ["classify", pictures, "--labels", "a,b", "-m", models / "clip"]
    transcribe = ["transcribe", tone, "-m", models / "asr", "-o", tmp_path]
    for arguments in (classify, transcribe):
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)], cwd=ROOT, capture_output=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert b"HEAVY []" in done.stdout


def test_no_model_is_built_with_the_compilers_help():
    """On the meta device torch imports it for some operations, which takes longer than all the rest of a start."""
    script = (
        "import sys, tiny; from multimodal.weights.folder import KINDS, build\n"
        "for kind, config in tiny.ALL.values():\n"
        "    build(KINDS[kind][0] if isinstance(kind, str) else kind, config)\n"
        "    assert not {'torch._dynamo', 'sympy'} & sys.modules.keys(), config"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize("kind", [ViT, TextTransformer])
def test_drawing_weights_on_the_meta_device_is_possible_for_every_model(kind):
    """`build` makes a model without memory; its state must have every name and shape."""
    from tiny import VIT, text

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


def test_a_pipe_among_pictures_is_not_waited_for_where_their_bytes_are_hashed(models, tmp_path):
    for name in ("red", "blue"):
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40), name).save(tmp_path / "data" / name / "a.png")
    os.mkfifo(tmp_path / "data" / "red" / "pipe.png")
    for _ in range(2):
        done = command("evaluate", "zeroshot", tmp_path / "data", "-m", models / "clip", "--features_cache",
                       tmp_path / "cache", text=True)  # fmt: skip
        assert (done.returncode, "(2 pictures, 2 classes)" in done.stdout) == (1, True)
        assert "pipe.png: not a regular file" in one_line(done.stderr)
