"""Folders of sentence-transformers: pooling, longest text, lower case, projections and prompts, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from multimodal.errors import CheckpointError, UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.tasks.text.embed import embed, is_language_model
from multimodal.tokens.text.tokenizer import TextCut
from multimodal.weights.convert import convert
from multimodal.weights.folder import save_folder
from multimodal.weights.load import load
from tests.helpers.data.wordpieces import WORDS
from tests.helpers.references.causal import SIZES
from tests.helpers.references.encoders import bert_folder
from tests.helpers.references.hub import hub_folder
from tests.helpers.references.texts import tiny_pieces
from tests.helpers.references.vision import randomized
from tests.helpers.spread import thin


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("bert"))


def sentence_folder(bert: Path, folder: Path, pooling: dict, modules: list[str]) -> Path:
    """As sentence-transformers writes one, but for the name of the Pooling's folder."""
    for path in bert.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "pool").mkdir()
    (folder / "pool" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24} | pooling))
    places = {"Transformer": "", "Pooling": "pool"}
    known = [{"idx": i, "path": places.get(name, f"{i}_{name}"), "type": f"sentence_transformers.models.{name}"}
             for i, name in enumerate(modules)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(known))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6, "do_lower_case": False}))
    return folder


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(
    ("record", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": ["cls"]}, "cls"),
        ({}, "mean"),
    ],
)
def test_a_folder_of_sentence_transformers_says_how_vectors_are_made(bert, tmp_path, record, pooling):
    folder = sentence_folder(bert, tmp_path, record, ["Transformer", "Pooling", "Dropout", "Normalize"])
    checkpoint, plain = load(folder), load(bert)
    assert checkpoint.tokenizer.context == 6
    texts = ["the dog at", "sea"]
    assert (embed(texts, checkpoint) - embed(texts, plain, pooling, normalize=True)).abs().max() < 1e-6
    longer = embed(texts, checkpoint, normalize=False)
    assert (longer - embed(texts, plain, pooling)).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("modules", "record", "got"),
    [
        (["Transformer", "Pooling", "LSTM"], {}, "LSTM"),
        (["MLMTransformer", "SpladePooling"], {}, "MLMTransformer, SpladePooling"),
        (["Transformer", "Normalize"], {}, "Transformer, Normalize"),
        (["Transformer", "Pooling", "Normalize", "Normalize"], {}, "Transformer, Pooling, Normalize, Normalize"[:39]),
        (["Transformer", "Pooling"], {"pooling_mode": ["cls", "mean"]}, "cls, mean"),
    ],
)
def test_steps_that_are_not_known_are_refused(bert, tmp_path, modules, record, got):
    checkpoint = load(sentence_folder(bert, tmp_path, {"pooling_mode_mean_tokens": True} | record, modules))
    with pytest.raises(UsageError, match=f"'{got}.*' of its modules.json or card"):
        embed(["a"], checkpoint)
    assert embed(["a"], checkpoint, "mean").shape == (1, 24)


def test_a_shorter_vector_and_code_of_the_repository_are_refused(bert, tmp_path):
    folder = sentence_folder(bert, tmp_path, {}, ["Transformer", "Pooling"])
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 8}))
    with pytest.raises(UsageError, match="'mean, truncate_dim 8'"):
        embed(["a"], load(folder))
    modules = (folder / "modules.json").read_text()
    (folder / "modules.json").write_text(modules.replace("sentence_transformers.models.T", "custom_st.T"))
    with pytest.raises(UsageError, match=r"'custom_st\.Transformer, truncate_dim 8'"):
        embed(["a"], load(folder))


@pytest.mark.parametrize("prompts", [{}, {"query": "dogs "}])
def test_a_default_prompt_that_the_folder_does_not_hold_is_refused(bert, tmp_path, prompts):
    folder = sentence_folder(bert, tmp_path, {}, ["Transformer", "Pooling"])
    record = {"prompts": prompts, "default_prompt_name": "passage"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"default_prompt_name among them \((none|query)\), got 'passage'"):
        load(folder)


def test_prompts_that_are_left_out_of_the_mean_are_refused(bert, tmp_path):
    folder = sentence_folder(bert, tmp_path, {"include_prompt": False}, ["Transformer", "Pooling"])
    assert (embed(["a dog"], load(folder)) - embed(["a dog"], load(bert), "mean")).abs().max() < 1e-6
    record = {"prompts": {"query": "", "document": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(record))
    assert load(folder).card["prompts"] == record["prompts"]
    record["prompts"]["query"] = "dogs "
    (folder / "config_sentence_transformers.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="include_prompt False with prompts is not supported"):
        load(folder)


def test_modules_that_are_missing_or_no_list_are_refused(bert, tmp_path):
    folder = sentence_folder(bert, tmp_path, {}, ["Transformer", "Pooling"])
    (folder / "pool" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"pool.config\.json: cannot be read as JSON \(missing\)"):
        load(folder)
    (folder / "modules.json").write_text("[3]")
    with pytest.raises(CheckpointError, match=r"modules\.json.*: expected"):
        load(folder)


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(
    ("name", "length", "own", "expected"),
    [
        ("sentence_bert_config.json", 9, 7, 9),
        ("sentence_bert_config.json", None, 7, 7),  # as version 6 writes it
        ("sentence_xlm-roberta_config.json", 9, 7, 9),
        ("sentence_bert_config.json", None, 10**30, 24),
        ("sentence_bert_config.json", 99, 7, 24),
    ],
)
def test_the_longest_text_is_the_module_s_or_else_the_tokenizer_s(bert, tmp_path, name, length, own, expected):
    folder = sentence_folder(bert, tmp_path, {}, ["Transformer", "Pooling"])
    (folder / "sentence_bert_config.json").unlink()
    (folder / name).write_text(json.dumps({"max_seq_length": length}))
    record = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(record | {"model_max_length": own}))
    with pytest.warns(TextCut, match=f"is cut to {expected} tokens"):
        made = embed(["a " * 33], load(folder))
    assert (made - embed(["a " * (expected - 2)], load(bert), "mean")).abs().max() < 1e-6


def test_long_texts_may_lose_their_beginning(bert, tmp_path):
    from transformers import AutoTokenizer

    for path in bert.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    record = json.loads((bert / "tokenizer_config.json").read_text())
    more = {"truncation_side": "left", "model_max_length": 6}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(record | more))
    save_folder(load(tmp_path), tmp_path / "ours")
    reference = AutoTokenizer.from_pretrained(tmp_path)
    pair = ("the dog at sea", "a red bus is on the road")
    for folder in (tmp_path, tmp_path / "ours"):
        tokenizer = load(folder).tokenizer
        with pytest.warns(TextCut, match="is cut to 6 tokens"):
            assert tokenizer.batch([pair[1]]).ids[0].tolist() == reference(pair[1], truncation=True).input_ids
        with pytest.warns(TextCut, match="a pair of texts is cut to 6 tokens"):
            assert tokenizer.pair(*pair)[0] == reference(*pair, truncation=True).input_ids
    with pytest.warns(TextCut):
        long, kept = embed([pair[1]], load(tmp_path)), embed(["road"], load(bert))  # four letters
    assert (long - kept).abs().max() < 1e-6


@pytest.mark.parametrize("file", ["vocab.txt", "tokenizer.json"])
def test_a_folder_may_say_that_texts_get_lower_case(bert, tmp_path, file):
    """Accents stay, unlike with a tokenizer of lower case alone."""
    from transformers import BertTokenizer

    folder = sentence_folder(bert, tmp_path, {}, ["Transformer", "Pooling"])
    words = [*WORDS[:-1], "é"]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}, do_lower_case=False).save_pretrained(folder)
    if file == "vocab.txt":
        (folder / "tokenizer.json").unlink()
        (folder / file).write_text("".join(f"{word}\n" for word in words))
    assert load(folder).tokenizer.encode("SEA É dog") == [1, 1, 6]
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    save_folder(load(folder), tmp_path / "ours")
    for one in (folder, tmp_path / "ours"):
        assert load(one).tokenizer.encode("SEA É dog") == [8, len(words) - 1, 6]


def decoder_folder(root: Path, kind: str, **options) -> tuple[Path, torch.nn.Module]:
    """A model of transformers whose tokenizer names an end that it puts after no text."""
    import transformers

    folder, config = hub_folder(root, "neox")
    gpt2 = {"n_positions": 24, "n_embd": 24, "n_layer": 2, "n_head": 3} if kind.startswith("GPT2") else SIZES
    made = getattr(transformers, f"{kind.removesuffix('ForCausalLM').removesuffix('Model')}Config")
    torch.manual_seed(0)
    model = randomized(getattr(transformers, kind)(made(**gpt2 | config | options))).eval()
    model.save_pretrained(folder)
    return folder, getattr(model, "model", model)


def mean_of(folder: Path, model: torch.nn.Module, text: str, length: int | None = None) -> torch.Tensor:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(text).input_ids[:length]
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0].mean(0)


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("kind", ["GPT2Model", "LlamaModel", "MistralModel", "Qwen2Model", "Qwen2ForCausalLM"])
def test_folders_of_decoders_say_how_vectors_are_made(tmp_path, kind):
    """As those of E5, GTE and KaLM do, with and without a head."""
    folder, model = decoder_folder(tmp_path, kind)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    modules = [{"path": place, "type": f"sentence_transformers.models.{name}"}
               for name, place in (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2"))]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 4}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "the "}}))
    expected = torch.nn.functional.normalize(mean_of(folder, model, "the cat sat on the mat", 4), dim=0)
    with pytest.warns(TextCut, match="is cut to 4 tokens"):
        found = embed(["cat sat on the mat"], load(folder), prompt="query")[0]
    assert (found - expected).abs().max() < 1e-5


def test_a_reranker_of_a_language_model_stays_one(tmp_path):
    """Qwen3-Reranker's kind, whose answer is a yes or a no."""
    folder, _ = decoder_folder(tmp_path, "Qwen2ForCausalLM")
    kinds = ("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore")
    modules = [{"path": str(i), "type": f"sentence_transformers.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert is_language_model(load(folder))


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("kind", ["GPT2Model", "LlamaForCausalLM", "Qwen2Model", "Qwen3Model"])
def test_a_decoder_may_read_in_both_directions(tmp_path, kind):
    """By `is_causal`, as transformers has it from 5.2 on; the mean is the default then, and no end is added."""
    folder, model = decoder_folder(tmp_path, kind, is_causal=False)
    save_folder(load(folder), tmp_path / "ours")
    for text in ("the cat sat", "a dog"):
        for one in (folder, tmp_path / "ours"):
            assert (embed([text, "more"], load(one))[0] - mean_of(folder, model, text)).abs().max() < 1e-5


def pooled_folder(model, folder: Path, *more: str) -> Path:
    """A model with the modules of sentence-transformers."""
    randomized(model).save_pretrained(folder)
    names = ("Transformer", "Pooling", *more)
    modules = [{"path": name, "type": f"sentence_transformers.models.{name}"} for name in names]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "Pooling").mkdir()
    (folder / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "max"}))
    return folder


def test_the_encoder_of_a_whole_t5_makes_vectors(tmp_path):
    """As sentence-transformers loads it: the decoder is not read."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=60, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_heads=3, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    folder = pooled_folder(model, tmp_path, "Normalize")
    tiny_pieces(folder).rename(folder / "spiece.model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 9}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(
        {"prompts": {"query": "the "}, "default_prompt_name": "query"}))  # fmt: skip
    checkpoint = load(folder)
    ids = [*checkpoint.tokenizer.encode("the cat sat"), 1]
    with torch.no_grad():
        expected = model.encoder(torch.tensor([ids])).last_hidden_state[0].amax(0)
    found = embed(["cat sat"], checkpoint)[0]
    assert (found - torch.nn.functional.normalize(expected, dim=0)).abs().max() < 1e-5


def test_vectors_of_a_bart_are_refused(tmp_path):
    """sentence-transformers pools the states of its decoder, and Dense modules would follow these."""
    from transformers import BartConfig, BartModel

    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder")
             for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))}  # fmt: skip
    folder, record = hub_folder(tmp_path, "byte-level")
    model = BartModel(BartConfig(**record, d_model=16, max_position_embeddings=32, **sizes))
    checkpoint = load(pooled_folder(model, folder))
    with pytest.raises(UsageError, match=r"'max, of the decoder' of its modules\.json or card is not supported"):
        embed(["a"], checkpoint)
    modules = json.loads((folder / "modules.json").read_text())
    more = {"path": "Dense", "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps([*modules, more]))
    with pytest.raises(CheckpointError, match=r"modules\.json: expected a text encoder before Dense, got Enc"):
        load(folder)


@pytest.mark.parametrize("kind", ["T5Tokenizer", "ByT5Tokenizer"])
def test_a_t5_encoder_has_the_longest_text_of_its_folder(tmp_path, kind):
    """Sentence-T5, GTR; unlike a T5 that writes, which it does not cut."""
    from transformers import T5Config, T5EncoderModel

    size = 384 if kind == "ByT5Tokenizer" else 60
    folder = tmp_path / "t5"
    torch.manual_seed(0)
    model = T5EncoderModel(T5Config(vocab_size=size, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_heads=3))
    randomized(model).save_pretrained(folder)
    tiny_pieces(folder).rename(folder / "spiece.model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, "extra_ids": 9}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6}))
    save_folder(load(folder), tmp_path / "ours")
    text = "the cat sat on the mat"
    ids = [*load(folder).tokenizer.encode(text)[:5], 1]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
    for one in (folder, tmp_path / "ours"):
        with pytest.warns(TextCut, match="is cut to 6 tokens"):
            assert (embed([text], load(one))[0] - expected).abs().max() < 1e-5
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    with pytest.raises(CheckpointError, match="do_lower_case true with T5's vocabulary is not supported"):
        load(folder)


def test_dense_modules_and_prompts_of_a_folder(bert, tmp_path):
    """As EmbeddingGemma and LaBSE have them: two maps after the mean, then length 1."""
    folder = sentence_folder(bert, tmp_path, {"pooling_mode_mean_tokens": True},
                             ["Transformer", "Pooling", "Dense", "Dense", "Normalize"])  # fmt: skip
    maps = [torch.nn.Linear(24, 40), torch.nn.Linear(40, 7, bias=False)]
    for place, own, function in zip((2, 3), maps, ("Tanh", "linear.Identity"), strict=True):
        (folder / f"{place}_Dense").mkdir()
        record = {"in_features": own.in_features, "out_features": own.out_features, "bias": own.bias is not None,
                  "activation_function": f"torch.nn.modules.{function}"}  # fmt: skip
        (folder / f"{place}_Dense" / "config.json").write_text(json.dumps(record))
        tensors = {f"linear.{name}": tensor for name, tensor in own.state_dict().items()}
        save_file(tensors, folder / f"{place}_Dense" / "model.safetensors")
    prompts = {"prompts": {"query": "dogs the ", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    checkpoint, means = load(folder), embed(["sea", "dogs the sea"], load(bert), "mean")
    save_folder(checkpoint, tmp_path / "ours")
    with torch.no_grad():
        expected = torch.nn.functional.normalize(maps[1](maps[0](means).tanh()), dim=-1)
    for one in (checkpoint, load(tmp_path / "ours"), prepare_for_inference(checkpoint, "float32")):
        assert (embed(["sea"], one)[0] - expected[0]).abs().max() < 1e-5
        assert (embed(["sea"], one, prompt="query")[0] - expected[1]).abs().max() < 1e-5
        assert (embed(["sea"], one, prompt="document")[0] - expected[0]).abs().max() < 1e-5
    torch.save(load_file(folder / "2_Dense" / "model.safetensors"), folder / "2_Dense" / "pytorch_model.bin")
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"2_Dense.pytorch_model\.bin: pickled weights; run multimodal convert "):
        load(folder)
    convert(folder, str(tmp_path / "converted"))
    assert (embed(["sea"], load(tmp_path / "converted"))[0] - expected[0]).abs().max() < 1e-5
    with pytest.raises(UsageError, match=r"'passage': model .* has no such prompt; it has query, document"):
        embed(["sea"], checkpoint, prompt="passage")
    record = json.loads((folder / "2_Dense" / "config.json").read_text())
    (folder / "2_Dense" / "config.json").write_text(json.dumps(record | {"use_residual": True}))
    with pytest.raises(CheckpointError, match=r"2_Dense.config\.json: use_residual True is not supported"):
        load(folder)
    (folder / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 23, "activation_function": "x.Tanh"}))
    with pytest.raises(CheckpointError, match=r"2_Dense.config\.json: activation_function 'Tanh', in_features 23"):
        load(folder)
