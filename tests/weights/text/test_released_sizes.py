"""Released configurations of encoders and encoder-decoders, on the meta device: names, shapes and sizes of
transformers' models."""

import json

import pytest
import torch

from multimodal.weights.folder import build
from multimodal.weights.load import families, recognize
from multimodal.weights.table import export_tensors

LARGE = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 2624}
DEBERTA3 = {"vocab_size": 128100, "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
            "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
            "type_vocab_size": 0, "max_relative_positions": -1}  # fmt: skip
UMT5 = {"vocab_size": 256384, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BLENDER = {"d_model": 2560, "encoder_layers": 2, "decoder_layers": 24, "encoder_attention_heads": 32,
           "decoder_attention_heads": 32, "encoder_ffn_dim": 10240, "decoder_ffn_dim": 10240}  # fmt: skip


def deberta(width: int, layers: int, heads: int) -> dict:
    return DEBERTA3 | {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
                       "intermediate_size": 4 * width}  # fmt: skip


# name: class, configuration beside the library's defaults, parameters of its model
RELEASED = {
    "answerdotai/ModernBERT-base": ("ModernBertForMaskedLM", {}, 149_655_232),
    "answerdotai/ModernBERT-large": ("ModernBertForMaskedLM", LARGE, 395_881_664),
    "microsoft/mpnet-base": ("MPNetForMaskedLM", {"max_position_embeddings": 514}, 109_518_527),
    "sentence-transformers/all-mpnet-base-v2": ("MPNetModel", {"max_position_embeddings": 514}, 109_486_464),
    "nomic-ai/nomic-embed-text-v1.5": ("NomicBertModel", {"max_position_embeddings": 2048}, 136_731_648),
    "microsoft/deberta-v3-small": ("DebertaV2Model", deberta(768, 6, 12), 141_304_320),
    "microsoft/deberta-v3-base": ("DebertaV2Model", deberta(768, 12, 12), 183_831_552),
    "microsoft/deberta-v3-large": ("DebertaV2Model", deberta(1024, 24, 16), 434_012_160),
    "google/pegasus-large": ("PegasusForConditionalGeneration", {
        "vocab_size": 96103, "encoder_layers": 16, "decoder_layers": 16, "scale_embedding": True}, 570_797_056),
    "facebook/blenderbot-3B": ("BlenderbotForConditionalGeneration", BLENDER | {"vocab_size": 8008}, 2_696_268_800),
    "google/umt5-small": ("UMT5ForConditionalGeneration", UMT5 | {
        "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6}, 175_333_376),
    "google/umt5-xxl": ("UMT5ForConditionalGeneration", UMT5 | {
        "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}, 11_922_382_848),
}  # fmt: skip
STATIC = "embed_positions.weight"  # Pegasus's sinusoids
SAVED = "nomic"  # under other names than in memory


@pytest.mark.ci
@pytest.mark.parametrize("name", RELEASED)
def test_released_configurations_have_the_references_names_and_shapes(name):
    import transformers

    kind, options, count = RELEASED[name]
    own = getattr(transformers, kind)
    with torch.device("meta"):
        reference = own(own.config_class(**options))
    config = json.loads(reference.config.to_json_string()) | {"architectures": [kind]}
    theirs = dict(reference.named_parameters())  # a shared one once
    theirs |= {key: tensor for key, tensor in reference.state_dict().items() if key.startswith("final_logits_bias")}
    theirs = {key: tensor for key, tensor in theirs.items() if not (key.endswith(STATIC) and "Pegasus" in kind)}
    family = families()["nomic-bert"] if SAVED in name else recognize(theirs, config, "file")
    made = family.config_from(family.completed(config, theirs), theirs)
    exported = export_tensors(family.rows(made), build(family.model, made).state_dict())
    if SAVED not in name:
        assert {key: exported[key].shape for key in theirs} == {key: tensor.shape for key, tensor in theirs.items()}
    assert sum(tensor.numel() for tensor in reference.parameters()) == count
