"""Parity of Whisper and torchaudio's Conformer with the original libraries."""

import json
from dataclasses import replace

import pytest
import torch

from multimodal.errors import CheckpointError
from multimodal.models.conformer import ConformerEncoder
from multimodal.tasks.transcribe.options import options_for
from multimodal.tasks.transcribe.transcribe import Transcriber
from multimodal.weights.speech.conformer_torchaudio import CONFORMER
from multimodal.weights.speech.whisper import WHISPER_HF, WHISPER_OPENAI
from multimodal.weights.speech.whisper_vocabulary import released_tokenizer
from tests.helpers.parity import record
from tests.helpers.references.speech import check_layout, on_meta
from tests.helpers.spread import thin
from tests.helpers.tiny_whisper import whispers

DIMS = {
    "n_mels": 8, "n_audio_ctx": 20, "n_audio_state": 32, "n_audio_head": 2, "n_audio_layer": 2,
    "n_vocab": 100, "n_text_ctx": 16, "n_text_state": 32, "n_text_head": 4, "n_text_layer": 2,
}  # fmt: skip
MEL = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[3, 14, 15, 92, 6, 5], [35, 8, 9, 7, 93, 2]])
CONFORMER_CONFIG = {"num_heads": 4, "convolution_first": False}


def randomized(model):
    """Every weight random, norms and buffers too, so that a swapped or forgotten tensor shows. Nothing is kept
    of what was there, since openai-whisper leaves its position table uninitialized."""
    torch.manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn_like(tensor) * 0.15
            gain = tensor.ndim == 1 and name.endswith("weight")
            tensor.copy_(noise.abs() + 0.5 if name.endswith("running_var") else noise + gain)
    return model.eval()


@pytest.fixture(scope="module")
def openai():
    from whisper.model import ModelDimensions, Whisper

    with torch.no_grad():
        return randomized(Whisper(ModelDimensions(**DIMS)))


@pytest.fixture(scope="module")
def hf():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=100, num_mel_bins=8, encoder_layers=2, encoder_attention_heads=2, decoder_layers=3,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=64, d_model=32, max_source_positions=20,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    with torch.no_grad():
        return randomized(WhisperForConditionalGeneration(config))


def conformer(group_norm=False, conv_first=False):
    from torchaudio.models import Conformer

    model = Conformer(32, 4, 48, 2, 7, use_group_norm=group_norm, convolution_first=conv_first)
    with torch.no_grad():
        return randomized(model)


def tensors(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def whisper_reference(model, mel, ids):
    """(features, logits, logits of cached decoding) of openai-whisper."""
    with torch.no_grad():
        features = model.encoder(mel)
        logits = model.decoder(ids, features)
        cache, hooks = model.install_kv_cache_hooks()
        steps = [model.decoder(part, features, kv_cache=cache) for part in (ids[:, :3], *ids[:, 3:].split(1, 1))]
        for hook in hooks:
            hook.remove()
    return features, logits, torch.cat(steps, 1)


def hf_reference(model, mel, ids):
    with torch.no_grad():
        features = model.model.encoder(mel).last_hidden_state
        logits = model(encoder_outputs=(features,), decoder_input_ids=ids).logits
        steps, past = [], None
        for part in (ids[:, :3], *ids[:, 3:].split(1, 1)):
            out = model(encoder_outputs=(features,), decoder_input_ids=part, past_key_values=past, use_cache=True)
            steps.append(out.logits)
            past = out.past_key_values
    return features, logits, torch.cat(steps, 1)


def ours_of(model, mel, ids):
    with torch.no_grad():
        features = model.encoder(mel)
        cache = model.decoder.new_cache()
        steps = [model.decoder(part, features, cache=cache) for part in (ids[:, :3], *ids[:, 3:].split(1, 1))]
        return features, model(mel, ids), torch.cat(steps, 1)


def differences(ours, reference):
    return [(a - b).abs().max().item() for a, b in zip(ours, reference, strict=True)]


def check_whisper(family, foreign, reference, config):
    ours = ours_of(family.load(foreign, config, "tiny").model, MEL, IDS)
    actual = differences(ours, reference)
    for output, difference in zip(("features", "logits", "cached logits"), actual, strict=True):
        record(family.name, output, difference)
    assert all(difference <= 1e-5 for difference in actual), actual
    assert (ours[1] - ours[2]).abs().max() <= 1e-4  # cache against the full forward


def test_whisper_openai_parity(openai):
    check_whisper(WHISPER_OPENAI, tensors(openai), whisper_reference(openai, MEL, IDS), {"dims": DIMS})


def test_whisper_hf_parity(hf):
    check_whisper(WHISPER_HF, tensors(hf), hf_reference(hf, MEL, IDS), hf.config.to_dict())


# width, heads, layers of both stacks, bands, vocabulary: config.json of the repositories
RELEASED = {
    "openai/whisper-large-v3-turbo": (1280, 20, 32, 4, 128, 51866),
    "distil-whisper/distil-large-v3": (1280, 20, 32, 2, 128, 51866),
    "distil-whisper/distil-medium.en": (1024, 16, 24, 2, 80, 51864),
    "distil-whisper/distil-small.en": (768, 12, 12, 4, 80, 51864),
}


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("name", RELEASED)
def test_released_whispers_fit(name):
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    width, heads, encoder, decoder, bands, vocabulary = RELEASED[name]
    config = WhisperConfig(
        d_model=width, encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_layers=encoder,
        decoder_layers=decoder, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, num_mel_bins=bands,
        vocab_size=vocabulary,
    )  # fmt: skip
    check_layout(WHISPER_HF, config.to_dict(), on_meta(WhisperForConditionalGeneration, config))
    assert WHISPER_HF.tokenizer(None, config.to_dict()).vocab_size == vocabulary


def test_whisper_hf_untied_head(hf):
    foreign, config = tensors(hf), hf.config.to_dict() | {"tie_word_embeddings": False}
    foreign["proj_out.weight"] = foreign["proj_out.weight"] * -1
    ours = ours_of(WHISPER_HF.load(foreign, config, "tiny").model, MEL, IDS)
    tied = hf_reference(hf, MEL, IDS)
    assert (ours[1] + tied[1]).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["decoder.blocks.1.cross_attn.value.weight", "encoder.blocks.0.attn_ln.bias"])
def test_one_corrupted_tensor_breaks_whisper_parity(openai, name):
    foreign = tensors(openai)
    foreign[name].view(-1)[0] += 0.5
    ours = ours_of(WHISPER_OPENAI.load(foreign, {"dims": DIMS}, "tiny").model, MEL, IDS)
    assert differences(ours, whisper_reference(openai, MEL, IDS))[1] > 1e-4


@pytest.mark.parametrize("group_norm", [False, True])
@pytest.mark.parametrize("conv_first", [False, True])
def test_conformer_parity(group_norm, conv_first):
    reference = conformer(group_norm, conv_first)
    family_config = CONFORMER_CONFIG | {"convolution_first": conv_first}
    model = CONFORMER.load(tensors(reference), family_config, "tiny").model
    for frames in (1, 5, 40):  # alone: with padding torchaudio's own results depend on the junk in it
        x, length = torch.randn(1, frames, 32), torch.tensor([frames])
        with torch.no_grad():
            difference = (model(x, length)[0] - reference(x, length)[0]).abs().max().item()
        record("conformer-torchaudio", "features", difference)
        assert difference <= 1e-5


def test_one_corrupted_tensor_breaks_conformer_parity():
    reference, x, length = conformer(), torch.randn(1, 12, 32), torch.tensor([12])
    foreign = tensors(reference)
    foreign["conformer_layers.1.conv_module.sequential.3.running_mean"][3] += 0.5
    with torch.no_grad():
        ours = CONFORMER.load(foreign, CONFORMER_CONFIG, "tiny").model(x, length)[0]
        assert (ours - reference(x, length)[0]).abs().max() > 1e-4


def assert_round_trip(family, foreign, config):
    back = family.export(family.load(foreign, config, "tiny").model)
    assert back.keys() == foreign.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in foreign.items())


def test_export_round_trips(openai, hf):
    assert_round_trip(WHISPER_OPENAI, tensors(openai), {"dims": DIMS})
    assert_round_trip(WHISPER_HF, tensors(hf), hf.config.to_dict())
    for group_norm in (False, True):
        assert_round_trip(CONFORMER, tensors(conformer(group_norm)), CONFORMER_CONFIG)


def test_hf_file_without_the_repeated_head(hf):
    foreign = tensors(hf)
    head = foreign.pop("proj_out.weight")
    back = WHISPER_HF.export(WHISPER_HF.load(foreign, hf.config.to_dict(), "tiny").model)
    assert torch.equal(back["proj_out.weight"], head)


CASES = {
    "openai": (WHISPER_OPENAI, "decoder.blocks.1.mlp.2.bias", {"dims": DIMS}),
    "hf": (WHISPER_HF, "model.encoder.layers.1.fc1.bias", None),
    "conformer": (CONFORMER, "conformer_layers.1.ffn2.sequential.4.bias", CONFORMER_CONFIG),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fault", ["missing", "extra", "misshapen"])
def test_faulty_tensors_are_named(openai, hf, case, fault):
    family, name, config = CASES[case]
    foreign = tensors({"openai": openai, "hf": hf}.get(case) or conformer())
    if fault == "missing":
        del foreign[name]
    elif fault == "extra":
        name = name.replace("bias", "bios")
        foreign[name] = torch.zeros(3)
    else:
        foreign[name] = torch.zeros(3)
    # a missing or misshapen tensor is named as ours; the layer and the kind identify it
    expected = name if fault == "extra" else "1.*bias"
    with pytest.raises(CheckpointError, match=f"tiny: .*tensor .*{expected}"):
        family.load(foreign, config or hf.config.to_dict(), "tiny")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "dims"),
        ({"dims": {k: v for k, v in DIMS.items() if k != "n_text_head"}}, "n_text_head"),
        ({"dims": DIMS | {"n_experts": 2}}, "n_experts"),
        ({"dims": DIMS | {"n_vocab": "100"}}, "n_vocab"),
        ({"dims": DIMS, "rope": True}, "rope"),
    ],
)
def test_whisper_without_its_sizes_is_refused(openai, config, message):
    with pytest.raises(CheckpointError, match=message):
        WHISPER_OPENAI.load(tensors(openai), config, "tiny")


@pytest.mark.parametrize("change", [{"activation_function": "relu"}, {"scale_embedding": True}])
def test_hf_settings_that_change_the_result_are_refused(hf, change):
    with pytest.raises(CheckpointError, match=next(iter(change))):
        WHISPER_HF.load(tensors(hf), hf.config.to_dict() | change, "tiny")


def test_heads_for_word_times_come_from_the_folder(hf, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"alignment_heads": [[1, 0]], "max_length": 448}')
    config = hf.config.to_dict()
    assert WHISPER_HF.load(tensors(hf), config, "tiny", tmp_path).card["alignment_heads"] == [[1, 0]]
    assert "alignment_heads" not in WHISPER_HF.load(tensors(hf), config, "tiny").card


@pytest.mark.parametrize(
    ("told", "asked"),
    [
        ({"language": "hindi", "suppress_tokens": []}, {"language": "hindi", "suppress_tokens": []}),
        ({"language": "<|de|>", "begin_suppress_tokens": []}, {"language": "de", "suppress_blank": False}),
        ({"forced_decoder_ids": [[1, 50261], [2, 50358]]}, {"language": "de", "task": "translate"}),
        ({"language": "de", "max_initial_timestamp_index": 5}, {"language": "de", "max_initial_timestamp": 0.1}),
        ({"language": "de", "logprob_threshold": -0.5}, {"language": "de", "logprob_threshold": -0.5}),
        ({"condition_on_prev_tokens": False}, {"condition_on_previous_text": False}),
        ({"task": "transcribe", "forced_decoder_ids": [[1, 50261], [2, 50359]]}, None),  # ignored beside a task
        ({"max_initial_timestamp_index": 50}, None),
        ({"max_initial_timestamp_index": 1, "begin_suppress_tokens": [50257, 220]}, None),
        ({"forced_decoder_ids": [[1, None], [2, 50359]], "begin_suppress_tokens": [220, 50257]}, None),
    ],
)
def test_what_a_fine_tuned_whisper_asks_for_is_its_default(told, asked, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(told))
    card = WHISPER_HF.card(tmp_path, {"vocab_size": 51865})
    assert card.get("transcribe") == asked
    if asked:
        options = options_for(replace(whispers()[1], card=card), {})
        assert options.language == {"hindi": "hi", "de": "de", None: None}[asked.get("language")]
        assert options.logprob_threshold == asked.get("logprob_threshold", -1)


def test_search_of_a_whisper_s_generation_config_is_followed_or_named(tmp_path):
    def options(*known, **told):
        (tmp_path / "generation_config.json").write_text(json.dumps({"max_length": 448, **told}))
        card = WHISPER_HF.card(tmp_path, {"vocab_size": 51865})
        return options_for(replace(whispers()[1], card=card), dict(known))

    assert options().beam_size is None
    assert options(num_beams=3).beam_size == 3
    assert options(("beam_size", 2), num_beams=3).beam_size == 2
    for told in ({"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 3}, {"length_penalty": 0.5}):
        assert options(**told).length_penalty is None
        checkpoint = replace(whispers()[1], card=WHISPER_HF.card(tmp_path, {"vocab_size": 51865}))
        with pytest.warns(UserWarning, match=f"asks for {next(iter(told))} .* not followed") as found:
            Transcriber(checkpoint)
        assert len(found) == 1


def test_suppressed_tokens_of_an_old_whisper_stand_in_its_configuration(tmp_path):
    config = {"vocab_size": 51865, "suppress_tokens": [5, 7], "begin_suppress_tokens": []}
    asked = {"suppress_tokens": [5, 7], "suppress_blank": False}
    assert WHISPER_HF.card(tmp_path, config | {"forced_decoder_ids": [[1, 50261]]}) == {"transcribe": asked}
    with pytest.raises(CheckpointError, match=r"^config\.json: begin_suppress_tokens must be .* \(got \[3\]\)"):
        WHISPER_HF.card(tmp_path, config | {"begin_suppress_tokens": [3]})
    (tmp_path / "generation_config.json").write_text('{"max_length": 448}')
    assert "transcribe" not in WHISPER_HF.card(tmp_path, config)


@pytest.mark.parametrize(
    "told",
    [{"begin_suppress_tokens": [220, 50257, 50384]}, {"begin_suppress_tokens": 220}, {"begin_suppress_tokens": [[]]},
     *({"max_initial_timestamp_index": latest} for latest in (0, "5", [])), {"is_multilingual": False}],
)  # fmt: skip
def test_rules_of_a_whisper_without_an_option_are_refused(told, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=rf"^generation_config\.json: {next(iter(told))} must be .* \(got "):
        WHISPER_HF.card(tmp_path, {"vocab_size": 51865})


def test_the_released_list_of_suppressed_tokens_is_ours(tmp_path):
    t = released_tokenizer(51865)
    never = sorted([*t.non_speech_tokens(), t.transcribe, t.translate, t.sot, t.sot_prev, t.sot_lm, t.no_speech])
    (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": never}))
    assert WHISPER_HF.card(tmp_path, {"vocab_size": 51865}) == {}


@pytest.mark.parametrize("change", [{"n_fft": 512}, {"hop_length": 80}, {"sampling_rate": 8000}, {"feature_size": 9},
                                    {"dither": 1e-4}, {"padding_value": 1.0}, {"padding_side": "left"}])  # fmt: skip
def test_other_spectrograms_are_refused(hf, change, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(change))
    (name, got), *_ = change.items()
    with pytest.raises(CheckpointError, match=rf"preprocessor_config\.json: {name} must be .* \(got {got!r}\)"):
        WHISPER_HF.load(tensors(hf), hf.config.to_dict(), "tiny", tmp_path)


def test_hf_head_that_is_no_repeat_is_refused(hf):
    foreign = tensors(hf)
    foreign["proj_out.weight"][0, 0] += 1
    with pytest.raises(CheckpointError, match=r"proj_out\.weight"):
        WHISPER_HF.load(foreign, hf.config.to_dict(), "tiny")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "num_heads"),
        ({"num_heads": 4}, "convolution_first"),
        ({"num_heads": 5, "convolution_first": False}, "must divide the width"),
        ({"num_heads": True, "convolution_first": False}, "num_heads"),
        (CONFORMER_CONFIG | {"num_group": 1}, "num_group"),
    ],
)
def test_conformer_settings_that_leave_no_trace_must_be_given(config, message):
    with pytest.raises(CheckpointError, match=message):
        CONFORMER.load(tensors(conformer()), config, "tiny")


def test_families_are_told_apart(openai, hf):
    files = [tensors(openai), tensors(hf), tensors(conformer())]
    actual = [[family.recognizes(file, {}) for file in files] for family in (WHISPER_OPENAI, WHISPER_HF, CONFORMER)]
    assert torch.tensor(actual).equal(torch.eye(3, dtype=torch.bool))
    assert not WHISPER_HF.recognizes(files[1], {"model_type": "bart"})


@pytest.mark.parametrize(("size", "languages"), [(51864, 99), (51865, 99), (51866, 100)])
def test_tokenizer_follows_from_the_vocabulary_size(size, languages):
    tokenizer = WHISPER_OPENAI.tokenizer(None, {"dims": DIMS | {"n_vocab": size}})
    assert tokenizer.vocab_size == size
    assert tokenizer.multilingual == (size > 51864)
    assert len(tokenizer.languages) == languages
    assert WHISPER_HF.tokenizer(None, {"vocab_size": 100}) is None


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("norm", ["layer", "batch", "group"])
@pytest.mark.parametrize("junk", [float("nan"), 1e3])
def test_conformer_batched_equals_alone(norm, junk):
    from dataclasses import replace

    config = CONFORMER.load(tensors(conformer()), CONFORMER_CONFIG, "tiny").model.config
    with torch.no_grad():
        model = randomized(ConformerEncoder(replace(config, block=replace(config.block, conv_norm=norm))))
    lengths = torch.tensor([3, 17, 25])
    batch = torch.randn(3, 25, 32)
    padding = torch.arange(25) >= lengths[:, None]
    batch[padding] = junk * torch.randn(int(padding.sum()), 32)
    with torch.no_grad():
        together = model(batch, lengths)[0]
        for row, length in enumerate(lengths.tolist()):
            alone = model(batch[row : row + 1, :length], lengths[row : row + 1])[0][0]
            assert (together[row, :length] - alone).abs().max() <= 1e-5
            assert not together[row, length:].any()
