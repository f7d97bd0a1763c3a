"""Canary: parity with transformers, prompts through the command, `.nemo` archives against NeMo's decoder written
plainly."""

import io
import json
import math
import warnings

import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from multimodal import transcribe
from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam_search
from multimodal.errors import CheckpointError
from multimodal.tasks.transcribe.conformer.recognizer import RedecodingRecognizer
from multimodal.tasks.transcribe.options import options_for
from multimodal.tokens.audio.reading import read_audio
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.weights.convert import convert
from multimodal.weights.load import families, load
from multimodal.weights.speech.canary import CANARY
from multimodal.weights.speech.canary_nemo import EMBEDDING, NEMO_CANARY, POSITIONS
from tests.helpers.commands import one_line, run
from tests.helpers.data.sets import wav
from tests.helpers.parity import record
from tests.helpers.references.speech import case, check_layout, on_meta
from tests.helpers.spread import thin
from tests.weights.speech.test_parakeet import nemo, nemo_config

IDS = torch.tensor([[7, 4, 30, 12, 5], [7, 4, 9, 1, 33]])
NAMES = ["<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>", "<|pnc|>", "<|noitn|>", "<|notimestamp|>",
         "<|nodiarize|>", "<|endoftext|>", "<|en|>", "<|de|>"]  # fmt: skip


def sounds():
    features = torch.randn(2, 90, 16, generator=torch.Generator().manual_seed(2))
    features[1, 60:] = 0
    return features, torch.tensor([90, 60])


def loaded(**more):
    made = case("canary")
    return made, CANARY.load(made.tensors | more, made.config, "file").model


@pytest.mark.ci
@torch.no_grad()
def test_states_logits_steps_and_texts_are_those_of_transformers():
    made, ours = loaded()
    features, lengths = sounds()
    mask = torch.arange(90) < lengths[:, None]
    theirs = made.model(input_features=features, attention_mask=mask, decoder_input_ids=IDS)
    frames, valid, counts = ours.encode(features, lengths)
    cache = ours.decoder.new_cache()
    steps = [ours.decode(part, frames, valid, cache=cache) for part in (IDS[:, :2], *IDS[:, 2:].split(1, 1))]
    found = {
        "states": (theirs.encoder_last_hidden_state - frames)[valid].abs().max().item(),
        "logits": (theirs.logits - ours(features, lengths, IDS)).abs().max().item(),
        "cached logits": (theirs.logits - torch.cat(steps, 1)).abs().max().item(),
    }
    for output, difference in found.items():
        record("canary", output, difference)
    assert max(found.values()) <= 1e-5, found
    for row, count in enumerate(lengths.tolist()):
        inputs = features[row : row + 1, :count], lengths[row : row + 1]
        alone, _, _ = ours.encode(*inputs)
        assert (alone[0] - frames[row, : counts[row]]).abs().max() <= 1e-5
        step, prompt = sampling.cross_attention_step(ours.decode, alone), IDS[row : row + 1, :2]
        for beams in (1, 3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                text = made.model.generate(inputs[0], decoder_input_ids=prompt, max_new_tokens=12, num_beams=beams,
                                           do_sample=False)[0].tolist()  # fmt: skip
            options = {"eos": 3, "max_new": 12}
            if beams == 1:
                mine = sampling.greedy(step, prompt, ours.decoder.new_cache(), **options)
            else:
                mine = beam_search(step, prompt, ours.decoder.new_cache(), beams=beams, **options)
            assert mine.ids[0] == [token for token in text[2:] if token not in (2, 3)]


@pytest.mark.parametrize("name", ["model.encoder.layers.1.norm_out.weight", "model.decoder.layers.1.mlp.fc1.bias"])
@torch.no_grad()
def test_one_corrupted_tensor_breaks_parity_and_export_is_exact(name):
    made, ours = loaded()
    changed = made.tensors[name].clone()
    changed[3] += 1
    other = loaded(**{name: changed})[1]
    assert (ours(*sounds(), IDS) - other(*sounds(), IDS)).abs().max() > 1e-4
    exported = CANARY.export(ours)
    assert exported.keys() == made.tensors.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in made.tensors.items())


@pytest.mark.ci
def test_the_released_configuration_fits():
    from transformers import CanaryConfig, CanaryForConditionalGeneration

    config = CanaryConfig()  # canary-1b-v2
    check_layout(CANARY, config.to_dict(), on_meta(CanaryForConditionalGeneration, config))


def folder(path, **config):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    path.mkdir()
    tensors = {name: tensor.clone() for name, tensor in case("canary").tensors.items() if name != "proj_out.weight"}
    tensors["proj_out.bias"][:13] -= 6  # letters rather than control tokens
    tensors["proj_out.bias"][10] += 6
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(case("canary").config | config))
    names = ["<unk>", "<|nospeech|>", "<pad>", *NAMES]
    letters = {f"\u2581{chr(97 + i)}": i + len(names) for i in range(40 - len(names))}
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)} | letters, [], unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens([AddedToken(name, special=True) for name in names])
    made.save(str(path / "tokenizer.json"))
    return path


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("stated", [{"hop_length": 80}, {"preemphasis": 0.0}, {"win_length": 320}])
@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_other_features_are_refused_in_both_files(file, stated, tmp_path):
    from transformers import ParakeetFeatureExtractor

    folder(tmp_path / "hub")
    extractor = ParakeetFeatureExtractor(feature_size=16, **stated).to_dict()
    content = extractor if file.startswith("pre") else {"feature_extractor": extractor}
    (tmp_path / "hub" / file).write_text(json.dumps(content))
    ((key, value),) = stated.items()
    with pytest.raises(CheckpointError, match=f"{key} must be .* .got {value}"):
        load(tmp_path / "hub")


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*the text was cut")
def test_the_command_tells_languages_and_task(tmp_path, capsys):
    made = folder(tmp_path / "hub", eos_token_id=10)
    (tmp_path / "a.wav").write_bytes(wav(1.0))
    fixed = ("transcribe", tmp_path / "a.wav", "-m", made, "--vad_filter", "False", "-o", "-", "-f", "json")
    texts = {}
    for flags in ((), ("--language", "de"), ("--language", "de", "--task", "translate"), ("--beam_size", "3"),
                  ("--task", "translate", "--target_language", "de")):  # fmt: skip
        code, out, err = run(capsys, *fixed, *flags)
        assert (code, err) == (0, "")
        texts[flags] = json.loads(out)["segments"]
        assert json.loads(out)["language"] == ("de" if flags[:1] == ("--language",) else "en")
    assert len({json.dumps(text) for text in texts.values()}) > 2
    assert texts[()] != texts["--task", "translate", "--target_language", "de"]
    for flags, cause in (
        (("--language", "fr"), "'fr': the model knows de, en"),
        (("--task", "translate", "--target_language", "fr"), "--target_language 'fr': the model knows de, en"),
        (("--target_language", "de"), "--target_language needs task translate (got 'transcribe')"),
        (("--word_timestamps", "True"), f"--word_timestamps needs times of words, which {made} does not give"),
        (("--max_line_width", "20"), f"--max_line_width needs times of words, which {made} does not give"),
        (("--lm", "asr-lm-en"), f"--lm needs a CTC model or a transducer (got {made})"),
    ):
        code, _, err = run(capsys, *fixed, *flags)
        assert code == 1
        assert cause in one_line(err)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*the text was cut")
def test_partials_are_in_the_language_asked_for(tmp_path):
    checkpoint, wave = load(folder(tmp_path / "hub")), read_audio(wav(1.0))
    finals = set()
    for asked in ({}, {"language": "de"}, {"language": "de", "task": "translate"}):
        options = options_for(checkpoint, asked | {"beam_size": 3})
        greedy = RedecodingRecognizer(checkpoint, options.replace(beam_size=1)).final(wave)
        assert RedecodingRecognizer(checkpoint, options).partial(wave) == greedy
        finals.add(greedy.avg_logprob)
    assert len(finals) == 3


@pytest.mark.ci
@pytest.mark.parametrize("beams", [1, 3])
def test_log_probabilities_of_tokens_sum_up_to_the_texts(beams, tmp_path):
    with pytest.warns(UserWarning, match="the text was cut"):  # so that no end adds its own
        found = transcribe(wav(1.0), load(folder(tmp_path / "hub")), vad_filter=False, beam_size=beams,
                           no_speech_threshold=None, token_logprobs=True)  # fmt: skip
    (segment,) = found["segments"]
    assert len(segment["token_logprobs"]) == len(segment["tokens"])
    mean = sum(segment["token_logprobs"]) / (len(segment["tokens"]) + 1)
    assert mean == pytest.approx(segment["avg_logprob"], abs=1e-5)


def plain(tensors, ids, frames, heads):
    """NeMo's TransformerEmbedding, TransformerDecoder (pre_ln) and TokenClassifier (nemo/collections/asr/modules/
    transformer), in its names."""
    width, d = len(tensors[EMBEDDING][0]), "transf_decoder._decoder."

    def linear(name, x):
        return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def norm(name, x):
        return F.layer_norm(x, (width,), tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def attend(name, x, source, causal):
        query, key, value = (linear(f"{name}.{part}_net", one).unflatten(-1, (heads, -1)).transpose(0, 1)
                             for part, one in (("query", x), ("key", source), ("value", source)))  # fmt: skip
        scores = query @ key.mT / math.sqrt(width // heads)
        scores = scores + (torch.full((len(x), len(x)), -1e9).triu(1) if causal else 0)
        return linear(f"{name}.out_projection", (scores.softmax(-1) @ value).transpose(0, 1).flatten(1))

    x = norm("transf_decoder._embedding.layer_norm", tensors[EMBEDDING][ids] + tensors[POSITIONS][: len(ids)])
    source = linear("encoder_decoder_proj", frames)
    for layer in range(2):
        own = f"{d}layers.{layer}."
        normed = norm(f"{own}layer_norm_1", x)
        x = x + attend(f"{own}first_sub_layer", normed, normed, True)
        x = x + attend(f"{own}second_sub_layer", norm(f"{own}layer_norm_2", x), source, False)
        x = x + linear(f"{own}third_sub_layer.dense_out",
                       linear(f"{own}third_sub_layer.dense_in", norm(f"{own}layer_norm_3", x)).relu())  # fmt: skip
    return linear("log_softmax.mlp.layer0", norm(f"{d}final_layer_norm", x))


def pieces(control, text):
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text] * 20), model_writer=made, vocab_size=len(control) + 11, model_type="bpe",
        bos_id=-1, eos_id=-1, pad_id=-1, unk_id=0, user_defined_symbols=control, minloglevel=2,
    )  # fmt: skip
    return made.getvalue()


@pytest.mark.ci
@torch.no_grad()
def test_archives_of_nemo_hold_the_same_model_and_several_vocabularies(tmp_path):
    config = nemo_config("parakeet-ctc") | {
        "transf_decoder": {"config_dict": {"num_layers": 2, "inner_size": 48, "num_attention_heads": 4,
                                           "hidden_size": 24, "max_sequence_length": 64, "pre_ln": True}},
        "tokenizer": {"type": "agg", "langs": {"spl_tokens": {"model_path": "nemo:0a1b_tokenizer.model"},
                                               "en": {"model_path": "nemo:2c_tokenizer.model"}}},
    }  # fmt: skip
    config["encoder"]["xscaling"] = False
    parts = pieces(["<pad>", *NAMES], "ab ba abc cab"), pieces([], "ab ba abc cab")
    size = len(NAMES) + 12 + 11 + 3
    generator = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randn(shape, generator=generator) * 0.3

    encoder = {name: tensor for name, tensor in families()["nemo-ctc"].export(
        families()["parakeet-ctc"].load(case("parakeet-ctc").tensors, case("parakeet-ctc").config, "file").model
    ).items() if name.startswith("encoder.")}  # fmt: skip
    rates = 10000 ** (-torch.arange(0, 24, 2) / 24) * torch.arange(64)[:, None]
    tensors = encoder | {EMBEDDING: noise(size, 24), POSITIONS: torch.stack(
        [rates.sin(), rates.cos()], -1).flatten(1) / 24**0.5}  # fmt: skip
    layers = {f"layers.{i}.{sub}.{part}": (24, 24) for i in range(2) for sub in ("first_sub_layer", "second_sub_layer")
              for part in ("query_net", "key_net", "value_net", "out_projection")}  # fmt: skip
    layers |= {f"layers.{i}.third_sub_layer.dense_{way}": shape for i in range(2)
               for way, shape in (("in", (48, 24)), ("out", (24, 48)))}  # fmt: skip
    norms = ["_embedding.layer_norm", "_decoder.final_layer_norm",
             *(f"_decoder.layers.{i}.layer_norm_{n}" for i in range(2) for n in (1, 2, 3))]  # fmt: skip
    for name, shape in layers.items():
        tensors |= {f"transf_decoder._decoder.{name}.weight": noise(*shape),
                    f"transf_decoder._decoder.{name}.bias": noise(shape[0])}  # fmt: skip
    for name in norms:
        tensors |= {f"transf_decoder.{name}.weight": 1 + noise(24), f"transf_decoder.{name}.bias": noise(24)}
    tensors |= {"log_softmax.mlp.layer0.weight": tensors[EMBEDDING].clone(), "log_softmax.mlp.layer0.bias": noise(size),
                "encoder_decoder_proj.weight": noise(24, 32), "encoder_decoder_proj.bias": noise(24)}  # fmt: skip
    path = nemo(tmp_path / "canary.nemo", config, tensors, parts[0], **{"./2c_tokenizer.model": parts[1]})
    made = convert(path, tmp_path / "made")
    frames, _, counts = made.model.encode(*sounds())
    states, _ = made.model.encoder(*sounds())
    for row, ids in enumerate(IDS):
        expected = plain(tensors, ids, states[row, : counts[row]], 4)
        actual = made.model.decode(ids[None], frames[row : row + 1, : counts[row]])[0]
        record("canary of NeMo (its decoder written plainly)", "logits", float((actual - expected).abs().max()))
        assert (actual - expected).abs().max() <= 1e-5
    exported = NEMO_CANARY.export(made.model)
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in tensors.items() if name != POSITIONS)
    assert (exported[POSITIONS] - tensors[POSITIONS]).abs().max() <= 1e-6
    tokenizer = tokenizer_from(tmp_path / "made")
    ids = tokenizer.encode("abc <|en|> cab")
    assert not tokenizer.control & set(ids)
    assert min(ids) >= len(NAMES) + 12
    assert "abc" in tokenizer.decode(ids)
    assert "cab" in tokenizer.decode(ids)
    assert tokenizer.eos_id == made.model.config.end_id == tokenizer.control_names["<|endoftext|>"]
    wrong = tensors | {POSITIONS: tensors[POSITIONS].flip(1)}
    with pytest.raises(CheckpointError, match="pos_enc"):
        convert(
            nemo(tmp_path / "b.nemo", config, wrong, parts[0], **{"./2c_tokenizer.model": parts[1]}), tmp_path / "b"
        )
    assert load(tmp_path / "made").kind == "canary"
