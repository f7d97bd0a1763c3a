"""One image or one recording as in the peers' documentation, as whole processes:

python -m benchmarks.peers.cold open_clip FOLDER IMAGE LABEL …
python -m benchmarks.peers.cold openai_whisper|faster_whisper FOLDER RECORDING TOKENS
"""

import sys
from collections.abc import Sequence
from pathlib import Path


def picture(folder: Path, device: str) -> None:
    from PIL import Image

    Image.effect_mandelbrot((640, 480), (-2, -1, 1, 1), 60).convert("RGB").save(folder / "picture.png")


def clip(folder: Path, device: str, tiny: bool) -> None:
    """A folder in open_clip's layout with random weights, and an image."""
    import json

    import open_clip
    import torch
    from safetensors.torch import save_file

    picture(folder, device)
    name = "ViT-B-32"
    config = open_clip.get_model_config(name)
    if tiny:
        config["vision_cfg"]["layers"] = config["text_cfg"]["layers"] = 2
    torch.manual_seed(0)
    model = open_clip.CLIP(**config)
    target = folder / "clip"
    target.mkdir()
    save_file({key: value.contiguous() for key, value in model.state_dict().items()},
              target / "open_clip_model.safetensors")  # fmt: skip
    record = {"mean": list(open_clip.OPENAI_DATASET_MEAN), "std": list(open_clip.OPENAI_DATASET_STD)}
    record |= {"interpolation": "bicubic", "resize_mode": "shortest", "size": [224, 224], "mode": "RGB"}
    (target / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": record}))


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
    sources: dict[str, object] = {work.__name__: work for work in (open_clip, openai_whisper, faster_whisper)}
    arguments: Sequence[str] = sys.argv[2:]
    sources[sys.argv[1]](*arguments)
