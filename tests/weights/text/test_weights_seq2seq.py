"""Parity of text encoder-decoders with transformers and torch: tiny random models, float32, all outputs."""

import copy
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.masks import causal
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.decoding.beam_search import beam_search, per_token
from multimodal.decoding.sampling import cross_attention_step, greedy
from multimodal.errors import CheckpointError
from multimodal.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig, TextConfig
from tests.helpers.parity import record
from tests.helpers.references.seq2seq import CASES, CONTEXT, VOCABULARY, WITH_HEAD, case
from tests.helpers.spread import firsts, spread, thin
from tests.helpers.tiny import randomized

TOLERANCE = 1e-5
LENGTHS, ANSWERS = (9, 4, 7), (6, 8, 3)
# repeats of another tensor; a bias of keys shifts all scores of a row alike
UNSEEN = ("k_proj.bias", "embed_positions.weight", "shared.weight", "embed_tokens.weight", "lm_head.weight")
every_case = pytest.mark.parametrize("name", CASES)
every_decoder = pytest.mark.parametrize("name", WITH_HEAD)


def padded(lengths: tuple[int, ...], start: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Ids padded on the right, and which are real. No id is one that any of the models begins or pads with."""
    ids = torch.randint(3, VOCABULARY - 2, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    if start is not None:
        ids[:, 0] = start
    return ids, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def load(name: str, tensors: dict[str, Tensor] | None = None) -> nn.Module:
    made = case(name)
    return made.family.load(made.tensors if tensors is None else tensors, made.config, "file").model


def labels(real: Tensor) -> Tensor:
    ids = torch.randint(VOCABULARY, real.shape, generator=torch.Generator().manual_seed(9))
    return torch.where(real, ids, -100)


@functools.cache
@torch.no_grad()
def theirs(name: str) -> dict[str, Tensor]:
    reference = case(name).reference
    (source, valid), (ids, real) = batch(reference.config)
    if name.endswith("encoder"):
        made = reference(input_ids=source, attention_mask=valid.long(), output_hidden_states=True)
        return {"encoder states": torch.stack(made.hidden_states)[:, valid]}
    made = reference(
        input_ids=source, attention_mask=valid.long(), decoder_input_ids=ids, decoder_attention_mask=real.long(),
        output_hidden_states=True, **({"labels": labels(real)} if name in WITH_HEAD else {}),
    )  # fmt: skip
    actual = {
        "encoder states": torch.stack(made.encoder_hidden_states)[:, valid],
        "decoder states": torch.stack(made.decoder_hidden_states)[:, real],
    }
    if name in WITH_HEAD:
        actual |= {"logits": made.logits[real], "loss": made.loss}
    return actual


def ours(model: nn.Module, name: str) -> dict[str, Tensor]:
    (source, valid), (ids, real) = batch(case(name).reference.config)
    below, above = [], []
    if isinstance(model, TextTransformer):
        model.states(source, valid=valid, states=below)
        return {"encoder states": torch.stack(below)[:, valid]}
    states = model.decoder.states(ids, model.encode(source, valid, below), valid, real, states=above)
    actual = {"encoder states": torch.stack(below)[:, valid], "decoder states": torch.stack(above)[:, real]}
    if name in WITH_HEAD:
        logits = model.decoder.logits(states)[real]
        actual |= {"logits": logits, "loss": F.cross_entropy(logits, labels(real)[real])}
    return actual


def batch(config) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return padded(LENGTHS, None, 5), padded(ANSWERS, start_of(config), 6)


def start_of(config) -> int:
    start = getattr(config, "decoder_start_token_id", None)
    return start if start is not None else config.eos_token_id if config.model_type == "mbart" else config.pad_token_id


@torch.no_grad()
def differences(name: str, model: nn.Module) -> dict[str, float]:
    reference, mine = theirs(name), ours(model, name)
    assert reference.keys() == mine.keys()
    assert all(reference[output].shape == mine[output].shape for output in reference)
    return {output: (reference[output] - mine[output]).abs().max().item() for output in reference}


@firsts(pytest.mark.ci)
@every_case
def test_padded_batches_equal_the_reference(name):
    actual = differences(name, load(name))
    for output, difference in actual.items():
        record(name, output, difference)
    assert max(actual.values()) <= TOLERANCE, actual


@thin(3, pytest.mark.ci)
@every_case
def test_as_many_numbers_are_trained_as_in_the_reference(name):
    counts = [sum(p.numel() for p in one.parameters() if p.requires_grad) for one in (case(name).reference, load(name))]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", spread(CASES, 3, pytest.mark.slow, pytest.mark.ci))
def test_a_corrupted_tensor_fails_the_comparison(name):
    made = case(name)
    names = [n for n in made.tensors if not n.endswith(UNSEEN)]
    for corrupted in names[5 :: len(names) // 4]:
        tensors = made.tensors
        tensors[corrupted] = tensors[corrupted] + torch.randn(tensors[corrupted].shape) * 0.3
        assert max(differences(name, load(name, tensors)).values()) > TOLERANCE, corrupted


@firsts(pytest.mark.ci)
@every_decoder
@torch.inference_mode()
def test_cached_decoding_of_prompts_padded_on_the_left_equals_the_reference(name):
    reference, model = case(name).reference, load(name)
    (source, valid), (ids, _) = batch(reference.config)
    encoded, width = model.encode(source, valid), max(ANSWERS)
    starts = torch.tensor([width - length for length in ANSWERS])
    rows = torch.stack([ids[i].roll(width - length) for i, length in enumerate(ANSWERS)])
    plain, left = model.decoder.new_cache(), model.decoder.new_cache(starts)
    stepwise = torch.cat([model.decode(ids[:, i : i + 1], encoded, valid, plain) for i in range(width)], 1)
    prompted = [model.decode(rows[:, :5], encoded, valid, left)]
    prompted += [model.decode(rows[:, i : i + 1], encoded, valid, left) for i in range(5, width)]
    prompted = torch.cat(prompted, 1)
    for row, length in enumerate(ANSWERS):
        alone = reference(
            input_ids=source[row : row + 1, : LENGTHS[row]], decoder_input_ids=ids[row : row + 1, :length]
        ).logits[0]
        for output, made in (
            ("cached logits", stepwise[row, :length]),
            ("left-padded logits", prompted[row, width - length :]),
        ):
            difference = (made - alone).abs().max().item()
            record(name, output, difference)
            assert difference <= TOLERANCE, output


@thin(2, pytest.mark.ci)
@thin(2, pytest.mark.slow)
@every_decoder
def test_greedy_and_beam_tokens_equal_generate(name):
    reference, model = case(name).reference, load(name)
    source, valid = padded(LENGTHS, None, 8)
    eos, most = 2, 8
    start = start_of(reference.config)
    common = {"input_ids": source, "attention_mask": valid.long(), "max_new_tokens": most, "eos_token_id": eos,
              "decoder_start_token_id": start, "forced_eos_token_id": None, "do_sample": False,
              "pad_token_id": reference.config.pad_token_id}  # fmt: skip
    with torch.inference_mode():
        encoded = model.encode(source, valid)
    step, prompt = cross_attention_step(model.decode, encoded, valid), torch.full((len(source), 1), start)
    options = {"eos": eos, "max_new": most}
    for beams in (1, 3):
        expected = reference.generate(**common, num_beams=beams, length_penalty=1.0, early_stopping=False)
        if beams == 1:
            actual = greedy(step, prompt, model.decoder.new_cache(), **options)
        else:
            actual = beam_search(step, prompt, model.decoder.new_cache(), beams=beams, early_stopping=False,
                         length_penalty=per_token(1.0), **options)  # fmt: skip
        for row, ids in zip(expected[:, 1:].tolist(), actual.ids, strict=True):
            assert ids == (row[: row.index(eos)] if eos in row else row[: len(ids)]), beams


def test_embeddings_that_should_repeat_one_another_are_compared():
    for name, table in (("Hugging Face T5", "encoder"), ("Hugging Face M2M100", "model.decoder")):
        tensors = case(name).tensors
        tensors[f"{table}.embed_tokens.weight"] = tensors[f"{table}.embed_tokens.weight"] + 1
        with pytest.raises(CheckpointError, match=f"^file: tensor '{table}.embed_tokens.weight' differs from"):
            load(name, tensors)


@pytest.mark.parametrize(
    ("name", "change", "cause"),
    [
        ("Hugging Face T5", {"dense_act_fn": "mish"}, "dense_act_fn 'mish'"),
        ("Hugging Face T5", {"is_gated_act": 1}, "is_gated_act 1"),
        ("Hugging Face T5", {"decoder_start_token_id": 60}, "decoder_start_token_id 60"),
        ("Hugging Face T5 v1.1", {"scale_decoder_outputs": True}, "differs from the embedding"),
        ("Hugging Face BART", {"activation_function": "mish"}, "activation_function 'mish'"),
        ("Hugging Face BART", {"encoder_attention_heads": 5}, "not divisible"),
        ("Hugging Face BART", {"max_position_embeddings": 23}, "embed_positions.weight' has shape"),
        ("Hugging Face M2M100", {"decoder_layers": 3}, "is missing"),
        ("Hugging Face M2M100", {"decoder_start_token_id": "x"}, "decoder_start_token_id 'x'"),
        ("Hugging Face M2M100", {"d_model": 15}, "d_model 15 must be even"),
        ("Hugging Face M2M100", {"pad_token_id": None}, "pad_token_id None"),
    ],
)
def test_configurations_that_do_not_fit_are_refused_in_one_line(name, change, cause):
    made = case(name)
    with pytest.raises(CheckpointError, match=f"^file: .*{cause}") as error:
        made.family.load(made.tensors, made.config | change, "file")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["Hugging Face T5", "Hugging Face T5 v1.1"])
def test_t5_configurations_of_transformers_4_mean_the_same(name):
    """They have `tie_word_embeddings` and `feed_forward_proj` alone."""
    made = case(name)
    old = made.config | {"tie_word_embeddings": name == "Hugging Face T5"}
    for key in ("scale_decoder_outputs", "dense_act_fn", "is_gated_act"):
        del old[key]
    assert made.family.load(made.tensors, old, "file").model.config == load(name).config
    with pytest.raises(CheckpointError, match="feed_forward_proj 'gated-mish'"):
        made.family.load(made.tensors, old | {"feed_forward_proj": "gated-mish"}, "file")


@pytest.mark.parametrize(
    ("name", "change"),
    [("Hugging Face BART", {}), ("Hugging Face mBART", {}), ("Hugging Face mBART", {"bos_token_id": 5}),
     ("Hugging Face M2M100", {"decoder_start_token_id": None}), ("Hugging Face T5", {"bos_token_id": 5})],
)  # fmt: skip
@torch.no_grad()
def test_texts_begin_as_in_generate_where_a_configuration_leaves_it_out(name, change):
    from transformers import GenerationConfig

    made = case(name)
    config = {key: value for key, value in made.config.items() if key != "decoder_start_token_id"} | change
    reference = copy.copy(made.reference)
    reference.config = type(made.reference.config)(**config)
    reference.generation_config = GenerationConfig.from_model_config(reference.config)
    told = reference.generate(torch.tensor([[4, 5, 6]]), max_new_tokens=1, do_sample=False)[0, 0]
    assert made.family.load(made.tensors, config, "file").model.config.start_id == told


@pytest.mark.parametrize("name", ["Hugging Face T5", "Hugging Face M2M100"])
def test_without_a_configuration_they_are_refused(name):
    made = case(name)
    with pytest.raises(CheckpointError, match=r"^file: t?.* weights without config\.json"):
        made.family.load(made.tensors, {}, "file")


def test_static_positions_in_a_marian_file_must_be_the_sinusoids():
    made = case("Hugging Face Marian")
    without = {key: value for key, value in made.tensors.items() if "embed_positions" not in key}
    assert max(differences("Hugging Face Marian", load("Hugging Face Marian", without)).values()) <= TOLERANCE
    key = "model.decoder.embed_positions.weight"
    with pytest.raises(CheckpointError, match=re.escape(f"file: tensor {key!r} does not hold sinusoidal positions")):
        load("Hugging Face Marian", made.tensors | {key: made.tensors[key].flip(0)})


def test_the_original_transformer_equals_torch_s_layers():
    """Post-norm, no norm at the end, interleaved sinusoids, embeddings times √D that also give the logits (Vaswani et
    al. 2017, sections 3.1 to 3.5)."""
    width, heads, own = 16, 4, AttentionConfig(16, 4)
    block = BlockConfig(own, 40, "relu", post_norm=True)
    common = {"positions": PositionConfig("sinusoidal", interleaved=True), "embed_scale": width**0.5}
    encoder = TextConfig(0, CONTEXT, StackConfig(block, 2, final_norm=False), False, **common)
    crossing = BlockConfig(own, 40, "relu", post_norm=True, cross=own)
    decoder = TextConfig(VOCABULARY, CONTEXT, StackConfig(crossing, 2, final_norm=False), True, True, **common)
    model = randomized(EncoderDecoder(EncoderDecoderConfig(encoder, decoder, start_id=2)))
    (source, valid), (ids, real) = padded(LENGTHS, None, 5), padded(ANSWERS, 2, 6)

    below, above = [], []
    for mine, kind, made in (
        (model.encoder, nn.TransformerEncoderLayer, below),
        (model.decoder, nn.TransformerDecoderLayer, above),
    ):
        for own_block in mine.stack.blocks:
            layer = kind(width, heads, 40, 0.0, batch_first=True).eval()
            layer.load_state_dict(_torch_names(own_block.state_dict()))
            made.append(layer)
    with torch.no_grad():
        table = model.decoder.embed.weight
        memory = table[source] * width**0.5 + _positions(source.shape[1], width)
        for layer in below:
            memory = layer(memory, src_key_padding_mask=~valid)
        states = table[ids] * width**0.5 + _positions(ids.shape[1], width)
        for layer in above:
            states = layer(
                states, memory, ~causal(ids.shape[1], ids.shape[1]), memory_key_padding_mask=~valid,
                tgt_key_padding_mask=~real,
            )  # fmt: skip
        difference = (model(source, ids, valid, real) - states @ table.T)[real].abs().max().item()
    record("the original Transformer", "logits", difference)
    assert difference <= TOLERANCE


def _positions(length: int, width: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i + 1) the cosine (section 3.5)."""
    table = torch.zeros(length, width, dtype=torch.float64)
    for position in range(length):
        for i in range(0, width, 2):
            angle = torch.tensor(position / 10000 ** (i / width), dtype=torch.float64)
            table[position, i], table[position, i + 1] = angle.sin(), angle.cos()
    return table.float()


def _torch_names(block: dict[str, Tensor]) -> dict[str, Tensor]:
    actual, cross = {}, any(name.startswith("cross.") for name in block)
    parts = {"attention": "self_attn"} | ({"cross": "multihead_attn"} if cross else {})
    for own, name in parts.items():
        for kind in ("weight", "bias"):
            actual[f"{name}.in_proj_{kind}"] = torch.cat(
                [block[f"{own}.{p}.{kind}"] for p in ("query", "key", "value")]
            )
            actual[f"{name}.out_proj.{kind}"] = block[f"{own}.out.{kind}"]
    norms = ["attention_branch", *(["cross_branch"] if cross else []), "feed_branch"]
    names = {"feed.up": "linear1", "feed.down": "linear2"} | {f"{n}.norm": f"norm{i}" for i, n in enumerate(norms, 1)}
    kinds = ("weight", "bias")
    return actual | {f"{name}.{kind}": block[f"{own}.{kind}"] for own, name in names.items() for kind in kinds}
