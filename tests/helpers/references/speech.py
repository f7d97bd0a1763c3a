"""Tiny random speech models of transformers, and the layouts of released ones."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from multimodal.weights.family import Family
from multimodal.weights.folder import build
from multimodal.weights.table import export_tensors

ENCODER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "num_mel_bins": 16,
    "conv_kernel_size": 5, "subsampling_conv_channels": 8, "dropout": 0.0, "layerdrop": 0.0,
}  # fmt: skip
TRANSDUCER = {"vocab_size": 13, "decoder_hidden_size": 24, "blank_token_id": 12, "pad_token_id": 2}
PARAKEET = {
    "parakeet-ctc": ("CTC", {"vocab_size": 13, "pad_token_id": 12}, {}),
    "parakeet-ctc without biases": ("CTC", {"vocab_size": 13, "pad_token_id": 12},
                                    {"attention_bias": False, "convolution_bias": False, "scale_input": False}),
    "parakeet-rnnt": ("RNNT", TRANSDUCER, {}),
    "parakeet-tdt": ("TDT", TRANSDUCER | {"durations": [0, 1, 2, 3, 4]}, {"subsampling_factor": 4}),
}  # fmt: skip
WAVE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 9,
    "conv_dim": [12, 12, 16], "conv_kernel": [10, 3, 2], "conv_stride": [5, 4, 2], "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "pad_token_id": 0, "mask_time_prob": 0.0,
}  # fmt: skip
LARGE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
WAV2VEC2 = {
    "wav2vec2": ("Wav2Vec2", {}, True),
    "wav2vec2 large": ("Wav2Vec2", LARGE, True),
    "hubert": ("Hubert", {"layer_norm_eps": 1e-3}, True),
    "hubert large": ("Hubert", LARGE | {"pad_token_id": 3}, False),
    "wavlm": ("WavLM", {"num_buckets": 16, "max_bucket_distance": 30}, False),
    "wavlm large": ("WavLM", LARGE | {"num_buckets": 16, "max_bucket_distance": 30}, True),
}  # fmt: skip
MOONSHINE = {
    "vocab_size": 50, "hidden_size": 40, "intermediate_size": 48, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 3, "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 2,
}  # fmt: skip
CANARY = {
    "vocab_size": 40, "encoder_config": ENCODER | {"subsampling_factor": 8, "scale_input": False},
    "decoder_config": {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
                       "max_position_embeddings": 64},
}  # fmt: skip
CASES = [*PARAKEET, *WAV2VEC2, "moonshine", "canary"]


def randomized(model: nn.Module, seed: int = 0, scale: float = 0.2) -> nn.Module:
    """Every weight random, buffers too, so that a swapped or forgotten tensor shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator) * scale
                gain = tensor.ndim == 1 and name.endswith("weight")
                tensor.copy_(noise.abs() + 0.5 if name.endswith("running_var") else noise + gain)
    return model.eval()


def _wave(name: str) -> SimpleNamespace:
    import transformers

    kind, more, normalize = WAV2VEC2[name]
    config = getattr(transformers, f"{kind}Config")(**WAVE | more)
    model = randomized(getattr(transformers, f"{kind}ForCTC")(config))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    beside = {"preprocessor_config.json": {"do_normalize": normalize, "sampling_rate": 16000}}
    return SimpleNamespace(model=model, config=config.to_dict() | beside, tensors=tensors, family=name.split()[0],
                           dropped=("masked_spec_embed",), normalize=normalize)  # fmt: skip


@cache
def case(name: str) -> SimpleNamespace:
    import transformers

    if name in WAV2VEC2:
        return _wave(name)
    if name in ("moonshine", "canary"):
        kind, sizes = ("Moonshine", MOONSHINE) if name == "moonshine" else ("Canary", CANARY)
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = randomized(getattr(transformers, f"{kind}ForConditionalGeneration")(config))
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return SimpleNamespace(model=model, config=config.to_dict(), tensors=tensors, family=name)
    kind, sizes, encoder = PARAKEET[name]
    config = getattr(transformers, f"Parakeet{kind}Config")(
        encoder_config=ENCODER | {"subsampling_factor": 8} | encoder, **sizes
    )
    model = randomized(getattr(transformers, f"ParakeetFor{kind}")(config))
    if kind != "CTC":  # a text that depends on the sound and on itself
        model.generation_config.decoder_start_token_id = 12
        with torch.no_grad():
            head = model.joint.head
            head.weight[:13] -= head.weight[:13].mean(1, keepdim=True)
            head.bias.mul_(0.1)
            head.weight[:13] *= 2
            head.bias[12] += 3.5 if kind == "RNNT" else 0.5
            model.decoder.embedding.weight *= 5
            model.decoder.lstm.weight_ih_l0 *= 3
            model.encoder_projector.weight *= 2
    family = "parakeet-ctc" if kind == "CTC" else "parakeet-transducer"
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return SimpleNamespace(model=model, config=config.to_dict(), tensors=tensors, family=family)


def check_layout(family: Family, config: dict[str, Any], theirs: nn.Module) -> None:
    """A released configuration, on the meta device: the same names and shapes as the reference model's."""
    expected = theirs.state_dict()
    made = family.config_from(family.completed(config, {}), {})
    rows = family.rows(made)
    exported = export_tensors(rows, build(family.model, made).state_dict())
    dropped = {row.foreign for row in rows if row.reason}
    assert exported.keys() - dropped == expected.keys() - dropped
    assert all(exported[name].shape == expected[name].shape for name in exported.keys() & expected.keys())


def on_meta(model: type[nn.Module], config: Any) -> nn.Module:
    with torch.device("meta"):
        return model(config)
