"""What a person gets for input that cannot be used: one line with file or flag, cause and value; the rest goes on."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import test_cli
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from test_cli import one_line, run

from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT
from multimodal.weights.folder import build, sha256

models, pictures, tone = test_cli.models, test_cli.pictures, test_cli.tone  # fixtures
ROOT = Path(__file__).resolve().parents[1]


def command(*arguments: object, **options) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("environment", {})
    return subprocess.run(
        [sys.executable, "-m", "multimodal", *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True,
        timeout=120, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--top", "0"], "--top"), (["--top", "x"], "--top"), (["--format", "xml"], "--format"),
        (["--batch_size", "-1"], "--batch_size"), (["--unknown"], "--unknown"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_line_and_exit_2(capsys, flags, named):
    code, out, err = run(capsys, "classify", "a.png", "--labels", "a,b", *flags)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert named in err


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("café\nb".encode("latin-1"), "not UTF-8 text (byte 3 is 0xe9)"), (b"\n \n", "there are none"),
        (b"a\nb\na\n", "'a' is there twice"), ("a\nb".encode("utf-16"), "not UTF-8"), (None, "No such file"),
    ],
)  # fmt: skip
def test_unusable_label_files_are_refused(capsys, models, pictures, tmp_path, content, cause):
    if content is not None:
        (tmp_path / "labels").write_bytes(content)
    code, out, err = run(capsys, "classify", pictures, "--labels_file", tmp_path / "labels", "-m", models / "clip")
    assert (code, out) == (1, "")
    assert cause in one_line(err)


def test_label_files_of_other_editors_mean_the_same(capsys, models, pictures, tmp_path):
    """A byte order mark and CRLF are no part of a label; a label is a line, whatever Unicode calls a line break."""
    (tmp_path / "labels").write_bytes("\ufeffred\r\nblue\u2028ish\r\n\r\n".encode())
    code, out, _ = run(capsys, "classify", pictures / "red.png", "--labels_file", tmp_path / "labels", "-m",
                       models / "clip", "--format", "json")  # fmt: skip
    assert code == 0
    assert {s["label"] for s in json.loads(out)[0]["scores"]} == {"red", "blue\u2028ish"}


@pytest.mark.parametrize("flag", ["--labels_file", "--templates"])
def test_a_pipe_or_folder_is_refused_and_not_waited_for(capsys, models, pictures, tmp_path, flag):
    os.mkfifo(tmp_path / "pipe")
    labels = ["--labels", "a,b"] if flag == "--templates" else []
    for path in (tmp_path / "pipe", tmp_path):
        code, _, err = run(capsys, "classify", pictures, *labels, flag, path, "-m", models / "clip")
        assert code == 1
        assert "not a regular file" in one_line(err)
        assert flag in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["classify", "", "--labels", "a,b"], ["classify", "a.png", "--labels", "a,b", "--heatmap", ""],
        ["classify", "a.png", "--labels", "a,b", "--templates", ""], ["classify", "a.png", "--labels_file", ""],
        ["caption", "a.png", "-m", "m", "--regions", ""], ["caption", "", "-m", "m"], ["index", "", "-o", "i"],
        ["search", "dog", "--index", ""], ["evaluate", "zeroshot", "d", "--features_cache", ""],
    ],
)  # fmt: skip
def test_an_empty_name_is_not_the_working_directory(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 40)).save("a.png")
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "an empty name" in err
    assert os.listdir() == ["a.png"]


def test_dead_links_and_pipes_in_a_folder_are_told_and_the_others_go_on(capsys, models, pictures):
    os.mkfifo(pictures / "pipe.png")
    (pictures / "dead.png").symlink_to("nowhere")
    (pictures / "loop.png").symlink_to("loop.png")
    (pictures / "folder.png").mkdir()
    code, out, err = run(capsys, "classify", pictures, "--labels", "a,b", "-m", models / "clip", "--format", "csv")
    assert (code, out.count("\n")) == (1, 1 + 2 * 2)
    assert err.count("\n") == 3
    assert all(name in err for name in ("dead.png: no such file", "loop.png", "pipe.png: not a regular file"))


@pytest.mark.parametrize("style", ["table", "csv", "json", "jsonl"])
def test_a_closed_output_is_no_fault_and_closed_errors_do_not_go_to_the_output(models, pictures, style):
    (pictures / "broken.png").write_bytes(b"")
    common = [sys.executable, "-m", "multimodal", "classify", str(pictures), "--labels", "a,b", "-m",
              str(models / "clip"), "--format", style]  # fmt: skip
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *common], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, one_line(done.stderr).count("empty file")) == (1, 1)
    if style == "csv":
        done = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *common], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout.count("\n"), "error" in done.stdout) == (1, 5, False)


@pytest.mark.parametrize(
    ("flag", "content", "cause"),
    [
        ("--labels_file", "a\nb\na", "'a' is there twice"), ("--labels_file", "\n", "there are none"),
        ("--templates", "a photo", "needs {} once"), ("--templates", "\n", "there are none"),
    ],
)  # fmt: skip
def test_faults_in_label_and_template_files_name_the_file(capsys, models, pictures, tmp_path, flag, content, cause):
    (tmp_path / "list.txt").write_text(content)
    labels = ["--labels", "a,b"] if flag == "--templates" else []
    arguments = [*labels, flag, tmp_path / "list.txt"]
    code, out, err = run(capsys, "classify", pictures, "-m", models / "clip", *arguments)
    assert (code, out) == (1, "")
    assert one_line(err).startswith(f"multimodal: error: {flag} {tmp_path / 'list.txt'}: ")
    assert cause in err


def test_pipes_links_and_missing_files_are_named_with_their_cause(capsys, models, pictures, tone, tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    os.mkfifo(tmp_path / "pipe.wav")
    (tmp_path / "link.png").symlink_to("nowhere")
    bad = [tmp_path / "pipe.png", tmp_path / "link.png", tmp_path / "absent.png", tmp_path / "x*.png"]
    code, out, err = run(capsys, "classify", *bad, pictures / "red.png", "--labels", "a,b", "-m", models / "clip",
                         "--format", "csv")  # fmt: skip
    assert code == 1
    assert out.count("red.png") == 2
    causes = ["not a regular file", "a link to a file that is not there", "no such file", "known suffixes"]
    assert [cause in line for cause, line in zip(causes, err.splitlines(), strict=True)] == [True] * 4
    code, _, err = run(capsys, "transcribe", tmp_path / "pipe.wav", tone, "-m", models / "asr", "-o", tmp_path / "out")
    assert code == 1
    assert "not a regular file" in one_line(err)
    assert (tmp_path / "out" / "tone.txt").exists()


def test_a_label_longer_than_the_model_takes_is_cut_and_said(capsys, models, pictures):
    with warnings.catch_warnings(action="default"):
        code, out, err = run(capsys, "classify", pictures / "red.png", "--labels", "word " * 300, "b", "-m",
                           models / "clip", "--templates", "none", "--format", "json")  # fmt: skip
    assert code == 0
    assert re.fullmatch(r"multimodal: warning: label 'word.+: its prompt is cut to 40 tokens, \d+ lost\n", err)
    assert sum(s["score"] for s in json.loads(out)[0]["scores"]) == pytest.approx(1, abs=1e-5)


def test_one_label_alone_is_said_to_mean_nothing(capsys, models, pictures):
    with warnings.catch_warnings(action="default"):
        code, _, err = run(capsys, "classify", pictures / "red.png", "--labels", "a", "-m", models / "clip")
    assert code == 0
    assert err == "multimodal: warning: --labels: one label alone gets the score 1 in every picture\n"


def test_ten_thousand_labels_are_checked_at_once():
    from time import perf_counter

    from multimodal.tasks.zeroshot import checked_labels

    start = perf_counter()
    assert len(checked_labels([f"thing {i}" for i in range(10_000)])) == 10_000
    assert perf_counter() - start < 0.5  # comparing each with each takes seconds


@pytest.mark.parametrize("name", ["", "a" * 5000, "nul\0byte", "absent/model"])
def test_a_model_name_that_is_no_path_is_refused(capsys, name):
    code, _, err = run(capsys, "info", name)
    assert code == 1
    assert "neither a path nor a shipped model" in one_line(err)
    assert len(err) < 400


def damaged(folder: Path, change: str) -> None:
    """One fault in a checkpoint folder of ours; the manifest vouches for the file where that is not the fault."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(weights)
    name = sorted(tensors)[3]
    if change == "missing tensor":
        del tensors[name]
    elif change == "extra tensor":
        tensors["extra.weight"] = torch.ones(2)
    elif change == "misshapen tensor":
        tensors[name] = torch.ones(3, 5)
    elif change == "not a number":
        tensors[name].view(-1)[0] = float("nan")
    elif change == "integers":
        tensors[name] = tensors[name].long()
    save_file(tensors, weights)
    if change == "deep configuration":
        config.write_text("[" * 100_000)
    elif change == "layers":
        config.write_text(config.read_text().replace('"layers": 2', '"layers": 1000000000000'))
    elif change == "list as configuration":
        config.write_text("[1]")
    elif change == "pipe as weights":
        weights.unlink()
    sums = {path.name: sha256(path) for path in folder.iterdir() if path.name != "manifest.json"}
    if change == "pipe as weights":
        os.mkfifo(weights)
        sums[weights.name] = ""
    (folder / "manifest.json").write_text(json.dumps({"sha256": sums}))
    if change == "flipped byte":
        data = bytearray(weights.read_bytes())
        data[len(data) // 2] ^= 1
        weights.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ("missing tensor", r"tensor '.+' is missing"), ("extra tensor", "'extra.weight' is not of this model"),
        ("misshapen tensor", r"has shape \[3, 5\], not"), ("not a number", "not finite"),
        ("layers", "layers: 1000000000000, more than"), ("integers", "holds torch.int64, not"),
        ("flipped byte", "sha256 differs"), ("deep configuration", "cannot be read as JSON"),
        ("list as configuration", "holds no JSON object"), ("pipe as weights", "missing"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_names_file_and_fault(capsys, models, tmp_path, change, cause):
    shutil.copytree(models / "clip", tmp_path / "clip")
    damaged(tmp_path / "clip", change)
    code, out, err = run(capsys, "info", tmp_path / "clip")
    assert (code, out) == (1, "")
    assert re.search(cause, one_line(err))
    assert "model.safetensors" in err or "config.json" in err


def test_a_pipe_among_the_weights_of_others_is_not_waited_for(capsys, tmp_path):
    os.mkfifo(tmp_path / "only.safetensors")
    for path in (tmp_path, tmp_path / "only.safetensors"):
        code, _, err = run(capsys, "info", path)
        assert code == 1
        assert "not a regular file" in one_line(err)


def test_an_output_in_the_way_is_named_and_the_others_are_written(capsys, models, tone, tmp_path):
    out = tmp_path / "out"
    (out / "tone.txt").mkdir(parents=True)
    other = shutil.copy(tone, tmp_path / "other.wav")
    code, _, err = run(capsys, "transcribe", tone, other, "-m", models / "asr", "-o", out, "-f", "txt")
    assert code == 1
    assert f"{out / 'tone.txt'}: cannot be written" in one_line(err)
    assert sorted(p.name for p in out.iterdir()) == ["other.txt", "tone.txt"]
    code, _, err = run(capsys, "transcribe", tone, "-m", models / "asr", "-o", other)
    assert code == 1
    assert "--output_dir" in one_line(err)


def test_names_that_would_break_lines_or_steer_a_terminal_are_escaped(capsys, models, pictures):
    (pictures / "red.png").rename(pictures / "red\n\x1b[31m.png")
    (pictures / "bad\x1b.png").write_bytes(b"no picture")
    code, out, err = run(capsys, "classify", pictures, "--labels", "a,b", "-m", models / "clip")
    assert code == 1
    assert r"red\n\x1b[31m.png" in out
    assert "\x1b" not in out + one_line(err)
    assert r"bad\x1b.png" in err


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
    closed = subprocess.run(["sh", "-c", f"{shell} >&-"], cwd=ROOT, capture_output=True)
    assert b"Traceback" not in closed.stderr
    if Path("/dev/full").exists():
        full = subprocess.run(["sh", "-c", f"{shell} > /dev/full"], cwd=ROOT, capture_output=True)
        assert full.returncode == 1
        assert full.stderr.count(b"\n") == 1
        assert b"No space left" in full.stderr


def test_own_checkpoints_need_no_heavy_package(models, pictures, tone, tmp_path):
    """Each of these costs seconds at every start."""
    script = (
        "import sys; from multimodal.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = ('torchvision', 'torchaudio', 'timm', 'open_clip', 'transformers', 'torch._dynamo', 'sympy')\n"
        "allowed = ('torchaudio',) if sys.argv[1] == 'transcribe' else ()\n"  # 0.1 s; it aligns the words of a CTC
        "print('HEAVY', [name for name in heavy if name in sys.modules and name not in allowed])"
    )
    classify = ["classify", pictures, "--labels", "a,b", "-m", models / "clip"]
    transcribe = ["transcribe", tone, "-m", models / "asr", "-o", tmp_path]
    for arguments in (classify, transcribe):
        done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], cwd=ROOT, capture_output=True)
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
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
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

    from multimodal.tasks.subtitles import write_transcript

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
