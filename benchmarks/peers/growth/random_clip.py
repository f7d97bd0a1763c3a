"""A random CLIP in the formats of open_clip, transformers and ours, a folder of images, and labels."""

import json
from pathlib import Path
from typing import Any

from benchmarks.peers.vision import clip_captions, clip_jpegs, openclip

SIZE = (400, 300)  # pixels of an image
KINDS = ("striped", "wooden", "young", "old", "red", "blue", "small", "wet", "broken", "golden")


def prepare(folder: Path, device: str, name: str, images: int, labels: int, tiny: bool = False, **_: Any) -> None:
    """`open_clip/` and `hub/` hold the same weights in each library's own layout."""
    import open_clip
    import torch

    torch.manual_seed(0)
    sizes = open_clip.get_model_config(name) | openclip.sizes(tiny)
    model = open_clip.CLIP(**sizes).eval()
    save_open_clip(model, sizes, folder / "open_clip")
    save_transformers(folder / "open_clip", sizes, folder / "hub")
    (folder / "images").mkdir()
    clip_jpegs.prepare(folder / "images", device, images, SIZE)
    names = open_clip.IMAGENET_CLASSNAMES
    words = dict.fromkeys([*names, *(f"{kind} {name}" for kind in KINDS for name in names)])
    (folder / "labels.json").write_text(json.dumps(list(words)[:labels]))


def save_open_clip(model: Any, sizes: dict[str, Any], to: Path) -> None:
    import open_clip
    from safetensors.torch import save_file

    to.mkdir()
    tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file(tensors, to / "open_clip_model.safetensors")
    side = sizes["vision_cfg"]["image_size"]
    record = {"mean": list(open_clip.OPENAI_DATASET_MEAN), "std": list(open_clip.OPENAI_DATASET_STD),
              "interpolation": "bicubic", "resize_mode": "shortest", "size": [side, side], "mode": "RGB"}  # fmt: skip
    (to / "open_clip_config.json").write_text(json.dumps({"model_cfg": sizes, "preprocess_cfg": record}))


def save_transformers(source: Path, sizes: dict[str, Any], to: Path) -> None:
    """Writes nothing without transformers: its candidate is then missing."""
    try:
        from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel
    except ImportError:
        return
    from multimodal.weights.load import load
    from multimodal.weights.vision.clip_hf import FAMILY

    vision, text = sizes["vision_cfg"], sizes["text_cfg"]
    common = {"hidden_act": "gelu", "projection_dim": sizes["embed_dim"]}
    parts = [{"hidden_size": part["width"], "intermediate_size": 4 * part["width"], **common,
              "num_hidden_layers": part["layers"]} for part in (text, vision)]  # fmt: skip
    parts[0] |= {"num_attention_heads": text["heads"], "vocab_size": text["vocab_size"], "eos_token_id": 49407,
                 "max_position_embeddings": text["context_length"], "bos_token_id": 49406}  # fmt: skip
    parts[1] |= {"num_attention_heads": vision["width"] // 64, "image_size": vision["image_size"],
                 "patch_size": vision["patch_size"]}  # fmt: skip
    model = CLIPModel(CLIPConfig(text_config=parts[0], vision_config=parts[1], projection_dim=sizes["embed_dim"]))
    model.load_state_dict(FAMILY.export(load(str(source)).model))
    model.save_pretrained(to)
    side = vision["image_size"]
    CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side}).save_pretrained(to)
    clip_captions.save_tokenizer(to)
