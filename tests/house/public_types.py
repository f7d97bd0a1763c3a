"""Use of the public names as an editor sees it; checked by mypy, never run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import multimodal
from multimodal import Captioner, Checkpoint, Classifier, Embedder, Generator, MultimodalError, Transcriber, Translator

checkpoint: Checkpoint = multimodal.load("clip-vit-16")
fast: Checkpoint = multimodal.prepare_for_inference(checkpoint, "bfloat16", "cpu")
classifier = Classifier(fast, ["a dog", "a cat"], threshold=0.5, device="auto")
scores: list[dict[str, Any]] = classifier(["a.jpg", Path("b.png"), b"", Image.new("RGB", (2, 2)), np.zeros((2, 2, 3))])
scores = multimodal.classify(torch.zeros(3, 2, 2), ["a", "b"], templates={"a": ["an a"], "b": ["a b"]})
rows: Iterator[tuple[Any, dict[str, Any] | MultimodalError]] = classifier.many(Path().glob("*.jpg"), on_error="raise")
transcriber = Transcriber("whisper-mini", language="de", temperature=0.0, clip_timestamps=[0.0, 1.5], batch_size=4)
transcript: dict[str, Any] = transcriber(np.zeros(16000), sampling_rate=16000)
transcript = multimodal.transcribe((44100, np.zeros(9)), word_timestamps=True)
transcript = multimodal.transcribe({"array": np.zeros(9), "sampling_rate": 8000}, beam_size=2)
captions: list[dict[str, Any]] = Captioner("folder", num_captions=3, beam_size=3)("a.jpg")
vectors: np.ndarray = Embedder("clip").images([np.zeros((2, 2), np.uint8)]) @ Embedder().texts(["a dog"]).T
text: str = Generator("folder", max_new_tokens=5, stop="\n")("Once")
one: str = Translator("folder", "de", "en")("Guten Morgen!")
several: list[str] = Translator("folder", target="de")(["a", "b"])

classifier(3)  # type: ignore[call-overload]
multimodal.classify("a.jpg", ["a"], threshhold=0.5)  # type: ignore[call-arg]
Transcriber("whisper-mini", languages=3)  # type: ignore[arg-type]
Transcriber("whisper-mini", beams=3)  # type: ignore[call-arg]
Generator("folder", max_new_tokens="5")  # type: ignore[arg-type]
classifier.many([], on_error="ignore")  # type: ignore[arg-type]
Translator("folder")(3)  # type: ignore[call-overload]
