"""Weights, requests, and the servers that are compared."""

import base64
import ctypes
import io
import json
import os
import signal
import sys
import tempfile
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any, NamedTuple

import numpy as np

import multimodal
from benchmarks.peers.growth import random_clip
from benchmarks.peers.speech import whisper_random
from benchmarks.serve.clients import Call, form
from multimodal.system.assets import asset
from multimodal.tokens.audio.reading import read_audio
from multimodal.weights.folder import save_folder
from multimodal.weights.load import load

OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_BETTERTRANSFORMER": "0", "INFINITY_MODEL_WARMUP": "0"}
THREADS = 1  # of a server: with more, other work on the machine slows each product many times over
TOKENS = 16  # of a random Whisper's answer
PIECES = ((0, 2.4), (2.4, 4.8), (4.0, 7.2), (0.5, 3.5))  # seconds of the sample
TEXTS = [f"{number} dogs run over the green hill while two women watch them" for number in range(16)]


class TestedServer(NamedTuple):
    """`command`: with {port} and {python}. `ready`: a path that answers 200 once the server is ready."""

    name: str
    command: tuple[str, ...]
    calls: list[Call]
    ready: str = "/health"


class Comparison(NamedTuple):
    """`read` finds what answers must agree in. `plain`: the work of one request without a server."""

    name: str
    candidates: tuple[TestedServer, ...]
    read: Callable[[dict], Any]
    plain: Callable[[int], Any] | None = None
    clients: tuple[int, ...] = (1, 8, 16, 32, 128)


def ours(*models: str) -> tuple[str, ...]:
    return ("{python}", "-m", "multimodal", "serve", "--port", "{port}", "--queue", "1024", "--compute_type", "float32",
            "--models", *models)  # fmt: skip


def recognition(folder: Path) -> Comparison:
    """The shipped recognizer: LitServe has it, too."""
    files = [recorded(*span) for span in PIECES]
    bodies = [json.dumps({"audio": base64.b64encode(file).decode()}).encode() for file in files]
    model = multimodal.Transcriber("asr-conformer-en", compute_type="float32")
    return Comparison(
        "asr-conformer-en",
        (TestedServer("ours", ours("asr-conformer-en"),
                      [Call("/v1/audio/transcriptions", *form(one)) for one in files]),
         TestedServer("LitServe", ("{python}", "-m", "benchmarks.serve.apps.lit", "{port}"),
                   [Call("/predict", "application/json", one) for one in bodies])),
        lambda answer: answer["text"], lambda number: model(files[number % len(files)])["text"],
    )  # fmt: skip


def whisper(folder: Path) -> Comparison:
    """Random weights of Whisper tiny that write 16 tokens."""
    whisper_random.prepare(folder, "cpu", "tiny", libraries=("ctranslate2",), seconds=8.0)
    card = {"transcribe": {"sample_len": TOKENS, "temperature": 0.0, "logprob_threshold": None, "language": "en",
                           "compression_ratio_threshold": None, "no_speech_threshold": None,
                           "without_timestamps": True, "remove_repetitions": False}}  # fmt: skip
    save_folder(replace(load(folder / "ours"), card=card), folder / "served")
    calls = [Call("/v1/audio/transcriptions", *form((folder / "speech.wav").read_bytes()))]
    peer = ("{python}", "-m", "benchmarks.serve.apps.faster_whisper", "{port}", str(folder / "ctranslate2"))
    return Comparison(
        "Whisper tiny, random, 16 tokens of 8 s",
        (
            TestedServer("ours", ours(str(folder / "served")), calls),
            TestedServer("faster-whisper, FastAPI", (*peer, str(TOKENS), str(THREADS)), calls),
        ),
        lambda answer: answer["text"].strip(), clients=(1, 8, 16),
    )  # fmt: skip


def embedding(folder: Path) -> Comparison:
    """Random weights of a BERT of MiniLM's size, mean of its states."""
    bert(folder / "bert")
    calls = lambda path: [
        Call(path, "application/json", json.dumps({"input": [text], "model": "bert"}).encode()) for text in TEXTS
    ]
    infinity = ("{bin}/infinity_emb", "v2", "--model-id", str(folder / "bert"), "--served-model-name", "bert",
                "--port", "{port}", "--host", "127.0.0.1", "--engine", "torch", "--device", "cpu",
                "--dtype", "float32")  # fmt: skip
    alias = ("--alias", f"bert={folder / 'bert'}")
    return Comparison(
        "BERT of 6 x 384, random, a sentence",
        (TestedServer("ours", (*ours(str(folder / "bert")), *alias), calls("/v1/embeddings")),
         TestedServer("infinity", infinity, calls("/embeddings"))),
        lambda answer: np.round(answer["data"][0]["embedding"], 3).tolist(),
    )  # fmt: skip


def images(folder: Path) -> Comparison:
    """Random weights of CLIP ViT-B/32; photographs of 400 x 300."""
    random_clip.prepare(folder, "cpu", "ViT-B-32", images=8, labels=1)
    files = sorted((folder / "images").iterdir())
    urls = [f"data:image/jpeg;base64,{base64.b64encode(file.read_bytes()).decode()}" for file in files]
    calls = lambda path, **more: [
        Call(path, "application/json", json.dumps({"input": [url], "model": "clip", **more}).encode()) for url in urls
    ]
    infinity = ("{python}", "-m", "benchmarks.serve.apps.infinity", "{port}", str(folder / "hub"))
    alias = ("--alias", f"clip={folder / 'hub'}")
    return Comparison(
        "CLIP ViT-B/32, random, an image",
        (TestedServer("ours", (*ours(str(folder / "hub")), *alias), calls("/v1/embeddings")),
         TestedServer("infinity", infinity, calls("/embeddings", modality="image"))),
        lambda answer: np.round(answer["data"][0]["embedding"], 2).tolist(),
    )  # fmt: skip


def bert(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{one}" for one in letters)]
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).eval().save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)


def samples() -> np.ndarray:
    """The sample's sentences, 16 bits."""
    return (read_audio(asset("sample", "speech.flac")).clamp(-1, 1) * 32767).short().numpy()


def recorded(start: float, end: float) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(samples()[int(start * 16_000) : int(end * 16_000)].tobytes())
    return made.getvalue()


def _ends_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextmanager
def running(candidate: TestedServer, port: int, python: str) -> Iterator[Popen]:
    places = {"port": port, "python": python, "bin": str(Path(python).parent)}
    own = {"OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment = os.environ | own | OFFLINE
    command = [part.format(**places) for part in candidate.command]
    made = Popen(command, env=environment, stderr=DEVNULL, stdout=DEVNULL, start_new_session=True,
                 cwd=tempfile.gettempdir(), preexec_fn=_ends_with_parent)  # fmt: skip
    try:
        yield made
    finally:
        made.terminate()
        with suppress(TimeoutExpired):
            made.wait(20)
        with suppress(ProcessLookupError):  # what its own end left
            os.killpg(made.pid, signal.SIGKILL)
