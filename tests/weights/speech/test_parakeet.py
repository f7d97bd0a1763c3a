"""Parakeet: parity with transformers at each stage, transducer searches against the papers' sums, `.nemo` archives."""

import io
import itertools
import json
import math
import tarfile
import warnings
from dataclasses import replace

import pytest
import sentencepiece
import torch
import yaml
from safetensors.torch import save_file

from multimodal.blocks import subsample
from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conformer import ConformerConfig
from multimodal.decoding.transducer import no_text_probability, transducer_beam, transducer_greedy
from multimodal.errors import CheckpointError
from multimodal.models.conformer import ConformerEncoderConfig
from multimodal.models.speech.transducer import PredictionConfig, Transducer, TransducerConfig
from multimodal.tokens.audio.features import speech_features
from multimodal.weights.convert import convert
from multimodal.weights.load import families, load, recognize
from multimodal.weights.speech.parakeet import PARAKEET_CTC, PARAKEET_TRANSDUCER
from multimodal.weights.speech.parakeet_nemo import NEMO_CTC, NEMO_TRANSDUCER
from tests.helpers.commands import run
from tests.helpers.data.sets import wav
from tests.helpers.parity import record
from tests.helpers.references.speech import PARAKEET, case, check_layout, on_meta, randomized
from tests.helpers.spread import thin

WAVES = [torch.randn(n, generator=torch.Generator().manual_seed(n)) * 0.1 for n in (16000, 40000, 29999)]


@pytest.fixture(scope="module")
def features():
    return speech_features("normalized", WAVES, 16)


def loaded(name):
    made = case(name)
    return made, recognize(made.tensors, made.config, "file").load(made.tensors, made.config, "file").model


def test_features_are_those_of_transformers(features):
    from transformers import ParakeetFeatureExtractor

    extract = ParakeetFeatureExtractor(feature_size=16)
    theirs = extract([wave.numpy() for wave in WAVES], sampling_rate=16000, return_tensors="pt")
    ours, lengths = features
    assert lengths.tolist() == theirs.attention_mask.sum(1).tolist()
    difference = (ours - theirs.input_features[:, : ours.shape[1]]).abs().max().item()
    record("parakeet-ctc", "features", difference)
    assert difference <= 5e-5  # of about 3, divided by a deviation
    for wave, row, length in zip(WAVES, ours, lengths, strict=True):
        alone, _ = speech_features("normalized", [wave], 16)
        assert (alone[0] - row[:length]).abs().max() <= 1e-5
    assert speech_features("normalized", [torch.ones(3)], 16)[0].isfinite().all()


@pytest.mark.parametrize("name", PARAKEET)
def test_encoder_and_heads_are_those_of_transformers(name, features):
    made, ours = loaded(name)
    x, lengths = features
    with torch.no_grad():
        frames, valid, counts = ours.encode(x, lengths)
        for row, length in enumerate(lengths.tolist()):
            alone, mask = x[row : row + 1, :length], torch.ones(1, length, dtype=torch.long)
            if "ctc" in name:
                theirs = made.model(alone, attention_mask=mask).logits
                actual = ours.ctc_logits(ours.encode(alone, lengths[row : row + 1])[0])
            else:
                theirs = made.model.get_audio_features(alone, attention_mask=mask).pooler_output
                actual = ours.encode(alone, lengths[row : row + 1])[0]
                assert (frames[row, : counts[row]] - actual[0]).abs().max() <= 1e-5
            difference = (theirs - actual).abs().max().item()
            record(made.family, "outputs", difference)
            assert difference <= 1e-5
    assert valid.sum(1).tolist() == counts.tolist()


@pytest.mark.parametrize("name", [pytest.param("parakeet-rnnt", marks=pytest.mark.ci), "parakeet-tdt"])
def test_greedy_text_is_that_of_transformers(name, features):
    made, ours = loaded(name)
    x, lengths = features
    texts = []
    for row, length in enumerate(lengths.tolist()):
        alone = x[row : row + 1, :length]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = made.model.generate(
                input_features=alone, attention_mask=torch.ones(1, length, dtype=torch.long), max_new_tokens=2000
            )
        frames = ours.encode(alone, lengths[row : row + 1])[0][0]
        path = transducer_greedy(ours, frames)
        # the frame of each output is the sum of the durations before it
        starts = (theirs.durations.cumsum(1) - theirs.durations)[0].tolist()
        outputs = list(zip(theirs.sequences[0].tolist(), starts, strict=True))[1:]
        expected = [(token, at) for token, at in outputs if token != 12 and at < len(frames)]
        assert [(token, span[0]) for token, span in zip(path.ids, path.spans, strict=True)] == expected
        texts.append(path.ids)
    assert any(texts)


@pytest.mark.parametrize("name", PARAKEET)
def test_one_corrupted_tensor_breaks_parity(name, features):
    made, ours = loaded(name)
    tensor = "encoder.layers.1.self_attn.relative_k_proj.weight"
    changed = made.tensors | {tensor: made.tensors[tensor] + 0.5 * torch.eye(32)}
    other = families()[made.family].load(changed, made.config, "file").model
    with torch.no_grad():
        assert (other.encode(*features)[0] - ours.encode(*features)[0]).abs().max() > 1e-3


def tiny_transducer(durations):
    """A transducer of two tokens, for sums over all alignments."""
    block = ConformerConfig(AttentionConfig(8, 2), 8, 3)
    encoder = ConformerEncoderConfig(8, block, 1, 1, 0)
    config = TransducerConfig(encoder, 2, PredictionConfig(4, 1), 6, "tanh", durations, most_symbols=8)
    return randomized(Transducer(config), seed=3, scale=1.0)


def text_logprob(model, frames, text):
    """log p(text), by the forward variables of Graves 2012 (equation 16) and Xu et al. 2023 (equation 4), written
    plainly: the reference of this test."""
    count, made = len(frames), model.predict(torch.tensor([[2, *text]]))[0][0]
    steps, alpha = model.config.durations, {(0, 0): 1.0}
    for at in range(count):
        for u in range(len(text) + 1):
            reached = alpha.get((at, u), 0.0)
            tokens, durations = (part.exp() for part in model.logprobs(frames[at], made[u]))
            outputs = [(2, u)] + ([(text[u], u + 1)] if u < len(text) else [])
            for token, after in outputs:
                for step, share in zip(steps, durations, strict=True) if steps else [(int(token == 2), 1.0)]:
                    if step or token != 2:
                        target = min(at + step, count), after
                        alpha[target] = alpha.get(target, 0.0) + reached * float(tokens[token] * share)
    return math.log(alpha[count, len(text)])


@pytest.mark.parametrize("durations", [(), (0, 1, 2)])
@torch.no_grad()
def test_beam_finds_the_likeliest_text_and_its_probability(durations):
    model, frames = tiny_transducer(durations), torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    texts = [text for length in range(5) for text in itertools.product(range(2), repeat=length)]
    expected = {text: text_logprob(model, frames, text) for text in texts}
    best = max(expected, key=expected.get)
    path = transducer_beam(model, frames, 60)
    assert tuple(path.ids) == best
    assert path.logprob == pytest.approx(expected[best], abs=1e-4)
    assert no_text_probability(model, frames) == pytest.approx(math.exp(expected[()]), abs=1e-5)
    # a language model that wants another text wins
    wanted = max((text for text in texts if text and text != best), key=expected.get)
    fuse = lambda ids: torch.tensor([5.0 if wanted[: len(ids) + 1] == (*ids, i) else -5.0 for i in range(2)])
    end = lambda ids: torch.tensor([0.0, 0.0, 9.0 * (ids == wanted)])  # one that knows it by its end alone
    assert [tuple(transducer_beam(model, frames, 60, *own).ids) for own in ((fuse,), (end, 2))] == [wanted] * 2


# encoder: layers, width, heads, bands; conv and feed-forward biases; scale; vocabulary; durations
RELEASED = {
    "nvidia/parakeet-ctc-1.1b": ("CTC", 42, 1024, 8, 80, True, 1025, None),
    "nvidia/parakeet-ctc-0.6b": ("CTC", 24, 1024, 8, 80, True, 1025, None),
    "nvidia/parakeet-rnnt-1.1b": ("RNNT", 42, 1024, 8, 80, True, 1025, None),
    "nvidia/parakeet-tdt-0.6b-v2": ("TDT", 24, 1024, 8, 128, False, 1025, [0, 1, 2, 3, 4]),
    "nvidia/parakeet-tdt-0.6b-v3": ("TDT", 24, 1024, 8, 128, False, 8193, [0, 1, 2, 3, 4]),
}


@thin(2, pytest.mark.slow, pytest.mark.ci)
@pytest.mark.parametrize("name", RELEASED)
def test_released_configurations_fit(name):
    import transformers

    kind, layers, width, heads, bands, biases, size, durations = RELEASED[name]
    encoder = {
        "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "num_mel_bins": bands,
        "attention_bias": biases, "convolution_bias": biases, "scale_input": biases, "intermediate_size": 4 * width,
    }  # fmt: skip
    more = {"durations": durations} if durations else {}
    blank = {"pad_token_id": size - 1} if kind == "CTC" else {"blank_token_id": size - 1}
    config = getattr(transformers, f"Parakeet{kind}Config")(encoder_config=encoder, vocab_size=size, **blank, **more)
    family = PARAKEET_CTC if kind == "CTC" else PARAKEET_TRANSDUCER
    check_layout(family, config.to_dict(), on_meta(getattr(transformers, f"ParakeetFor{kind}"), config))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A SentencePiece model of 12 pieces, and its file."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["ab ba", "abc cab"] * 20), model_writer=made, vocab_size=12, model_type="bpe",
        bos_id=-1, eos_id=-1, pad_id=-1, unk_id=0, minloglevel=2,
    )  # fmt: skip
    return made.getvalue()


def nemo_config(name):
    made = case(name)
    own = made.config["encoder_config"]
    bias = own["attention_bias"]
    config = {
        "target": "nemo.collections.asr.models.EncDecModel",
        "preprocessor": {"sample_rate": 16000, "normalize": "per_feature", "window_size": 0.025, "window": "hann",
                         "window_stride": 0.01, "features": 16, "n_fft": 512, "dither": 1e-5, "pad_to": 0},
        "encoder": {"feat_in": 16, "n_layers": 2, "d_model": 32, "subsampling": "dw_striding", "n_heads": 4,
                    "subsampling_factor": own["subsampling_factor"], "subsampling_conv_channels": 8,
                    "ff_expansion_factor": 2, "self_attention_model": "rel_pos", "att_context_size": [-1, -1],
                    "xscaling": own["scale_input"], "conv_kernel_size": 5, "use_bias": bias, "dropout": 0.1},
        "decoder": {"vocabulary": ["a"] * 12},
    }  # fmt: skip
    if "ctc" not in name:
        config |= {"joint": {"jointnet": {"activation": "relu", "joint_hidden": "${model_defaults.joint_hidden}"}},
                   "model_defaults": {"tdt_durations": made.config.get("durations")},
                   "decoding": {"greedy": {"max_symbols": 10}}}  # fmt: skip
    return config


def nemo_tensors(name):
    _, ours = loaded(name)
    tensors = (NEMO_CTC if "ctc" in name else NEMO_TRANSDUCER).export(ours)
    return tensors | {"preprocessor.featurizer.fb": torch.ones(1, 16, 257)}


def nemo(path, config, tensors, pieces, **more):
    """An archive as NeMo writes it; `more`: other members, by name."""
    weights = io.BytesIO()
    torch.save(tensors, weights)
    files = {"./model_config.yaml": yaml.safe_dump(config).encode(), "./0a1b_tokenizer.model": pieces,
             "./model_weights.ckpt": weights.getvalue()}  # fmt: skip
    with tarfile.open(path, "w") as tar:
        for name, data in [*files.items(), *more.items()]:
            member = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(data, bytes):
                member.size = len(data)
            tar.addfile(member, io.BytesIO(data) if isinstance(data, bytes) else None)
    return path


@pytest.mark.parametrize("name", ["parakeet-ctc", "parakeet-ctc without biases", "parakeet-rnnt", "parakeet-tdt"])
def test_nemo_archives_become_folders_with_the_same_weights(name, tmp_path, pieces):
    _, ours = loaded(name)
    more = {"ctc_decoder.decoder_layers.0.bias": torch.ones(3)} if "ctc" not in name else {}  # a hybrid
    path = nemo(tmp_path / "asr.nemo", nemo_config(name), nemo_tensors(name) | more, pieces)
    with pytest.raises(CheckpointError, match=r"pickled weights; run multimodal convert .*asr\.nemo FOLDER"):
        load(path)
    convert(path, tmp_path / "made")
    made = load(tmp_path / "made")
    assert made.model.config == ours.config
    assert all(torch.equal(tensor, ours.state_dict()[key]) for key, tensor in made.model.state_dict().items())
    assert made.tokenizer.decode(made.tokenizer.encode("abc cab")) == "abc cab"


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(("key", "value"), [
    ("lowfreq", 80), ("n_fft", 1024), ("highfreq", 4000), ("mag_power", 1.0), ("mel_norm", None), ("exact_pad", True),
    ("log_zero_guard_type", "clamp"), ("log_zero_guard_value", 1e-3), ("n_window_size", 320), ("n_window_stride", 80),
])  # fmt: skip
def test_other_features_of_nemo_are_refused(key, value, tmp_path, pieces):
    config = nemo_config("parakeet-ctc")
    config["preprocessor"][key] = value
    path = nemo(tmp_path / "asr.nemo", config, nemo_tensors("parakeet-ctc"), pieces)
    with pytest.raises(CheckpointError, match=f"preprocessor: {key} must be .* .got {value!r}"):
        convert(path, tmp_path / "made")


@pytest.mark.parametrize(("section", "key", "named"), [
    ("preprocessor", "window_size", r"window_size must be 0\.025 \(got 0\.02\)"),
    ("preprocessor", "features", "preprocessor has 64 features, encoder's feat_in is 16"),
    ("encoder", "subsampling", r"subsampling must be 'dw_striding' \(got 'striding'\)"),
])  # fmt: skip
def test_what_an_archive_leaves_out_is_nemos_default(section, key, named, tmp_path, pieces):
    config = nemo_config("parakeet-ctc")
    del config[section][key]
    with pytest.raises(CheckpointError, match=named):
        convert(nemo(tmp_path / "asr.nemo", config, nemo_tensors("parakeet-ctc"), pieces), tmp_path / "made")


@pytest.mark.parametrize(("greedy", "most"), [
    ({"max_symbols": 7}, 7), ({"max_symbols": None, "max_symbols_per_step": 3}, 3), ({"max_symbols": None}, 1000),
])  # fmt: skip
def test_nemos_limit_of_symbols_and_a_joint_without_dropout(greedy, most, tmp_path, pieces):
    config, tensors = nemo_config("parakeet-rnnt"), nemo_tensors("parakeet-rnnt")
    config["decoding"]["greedy"] = greedy
    config["preprocessor"] |= {"n_fft": None, "highfreq": 8000}  # are 512 and the half of the rate
    tensors = {name.replace("joint_net.2.", "joint_net.1."): one for name, one in tensors.items()}
    made = convert(nemo(tmp_path / "asr.nemo", config, tensors, pieces), tmp_path / "made").model
    assert made.config == replace(loaded("parakeet-rnnt")[1].config, most_symbols=most)


@pytest.mark.parametrize("stated", [None, {"type": "wpe"}])
def test_a_tokenizer_that_is_not_read_is_told(stated, tmp_path):
    config = nemo_config("parakeet-ctc") | ({} if stated is None else {"tokenizer": stated})
    path = nemo(tmp_path / "asr.nemo", config, nemo_tensors("parakeet-ctc"), b"", **{"./a_vocab.txt": b"a"})
    with tarfile.open(path) as whole, tarfile.open(tmp_path / "b.nemo", "w") as made:
        for member in whole:
            if not member.name.endswith("tokenizer.model"):
                made.addfile(member, whole.extractfile(member))
    with pytest.warns(UserWarning, match=f"tokenizer of type {'wpe' if stated else 'letters'} is not read"):
        assert convert(tmp_path / "b.nemo", tmp_path / "made").tokenizer is None


def test_local_attention_of_nemo_sees_its_neighbours_alone(tmp_path, pieces, features):
    config = nemo_config("parakeet-ctc")
    config["encoder"] |= {"self_attention_model": "rel_pos_local_attn", "att_context_size": [1, 1]}
    path = nemo(tmp_path / "long.nemo", config, nemo_tensors("parakeet-ctc"), pieces)
    local, whole = convert(path, tmp_path / "made").model, loaded("parakeet-ctc")[1]
    x = features[0][:1, :96].clone()  # 12 states of 2 layers with kernels of 5: 6 states on each side
    with torch.no_grad():
        first = [model.encode(x, torch.tensor([96]))[0][0, 0] for model in (local, whole)]
        x[:, 72:] += 1
        second = [model.encode(x, torch.tensor([96]))[0][0, 0] for model in (local, whole)]
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_long_sound_goes_through_the_subsampling_in_parts(monkeypatch):
    _, ours = loaded("parakeet-ctc")
    x, lengths = torch.randn(3, 203, 16, generator=torch.Generator().manual_seed(5)), torch.tensor([203, 100, 190])
    whole, counts = ours.encoder.stem(x, lengths)
    monkeypatch.setattr(subsample, "PART", 64)
    with torch.no_grad():
        parts, same = ours.encoder.stem(x, lengths)
    assert parts.shape == whole.shape
    assert torch.equal(counts, same)
    for row, count in enumerate(counts):
        assert (whole[row, :count] - parts[row, :count]).abs().max() <= 1e-5


def hub_folder(folder, name, pieces):
    """The layout of Hugging Face: weights, configuration, `tokenizer.json` with the blank after the pieces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    processor = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    vocab = {processor.id_to_piece(i): i for i in range(12)}
    merges = [(a, b) for a in vocab for b in vocab if a + b in vocab]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(["<unk>", "<blank>"])
    folder.mkdir()
    save_file(case(name).tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(case(name).config))
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>", "pad_token": "<blank>"}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": 16, "hop_length": 160}))


@pytest.mark.parametrize("name", ["parakeet-ctc", "parakeet-tdt"])
def test_command_transcribes_with_subtitles_words_and_a_language_model(name, tmp_path, capsys, pieces):
    hub_folder(tmp_path / "hub", name, pieces)
    (tmp_path / "a.wav").write_bytes(wav(0.4))
    words = "\\data\\\nngram 1=4\n\n\\1-grams:\n-1.0\t<unk>\n-99\t<s>\n-0.5\t</s>\n-0.3\tab\n\n\\end\\\n"
    (tmp_path / "words.arpa").write_text(words)
    for more in ((), ("--beam_size", "3"), ("--beam_size", "5", "--lm", str(tmp_path / "words.arpa"))):
        options = ("--word_timestamps", "True", "--vad_filter", "False", "--compute_type", "float32", *more)
        code, out, err = run(capsys, "transcribe", tmp_path / "a.wav", "-m", tmp_path / "hub", *options,
                             "-o", "-", "-f", "json")  # fmt: skip
        none = f"multimodal: warning: {tmp_path / 'a.wav'}: no speech recognized (no_speech)\n"
        result = json.loads(out)
        assert (code, err) == (0, "" if result["segments"] else none)
        words = [word for segment in result["segments"] for word in segment["words"]]
        assert " ".join(result["text"].split()) == " ".join("".join(word["word"] for word in words).split())
        assert all(0 <= word["start"] <= word["end"] <= 0.5 for word in words)
    assert words


def test_bad_archives_are_one_line(tmp_path, pieces):
    config, tensors = nemo_config("parakeet-tdt"), nemo_tensors("parakeet-tdt")
    link = tarfile.TarInfo("./more.yaml")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    wrong = json.loads(json.dumps(config))
    wrong["model_defaults"]["tdt_durations"] = [0, 1]
    stream = json.loads(json.dumps(config))
    stream["encoder"]["att_context_style"] = "chunked_limited"
    layers = json.loads(json.dumps(config))
    layers["encoder"]["n_layers"] = 999
    cases = [
        (config, {"../out.yaml": b"a"}, "'../out.yaml' lies outside the archive's top folder"),
        (config, {"/etc/out": b"a"}, "'/etc/out' lies outside"),
        (config, {"./more.yaml": link}, "'more.yaml' is no plain file"),
        (config, {"model_config.yaml": b"a: 1"}, "holds 'model_config.yaml' twice"),
        (wrong, {}, "13 tokens with the blank and 2 durations, but 'joint.joint_net.2.weight' has 18 outputs"),
        (stream, {}, "encoder: att_context_style must be 'regular' \\(got 'chunked_limited'\\)"),
        (layers, {}, "layers: 999 in all|layers: 1001 in all"),
        ([1], {}, "model_config.yaml: expected a table"),
        ("a: !!python/object/apply:os.system [ls]", {}, "expected a table"),
    ]
    for number, (own, more, cause) in enumerate(cases):
        path = nemo(tmp_path / f"{number}.nemo", own, tensors, pieces, **more)
        with pytest.raises(CheckpointError, match=cause) as error:
            convert(path, tmp_path / "made")
        assert str(error.value).startswith(str(path)), error.value
        assert "\n" not in str(error.value)
    path = nemo(tmp_path / "cut.nemo", config, tensors, pieces)
    for share in (0.3, 0.9):
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        with pytest.raises(CheckpointError, match=r"cut\.nemo: (cut off|a damaged tar archive|has no model)"):
            convert(path, tmp_path / "made")
