"""OpenCLIP's image towers on a timm trunk (open_clip/timm_model.py): ViTs, ConvNeXt and MobileCLIP's FastViT.

Traps: without `timm_proj`, the trunk's own head is the projection, with a bias. A linear one is `head.proj`, two layers
are `head.mlp`. OpenCLIP's first SigLIPs have the exact GELU."""

from dataclasses import replace
from functools import partial
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.vit import ViTConfig
from multimodal.weights.family import Family
from multimodal.weights.table import NameRow, Tensors, under, weight_and_bias
from multimodal.weights.vision import clip_openai, conv_towers, vit_timm
from multimodal.weights.vision.open_clip import (
    TRUNK,
    model_settings,
    open_clip_preprocessing,
    open_clip_tokenizer,
    pair,
    settings,
    text_part,
)
from multimodal.weights.vision.timm_model import plain, timm_built, timm_model, vit_config

PROJECTIONS = ("linear", "mlp", "none", "", None)


def trunk_config(config: dict[str, Any], tensors: Tensors, conv: bool = False) -> CLIPConfig:
    """`conv`: the trunk is a convolutional network. Raises CheckpointError for a trunk that we do not have."""
    model = model_settings(config)
    vision = settings(model["vision_cfg"], TRUNK, "vision_cfg.")
    name, projection, size = vision["timm_model_name"], vision["timm_proj"], pair(vision["image_size"])
    if not name or projection not in PROJECTIONS or vision["timm_proj_bias"]:
        raise CheckpointError(
            f"OpenCLIP configuration: timm_model_name {name!r} with timm_proj {projection!r} (bias "
            f"{vision['timm_proj_bias']}) is not supported"
        )
    image = conv_towers.trunk(timm_built(name), name, vision["timm_pool"], size) if conv else _vit(model, vision)
    if image.image != size:
        raise CheckpointError(f"OpenCLIP configuration: image_size {vision['image_size']}, {name} has {image.image}")
    text, fields = text_part(model)
    loss = "softmax" if model["init_logit_bias"] is None else "sigmoid"
    return CLIPConfig(
        image, text, model["embed_dim"], loss, image_project=projection != "none", image_bias=not projection,
        image_hidden=2 * model["embed_dim"] if projection == "mlp" else 0, **fields,
    )  # fmt: skip


def _vit(model: dict[str, Any], vision: dict[str, Any]) -> ViTConfig:
    name, pool, projection = vision["timm_model_name"], vision["timm_pool"], vision["timm_proj"]
    if projection in ("linear", "mlp"):  # OpenCLIP removes the head of a finished model, so the norm keeps its place
        trunk = timm_model(name)
        trunk.reset_classifier(0, **({"global_pool": pool} if pool else {}))
        return vit_config(plain(trunk, name))
    pooled = {} if pool is None else {"global_pool": pool}
    return replace(vit_config(timm_model(name, num_classes=model["embed_dim"], **pooled)), classes=0)


def trunk_rows(prefix: str, layout: vit_timm.TimmNames | None, config: CLIPConfig) -> list[NameRow]:
    """`layout`: names of a ViT's parts; None: of a convolutional network."""
    conv = layout is None
    trunk = conv_towers.rows(config.image) if conv else vit_timm.rows(config.image, layout)
    project: list[NameRow] = []
    if config.image_hidden:
        project = [*weight_and_bias("visual.head.mlp.fc1", "image_hidden"),
                   NameRow("visual.head.mlp.fc2.weight", "image_project.weight")]  # fmt: skip
    elif config.image_bias:
        project = weight_and_bias(f"visual.trunk.head{'.fc' if conv else ''}", "image_project")
    elif config.image_project:
        project = [NameRow("visual.head.proj.weight", "image_project.weight")]
    return [*under("visual.trunk.", "image.", trunk), *project, *clip_openai.text_rows(config, prefix)]


def _trunks(name: str, prefix: str) -> tuple[Family, ...]:
    text = f"{prefix}token_embedding.weight"
    vits = tuple(
        Family(
            f"{name}{kind}{stem}", CLIP, (f"visual.trunk.patch_embed.{patches}.weight", text), trunk_config,
            partial(trunk_rows, prefix, layout), open_clip_tokenizer, open_clip_preprocessing,
            only=partial(layout.fits, prefix="visual.trunk."),
        )
        for kind, layout in vit_timm.LAYOUTS.items()
        for stem, patches in (("", "proj"), ("-stem", "backbone.0.conv"))
        if not (kind and stem)
    )  # fmt: skip
    return vits + tuple(
        Family(
            f"{name}-{kind}", CLIP, (f"visual.trunk.{own}", text), partial(trunk_config, conv=True),
            partial(trunk_rows, prefix, None), open_clip_tokenizer, open_clip_preprocessing,
        )
        for kind, own in conv_towers.TRUNKS.items()
    )  # fmt: skip


FAMILIES = _trunks("open_clip-timm", "text.")
FLAT_FAMILIES = _trunks("open_clip-timm-flat", "")
