"""Names of transformers' classes."""

from torch import nn

from multimodal.models.clip import CLIP
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT
from multimodal.models.whisper import Whisper

PREFIXES = {
    "gpt2": "GPT2", "llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "smollm3": "SmolLM3", "granite": "Granite", "olmo2": "Olmo2", "olmo3": "Olmo3", "gemma": "Gemma",
    "gemma2": "Gemma2", "gemma3_text": "Gemma3", "phi3": "Phi3", "stablelm": "StableLm", "starcoder2": "Starcoder2",
    "gpt_neox": "GPTNeoX", "bloom": "Bloom", "opt": "OPT", "falcon": "Falcon", "bert": "Bert", "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta", "camembert": "Camembert", "albert": "Albert", "electra": "Electra", "mpnet": "MPNet",
    "distilbert": "DistilBert", "t5": "T5", "mt5": "MT5", "umt5": "UMT5", "bart": "Bart", "mbart": "MBart",
    "m2m_100": "M2M100", "marian": "Marian", "pegasus": "Pegasus", "blenderbot": "Blenderbot", "whisper": "Whisper",
    "clip": "CLIP", "siglip": "Siglip", "vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2",
    "dinov2_with_registers": "Dinov2WithRegisters", "dinov3_vit": "DINOv3ViT", "beit": "Beit",
}  # fmt: skip


def architecture(kind: str, model: nn.Module, family: str, labelled: bool) -> str:
    """Class of a model whose configuration has this `model_type` and whose tensors have the `family`'s names.
    `labelled`: its classes have names, which choices have not."""
    config = model.config
    suffix = "Model"
    if isinstance(model, EncoderDecoder | Whisper):
        suffix = "MTModel" if kind == "marian" else "ForConditionalGeneration"
    elif isinstance(model, ViT) and config.classes:
        suffix = "ForImageClassification" + "WithTeacher" * (config.pool == "pair")
    elif isinstance(model, TextTransformer):
        suffix = _text(kind, model, family, labelled)
    elif not isinstance(model, CLIP | ViT):
        raise TypeError(f"{type(model).__name__}: expected a model with a class in transformers")
    return PREFIXES[kind] + (suffix.replace("Model", "TextModel") if kind == "gemma3_text" else suffix)


def _text(kind: str, model: TextTransformer, family: str, labelled: bool) -> str:
    config = model.config
    heads = {
        "ForTokenClassification": config.tags, "ForQuestionAnswering": config.spans,
        "ForPreTraining": config.detect or (config.classes and config.tied is not None),
        "ForNextSentencePrediction": family == "bert-next-sentence",
        "ForMultipleChoice": config.classes == 1 and not labelled, "ForSequenceClassification": config.classes,
        "ForMaskedLM": config.tied is not None and not config.causal and kind != "gemma3_text",  # which has none
        "LMHeadModel": config.tied is not None and kind in ("gpt2", "bert"),
        "ForCausalLM": config.tied is not None,
    }  # fmt: skip
    plain = "EncoderModel" if kind in ("t5", "umt5", "mt5") else "Model"
    return next((name for name, has in heads.items() if has), plain)
