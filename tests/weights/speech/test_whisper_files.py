"""Whisper as faster-whisper and whisper.cpp store it: the same numbers as the original weights, or one line."""

import copy
import json
import struct
from dataclasses import replace

import pytest
import torch

from multimodal.errors import CheckpointError
from multimodal.export.client_files import write_client
from multimodal.export.export import export
from multimodal.weights.convert import convert
from multimodal.weights.folder import save_folder
from multimodal.weights.load import load
from multimodal.weights.speech.whisper import WHISPER_OPENAI
from multimodal.weights.speech.whisper_ct2 import WHISPER_CT2
from multimodal.weights.speech.whisper_vocabulary import released_tokenizer
from tests.helpers.commands import run
from tests.helpers.data.sets import wav
from tests.helpers.data.whisper_files import ctranslate2, ggml, text_tokens
from tests.helpers.spread import thin
from tests.helpers.tiny_whisper import DIMS, whispers

SMALL = {
    "n_mels": 8, "n_audio_ctx": 20, "n_audio_state": 32, "n_audio_head": 2, "n_audio_layer": 1,
    "n_vocab": 100, "n_text_ctx": 16, "n_text_state": 32, "n_text_head": 4, "n_text_layer": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def state():
    """OpenAI's tensors of a random model."""
    from whisper.model import ModelDimensions, Whisper

    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in
            Whisper(ModelDimensions(**SMALL)).state_dict().items()}  # fmt: skip


def loaded(path):
    return WHISPER_OPENAI.export(load(path).model)


@pytest.mark.parametrize(("kind", "tolerance"), [("float32", 0), ("float16", 2**-11), ("int8", 1 / 254 + 1e-6)])
def test_faster_whisper_folder_is_the_original(state, tmp_path, kind, tolerance):
    ctranslate2(tmp_path / "ct2", state, SMALL, kind)
    back = loaded(tmp_path / "ct2")
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert (back[name] - tensor).abs().max() <= tolerance * tensor.abs().max(), name
    assert load(tmp_path / "ct2").card == {"format": "whisper-ctranslate2", "alignment_heads": [[1, 0]]}


def test_a_faster_whisper_folder_s_first_tokens_and_features_are_followed_or_refused(state, tmp_path):
    config = {"vocabulary": 51865, "suppress_ids_begin": [220, 50257]}
    assert WHISPER_CT2.card(None, config) == {}
    assert WHISPER_CT2.card(None, config | {"suppress_ids_begin": []}) == {"transcribe": {"suppress_blank": False}}
    with pytest.raises(CheckpointError, match=r"config\.json: suppress_ids_begin must be \[220, 50257\] .*\(got \[7\]"):
        WHISPER_CT2.card(None, config | {"suppress_ids_begin": [7]})
    ctranslate2(tmp_path / "ct2", state, SMALL)
    (tmp_path / "ct2" / "preprocessor_config.json").write_text('{"feature_size": 8, "hop_length": 80}')
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json: hop_length must be 160 \(got 80\)"):
        load(tmp_path / "ct2")


@thin(7, pytest.mark.ci)
@pytest.mark.parametrize("kind", ["f32", "f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_ggml_file_holds_the_numbers_of_its_blocks(state, tmp_path, kind):
    expected = ggml(tmp_path / "ggml.bin", state, SMALL, kind)
    back = loaded(tmp_path / "ggml.bin")
    assert all(torch.allclose(back[name], tensor, rtol=1e-6, atol=1e-6) for name, tensor in expected.items())
    bits = {"f32": 30, "f16": 11}.get(kind, int(kind[1]) if kind[0] == "q" else 0)
    assert max((back[name] - state[name]).abs().max().item() for name in state) <= 11 / 2**bits  # weights reach 4.5
    convert(tmp_path / "ggml.bin", tmp_path / "made")
    assert all(torch.equal(tensor, back[name]) for name, tensor in loaded(tmp_path / "made").items())


@pytest.mark.ci
def test_the_real_converter_writes_what_is_read(tmp_path):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    from ctranslate2.converters.transformers import WhisperLoader
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(vocab_size=100, num_mel_bins=8, encoder_layers=1, encoder_attention_heads=2, d_model=32,
                           decoder_layers=2, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=64,
                           pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # int8 changes them in place
    for kind in ("float32", "float16", "int8", "int8_float16", "int16"):
        loader = WhisperLoader()
        spec = loader.get_model_spec(model)
        spec.register_vocabulary([str(i) for i in range(100)])
        spec.validate()
        spec.optimize(kind)
        (tmp_path / kind).mkdir()
        spec.save(str(tmp_path / kind))
        model.load_state_dict(expected)
        back = load(tmp_path / kind).model.state_dict()
        scale = 0 if kind == "float32" else 0.005
        assert torch.allclose(back["decoder.embed.weight"], expected["model.decoder.embed_tokens.weight"], atol=scale)


def test_export_is_the_inverse_and_a_corrupted_weight_shows(state, tmp_path):
    from multimodal.weights.files.ctranslate2 import read_ctranslate2

    ctranslate2(tmp_path / "ct2", state, SMALL)
    tensors, _ = read_ctranslate2(tmp_path / "ct2" / "model.bin")
    back = WHISPER_CT2.export(load(tmp_path / "ct2").model)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    path = tmp_path / "ct2" / "model.bin"
    at = path.read_bytes().index(state["encoder.conv1.weight"].numpy().tobytes())
    data = bytearray(path.read_bytes())
    data[at : at + 4] = struct.pack("<f", 9.0)
    path.write_bytes(bytes(data))
    assert not torch.equal(loaded(path)["encoder.conv1.weight"], state["encoder.conv1.weight"])


@pytest.mark.ci
def test_command_transcribes_with_them_as_with_the_original(tmp_path, capsys):
    theirs, ours = whispers()
    own = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    ctranslate2(tmp_path / "faster", own, DIMS)
    ggml(tmp_path / "ggml-tiny.bin", own, DIMS)
    save_folder(replace(ours, card={"alignment_heads": [[1, 0]]}), tmp_path / "ours")
    (tmp_path / "a.wav").write_bytes(wav(1.0))
    texts = []
    for model, words in (("ours", True), ("faster", True), ("ours", False), ("ggml-tiny.bin", False)):
        options = ("--language", "en", "--temperature", "0", "--sample_len", "6", "--word_timestamps", words)
        code, out, err = run(capsys, "transcribe", tmp_path / "a.wav", "-m", tmp_path / model, *options,
                             "-f", "srt", "-o", "-", "--compute_type", "float32")  # fmt: skip
        assert (code, err) == (0, "")
        texts.append(out)
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert "-->" in texts[0]


def vocabulary_file(folder, name, tokens, control):
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    names = ["".join(letters[byte] for byte in token) for token in tokens]
    ids = {token: i for i, token in enumerate(names)}
    whole = [*names, *control]
    added = [{"content": token, "id": i} for token, i in control.items()]
    content = {
        "tokenizer.json": {"model": {"vocab": ids}, "added_tokens": added}, "vocab.json": ids,
        "vocabulary.json": whole, "vocabulary.txt": whole,
    }[name]  # fmt: skip
    (folder / name).write_text("\n".join(whole) if name.endswith("txt") else json.dumps(content))
    if name == "vocab.json":
        (folder / "added_tokens.json").write_text(json.dumps(control))


@thin(2, pytest.mark.slow, pytest.mark.ci)
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "vocabulary.json", "vocabulary.txt"])
def test_a_folder_with_other_tokens_than_the_released_ones_is_refused(name, tmp_path):
    tokens, control = text_tokens(51865), released_tokenizer(51865).control_ids
    vocabulary_file(tmp_path, name, tokens, control)
    assert released_tokenizer(51865, tmp_path).vocab_size == 51865
    permuted = [*tokens[:300], *tokens[301:299:-1], *tokens[302:]]
    vocabulary_file(tmp_path, name, permuted, control)
    with pytest.raises(CheckpointError, match=f"^{name}: 2 of 51865 tokens are not those of the released"):
        released_tokenizer(51865, tmp_path)
    if name == "vocab.json":
        vocabulary_file(tmp_path, name, tokens, control)
        with pytest.raises(CheckpointError, match=f"^{name}: 1507 of 51866 tokens"):  # a language more than in the file
            released_tokenizer(51866, tmp_path)


@pytest.mark.ci
def test_other_tokens_of_ggml_and_faster_whisper_are_refused(tmp_path):
    theirs, _ = whispers()
    own = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    ggml(tmp_path / "ggml.bin", own, DIMS)
    data = (tmp_path / "ggml.bin").read_bytes()
    (tmp_path / "ggml.bin").write_bytes(data.replace(b"\x07\0\0\0 people", b"\x07\0\0\0 peopel"))
    ctranslate2(tmp_path / "ct2", own, DIMS)
    tokens = text_tokens(DIMS["n_vocab"])
    tokens[tokens.index(b" people")] = b" peopel"
    vocabulary_file(tmp_path / "ct2", "vocabulary.json", tokens, {})
    for name in ("ggml.bin", "ct2"):
        with pytest.raises(CheckpointError, match=f"{name}: .*: 1 of 51865 tokens are not those of"):
            load(tmp_path / name)


@pytest.mark.ci
def test_a_folder_without_a_tokenizer_gets_the_released_one_in_its_exports(tmp_path, monkeypatch):
    """A Trainer's checkpoint: faster-whisper would take Whisper tiny's for every size."""
    pipeline = (tokenizer := whispers()[1].tokenizer).pipeline()
    monkeypatch.setattr(type(tokenizer), "pipeline", lambda _: copy.deepcopy(pipeline))  # it takes two seconds
    save_folder(whispers()[1], tmp_path / "own")
    export(tmp_path / "own", tmp_path / "checkpoint-100", to="hf")
    expected = json.loads((tmp_path / "checkpoint-100" / "tokenizer.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "multimodal/tokenizer_config.json"):
        (tmp_path / "checkpoint-100" / name).unlink()
    (tmp_path / "checkpoint-100" / "multimodal").rmdir()
    export(tmp_path / "checkpoint-100", tmp_path / "out", to="hf")
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text()) == expected


@pytest.mark.ci
def test_what_a_fine_tuned_model_asks_for_is_in_its_exports(tmp_path, monkeypatch):
    pipeline = (tokenizer := whispers()[1].tokenizer).pipeline()
    monkeypatch.setattr(type(tokenizer), "pipeline", lambda _: copy.deepcopy(pipeline))  # it takes two seconds
    options = {"suppress_blank": False, "max_initial_timestamp": 0.5, "language": "de", "task": "translate",
               "no_speech_threshold": 0.3, "condition_on_previous_text": False}  # fmt: skip
    search = {"num_beams": 3, "length_penalty": 0.7, "no_repeat_ngram_size": 2}
    for listed, never in (([], []), ([7], [7, 50258, 50358, 50359, 50360, 50361, 50362])):
        card = {"transcribe": {"suppress_tokens": listed, **options}, "generation": search}
        source = replace(whispers()[1], card=card)
        save_folder(source, tmp_path / "own")
        export(tmp_path / "own", tmp_path / "out", to="hf", overwrite=True)
        found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
        told = {"suppress_tokens": never, "begin_suppress_tokens": [], "max_initial_timestamp_index": 25,
                "language": "de", "task": "translate", "no_speech_threshold": 0.3, "condition_on_prev_tokens": False,
                **search}  # fmt: skip
        assert {name: found.get(name) for name in told} == told
        again = load(tmp_path / "out").card
        assert (again["transcribe"], again["generation"]) == (
            {"suppress_tokens": never, **options}, {**search, "max_length": DIMS["n_text_ctx"]})  # fmt: skip
        (tmp_path / "client").mkdir(exist_ok=True)
        settings = write_client(source, tmp_path / "client")
        assert settings["prompt"] == [50258, 50261, 50358, 50363]
        assert (settings["never"], settings["never_first"]) == (never, [])


def test_bad_files_are_one_line(state, tmp_path):
    ctranslate2(tmp_path / "ct2", state, SMALL)
    ggml(tmp_path / "ggml.bin", state, SMALL, "q8_0")
    ct2, own = tmp_path / "ct2" / "model.bin", tmp_path / "ggml.bin"
    whole, data = ct2.read_bytes(), own.read_bytes()
    heads = whole.index(b"encoder/num_heads\0") + 18
    first = data.index(b"decoder.token_embedding.weight")
    scale = first + len("decoder.token_embedding.weight")
    cases = [
        (ct2, whole[: len(whole) // 2], "a CTranslate2 model, cut off: variable"),
        (ct2, whole + b"more", "4 bytes follow its end"),
        (ct2, struct.pack("<I", 5) + whole[4:], "expected version 6 \\(got 5\\)"),
        (ct2, whole[: heads + 6] + struct.pack("<h", 5) + whole[heads + 8 :], "heads 5 does not divide the width 32"),
        (ct2, whole[:heads] + bytes([0, 9]) + whole[heads + 2 :], "unknown number type 9"),
        (ct2, whole.replace(b"WhisperSpec", b"WhispexSpec"), "spec must be 'WhisperSpec' \\(got 'WhispexSpec'\\)"),
        (own, data[: len(data) // 2], "a ggml file of whisper.cpp, cut off: "),
        (own, data[:4] + struct.pack("<i", -3) + data[8:], "not of Whisper: n_vocab is -3"),
        (own, data[: first - 12] + struct.pack("<i", 12) + data[first - 8 :], "is quantized as q4_k, expected one of"),
        (own, data[: first - 8] + struct.pack("<i", 31) + data[first - 4 :], r"shape \[100, 31\] does not split in"),
        (own, data[: first - 8] + struct.pack("<i", 0) + data[first - 4 :], r"shape \[100, 0\] does not split in"),
        (own, data[:scale] + struct.pack("<e", float("inf")) + data[scale + 2 :], "holds values that are not finite"),
        (own, data[:24] + struct.pack("<i", 4) + data[28:], r"embedding' has shape \[16, 32\], not \[4, 32\]"),
        (own, data[:16] + struct.pack("<i", 5) + data[20:], "width 32 is not divisible by heads 5"),
        (own, data[:48] + struct.pack("<i", 1 << 30) + data[52:], "cut off: the mel filters needs"),
    ]  # fmt: skip
    for path, bad, cause in cases:
        path.write_bytes(bad)
        for read in (load, lambda path: convert(path, tmp_path / "made")):
            with pytest.raises(CheckpointError, match=cause) as error:
                read(path)
            assert str(error.value).startswith(str(path)), error.value
            assert "\n" not in str(error.value)
    ct2.write_bytes(whole)
    (tmp_path / "ct2" / "config.json").write_text(json.dumps({"decoder/activation": 0}))
    with pytest.raises(CheckpointError, match="activation must be 3"):
        load(ct2)
