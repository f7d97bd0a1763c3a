"""CTranslate2 folders: scaled positions, windows, rounding and missing files, beside transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import multimodal
from multimodal.errors import UsageError
from multimodal.export.export import export
from multimodal.system.assets import asset
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.load import load
from tests.helpers.data import wordpieces
from tests.helpers.references import hub, seq2seq, translation
from tests.helpers.spread import thin
from tests.helpers.tiny import randomized
from tests.helpers.tiny_checkpoints import BYTES, IDS

ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "intermediate_size": 48, "vocab_size": IDS, "max_position_embeddings": 256}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
GEMMA3 = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8,
          "rope_parameters": {"sliding_attention": PLAIN, "full_attention": LINEAR}}  # fmt: skip


def written(family: str, folder: Path, **options):
    """Transformers' random model, and in `folder` its checkpoint with a vocabulary of bytes."""
    import transformers

    sizes = {name: value for name, value in (SIZES | options).items() if value is not None}
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = randomized(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    model.save_pretrained(folder.with_name("hf"))
    save_folder(Checkpoint(load(folder.with_name("hf")).model, BYTES), folder)
    return model


@torch.no_grad()
@thin(2, pytest.mark.slow, pytest.mark.ci)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"rope_parameters": LLAMA3}),
        ("Qwen2", {"rope_parameters": LLAMA3}),
        ("Llama", {"rope_parameters": LINEAR}),
        ("Gemma3Text", GEMMA3 | {"sliding_window": 256}),
    ],
)
def test_scaled_positions_are_those_of_transformers_far_from_the_start(family, options, tmp_path):
    model, ids = written(family, tmp_path / "model", **options), torch.randint(3, 256, (1, 240))
    export(tmp_path / "model", tmp_path / "out", to="ctranslate2")
    found = np.array(ctranslate2.Generator(str(tmp_path / "out")).forward_batch(ids.tolist()))
    assert torch.allclose(torch.from_numpy(found), model(ids).logits, atol=1e-3)


@pytest.mark.ci
@torch.no_grad()
@pytest.mark.parametrize(("family", "options"), [("Mistral", {}), ("Gemma3Text", GEMMA3)])
def test_a_window_is_told_and_texts_beyond_it_are_those_of_transformers(family, options, tmp_path):
    model, ids = written(family, tmp_path / "model", **options, sliding_window=6), torch.randint(3, 256, (1, 6))
    with pytest.warns(UserWarning, match="prompts of up to 6 tokens alone, which is the model's window"):
        export(tmp_path / "model", tmp_path / "out", to="ctranslate2")
    names = json.loads((tmp_path / "out" / "vocabulary.json").read_text())
    options = {"max_length": 20, "include_prompt_in_result": False, "end_token": [], "sampling_topk": 1}
    made = ctranslate2.Generator(str(tmp_path / "out"))
    found = made.generate_batch([[names[i] for i in ids[0]]], **options)[0].sequences_ids[0]
    for _ in range(20):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert found == ids[0, 6:].tolist()


@torch.no_grad()
@pytest.mark.parametrize("more", [0, 6])
def test_a_vocabulary_without_an_unknown_token_and_rows_without_tokens_are_exported(more, tmp_path):
    import tokenizers
    import transformers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, "<s>", "</s>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32,
                                     vocab_size=len(vocab) + more, bos_token_id=256, eos_token_id=257)  # fmt: skip
    model = randomized(transformers.GPT2LMHeadModel(config))
    for one in (model, own):
        one.save_pretrained(tmp_path / "hf")
    export(tmp_path / "hf", tmp_path / "out", to="ctranslate2")
    ids = own("the dog", add_special_tokens=False)["input_ids"]
    found = np.array(ctranslate2.Generator(str(tmp_path / "out")).forward_batch([ids]))
    assert torch.allclose(torch.from_numpy(found), model(torch.tensor([ids])).logits, atol=1e-3)


@thin(5, pytest.mark.ci)
@pytest.mark.parametrize(
    ("family", "options", "cause"),
    [
        ("Llama", {"rope_parameters": YARN}, "does not support yarn scaling"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
         r"has no windows of a qwen2 \(got one of 8 tokens\)"),
        ("Falcon", {"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2},
         "does not support Falcon's new_decoder_architecture"),
        ("Llama", {"head_dim": 16}, "cannot compute it: head_dim is 16, which it may take to be width / heads"),
        ("Gemma3Text", GEMMA3 | {"query_pre_attn_scalar": 9, "sliding_window": 256}, r"numbers are .*it lacks some"),
    ],
)  # fmt: skip
@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("store", ["float32", "int8"])
def test_what_ctranslate2_lacks_is_refused_in_all_numbers(family, options, cause, store, tmp_path):
    written(family, tmp_path / "model", **options)
    with pytest.raises(UsageError, match=cause):
        export(tmp_path / "model", tmp_path / "out", to="ctranslate2", store=store)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "model"]


@pytest.mark.ci
def test_a_model_that_rounding_changes_too_much_is_refused_as_such(tmp_path, monkeypatch):
    written("Llama", tmp_path / "model")
    monkeypatch.setattr("multimodal.export.ctranslate2.ROUNDED", 1e-6)
    with pytest.raises(UsageError, match="% off: its rounding is too coarse for this model"):
        export(tmp_path / "model", tmp_path / "out", to="ctranslate2", store="int8")


def test_the_vocabulary_lies_beside_its_settings(tmp_path):
    import transformers

    words, folder = wordpieces.WORDS, tmp_path / "bert"
    config = transformers.BertConfig(**wordpieces.SIZES, vocab_size=len(words))
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    export(folder, tmp_path / "out", to="ctranslate2")
    ids = [transformers.AutoTokenizer.from_pretrained(one)("the dogs").input_ids for one in (folder, tmp_path / "out")]
    assert ids[0] == ids[1] == [2, 5, 6, 7, 3]


def bytes_of_bart(folder: Path) -> int:
    """Write a vocabulary; return the rows of the embedding, some of them without a token."""
    made, record = hub.hub_folder(folder, "byte-level")
    for path in made.iterdir():
        path.rename(folder / path.name)
    return record["vocab_size"]


def translator(kind: str, folder: Path):
    """Transformers' random model with the tokenizer of its kind, which both lie in `folder`. The decoder has other
    heads than the encoder; T5's epsilon is large."""
    import transformers

    folder.mkdir()
    if kind == "T5":
        size = translation.t5(folder) + 20
        config = transformers.T5Config(vocab_size=size, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_heads=3,
                                       layer_norm_epsilon=1e-3)  # fmt: skip
        model = randomized(transformers.T5ForConditionalGeneration(config))
    else:
        name = "MarianMTModel" if kind == "Marian" else f"{kind}ForConditionalGeneration"
        size = {
            "Bart": bytes_of_bart,
            "M2M100": translation.m2m100,
            "MBart": translation.mbart50,
            "Marian": translation.marian,
        }[kind](folder)
        last = {"decoder_start_token_id": size - 1, "pad_token_id": size - 1} if kind == "Marian" else {}
        options = {"vocab_size": size, "decoder_start_token_id": 2, "activation_function": "relu"} | last
        model = seq2seq.named(None, kind, name, (seq2seq.STATIC,) if last else (), **options).reference
        if last:
            model.model.shared.weight.data[-1] = 0  # as in released files
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
@thin(5, pytest.mark.ci)
@pytest.mark.parametrize("kind", ["Bart", "Marian", "MBart", "M2M100", "T5"])
def test_translators_score_as_transformers_does(kind, tmp_path):
    """Marian's <pad> comes last and is removed; mBART's tokenizer names no bos, and M2M-100's no languages."""
    model = translator(kind, tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", to="ctranslate2")
    names = json.loads((tmp_path / "out" / "shared_vocabulary.json").read_text())
    ids, config = torch.randint(3, 30, (1, 12)), model.config
    start = 0 if kind == "T5" else config.decoder_start_token_id
    before = torch.cat([torch.tensor([[start]]), ids[:, :-1]], 1)
    wanted = model(ids, decoder_input_ids=before).logits[..., : len(names)].log_softmax(-1).gather(-1, ids[..., None])
    tokens = [names[i] for i in ids[0]]
    found = ctranslate2.Translator(str(tmp_path / "out")).score_batch([tokens], [tokens])[0].log_probs[:-1]
    assert torch.allclose(torch.tensor(found), wanted.flatten(), atol=1e-4)
    own = load(tmp_path / "model").required_tokenizer()
    assert all(names[i] == name for name, i in getattr(own, "languages", {}).items())


def test_a_missing_vocabulary_is_named(tmp_path):
    made = seq2seq.case("Hugging Face Marian")
    made.reference.save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match=r"needs source\.spm, target\.spm, vocab\.json, which it lacks"):
        export(tmp_path / "model", tmp_path / "out", to="ctranslate2")


@pytest.mark.ci
def test_ctranslate2_holds_a_model_of_ours(tmp_path):
    export("whisper-mini", tmp_path / "old", to="hf", store="float32")
    settings = tmp_path / "old" / "generation_config.json"
    languages = sorted(json.loads(settings.read_text())["lang_to_id"].values())
    settings.unlink()  # as in folders of 2022
    with pytest.warns(UserWarning, match="faster-whisper takes windows of 30 s alone, not of 6 s"):
        export(tmp_path / "old", tmp_path / "out", to="ctranslate2", store="float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["lang_ids"] == languages
    own, features = load("whisper-mini"), torch.randn(1, 80, 600)
    prompt = own.required_tokenizer().sot_sequence("en", timestamps=False)
    made = ctranslate2.models.Whisper(str(tmp_path / "out"))
    found = made.encode(ctranslate2.StorageView.from_array(features.numpy())).to(ctranslate2.DataType.float32)
    assert torch.allclose(torch.from_numpy(np.array(found)), own.model.encoder(features), atol=1e-4)
    assert load(tmp_path / "out").model.config == own.model.config
    assert len(prompt) == 4
    recording = asset("sample", "german.flac")
    texts = [multimodal.transcribe(recording, model=str(model))["text"] for model in ("whisper-mini", tmp_path / "out")]
    assert texts[0] == texts[1] != ""
