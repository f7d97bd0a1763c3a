"""wav2vec 2.0, HuBERT and WavLM with CTC: parity with transformers, batches, letters, the command."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from multimodal.errors import CheckpointError, UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.conformer import ConformerCTC
from multimodal.tokens.audio.features import speech_features
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import families, load
from tests.helpers.commands import run
from tests.helpers.data.sets import wav
from tests.helpers.parity import record
from tests.helpers.references.speech import WAV2VEC2, case, check_layout, on_meta
from tests.helpers.spread import thin

WAVES = [torch.randn(n, generator=torch.Generator().manual_seed(n)) * 0.1 + 0.02 for n in (900, 4000, 2999)]


def loaded(name, **more):
    made = case(name)
    return made, families()[made.family].load(made.tensors | more, made.config, "file").model


@pytest.mark.parametrize("name", WAV2VEC2)
def test_samples_states_and_logits_are_those_of_transformers(name):
    from transformers import Wav2Vec2FeatureExtractor

    made, ours = loaded(name)
    features, lengths = speech_features(ours.config.encoder.features, WAVES, 0)
    extract = Wav2Vec2FeatureExtractor(do_normalize=made.normalize)
    blank = made.config["pad_token_id"]
    order = [i for i in range(9) if i != blank] + [blank]
    with torch.no_grad():
        together, _, counts = ours.encode(features, lengths)
        for row, wave in enumerate(WAVES):
            samples = extract(wave.numpy(), sampling_rate=16000, return_tensors="pt").input_values
            assert (samples[0] - features[row, : len(wave)]).abs().max() <= 1e-5
            theirs, last = made.model(samples), made.model.base_model(samples).last_hidden_state
            alone = ours.encode(features[row : row + 1, : len(wave)], lengths[row : row + 1])[0]
            states = (last - alone).abs().max().item()
            logits = (theirs.logits[..., order] - ours.ctc_logits(alone)).abs().max().item()
            record(made.family, "states", states)
            record(made.family, "logits", logits)
            assert max(states, logits) <= 1e-5
            assert (together[row, : counts[row]] - alone[0]).abs().max() <= 1e-5
            assert theirs.logits.argmax(-1).tolist() == [[order[i] for i in ours.ctc_logits(alone).argmax(-1)[0]]]


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", WAV2VEC2)
def test_short_audio_is_padded_to_one_state(name):
    config = loaded(name)[1].config
    encoder = replace(config.encoder, kernels=(20, *config.encoder.kernels[1:]))
    model = ConformerCTC(replace(config, encoder=encoder))
    waves = [WAVES[1][:n] for n in (1, encoder.least - 1, encoder.least)]
    states, _, counts = model.encode(*speech_features("wave", waves, 0))
    assert counts.tolist() == [1, 1, 1]
    for wave, row in zip(waves, states, strict=True):
        padded = F.pad(wave, (0, encoder.least - len(wave)))[None]
        assert (row - model.encode(padded, torch.tensor([encoder.least]))[0][0]).abs().max() <= 1e-5


@pytest.mark.parametrize("name", WAV2VEC2)
def test_prepared_encoders_give_the_same_states(name):
    model = loaded(name)[1]
    waves = [*WAVES, WAVES[0][: model.config.encoder.least]]
    features, lengths = speech_features(model.config.encoder.features, waves, 0)
    prepared = prepare_for_inference(Checkpoint(model), "float32", torch.device("cpu")).model
    with torch.inference_mode():
        states, _, counts = model.encode(features, lengths)
        together = prepared.encode(features, lengths)[0]
        for row, (wave, count) in enumerate(zip(waves, counts.tolist(), strict=True)):
            alone = prepared.encode(features[row : row + 1, : len(wave)], lengths[row : row + 1])[0]
            for found in (together[row], alone[0]):
                assert torch.allclose(found[:count], states[row, :count], atol=1e-5)


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", WAV2VEC2)
def test_one_corrupted_tensor_breaks_parity(name):
    tensor = next(
        key for key in case(name).tensors if key.endswith("pos_conv_embed.conv.parametrizations.weight.original1")
    )
    changed = case(name).tensors[tensor].clone()
    changed[0] *= 3
    ours, other = loaded(name)[1], loaded(name, **{tensor: changed})[1]
    batch = speech_features(ours.config.encoder.features, WAVES, 0)
    with torch.no_grad():
        assert (ours.encode(*batch)[0] - other.encode(*batch)[0]).abs().max() > 1e-3


def test_older_names_of_the_position_weights_load():
    made, ours = loaded("wav2vec2")
    place = "wav2vec2.encoder.pos_conv_embed.conv."
    older = {key.replace("parametrizations.weight.original0", "weight_g").replace(
        "parametrizations.weight.original1", "weight_v"): value for key, value in made.tensors.items()}  # fmt: skip
    assert place + "weight_g" in older
    other = families()["wav2vec2"].load(older, made.config, "file").model
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in ours.state_dict().items())


BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
BIG = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
       "feat_extract_norm": "layer", "do_stable_layer_norm": True}  # fmt: skip
RELEASED = {
    "facebook/wav2vec2-base-960h": ("Wav2Vec2", BASE | {"vocab_size": 32}),
    "facebook/wav2vec2-large-960h-lv60-self": ("Wav2Vec2", BIG | {"vocab_size": 32, "conv_bias": True}),
    "facebook/hubert-large-ls960-ft": ("Hubert", BIG | {"vocab_size": 32, "conv_bias": True}),
    "facebook/hubert-xlarge-ls960-ft": ("Hubert", BIG | {"hidden_size": 1280, "num_hidden_layers": 48,
                                                         "intermediate_size": 5120, "conv_bias": True}),
    "patrickvonplaten/wavlm-libri-clean-100h-base-plus": ("WavLM", BASE | {"vocab_size": 31, "pad_token_id": 28}),
    "patrickvonplaten/wavlm-libri-clean-100h-large": ("WavLM", BIG | {"vocab_size": 31, "pad_token_id": 28}),
}  # fmt: skip


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", RELEASED)
def test_released_configurations_fit(name):
    import transformers

    kind, sizes = RELEASED[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    stated = config.to_dict() | {"preprocessor_config.json": {"do_normalize": True}}
    check_layout(families()[kind.lower()], stated, on_meta(getattr(transformers, f"{kind}ForCTC"), config))


def folder(path, name, **preprocessor):
    path.mkdir()
    # writes more than blanks
    lively = {"lm_head.bias": torch.tensor([0.0, -9, -9, -9, 2, 3, 3, 3, 3])}
    save_file(case(name).tensors | lively, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({k: v for k, v in case(name).config.items() if ".json" not in k}))
    (path / "preprocessor_config.json").write_text(json.dumps(preprocessor or {"do_normalize": True}))
    vocab = ["<pad>", "<s>", "</s>", "<unk>", "|", "E", "T", "A", "O"]
    (path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocab)}))
    (path / "tokenizer_config.json").write_text(json.dumps({"word_delimiter_token": "|", "unk_token": "<unk>"}))
    return path


def test_letters_are_spelled_and_kept(tmp_path):
    from multimodal.weights.folder import load_folder, save_folder

    made = load(folder(tmp_path / "hub", "wav2vec2"))
    assert made.tokenizer.encode("tea at") == [5, 4, 6, 3, 6, 5]
    assert made.tokenizer.decode([5, 4, 6, 3, 6, 5]) == "TEA AT"
    assert not made.tokenizer.control & set(made.tokenizer.encode("<s>|</s>"))
    save_folder(made, tmp_path / "ours")
    again = load_folder(tmp_path / "ours")
    assert again.model.config == made.model.config
    assert again.tokenizer.encode("tea at") == [5, 4, 6, 3, 6, 5]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(
    ("vocab", "named"),
    [
        (["E", "T", "A", "O", "|", "[UNK]", "[PAD]"], {"unk_token": "[UNK]", "pad_token": "[PAD]"}),
        (["<pad>", "<s>", "</s>", "<unk>", "|", "E", "T", "A"], {"word_delimiter_token": " "}),
        (["<pad>", "E", "T", "A", "O", "'", "I", "|", "<unk>"], {}),  # the model has neither <s> nor </s>
    ],
)
def test_added_tokens_are_those_of_transformers(vocab, named, older, tmp_path):
    from transformers import Wav2Vec2CTCTokenizer

    made, ids = folder(tmp_path / "hub", "wav2vec2"), {token: i for i, token in enumerate(vocab)}
    (made / "vocab.json").write_text(json.dumps(ids))
    theirs = Wav2Vec2CTCTokenizer(str(made / "vocab.json"), **named)
    theirs.save_pretrained(made)
    if older:  # added_tokens.json alone
        record = json.loads((made / "tokenizer_config.json").read_text())
        record.pop("added_tokens_decoder")
        (made / "tokenizer_config.json").write_text(json.dumps(record))
    blank = theirs.pad_token_id
    (made / "config.json").write_text(
        json.dumps(json.loads((made / "config.json").read_text()) | {"pad_token_id": blank})
    )
    ours = load(made).tokenizer
    assert ours.vocab_size == 8
    letters = [i for i in range(9) if i != blank]  # ours are numbered without the blank
    assert ours.tokens == theirs.convert_ids_to_tokens(letters)
    text = [*range(8), *ours.encode(" "), 2]
    assert ours.decode(text, skip_control=False) == theirs.decode([letters[i] for i in text], group_tokens=False)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("clean", [True, False])
def test_blanks_before_punctuation_are_those_of_transformers(clean, tmp_path):
    from transformers import Wav2Vec2CTCTokenizer

    from multimodal.tasks.transcribe.word_times import split_on_spaces
    from multimodal.weights.folder import load_folder, save_folder

    made = folder(tmp_path / "hub", "wav2vec2")
    (made / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(["<pad>", *"nts'.,?|"])}))
    theirs = Wav2Vec2CTCTokenizer(
        str(made / "vocab.json"), bos_token=None, eos_token=None, unk_token="?", clean_up_tokenization_spaces=clean
    )
    theirs.save_pretrained(made)
    save_folder(load(made), tmp_path / "ours")
    for text in ("t .n", "n ' t", "s 's n't ,s ?", ". n"):
        ids = theirs.convert_tokens_to_ids([*text.replace(" ", "|")])
        wanted, own = theirs.decode(ids, group_tokens=False), [i - 1 for i in ids]
        for tokenizer in (load(made).tokenizer, load_folder(tmp_path / "ours").tokenizer):
            assert tokenizer.decode(own, skip_control=False) == wanted
            assert "".join(word for word, _ in split_on_spaces(tokenizer, own)) == wanted


@pytest.mark.parametrize("text", ["TEA AT", " TEA   AT ", "||T| A  ", "  "])
def test_words_are_those_of_transformers(text, tmp_path):
    from transformers import Wav2Vec2CTCTokenizer

    from multimodal.tasks.transcribe.conformer.words import ctc_words

    made = folder(tmp_path / "hub", "wav2vec2")
    theirs, ours = Wav2Vec2CTCTokenizer(str(made / "vocab.json")), load(made).tokenizer
    ids = theirs.convert_tokens_to_ids([*text.replace(" ", "|")])
    path = [token for i in ids for token in (i, 0)]  # each for a frame, then a blank
    spoken = theirs.decode(path, output_word_offsets=True).word_offsets
    logprobs = torch.full((len(path), 9), 0.01).scatter(1, torch.tensor([[(i - 1) % 9] for i in path]), 0.92).log()
    words = ctc_words(logprobs, [i - 1 for i in ids], ours, 8, 0.04)
    assert "".join(word.word for word in words) == text.replace("|", " ")
    assert [word.word.strip() for word in words if text.strip()] == [one["word"] for one in spoken]
    for word, one in zip(words, spoken, strict=False):
        expected = max(0, one["start_offset"] - 0.5) * 0.04, (one["end_offset"] - 0.5) * 0.04
        assert (word.start, word.end) == pytest.approx(expected)
        assert len(word.of_tokens) == len(word.tokens)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["wav2vec2 large", "wavlm"])
def test_command_transcribes_with_beams_a_language_model_and_words(name, tmp_path, capsys):
    made = folder(tmp_path / "hub", name)
    (tmp_path / "a.wav").write_bytes(wav(0.5))
    (tmp_path / "words.arpa").write_text(
        "\\data\\\nngram 1=4\n\n\\1-grams:\n-1.0\t<unk>\n-99\t<s>\n-0.5\t</s>\n-0.3\tTEA\n\n\\end\\\n"
    )
    for more in ((), ("--beam_size", "3"), ("--lm", str(tmp_path / "words.arpa"))):
        options = ("--word_timestamps", "True", "--vad_filter", "False", "--compute_type", "float32", *more)
        code, out, err = run(capsys, "transcribe", tmp_path / "a.wav", "-m", made, *options, "-o", "-", "-f", "json")
        assert (code, err) == (0, "")
        result = json.loads(out)
        words = [word for segment in result["segments"] for word in segment["words"]]
        assert " ".join(result["text"].split()) == " ".join("".join(word["word"] for word in words).split())
        assert set(result["text"]) & set("ETAO")
        assert all(0 <= word["start"] <= word["end"] <= 0.51 for word in words)
    (tmp_path / "a.jsonl").write_text(json.dumps({"audio_filepath": "a.wav", "duration": 0.5, "text": "TEA"}) + "\n")
    code, out, _ = run(capsys, "evaluate", "asr", tmp_path / "a.jsonl", "-m", made, "--format", "json")
    assert code == 0
    assert "wer" in out


def test_a_language_model_in_the_folder_is_named(tmp_path):
    from multimodal.tasks.transcribe.conformer.decode import language_model

    made = folder(tmp_path / "hub", "wav2vec2")
    (lm := made / "language_model").mkdir()
    (lm / "lm.bin").write_bytes(b"mmap lm http://kheafield.com/code format version 5\n\0")
    with pytest.warns(UserWarning, match="its language model is not used: it has no ARPA file"):
        tokenizer = load(made).tokenizer
    (lm / "lm.arpa").write_text("")
    with pytest.warns(UserWarning, match=r"used only with lm='.*language_model.lm\.arpa'"):
        load(made)
    with pytest.raises(UsageError, match=r"expected an ARPA file or a text model, got a folder around .*lm\.arpa"):
        language_model(str(lm), tokenizer, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"lm\.bin: KenLM's binary format is not read"):
        language_model(str(lm / "lm.bin"), tokenizer, torch.device("cpu"))


def test_what_the_folder_lacks_or_contradicts_is_one_line(tmp_path):
    cases = {
        "no preprocessing": ({"preprocessor_config.json": "{}"}, "which says whether samples are normalized"),
        "rate": (
            {"preprocessor_config.json": '{"do_normalize": true, "sampling_rate": 8000}'},
            "must be 16000 .got 8000",
        ),
        "adapters": ({"config.json": {"adapter_attn_dim": 16}}, "adapter_attn_dim must be None .got 16"),
        "blank": ({"config.json": {"pad_token_id": 9}}, "must be a whole number below vocab_size 9 .got 9"),
        "padding": ({"config.json": {"pad_token_id": 5}}, "pad_token '<pad>' must be the blank, 'E' by .*_id 5"),
        "other padding": (
            {"tokenizer_config.json": {"pad_token": {"content": "|"}}},
            "pad_token '.' must be the blank, '<pad>' by",
        ),
        "layers": ({"config.json": {"num_hidden_layers": 999}}, "layers: 999 in all, more than the"),
        "case": ({"tokenizer_config.json": {"do_lower_case": True}}, "do_lower_case must be False .got True"),
        "blanks": (
            {"tokenizer_config.json": {"replace_word_delimiter_char": "_"}},
            "replace_word_delimiter_char must be ' ' .got '_'",
        ),
        "phones": (
            {"tokenizer_config.json": {"tokenizer_class": "Wav2Vec2PhonemeCTCTokenizer"}},
            "Wav2Vec2PhonemeCTCTokenizer is not supported, expected Wav2Vec2CTCTokenizer",
        ),
        "no delimiter": (
            {"tokenizer_config.json": {"word_delimiter_token": None}},
            "word_delimiter_token must be in vocab.json .got None",
        ),
        "languages": (
            {"vocab.json": '{"eng": {"<pad>": 0}, "fra": {"<pad>": 0}}'},
            r"vocab\.json: expected one vocabulary, got one for each of eng, fra .MMS",
        ),
        "letters": ({"vocab.json": '{"<pad>": 0, "a": 2}'}, "ids, with added tokens, must be 0 to 8, each once"),
    }
    for number, (files, cause) in enumerate(cases.values()):
        made = folder(tmp_path / str(number), "wav2vec2")
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(json.loads((made / name).read_text()) | content)
            (made / name).write_text(text)
        with pytest.raises(CheckpointError, match=cause) as error:
            load(made)
        assert "\n" not in str(error.value)
