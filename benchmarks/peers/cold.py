"""One image or one recording as in the peers' documentation, as whole processes:

python -m benchmarks.peers.cold open_clip FOLDER IMAGE LABEL …
python -m benchmarks.peers.cold openai_whisper|faster_whisper FOLDER RECORDING TOKENS
"""

import sys
from pathlib import Path


def image(folder: Path, device: str) -> None:
    from PIL import Image

    Image.effect_mandelbrot((640, 480), (-2, -1, 1, 1), 60).convert("RGB").save(folder / "image.png")


def clip(folder: Path, device: str, tiny: bool) -> None:
    """A folder in open_clip's layout with random weights, and an image."""
    import open_clip
    import torch

    from benchmarks.peers.growth.random_clip import save_open_clip

    image(folder, device)
    config = open_clip.get_model_config("ViT-B-32")
    if tiny:
        config["vision_cfg"]["layers"] = config["text_cfg"]["layers"] = 2
    torch.manual_seed(0)
    save_open_clip(open_clip.CLIP(**config), config, folder / "clip")


def open_clip(folder: str, file: str, *labels: str) -> None:
    import open_clip
    import torch
    from PIL import Image

    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    model.eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    with torch.no_grad():
        images = model.encode_image(preprocess(Image.open(file)).unsqueeze(0), normalize=True)
        texts = model.encode_text(tokenizer(list(labels)), normalize=True)
        scores = (model.logit_scale.exp() * images @ texts.T).softmax(-1)[0]
    for score, label in sorted(zip(scores.tolist(), labels, strict=True), reverse=True):
        print(f"{score:.4f} {label}")


def openai_whisper(folder: str, file: str, tokens: str) -> None:
    import whisper

    model = whisper.load_model(f"{folder}/openai.pt")
    found = model.transcribe(
        file, language="en", temperature=0.0, sample_len=int(tokens), fp16=False, logprob_threshold=None,
        no_speech_threshold=None, compression_ratio_threshold=None,
    )  # fmt: skip
    print(len([token for segment in found["segments"] for token in segment["tokens"]]), "tokens")


def faster_whisper(folder: str, file: str, tokens: str) -> None:
    from faster_whisper import WhisperModel

    model = WhisperModel(f"{folder}/ctranslate2", "cpu")
    segments, _ = model.transcribe(
        file, language="en", temperature=0.0, beam_size=1, max_new_tokens=int(tokens), log_prob_threshold=None,
        no_speech_threshold=None, compression_ratio_threshold=None,
    )  # fmt: skip
    print(len([token for segment in segments for token in segment.tokens]), "tokens")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
