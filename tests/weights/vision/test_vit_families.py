"""Parity with transformers and timm of every family of vision transformers: tiny random models, float32."""

import re

import pytest
import torch
from torch import Tensor

from multimodal.errors import CheckpointError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.vit import ViT
from multimodal.weights.folder import Checkpoint, build, load_folder, save_folder
from multimodal.weights.load import families, recognize
from tests.helpers.data.vits.cases import CASES, TIMM, case
from tests.helpers.data.vits.released import RELEASED
from tests.helpers.parity import idle, record
from tests.helpers.spread import firsts, spread

TOLERANCE = 1e-5
every_case = pytest.mark.parametrize("name", [*CASES, *TIMM])
some_cases = pytest.mark.parametrize("name", spread([*CASES, *TIMM], 3, pytest.mark.slow, pytest.mark.ci))
every_case_of_transformers = pytest.mark.parametrize("name", CASES)


def load(name: str, tensors: dict[str, Tensor] | None = None) -> ViT:
    made = case(name)
    return families()[made.family].load(made.tensors if tensors is None else tensors, made.config, "file").model


def images(size: tuple[int, int] = (32, 32), count: int = 2) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(4))


def expected(name: str, pixels: Tensor) -> dict[str, Tensor]:
    """States before each block and after the last norm, pooled vector and logits of the reference."""
    if name in TIMM:
        model = case(name).reference
        tokens = model.forward_features(pixels)
        return {"tokens": tokens, "pooled": model.forward_head(tokens, pre_logits=True), "logits": model(pixels)}
    model, other = case(name).reference, pixels.shape[-2:] != (32, 32)
    resized = {"interpolate_pos_encoding": True} if other and case(name).family in ("vit-hf", "deit-hf") else {}
    base = model if "Model" in CASES[name][1] else getattr(model, model.base_model_prefix)
    made = base(pixels, output_hidden_states=True, **resized)
    found = {f"states {i}": state for i, state in enumerate(made.hidden_states[:3])}
    found["tokens"] = made.last_hidden_state
    if base is model:
        return found | {"pooled": made.pooler_output}
    return found | {"logits": model(pixels, **resized).logits}


def ours(model: ViT, pixels: Tensor) -> dict[str, Tensor]:
    states: list[Tensor] = []
    tokens = model.tokens(pixels, states=states)
    found = {f"states {i}": state for i, state in enumerate(states[:3])} | {"tokens": tokens}
    return found | {"pooled": model.features(pixels), "logits": model(pixels)}


def sizes(name: str) -> list[tuple[int, int]]:
    one = name in TIMM and not getattr(case(name).reference, "dynamic_img_size", False)
    return [(32, 32)] if one or load(name).config.fixed else [(32, 32), (48, 24)]


@firsts(pytest.mark.ci)
@every_case
@torch.no_grad()
def test_all_outputs_equal_the_references_and_depend_on_every_tensor(name):
    model = load(name)
    for size in sizes(name):
        theirs, mine = expected(name, images(size)), ours(model, images(size))
        for key, tensor in theirs.items():
            difference = float((tensor - mine[key]).abs().max())
            record(name, key.split()[0], difference)
            assert difference <= TOLERANCE, (key, size)
    output = model.features if list(theirs)[-1] == "pooled" else model
    found = idle(model, lambda: output(images()))
    assert [own for own in found if not own.endswith(("key.bias", "key_norm.bias"))] == []  # softmax ignores these


@torch.no_grad()
def test_beit_without_its_pooler_gives_the_mean_of_the_patches():
    from transformers import BeitModel

    made = case("BEiT")
    reference = BeitModel(made.reference.config, add_pooling_layer=False).eval()
    tensors = {name.removeprefix("beit."): tensor for name, tensor in made.tensors.items()
               if not name.startswith(("classifier", "beit.pooler"))}  # fmt: skip
    reference.load_state_dict(made.reference.beit.state_dict(), strict=False)
    tokens = reference(images()).last_hidden_state
    model = load("BEiT", tensors)
    assert (model.tokens(images()) - tokens).abs().max() <= TOLERANCE
    assert (model.features(images()) - tokens[:, 1:].mean(1)).abs().max() <= TOLERANCE
    with pytest.raises(CheckpointError, match=r"'beit\.pooler\.layernorm\.bias' is missing"):
        load("BEiT", {name: tensor for name, tensor in made.tensors.items() if "pooler" not in name})


@some_cases
@torch.no_grad()
def test_a_file_is_recognized_and_exported_exactly(name, tmp_path):
    made = case(name)
    family = recognize(made.tensors, made.config, "file")
    assert family.name == made.family
    save_folder(Checkpoint(load(name)), tmp_path / "ours")
    read = load_folder(tmp_path / "ours").model
    assert read.config == load(name).config
    exported = family.export(read)
    kept = {key: value for key, value in made.held.items() if not key.endswith("mask_token") and value.numel()}
    assert exported.keys() == kept.keys()
    assert all(exported[key].equal(value) for key, value in kept.items())


@some_cases
@torch.no_grad()
def test_an_image_in_a_batch_and_in_a_prepared_copy_equals_itself_alone(name):
    model = load(name)
    pixels = tuple(images(size, 1)[0] for size in sizes(name))
    alone = torch.cat([model(image[None]) for image in pixels])
    prepared = prepare_for_inference(Checkpoint(load(name)), "float32").model
    for one in (model, prepared):
        assert (one(pixels) - alone).abs().max() <= TOLERANCE
    assert (prepared(images()) - model(images())).abs().max() <= TOLERANCE
    with torch.enable_grad():
        dropped = model.features(images(), keep=torch.arange(16).expand(2, -1))
    assert (dropped - model.features(images())).abs().max() <= TOLERANCE


@pytest.mark.ci
@pytest.mark.parametrize("name", RELEASED)
def test_released_configurations_build_models_of_their_size(name):
    config, kind, count = RELEASED[name]
    heads = ["classifier"] if kind.endswith("Classification") else ["cls_classifier"] if "Teacher" in kind else []
    held = {f"{head}.weight": torch.empty(1000, 8, device="meta") for head in heads}
    if kind in ("ViTModel", "DeiTModel") and "dino" not in name:
        held["pooler.dense.weight"] = torch.empty(8, 8, device="meta")
    family = families()[f"{config['model_type']}-hf"]
    ours = family.config_from(family.completed(config, {}), held)
    with torch.device("meta"):
        exported = family.export(build(ViT, ours))
    assert sum(tensor.numel() for tensor in exported.values()) == count


NEUTRAL = """
    architectures attention_dropout attention_probs_dropout_prob drop_path_rate hidden_dropout_prob id2label label2id
    initializer_range layerscale_value output_attentions output_hidden_states problem_type return_dict dtype
    transformers_version chunk_size_feed_forward is_encoder_decoder _name_or_path encoder_stride model_type
    pos_embed_shift pos_embed_jitter pos_embed_rescale use_mask_token vocab_size
    _out_features _out_indices out_features out_indices stage_names apply_layernorm reshape_hidden_states add_fpn
    pool_scales use_auxiliary_head auxiliary_loss_weight auxiliary_channels auxiliary_num_convs auxiliary_concat_input
    semantic_loss_ignore_index
"""  # of training, of backbones and segmentation, whose own tensors are refused


@every_case_of_transformers
def test_no_option_of_the_reference_is_ignored(name):
    class Read(dict):
        def __getitem__(self, key):
            seen.add(key)
            return super().__getitem__(key)

    seen, made = set(NEUTRAL.split()), case(name)
    family = families()[made.family]
    tensors = made.tensors | {"pooler.dense.weight": torch.empty(0)} if "pooler" in name else made.tensors
    family.config_from(Read(family.completed(made.config, {})), tensors)
    own = type(made.reference.config)().to_dict().keys()
    unread = {"intermediate_size"} if "mlp_ratio" in own else {"mlp_ratio"}
    poolers = set() if "pooler" in name else {"pooler_act", "pooler_output_size"}
    assert not own - seen - unread - poolers


REFUSED = [
    ("ViT", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
    ("ViT", {"num_channels": 1}, "num_channels 1"),
    ("ViT, pooler", {"pooler_act": "mish"}, "pooler_act 'mish' is not supported"),
    ("ViT, pooler", {"pooler_output_size": 12}, "pooler_output_size 12 is not supported"),
    ("DINOv2", {"patch_size": [8, 4]}, "patch_size (8, 4)"),
    ("DINOv3", {"value_bias": False}, "query_bias True, key_bias False, value_bias False, proj_bias True"),
    ("BEiT", {"use_shared_relative_position_bias": True}, "use_shared_relative_position_bias True is not supported"),
]


@pytest.mark.parametrize(("name", "changed", "named"), REFUSED)
def test_options_that_are_not_supported_are_refused_by_name_and_value(name, changed, named):
    made = case(name)
    with pytest.raises(CheckpointError, match=re.escape(named)):
        families()[made.family].load(made.tensors, made.config | changed, "file")
