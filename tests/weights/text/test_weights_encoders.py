"""Parity of BERT, RoBERTa, ALBERT, DistilBERT and ELECTRA with transformers: tiny random models, float32."""

import re
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

from multimodal.errors import CheckpointError
from multimodal.train.losses import detection_loss, token_loss
from multimodal.weights.load import families, recognize
from tests.helpers.parity import record
from tests.helpers.references.encoders import CASES, CONTEXT, PAD, VOCABULARY, case, outputs
from tests.helpers.spread import firsts, spread, thin

TOLERANCE = 1e-5
LENGTHS = (9, 4, CONTEXT)
# they hold what another name holds too, or nothing that outputs show: a key bias shifts all scores of a row alike
REPEATED = ("predictions.decoder.bias", "decoder.weight", "lm_head.decoder.bias", "vocab_projector.weight",
            "generator_lm_head.weight")  # fmt: skip
TWINS = ("predictions.decoder.bias", "lm_head.decoder.bias")  # refused where they differ
UNSEEN = (*REPEATED, "key.bias", "k_lin.bias")
HEADLESS = ("DistilBERT, encoder", "ELECTRA, encoder", "ModernBERT, encoder", "NomicBERT", "DeBERTa, encoder")
every_case = pytest.mark.parametrize("name", CASES)


def texts(left: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, which are real, and segments; padded on one side."""
    source = torch.Generator().manual_seed(5)
    ids = torch.randint(4, VOCABULARY, (len(LENGTHS), CONTEXT), generator=source)
    order = torch.arange(CONTEXT).flip(0) if left else torch.arange(CONTEXT)
    valid = order < torch.tensor(LENGTHS)[:, None]
    segments = (torch.rand(ids.shape, generator=source) < 0.5).long()
    return torch.where(valid, ids, PAD if not left else 3), valid, segments


def load(name: str, tensors: dict[str, Tensor] | None = None) -> nn.Module:
    made = case(name)
    family = families()[made.family]
    return family.load(made.tensors if tensors is None else tensors, made.config, "file").model


def ours(name: str, model: nn.Module, ids: Tensor, valid: Tensor, segments: Tensor, places: Tensor | None = None):
    actual: list[Tensor] = []
    segments = segments if case(name).segments else None
    states = model.states(ids, valid=valid, segments=segments, positions=places, states=actual)
    made = {f"states {i}": value for i, value in enumerate(actual)}
    made |= {"pooled": model.pooled(states, valid)} if model.pool else {}
    made |= {"logits": model.logits(states)} if model.config.tied is not None else {}
    made |= {"classes": model.classes(model.pooled(states, valid))} if model.classes else {}
    made |= {name: head(states) for name in ("detect", "tags", "spans") if (head := getattr(model, name))}
    if "choices" in name:
        made["classes"] = made["classes"].T
    return made


def differences(theirs: dict[str, Tensor], mine: dict[str, Tensor], valid: Tensor) -> dict[str, float]:
    """Differences of the reference's outputs, at real tokens."""
    assert set(theirs) <= set(mine), set(theirs) - set(mine)
    assert all(theirs[key].shape == mine[key].shape for key in theirs)
    seen = {key: (theirs[key] - mine[key]).abs() for key in theirs}
    return {key: float((one[valid] if one.shape[:2] == valid.shape else one).max()) for key, one in seen.items()}


@lru_cache
def expected(name: str) -> dict[str, Tensor]:
    return outputs(case(name), *texts())


def compared(name: str, model: nn.Module) -> dict[str, float]:
    ids, valid, segments = texts()
    return differences(expected(name), ours(name, model, ids, valid, segments), valid)


@firsts(pytest.mark.ci)
@every_case
@torch.inference_mode()
def test_outputs_of_padded_texts_equal_the_reference(name):
    actual = compared(name, load(name))
    assert {"states 0", "states 3"} <= set(actual)
    assert len(actual) > 4 or name in HEADLESS
    for output, difference in actual.items():
        record(name, re.sub(r" \d+", "", output), difference)
    assert max(actual.values()) <= TOLERANCE, actual


@pytest.mark.parametrize("name", ["BERT", "BERT, causal", "RoBERTa", "ALBERT", "DistilBERT", "ELECTRA, discriminator"])
@torch.inference_mode()
def test_left_padding_needs_places_and_then_equals_the_reference(name):
    made, model = case(name), load(name)
    ids, valid, segments = texts(left=True)
    places = (valid.cumsum(1) - 1).clamp(min=0)
    theirs = places + model.config.positions.first
    actual = differences(
        outputs(made, ids, valid, segments, theirs), ours(name, model, ids, valid, segments, places), valid
    )
    token_wise = {key: value for key, value in actual.items() if key not in ("pooled", "classes")}  # of a first token
    assert max(token_wise.values()) <= TOLERANCE, token_wise


@pytest.mark.parametrize("name", spread(CASES, 3, pytest.mark.slow, pytest.mark.ci))
def test_a_corrupted_tensor_fails_the_comparison(name):
    noise = torch.Generator().manual_seed(1)
    tensors = {key: value for key, value in case(name).tensors.items() if not key.endswith(TWINS)}
    names = [key for key in tensors if not key.endswith(UNSEEN)]
    some = [] if "," in name else names[:: len(names) // 3]  # another head on the same encoder is the last alone
    for corrupted in some + names[-1:]:
        more = torch.randn(tensors[corrupted].shape, generator=noise) * 0.3
        with torch.inference_mode():
            actual = compared(name, load(name, tensors | {corrupted: tensors[corrupted] + more}))
        assert max(actual.values()) > TOLERANCE, corrupted


@thin(2, pytest.mark.ci)
@thin(2, pytest.mark.slow)
@every_case
def test_repeated_tensors_may_be_missing_and_position_ids_present(name):
    tensors = case(name).tensors
    repeated = TWINS if "not tied" in name else REPEATED
    shorter = {key: value for key, value in tensors.items() if not key.endswith(repeated)}
    positions = [key for key in tensors if key.endswith("position_embeddings.weight")]
    old = {key.replace("embeddings.weight", "ids"): torch.arange(CONTEXT)[None] for key in positions}
    assert load(name, shorter | old).config == load(name).config


@pytest.mark.parametrize("name", ["BERT", "ALBERT", "ELECTRA, generator", "RoBERTa", "DistilBERT"])
@torch.inference_mode()
def test_losses_equal_the_reference(name):
    """Losses of masked tokens and of next-sentence or sentence-order prediction."""
    made, model = case(name), load(name)
    ids, valid, segments = texts()
    chosen = valid & (torch.arange(CONTEXT) % 3 == 1)
    follows = torch.tensor([0, 1, 1])
    named = {"BERT": {"next_sentence_label": follows}, "ALBERT": {"sentence_order_label": follows}}.get(name, {})
    theirs = outputs(made, ids, valid, segments, labels=torch.where(chosen, ids, -100), **named)["loss"]
    mine = ours(name, model, ids, valid, segments)
    loss = token_loss(mine["logits"], ids, chosen) / chosen.sum()
    if named:
        loss = loss + token_loss(mine["classes"][:, None], follows[:, None], torch.ones(3, 1, dtype=torch.bool)) / 3
    record(name, "loss", float((theirs - loss).abs()))
    assert (theirs - loss).abs() <= TOLERANCE


@torch.inference_mode()
def test_the_loss_of_detection_equals_the_reference():
    name = "ELECTRA, discriminator"
    ids, valid, segments = texts()
    replaced = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.3
    theirs = outputs(case(name), ids, valid, segments, labels=replaced.long())["loss"]
    mine = ours(name, load(name), ids, valid, segments)["detect"]
    loss = detection_loss(mine, replaced, valid) / valid.sum()
    record(name, "loss", float((theirs - loss).abs()))
    assert (theirs - loss).abs() <= TOLERANCE


@pytest.mark.parametrize("name", ["BERT", "RoBERTa", "XLM-RoBERTa", "ALBERT, masked"])
@torch.inference_mode()
def test_a_text_beyond_the_context_is_refused(name):
    model = load(name)
    assert model.config.context == CONTEXT
    with pytest.raises(ValueError, match=f"longer than the context {CONTEXT}"):
        model.states(torch.full((1, CONTEXT + 1), 5))


@pytest.mark.parametrize(
    ("name", "change", "cause"),
    [
        ("BERT", {"position_embedding_type": "relative_key"}, "'relative_key' is not supported"),
        ("BERT", {"hidden_act": "mish"}, "hidden_act 'mish'"),
        ("BERT", {"add_cross_attention": True}, "add_cross_attention"),
        ("BERT", {"num_attention_heads": 7}, "not divisible"),
        ("BERT", {"type_vocab_size": 3}, "token_type_embeddings.weight' has shape"),
        ("RoBERTa", {"hidden_act": "relu"}, "hidden_act 'relu' with a gelu head is not supported"),
        ("RoBERTa", {"pad_token_id": None}, "pad_token_id None"),
        ("ELECTRA, generator", {"hidden_act": "relu"}, "hidden_act 'relu' with a gelu head"),
        ("ALBERT", {"num_hidden_groups": 2}, "2 groups of 1 blocks in 3 layers are not supported"),
        ("DistilBERT", {"n_layers": 2}, "unexpected tensor"),
        ("ELECTRA, choices", {"summary_use_proj": False}, "summary_use_proj False is not supported"),
        ("MPNet", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets 64 is not supported"),
        # a decoder pools its last token, where the reference pools the first
        ("BERT", {"is_decoder": True}, "is_decoder True with a pooler"),
        ("ELECTRA, classes", {"is_decoder": True}, "is_decoder True with a pooler"),
    ],
)
def test_configurations_that_do_not_fit_are_refused_in_one_line(name, change, cause):
    made = case(name)
    with pytest.raises(CheckpointError, match=f"^file: .*{cause}") as error:
        families()[made.family].load(made.tensors, made.config | change, "file")
    assert "\n" not in str(error.value)


def test_rope_scaling_of_modernbert_is_the_references():
    made, family = case("ModernBERT"), families()["modernbert"]
    config = {key: value for key, value in made.config.items() if key != "rope_parameters"}
    config |= {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 6}
    new = config | {"rope_scaling": None, "rope_parameters": type(made.reference.config)(**config).rope_parameters}
    old, told = (family.load(made.tensors, one, "file").model.config for one in (config, new))
    assert old == told
    assert old.positions.yarn[2] == CONTEXT


def test_sizes_that_a_configuration_of_deberta_leaves_out_are_the_references():
    from transformers import DebertaV2Config

    family = families()["deberta"]
    theirs, ours = DebertaV2Config().to_dict(), family.completed({"model_type": "deberta-v2"}, {})
    known = ours.keys() & theirs.keys()
    assert {key: ours[key] for key in known} == {key: theirs[key] for key in known}


def test_a_bias_of_two_names_that_differ_and_a_file_without_configuration_are_refused():
    tensors, name = case("BERT").tensors, "cls.predictions.decoder.bias"
    with pytest.raises(CheckpointError, match=re.escape(f"file: tensor {name!r} differs from")):
        load("BERT", tensors | {name: tensors[name] + 1})
    for name in ("BERT", "BERT, encoder"):
        with pytest.raises(CheckpointError, match=r"without config\.json"):
            families()[case(name).family].load(case(name).tensors, {}, "file")


def test_an_unused_pooler_beside_a_classifier_is_left_out():
    tensors = case("RoBERTa, classes").tensors
    spare = {f"roberta.pooler.dense.{part}": torch.randn(24, 24)[:, : 24 if part == "weight" else 1].squeeze()
             for part in ("weight", "bias")}  # fmt: skip
    model = load("RoBERTa, classes", tensors | spare)
    assert torch.equal(model.pool.linear.weight, tensors["classifier.dense.weight"])


HEADS = ("tags", "answers", "choices")


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(HEADS)])
def test_heads_are_recognized_and_exported_to_the_bit(name):
    made = case(name)
    family = recognize(made.tensors, made.config, "file")
    assert family.name == made.family
    again = family.export(family.load(made.tensors, made.config, "file").model)
    assert again.keys() == made.tensors.keys()
    assert all(torch.equal(again[key], made.tensors[key]) for key in again)


def test_a_pooler_beside_a_token_classifier_is_kept_if_the_configuration_names_the_class():
    """Old files of BertForTokenClassification hold the encoder's pooler."""
    made, pooler = case("BERT, tags"), case("BERT, encoder").tensors
    tensors = made.tensors | {f"bert.{key}": value for key, value in pooler.items() if key.startswith("pooler")}
    named = made.config | {
        "architectures": ["BertForTokenClassification"],
        "id2label": {"1": "B-X", "0": "O", "2": "I-X"},
    }
    checkpoint = families()["bert"].load(tensors, named, "file")
    assert (checkpoint.model.config.tags, checkpoint.model.config.classes) == (3, 0)
    assert checkpoint.card["labels"] == ["O", "B-X", "I-X"]
    assert families()["bert"].load(tensors, made.config | {"architectures": None}, "file").model.config.classes == 3


def test_answers_after_a_head_are_refused():
    made = case("ModernBERT, classes")
    named = made.config | {"architectures": ["ModernBertForQuestionAnswering"]}
    with pytest.raises(CheckpointError, match="ModernBertForQuestionAnswering, which finds answers after a head"):
        families()["modernbert"].load(made.tensors, named, "file")


def test_answers_need_a_start_and_an_end():
    tensors = case("BERT, answers").tensors
    wide = {"qa_outputs.weight": torch.zeros(3, 24), "qa_outputs.bias": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="expected 2 rows"):
        load("BERT, answers", tensors | wide)
