"""Random CLIPs of released sizes, as our checkpoint and as each peer's model: the same numbers in all."""

import logging
import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.weights import clip_openai
from multimodal.weights.folder import Checkpoint

TIMM = {"ViT-B-16": "vit_base_patch16_clip_224", "ViT-L-14": "vit_large_patch14_clip_224"}


def open_clip_model(name: str, seed: int = 0, **sizes: Any) -> nn.Module:
    """As open_clip makes it before training."""
    logging.disable(logging.WARNING)  # it warns that no weights were asked for
    import open_clip

    torch.manual_seed(seed)
    return open_clip.create_model(name, **sizes).eval().requires_grad_(False)


def checkpoint(theirs: nn.Module, name: str, **sizes: Any) -> Checkpoint:
    config = clip_openai.open_clip_architecture(name) | sizes
    return clip_openai.FAMILY.load(theirs.state_dict(), config, f"random {name}")


def timm_model(theirs: nn.Module, name: str, **sizes: Any) -> nn.Module:
    """The picture tower, whose classes are the dimensions of the shared space."""
    import timm
    from timm.models.vision_transformer import checkpoint_filter_fn

    model = timm.create_model(TIMM[name], num_classes=theirs.visual.output_dim, **sizes)
    model.load_state_dict(checkpoint_filter_fn(theirs.state_dict(), model))
    return model.eval().requires_grad_(False)


def openvino_models(model: nn.Module, batch: int, threads: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Compiled from PyTorch's module, with its weights in float32, for sums in float32 and in bfloat16."""
    import openvino

    core, pixels = openvino.Core(), torch.zeros(batch, 3, 224, 224)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its tracer's
        graph = openvino.convert_model(model, example_input=pixels, input=list(pixels.shape))

    def run(request: openvino.InferRequest, images: Tensor) -> Tensor:
        return torch.from_numpy(request.infer([images.numpy()])[0])

    found = {}
    for kind, hint in (("float32", "f32"), ("bfloat16", "bf16")):
        settings = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        compiled = core.compile_model(graph, "CPU", settings)
        if compiled.get_property("INFERENCE_NUM_THREADS") != threads:
            raise SystemExit(f"OpenVINO does not keep to {threads} threads")
        found[f"OpenVINO {kind}"] = partial(run, compiled.create_infer_request())
    return found


def prompts(count: int) -> list[str]:
    """Of the 80,000 that CLIP's templates make of ImageNet's names."""
    from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES

    pairs = [(template, name) for template in OPENAI_IMAGENET_TEMPLATES for name in IMAGENET_CLASSNAMES]
    return [template(name) for template, name in random.Random(0).sample(pairs, count)]


@torch.inference_mode()
def open_clip_texts(model: nn.Module, texts: Sequence[str], batch_size: int = 256) -> Tensor:
    """Unit vectors of texts, tokenized and encoded as open_clip's documentation does."""
    from open_clip import tokenize

    parts = [texts[start : start + batch_size] for start in range(0, len(texts), batch_size)]
    return torch.cat([model.encode_text(tokenize(part), normalize=True) for part in parts])
