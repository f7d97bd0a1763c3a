"""The papers' text models: configurations as the families read them from the library's own, and as many parameters."""

import warnings
from dataclasses import replace
from typing import Any

import pytest

from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.presets import preset
from multimodal.models.presets_text import TEXT_PRESETS
from multimodal.models.text import TextTransformer
from multimodal.weights.folder import build
from multimodal.weights.text import bart, bert_hf, gpt2, llama, m2m100, switch, t5
from multimodal.weights.text.encoders import albert, distilbert, electra, roberta
from tests.helpers.counting import count, undrawn
from tests.helpers.spread import spread, thin


def _gpt(width: int, layers: int, heads: int, positions: int = 1024) -> tuple[Any, ...]:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": positions}
    return gpt2.FAMILY, "GPT2Config", "GPT2LMHeadModel", sizes


def _llama(name: str = "Llama", **sizes: Any) -> tuple[Any, ...]:
    sizes = {"rms_norm_eps": 1e-5, "num_hidden_layers": 32, "hidden_size": 4096} | sizes
    return llama.LLAMA_HF, f"{name}Config", f"{name}ForCausalLM", sizes


def _qwen2(width: int, layers: int, heads: int, kv_heads: int, hidden: int, **sizes: Any) -> tuple[Any, ...]:
    sizes |= {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
              "num_key_value_heads": kv_heads, "intermediate_size": hidden, "max_position_embeddings": 131072,
              "rope_parameters": ROPE | {"rope_theta": 1e6}}  # fmt: skip
    return _llama("Qwen2", **{"rms_norm_eps": 1e-6, "tie_word_embeddings": width < 2000} | sizes)


def _bert(family: Any, name: str, use: str, **sizes: Any) -> tuple[Any, ...]:
    return family, f"{name}Config", f"{name}For{use}", sizes


def _t5(width: int, layers: int, heads: int, hidden: int, head_width: int = 64) -> tuple[Any, ...]:
    sizes = {"d_model": width, "num_layers": layers, "num_heads": heads, "d_ff": hidden, "d_kv": head_width}
    return t5.FAMILY, "T5Config", "T5ForConditionalGeneration", sizes


def _sides(family: Any, name: str, layers: int, width: int, heads: int, hidden: int) -> tuple[Any, ...]:
    sides = {f"{side}_{part}": value for side in ("encoder", "decoder")
             for part, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", hidden))}  # fmt: skip
    return family, f"{name}Config", f"{name}ForConditionalGeneration", sides | {"d_model": width}


GROUPED = {"num_key_value_heads": 8, "intermediate_size": 14336}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
# the sizes that config.json of each release has, where they are not the library's defaults
REFERENCES = {
    "gpt2": _gpt(768, 12, 12), "gpt2_medium": _gpt(1024, 24, 16), "gpt2_large": _gpt(1280, 36, 20),
    "gpt2_xl": _gpt(1600, 48, 25), "gpt3_125m": _gpt(768, 12, 12, 2048), "gpt3_350m": _gpt(1024, 24, 16, 2048),
    "gpt3_760m": _gpt(1536, 24, 16, 2048), "gpt3_1.3b": _gpt(2048, 24, 16, 2048),
    "gpt3_2.7b": _gpt(2560, 32, 32, 2048), "gpt3_6.7b": _gpt(4096, 32, 32, 2048),
    "gpt3_13b": _gpt(5120, 40, 40, 2048), "gpt3_175b": _gpt(12288, 96, 96, 2048),
    "llama2_7b": _llama(max_position_embeddings=4096),
    "llama2_13b": _llama(
        max_position_embeddings=4096, hidden_size=5120, num_hidden_layers=40, num_attention_heads=40,
        intermediate_size=13824,
    ),
    "llama2_70b": _llama(
        max_position_embeddings=4096, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, intermediate_size=28672,
    ),
    "llama3_8b": _llama(
        vocab_size=128256, max_position_embeddings=8192, rope_parameters=ROPE | {"rope_theta": 500000.0}, **GROUPED
    ),
    "mistral_7b": _llama("Mistral", max_position_embeddings=32768, rope_parameters=ROPE, **GROUPED),
    "qwen2_0.5b": _qwen2(896, 24, 14, 2, 4864),
    "qwen2_1.5b": _qwen2(1536, 28, 12, 2, 8960),
    "qwen2_7b": _qwen2(3584, 28, 28, 4, 18944, vocab_size=152064),
    "bert_base": _bert(bert_hf.FAMILY, "Bert", "PreTraining"),
    "bert_large": _bert(bert_hf.FAMILY, "Bert", "PreTraining", **LARGE),
    "roberta_base": _bert(
        roberta.FAMILY, "Roberta", "MaskedLM", vocab_size=50265, max_position_embeddings=514, type_vocab_size=1,
        layer_norm_eps=1e-5,
    ),
    "albert_base-v2": _bert(
        albert.FAMILY, "Albert", "PreTraining", hidden_size=768, num_attention_heads=12, intermediate_size=3072
    ),
    "distilbert_base": _bert(distilbert.FAMILY, "DistilBert", "MaskedLM"),
    "electra_small": _bert(electra.FAMILY, "Electra", "PreTraining"),
    "electra_base": _bert(
        electra.FAMILY, "Electra", "PreTraining", embedding_size=768, hidden_size=768, num_attention_heads=12,
        intermediate_size=3072,
    ),
    "t5_small": _t5(512, 6, 8, 2048), "t5_base": _t5(768, 12, 12, 3072), "t5_large": _t5(1024, 24, 16, 4096),
    "t5_3b": _t5(1024, 24, 32, 16384, 128), "t5_11b": _t5(1024, 24, 128, 65536, 128),
    "switch_base-8": (
        switch.FAMILY, "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration",
        {"d_ff": 3072, "num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6},
    ),
    "bart_base": _sides(bart.FAMILY, "Bart", 6, 768, 12, 3072),
    "bart_large": _sides(bart.FAMILY, "Bart", 12, 1024, 16, 4096),
    "m2m100_418m": _sides(m2m100.FAMILY, "M2M100", 12, 1024, 16, 4096),
    "m2m100_1.2b": _sides(m2m100.FAMILY, "M2M100", 24, 1024, 16, 8192),
}  # fmt: skip
VASWANI = {"transformer_base": 65, "transformer_big": 213}  # millions: table 3
REPEATED = (
    "lm_head.weight",
    "embed_tokens.weight",
    "decoder.weight",
    "decoder.bias",
    "projector.bias",
    "projector.weight",
)


def parameters(name: str) -> int:
    config = preset(name)
    return count(build(EncoderDecoder if hasattr(config, "decoder") else TextTransformer, config))


@pytest.mark.parametrize("name", spread(REFERENCES, 3, pytest.mark.slow, pytest.mark.ci))
def test_a_size_is_what_its_family_reads_from_the_librarys_own(name):
    import transformers

    family, config_name, model_name, sizes = REFERENCES[name]
    with undrawn(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own, of weights that cannot be drawn
        config = getattr(transformers, config_name)(**sizes)
        reference = getattr(transformers, model_name)(config)
    tied = config.tie_word_embeddings
    tensors = {key: value for key, value in reference.state_dict().items() if not (tied and key.endswith(REPEATED))}
    assert family.config_from(family.completed(config.to_dict(), tensors), tensors) == preset(name)
    assert parameters(name) == count(reference)


@pytest.mark.parametrize("name", VASWANI)
def test_the_first_transformer_has_the_papers_parameters(name):
    assert parameters(name) / 1e6 == pytest.approx(VASWANI[name], rel=0.035)


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("name", [name for name in TEXT_PRESETS if name.startswith("gpt3")])
def test_gpt3_has_the_papers_parameters(name):
    """Table 2.1 gives one or two digits."""
    unit = {"m": 1e6, "b": 1e9}[name[-1]]
    assert parameters(name) / unit == pytest.approx(float(name.removeprefix("gpt3_")[:-1]), rel=0.03)


def test_each_size_is_compared():
    assert {*REFERENCES, *VASWANI, "mixtral_8x7b"} == set(TEXT_PRESETS)
    assert parameters("mixtral_8x7b") / 1e9 == pytest.approx(46.7, abs=0.01)  # as its authors announced
    assert preset("gpt2") == replace(preset("gpt3_125m"), context=1024)
