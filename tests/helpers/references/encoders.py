"""Tiny random transformers encoders and their outputs, for test_weights_encoders.py."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.data import wordpieces
from tests.helpers.references.vision import randomized

VOCABULARY, CONTEXT, PAD = 50, 12, 1
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3,
         "intermediate_size": 40, "max_position_embeddings": CONTEXT, "pad_token_id": PAD}  # fmt: skip
DISTIL = {"vocab_size": VOCABULARY, "dim": 24, "n_layers": 3, "n_heads": 3, "hidden_dim": 40, "pad_token_id": PAD,
          "max_position_embeddings": CONTEXT}  # fmt: skip
ROBERTA = SIZES | {"max_position_embeddings": CONTEXT + PAD + 1, "type_vocab_size": 1}
MODERN = SIZES | {"local_attention": 6, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]} | {
    f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}  # fmt: skip
DEBERTA = SIZES | {"relative_attention": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm",
                   "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
                   "type_vocab_size": 0}  # fmt: skip
NARROW = SIZES | {"embedding_size": 16}
LABELS = {"num_labels": 3}


@dataclass(frozen=True)
class EncoderCase:
    """`segments`: the reference takes segment ids; `renamed`: its tensors under other names."""

    family: str
    reference: nn.Module
    segments: bool = True
    renamed: dict[str, str] = field(default_factory=dict)
    saved: bool = False  # under other names than in memory

    @property
    def config(self) -> dict[str, Any]:
        return self.reference.config.to_dict() | {"architectures": [type(self.reference).__name__]}

    @property
    def tensors(self) -> dict[str, Tensor]:
        held = _saved(self.reference) if self.saved else self.reference.state_dict()
        return {self._name(name): tensor.clone() for name, tensor in held.items()}

    def _name(self, name: str) -> str:
        for theirs, other in self.renamed.items():
            name = name.replace(theirs, other)
        return name


def _saved(model: nn.Module) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


def outputs(case: EncoderCase, ids: Tensor, valid: Tensor, segments: Tensor, places: Tensor | None = None,
            **labels: Tensor) -> dict[str, Tensor]:  # fmt: skip
    """Reference outputs by the names that the tests use."""
    more = {"token_type_ids": segments} if case.segments else {}
    more |= {"position_ids": places} if places is not None else {}
    given = {"input_ids": ids, "attention_mask": valid.long(), **more}
    if type(case.reference).__name__.endswith("ForMultipleChoice"):  # each text is a choice of one question
        given = {name: rows[None] for name, rows in given.items()}
    made = case.reference(**given, output_hidden_states=True, **labels)
    found = {f"states {i}": states for i, states in enumerate(made.hidden_states)}
    for name, key in (("prediction_logits", "logits"), ("seq_relationship_logits", "classes"),
                      ("sop_logits", "classes"), ("pooler_output", "pooled"), ("loss", "loss")):  # fmt: skip
        if made.get(name) is not None:
            found[key] = made[name]
    if made.get("start_logits") is not None:
        found["spans"] = torch.stack([made.start_logits, made.end_logits], -1)
    if (logits := made.get("logits")) is not None:
        kind = {"ForTokenClassification": "tags", "ForPreTraining": "detect"}
        name = next((own for end, own in kind.items() if type(case.reference).__name__.endswith(end)), None)
        found[name or {2: "classes", 3: "logits"}[logits.ndim]] = logits
    return found


def _made(family: str, model: str, config: str, options: dict[str, Any], **case: Any) -> Callable[[], EncoderCase]:
    def make() -> EncoderCase:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**options))
        if not options.get("tie_word_embeddings", True):  # one bias of two names all the same
            made.cls.predictions.decoder.bias = made.cls.predictions.bias
        return EncoderCase(family, randomized_once(made), **case)

    return make


def randomized_once(model: nn.Module) -> nn.Module:
    """Randomize every weight, shared ones once."""
    named = dict(model.named_parameters())  # each once
    holder = nn.Module()
    for name, parameter in named.items():
        holder.register_parameter(name.replace(".", "/"), parameter)
    randomized(holder)
    return model.eval()


OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
IGNORED = {"is_decoder": True}  # by classes without a causal form
CASES: dict[str, Callable[[], EncoderCase]] = {
    "BERT": _made("bert", "BertForPreTraining", "BertConfig", SIZES),
    "BERT, old names": _made("bert-old", "BertForPreTraining", "BertConfig", SIZES, renamed=OLD),
    "BERT, old names, encoder": _made("bert-old-model", "BertModel", "BertConfig", SIZES, renamed=OLD),
    "BERT, masked": _made("bert", "BertForMaskedLM", "BertConfig", SIZES | {"hidden_act": "relu"}),
    "BERT, not tied": _made("bert", "BertForMaskedLM", "BertConfig", SIZES | {"tie_word_embeddings": False}),
    "BERT, causal": _made("bert", "BertLMHeadModel", "BertConfig", SIZES | {"is_decoder": True}),
    "BERT, encoder": _made("bert-model", "BertModel", "BertConfig", SIZES | {"layer_norm_eps": 1e-3}),
    "BERT, classes": _made("bert", "BertForSequenceClassification", "BertConfig", SIZES | LABELS),
    "BERT, one class": _made("bert", "BertForSequenceClassification", "BertConfig", SIZES | {"num_labels": 1}),
    "RoBERTa, one class": _made("roberta", "RobertaForSequenceClassification", "RobertaConfig",
                                ROBERTA | {"num_labels": 1}, segments=False),
    "BERT, next sentence": _made("bert-next-sentence", "BertForNextSentencePrediction", "BertConfig", SIZES),
    "RoBERTa": _made("roberta", "RobertaForMaskedLM", "RobertaConfig", ROBERTA, segments=False),
    "RoBERTa, classes": _made("roberta", "RobertaForSequenceClassification", "RobertaConfig", ROBERTA | LABELS,
                              segments=False),
    "RoBERTa, encoder": _made("roberta-model", "RobertaModel", "RobertaConfig", ROBERTA, segments=False),
    "XLM-RoBERTa": _made("roberta", "XLMRobertaForMaskedLM", "XLMRobertaConfig", ROBERTA, segments=False),
    "ALBERT": _made("albert", "AlbertForPreTraining", "AlbertConfig", NARROW),
    "ALBERT, masked": _made("albert", "AlbertForMaskedLM", "AlbertConfig", NARROW | IGNORED | {"inner_group_num": 2}),
    "ALBERT, classes": _made("albert", "AlbertForSequenceClassification", "AlbertConfig",
                             NARROW | LABELS | {"num_hidden_groups": 3}),
    "ALBERT, encoder": _made("albert-model", "AlbertModel", "AlbertConfig", NARROW | {"embedding_size": 24}),
    "DistilBERT": _made("distilbert", "DistilBertForMaskedLM", "DistilBertConfig",
                         DISTIL | IGNORED | {"layer_norm_eps": 1e-3}, segments=False),
    "DistilBERT, classes": _made("distilbert", "DistilBertForSequenceClassification", "DistilBertConfig",
                                 DISTIL | LABELS | {"sinusoidal_pos_embds": True}, segments=False),
    "DistilBERT, encoder": _made("distilbert-model", "DistilBertModel", "DistilBertConfig", DISTIL, segments=False),
    "ELECTRA, generator": _made("electra", "ElectraForMaskedLM", "ElectraConfig", NARROW),
    "ELECTRA, discriminator": _made("electra", "ElectraForPreTraining", "ElectraConfig",
                                    NARROW | {"hidden_act": "gelu_new"}),
    "ELECTRA, classes": _made("electra", "ElectraForSequenceClassification", "ElectraConfig", NARROW | LABELS),
    "ELECTRA, encoder": _made("electra-model", "ElectraModel", "ElectraConfig", NARROW | {"embedding_size": 24}),
    "ModernBERT": _made("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", MODERN, segments=False),
    "ModernBERT, classes": _made("modernbert", "ModernBertForSequenceClassification", "ModernBertConfig",
                                 MODERN | LABELS | {"norm_bias": True, "classifier_bias": True}, segments=False),
    "ModernBERT, classes of means": _made(
        "modernbert", "ModernBertForSequenceClassification", "ModernBertConfig",
        MODERN | LABELS | {"classifier_pooling": "mean"}, segments=False),
    "ModernBERT, encoder": _made("modernbert-model", "ModernBertModel", "ModernBertConfig",
                                 MODERN | {"attention_bias": True, "mlp_bias": True}, segments=False),
    "MPNet": _made("mpnet", "MPNetForMaskedLM", "MPNetConfig", ROBERTA | IGNORED, segments=False),
    "MPNet, classes": _made("mpnet", "MPNetForSequenceClassification", "MPNetConfig", ROBERTA | LABELS,
                            segments=False),
    "MPNet, encoder": _made("mpnet-model", "MPNetModel", "MPNetConfig", ROBERTA, segments=False),
    "DeBERTa": _made("deberta", "DebertaV2ForMaskedLM", "DebertaV2Config", DEBERTA | IGNORED, segments=False),
    "DeBERTa, classes": _made("deberta", "DebertaV2ForSequenceClassification", "DebertaV2Config", DEBERTA | LABELS,
                              segments=False),
    "DeBERTa, tags": _made("deberta", "DebertaV2ForTokenClassification", "DebertaV2Config",
                           DEBERTA | LABELS | {"norm_rel_ebd": "none"}, segments=False),
    "DeBERTa, encoder": _made("deberta-model", "DebertaV2Model", "DebertaV2Config", DEBERTA, segments=False),
    "NomicBERT": _made("nomic-bert", "NomicBertModel", "NomicBertConfig", SIZES | {"head_dim": 8}, saved=True),
} | {
    f"{name}, {kind}": _made(family, f"{model}For{head}", f"{model}Config", sizes | labels, segments=segments)
    for name, family, model, sizes, segments in (
        ("BERT", "bert", "Bert", SIZES, True), ("RoBERTa", "roberta", "Roberta", ROBERTA, False),
        ("ALBERT", "albert", "Albert", NARROW, True), ("DistilBERT", "distilbert", "DistilBert", DISTIL, False),
        ("ELECTRA", "electra", "Electra", NARROW, True),
    )
    for kind, head, labels in (("tags", "TokenClassification", LABELS), ("answers", "QuestionAnswering", {}))
} | {
    "BERT, choices": _made("bert", "BertForMultipleChoice", "BertConfig", SIZES),
    "RoBERTa, choices": _made("roberta-choice", "RobertaForMultipleChoice", "RobertaConfig", ROBERTA, segments=False),
    "ALBERT, choices": _made("albert", "AlbertForMultipleChoice", "AlbertConfig", NARROW),
    "DistilBERT, choices": _made("distilbert", "DistilBertForMultipleChoice", "DistilBertConfig", DISTIL,
                                 segments=False),
    "ELECTRA, choices": _made("electra-choice", "ElectraForMultipleChoice", "ElectraConfig", NARROW),
    "MPNet, choices": _made("mpnet-choice", "MPNetForMultipleChoice", "MPNetConfig", ROBERTA, segments=False),
}  # fmt: skip


@lru_cache
def case(name: str) -> EncoderCase:
    torch.manual_seed(0)
    return CASES[name]()


def bert_folder(folder: Path) -> Path:
    """Save a BertModel with its pooler and a few words, as transformers writes it."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(**wordpieces.SIZES, vocab_size=len(wordpieces.WORDS), max_position_embeddings=24)
    randomized(BertModel(config)).save_pretrained(folder)
    wordpieces.wordpiece(wordpieces.WORDS).save_pretrained(folder)
    return folder
