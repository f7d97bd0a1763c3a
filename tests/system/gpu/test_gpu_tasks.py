"""The shipped models on a GPU: the texts, scores and vectors of a CPU; a bad input leaves the others."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import multimodal
from multimodal.system.assets import asset
from tests.helpers.commands import run
from tests.system.gpu.conftest import on_devices

SPEECH, GERMAN = asset("sample", "speech.flac"), asset("sample", "german.flac")
LABELS = ["a dog", "a lighthouse", "a school bus", "a banana"]
TEXTS: dict[str, Callable[..., Any]] = {
    "transcribe": lambda **more: multimodal.transcribe(SPEECH, **more)["text"],
    "transcribe by Whisper": lambda **more: multimodal.transcribe(GERMAN, "whisper-mini", **more)["text"],
    "translate by Whisper": lambda **more: multimodal.transcribe(
        GERMAN, "whisper-mini", task="translate", language="de", beam_size=3, **more)["text"],
    "caption": lambda **more: [one["caption"] for one in multimodal.caption(photographs(), **more)],
    "caption by beams": lambda **more: [
        one["caption"] for one in multimodal.caption(photographs(), beam_size=3, **more)],
    "translate": lambda **more: multimodal.translate(
        ["Two dogs run on the beach.", "A man sits."], source="en", target="de", **more),
    "generate": lambda **more: multimodal.generate("A man in a red shirt", max_new_tokens=20, temperature=0, **more),
    "generate by penalties": lambda **more: multimodal.generate(
        "A man in a red shirt", max_new_tokens=20, temperature=0, repetition_penalty=1.3, **more),
    "ask": lambda **more: multimodal.ask("What is this?", photographs()[0], **more),
    "ask about speech": lambda **more: multimodal.ask("Which language is spoken?", SPEECH, **more),
}  # fmt: skip

RECOGNIZERS = {
    "asr-conformer-en": ("--compute_type", "float32"), "whisper-mini": ("--language", "de", "--whole_recordings"),
}  # fmt: skip


def photographs() -> list[Image.Image]:
    random = np.random.default_rng(0)
    small = [random.integers(0, 255, (6, 8, 3), np.uint8) for _ in range(3)]
    return [Image.fromarray(one).resize((160, 120), Image.Resampling.BICUBIC) for one in small]


@cache
def on_a_cpu(name: str) -> Any:
    return TEXTS[name](device="cpu", compute_type="float32")


@on_devices("name", TEXTS, ["transcribe by Whisper", "caption", "translate", "generate by penalties"])
def test_texts_are_those_of_a_cpu(name: str, device: str):
    assert TEXTS[name](device=device, compute_type="float32") == on_a_cpu(name)


@on_devices("name", ["transcribe", "transcribe by Whisper", "translate"], ["translate"])
def test_texts_in_the_usual_type_are_nearly_those(name: str, device: str):
    (found, expected) = (made if isinstance(made, str) else " ".join(made) for made in
                         (TEXTS[name](device=device), on_a_cpu(name)))  # fmt: skip
    same = sum(a == b for a, b in zip(found.split(), expected.split(), strict=False))
    assert same >= 0.8 * len(expected.split())


def test_drawn_texts_are_the_same_each_time(device: str):
    draw = lambda seed: multimodal.generate("A man", max_new_tokens=20, temperature=1.0, seed=seed, device=device)
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize(("kind", "near"), [("float32", 1e-4), ("auto", 0.05)])
def test_scores_and_vectors_are_those_of_a_cpu(kind: str, near: float, device: str):
    def made(on: str, kind: str) -> np.ndarray:
        classifier = multimodal.Classifier("clip-vit-16", LABELS, device=on, compute_type=kind)
        scores = [{row["label"]: row["score"] for row in one["scores"]} for one in classifier(photographs())]
        embedder = multimodal.Embedder("clip-vit-16", device=on, compute_type=kind)
        parts = (
            [[one[label] for label in LABELS] for one in scores],
            embedder.images(photographs()),
            embedder.texts(LABELS),
        )
        return np.concatenate([np.asarray(part).ravel() for part in parts])

    np.testing.assert_allclose(made(device, kind), made("cpu", "float32"), atol=near, rtol=0)


@on_devices("model", RECOGNIZERS, ["whisper-mini"])
def test_error_rates_are_those_of_a_cpu(model: str, capsys: pytest.CaptureFixture, tmp_path: Path, device: str):
    manifest = tmp_path / "rows.jsonl"
    manifest.write_text("".join(json.dumps({"audio_filepath": str(path), "text": "Ein Haus am See"}) + "\n"
                                for path in (SPEECH, GERMAN)))  # fmt: skip
    rates = []
    for on in ("cpu", device):
        code, out, err = run(capsys, "evaluate", "asr", manifest, "--model", model, *RECOGNIZERS[model], "--format",
                             "json", "--trust_paths", "--device", on)  # fmt: skip
        assert code == 0, err
        found = json.loads(out)
        found = next(iter(found.get("sets", {"": found}).values()))
        rates.append([found[name] for name in ("wer", "cer")])
    assert rates[0] == pytest.approx(rates[1], abs=1e-3)


def test_a_broken_file_leaves_the_others(capsys: pytest.CaptureFixture, tmp_path: Path, device: str):
    photographs()[0].save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:200])
    code, out, err = run(capsys, "classify", tmp_path, "--labels", *LABELS, "--device", device)
    assert code == 1
    assert "good.png" in out
    assert "cut.png" in err and "Traceback" not in err  # noqa: PT018
