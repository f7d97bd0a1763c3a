"""Moonshine: parity with transformers, batches, the command."""

import json
import warnings
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import save_file

from multimodal import transcribe
from multimodal.errors import CheckpointError
from multimodal.tokens.audio.features import speech_features
from multimodal.weights.load import families, load
from multimodal.weights.speech.moonshine import MOONSHINE
from tests.helpers.commands import one_line, run
from tests.helpers.data.sets import wav
from tests.helpers.parity import record
from tests.helpers.references.speech import case, check_layout, on_meta
from tests.helpers.spread import thin

WAVES = [torch.randn(n, generator=torch.Generator().manual_seed(n)) * 0.3 for n in (1500, 16000, 9999)]
CLIPPED = WAVES[1].clamp(-1, 1)  # as a recording is read
IDS = torch.tensor([[1, 7, 30, 12, 5]])


def loaded(**more):
    made = case("moonshine")
    return made, MOONSHINE.load(made.tensors | more, made.config, "file").model


def test_states_logits_and_steps_are_those_of_transformers():
    made, ours = loaded()
    features, lengths = speech_features("wave", WAVES, 0)
    with torch.no_grad():
        together, _, counts = ours.encode(features, lengths)
        for row, wave in enumerate(WAVES):
            states = made.model.model.encoder(wave[None]).last_hidden_state
            alone, _, _ = ours.encode(wave[None], torch.tensor([len(wave)]))
            theirs = made.model(wave[None], decoder_input_ids=IDS).logits
            cache = ours.decoder.new_cache()
            steps = [ours.decode(part, alone, cache=cache) for part in (IDS[:, :2], *IDS[:, 2:].split(1, 1))]
            found = {
                "states": (states - alone).abs().max().item(),
                "logits": (theirs - ours.decode(IDS, alone)).abs().max().item(),
                "cached logits": (theirs - torch.cat(steps, 1)).abs().max().item(),
            }
            for output, difference in found.items():
                record("moonshine", output, difference)
            assert max(found.values()) <= 1e-5, found
            assert (together[row, : counts[row]] - alone[0]).abs().max() <= 1e-5
            assert not together[row, counts[row] :].any()
    assert ours.encode(torch.ones(1, 100), torch.tensor([100]))[2].tolist() == [1]


@pytest.mark.ci
def test_greedy_text_is_that_of_transformers():
    from multimodal.decoding import sampling

    made, ours = loaded()
    for wave in WAVES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = made.model.generate(wave[None], max_new_tokens=12, do_sample=False)[0].tolist()
        frames, _, _ = ours.encode(wave[None], torch.tensor([len(wave)]))
        step = sampling.cross_attention_step(ours.decode, frames)
        found = sampling.greedy(step, torch.tensor([[1]]), ours.decoder.new_cache(), eos=2, max_new=12)
        assert found.ids[0] == [token for token in theirs[1:] if token != 2]


@pytest.mark.parametrize("name", ["model.encoder.groupnorm.weight", "model.decoder.layers.2.mlp.fc1.bias"])
def test_one_corrupted_tensor_breaks_parity(name):
    made, ours = loaded()
    changed = made.tensors[name].clone()
    changed[3] += 1
    other = loaded(**{name: changed})[1]
    inputs = WAVES[1][None], torch.tensor([16000]), IDS
    with torch.no_grad():
        assert (ours(*inputs) - other(*inputs)).abs().max() > 1e-4


SIZES = {"tiny": (288, 1152, 6), "base": (416, 1664, 8)}


@pytest.mark.parametrize("size", SIZES)
def test_released_configurations_fit(size):
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration

    width, hidden, layers = SIZES[size]
    config = MoonshineConfig(hidden_size=width, intermediate_size=hidden, encoder_num_hidden_layers=layers,
                             decoder_num_hidden_layers=layers)  # fmt: skip
    check_layout(MOONSHINE, config.to_dict(), on_meta(MoonshineForConditionalGeneration, config))


def folder(path, **config):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path.mkdir()
    tensors = {name: tensor for name, tensor in case("moonshine").tensors.items() if name != "proj_out.weight"}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(case("moonshine").config | config))
    letters = {chr(97 + i): i + 3 for i in range(26)} | {f"\u2581{chr(97 + i)}": i + 29 for i in range(21)}
    made = Tokenizer(models.BPE({"<unk>": 0, "<s>": 1, "</s>": 2} | letters, [], unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return path


@pytest.mark.parametrize("seconds", [1, 6])
def test_a_text_has_at_most_13_tokens_a_second_and_a_cut_one_warns(seconds, tmp_path):
    wave = torch.randn(seconds * 16000, generator=torch.Generator().manual_seed(0)) * 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = case("moonshine").model.generate(wave[None], max_length=13 * seconds + 1, do_sample=False)[0].tolist()
    assert (theirs[-1] == 2) == (seconds == 6)
    cut = f"<samples>: 0.00 to {seconds}.00 seconds: the text was cut at {13 * seconds} tokens"
    with nullcontext() if theirs[-1] == 2 else pytest.warns(UserWarning, match=cut):
        ours = transcribe(wave, load(folder(tmp_path / "hub")), vad_filter=False, no_speech_threshold=None)
    assert [token for one in ours["segments"] for token in one["tokens"]] == [i for i in theirs[1:] if i != 2]


@pytest.mark.filterwarnings("ignore:.*the text was cut")
@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(("beams", "more"), [(1, {"decoder_start_token_id": 7}), (1, {}), (2, {}), (3, None)])
@pytest.mark.parametrize("stated_by", ["generation_config.json", "config.json"])
def test_a_generation_config_is_followed(beams, more, stated_by, tmp_path):
    made, wave = case("moonshine").model, WAVES[1]
    plain = made.generate(wave[None], max_length=14, do_sample=False)[0].tolist()
    asked = {"num_beams": beams, "eos_token_id": [2] if more is None else [2, plain[4]], **(more or {})}
    theirs = made.generate(wave[None], max_length=14, do_sample=False, **asked)[0].tolist()
    assert theirs != plain
    if stated_by == "config.json":
        folder(tmp_path / "hub", **asked)
    else:
        (folder(tmp_path / "hub") / stated_by).write_text(json.dumps(asked))
    ours = transcribe(wave, load(tmp_path / "hub"), vad_filter=False, no_speech_threshold=None)
    found = [token for one in ours["segments"] for token in one["tokens"]]
    assert found == [i for i in theirs[1:] if i not in asked["eos_token_id"]]


@pytest.mark.parametrize("beams", [1, 3])
@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("asked", [{"max_new_tokens": 5}, {"max_length": 8}, {"max_new_tokens": 6, "max_length": 4}])
def test_the_most_tokens_of_a_generation_config_are_followed(asked, beams, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = case("moonshine").model.generate(CLIPPED[None], do_sample=False, num_beams=beams, **asked)[0].tolist()
    (folder(tmp_path / "hub") / "generation_config.json").write_text(json.dumps(asked))
    options = {"vad_filter": False, "beam_size": beams, "compute_type": "float32"}
    cut = f"the text was cut at {len(theirs) - 1} tokens, its limit"
    with nullcontext() if theirs[-1] == 2 else pytest.warns(UserWarning, match=cut):
        ours = transcribe(CLIPPED, load(tmp_path / "hub"), **options)
    assert ours["segments"][0]["tokens"] == [i for i in theirs[1:] if i != 2]


@pytest.mark.parametrize("asked", [{"max_new_tokens": "many"}, {"max_new_tokens": 0}, {"max_length": 1}])
def test_most_tokens_that_leave_none_are_refused(asked, tmp_path):
    (folder(tmp_path / "hub") / "generation_config.json").write_text(json.dumps(asked))
    with pytest.raises(CheckpointError, match=f"generation_config.json: {next(iter(asked))} must be an integer of at"):
        transcribe(WAVES[1], load(tmp_path / "hub"))


@pytest.mark.filterwarnings("ignore:.*the text was cut")
@pytest.mark.parametrize("beams", [1, 3])
def test_log_probabilities_of_tokens_are_those_of_transformers(beams, tmp_path):
    options = {"vad_filter": False, "beam_size": beams, "compute_type": "float32", "token_logprobs": True}
    (segment,) = transcribe(CLIPPED, load(folder(tmp_path / "hub")), **options)["segments"]
    ids = torch.tensor([[1, *segment["tokens"]]])
    with torch.no_grad():
        theirs = case("moonshine").model(CLIPPED[None], decoder_input_ids=ids).logits.log_softmax(-1)
    expected = theirs[:, :-1].gather(2, ids[:, 1:, None]).flatten()
    assert (torch.tensor(segment["token_logprobs"]) - expected).abs().max() <= 1e-5


@pytest.mark.filterwarnings("ignore:.*the text was cut")
@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("asked", [{"suppress_tokens": [5]}, {"repetition_penalty": 2.0}, {"no_repeat_ngram_size": 2}])
def test_what_a_generation_config_asks_for_besides_is_named(asked, tmp_path):
    (folder(tmp_path / "hub") / "generation_config.json").write_text(json.dumps({"max_length": 194} | asked))
    with pytest.warns(UserWarning, match=f"asks for {next(iter(asked))} .*, which is not followed"):
        transcribe(WAVES[1], load(tmp_path / "hub"), vad_filter=False)


@pytest.mark.filterwarnings("ignore:.*the text was cut")
@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("compute", ["float32", "int8", "bfloat16"])
def test_command_transcribes_in_segments(compute, tmp_path, capsys):
    made = folder(tmp_path / "hub")
    assert families()["moonshine"].recognizes(case("moonshine").tensors, {})
    (tmp_path / "a.wav").write_bytes(wav(1.0))
    for beams in ("1", "3"):
        code, out, err = run(capsys, "transcribe", tmp_path / "a.wav", "-m", made, "--beam_size", beams, "--vad_filter",
                             "False", "--compute_type", compute, "-o", "-", "-f", "srt")  # fmt: skip
        assert (code, err) == (0, "")
        assert "-->" in out
    code, _, err = run(capsys, "transcribe", tmp_path / "a.wav", "-m", made, "--word_timestamps", "True", "-o", "-")
    assert code == 1
    assert "word_timestamps" in one_line(err)


def test_unfit_settings_are_one_line(tmp_path):
    cases = {"attention_bias": True, "encoder_num_key_value_heads": 1, "decoder_hidden_act": "relu",
             "decoder_start_token_id": 50}  # fmt: skip
    for number, change in enumerate({name: value} for name, value in cases.items()):
        with pytest.raises(CheckpointError, match=f"{next(iter(change))}|start_id 50 is outside 50 tokens") as error:
            load(folder(tmp_path / str(number), **change))
        assert "\n" not in str(error.value)
