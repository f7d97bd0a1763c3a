"""Tiny random captioners of open_clip and transformers and their outputs, for the tests of weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.weights.vision import blip, coca, git
from tests.helpers.references.vision import CONTEXT, HF_TEXT, HF_VISION, VOCABULARY, VisionCase, randomized

BOS, EOS = VOCABULARY - 2, VOCABULARY - 1
CONTRASTED = {"image_features": "image features", "text_features": "text features", "logits": "captions"}


def coca_outputs(model: nn.Module, images: Tensor, ids: Tensor) -> dict[str, Tensor]:
    made = model(images.repeat(2, 1, 1, 1)[: len(ids)], ids, output_labels=False)
    bias = 0 if model.logit_bias is None else model.logit_bias
    logits = made["logit_scale"] * made["image_features"] @ made["text_features"].T + bias
    return {CONTRASTED[key]: made[key] for key in CONTRASTED} | {
        "logits": logits[: len(images)], "image tokens": model(images)["image_embs"],
    }  # fmt: skip


def coca_case(
    vision: dict | None = None, text: dict | None = None, decoder: dict | None = None, **top: Any
) -> VisionCase:
    """Its pooler has another width than the image tower, as in open_clip's own models, unless `vision` says so."""
    from open_clip.coca_model import CoCa

    vision = {"image_size": [24, 16], "layers": 2, "width": 32, "head_width": 16, "patch_size": 8,
              "attentional_pool": True, "attn_pooler_heads": 4, "attn_pooler_queries": 5} | (vision or {})  # fmt: skip
    texts = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 24}
    text = texts | {"heads": 3, "layers": 3, "embed_cls": True} | (text or {})
    decoder = texts | {"heads": 2, "layers": 2, "mlp_ratio": 2, "attn_pooler_heads": 8} | (decoder or {})
    record = {"embed_dim": 24, "vision_cfg": vision | {"output_tokens": True},
              "text_cfg": text | {"output_tokens": True}, "multimodal_cfg": decoder, **top}  # fmt: skip
    torch.manual_seed(0)
    model = CoCa(**record)
    nn.init.normal_(model.text_decoder.text_projection, std=0.2)  # open_clip leaves it uninitialized
    return VisionCase(
        coca.FAMILY, {"model_cfg": record | {"custom_text": True}}, randomized(model), coca_outputs, (24, 16)
    )


def blip_outputs(model: nn.Module, images: Tensor, ids: Tensor) -> dict[str, Tensor]:
    made = model(pixel_values=images, input_ids=ids[: len(images)])
    return {"logits": made.logits, "image tokens": made.image_embeds}


def blip_case(tied: bool = True, **text: Any) -> VisionCase:
    from transformers import BlipConfig, BlipForConditionalGeneration

    text = HF_TEXT | {"bos_token_id": BOS, "sep_token_id": EOS, "eos_token_id": 2, "pad_token_id": 0} | text
    text["tie_word_embeddings"] = tied
    config = BlipConfig(text_config=text, vision_config=HF_VISION, tie_word_embeddings=tied)
    model = randomized(BlipForConditionalGeneration(config))
    predictions = model.text_decoder.cls.predictions
    predictions.decoder.bias = predictions.bias  # one tensor of two names, also where the weights are not tied
    return VisionCase(blip.FAMILY, config.to_dict(), model, blip_outputs, (24, 24))


def git_outputs(model: nn.Module, images: Tensor, ids: Tensor) -> dict[str, Tensor]:
    tokens = model.git.visual_projection(model.git.image_encoder(images).last_hidden_state)
    made = model(pixel_values=images, input_ids=ids[: len(images)])
    return {"logits": made.logits[:, tokens.shape[1] :], "image tokens": tokens}


def git_case(tied: bool = False, **options: Any) -> VisionCase:
    from transformers import GitConfig, GitForCausalLM

    text = HF_TEXT | {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0} | options
    config = GitConfig(**text, vision_config=HF_VISION, tie_word_embeddings=tied)
    return VisionCase(git.FAMILY, config.to_dict(), randomized(GitForCausalLM(config)), git_outputs, (24, 24))


CAPTIONERS: dict[str, Callable[[], VisionCase]] = {
    "OpenCLIP CoCa": coca_case,
    "OpenCLIP CoCa, one width": lambda: coca_case(
        vision={"width": 24, "head_width": 12, "pool_type": "avg", "ls_init_value": 0.1}, quick_gelu=True,
        text={"ls_init_value": 0.1}, decoder={"ls_init_value": 0.1}, init_logit_bias=-3.0,
    ),
    "OpenCLIP CoCa, epsilons": lambda: coca_case(
        vision={"norm_kwargs": {"eps": 0.02}},
        text={"norm_kwargs": {"eps": 0.01}, "act_kwargs": {"approximate": "tanh"}},
    ),
    "OpenCLIP CoCa, no pooler": lambda: coca_case(
        vision={"attentional_pool": False, "width": 24, "head_width": 12, "no_ln_pre": True},
    ),
    "Hugging Face BLIP": blip_case,
    "Hugging Face BLIP, not tied": lambda: blip_case(tied=False, hidden_act="gelu_new"),
    "Hugging Face GIT": git_case,
    "Hugging Face GIT, tied": lambda: git_case(tied=True),
}  # fmt: skip
