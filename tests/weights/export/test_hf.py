"""Folders for transformers: loaded there they compute what the model computes that ours came from."""

import json
import re
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import multimodal
from multimodal.errors import UsageError
from multimodal.export.export import export
from multimodal.export.hf.configs import WRITERS
from multimodal.export.hf.files import write_tokenizer
from multimodal.export.hf.folder import parts_of, write_folder
from multimodal.models.text import TextTransformer
from multimodal.system.files import optional_json
from multimodal.tasks.text.embed import embed
from multimodal.tokens.chat.format import ChatFormat
from multimodal.tokens.chat.messages import read_messages
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.tokenizer import TextCut
from multimodal.tokens.text.translation import m2m100_tokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.weights.card import searched
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.load import families, load
from tests.helpers.data import wordpieces
from tests.helpers.paths import ROOT
from tests.helpers.references import causal, decoders, encoders, seq2seq, translation, vision
from tests.helpers.references.hub import hub_folder, llama_pieces
from tests.helpers.spread import spread, thin
from tests.helpers.tiny import ENCODER, TEXTS
from tests.helpers.tiny_checkpoints import BYTES, checkpoint

MODULES = {causal: causal.CASES, decoders: decoders.CASES, encoders: encoders.CASES, seq2seq: seq2seq.CASES,
           vision: vision.CASES}  # fmt: skip
NAMES = [(module, name) for module, names in MODULES.items() for name in names]
# a third of the families, and of heads whose class their tensors do not tell; the others with -m slow
HEADS = ("BERT, one class", "BERT, choices", "BERT, next sentence", "MPNet, choices")
CASES = [pytest.param(module, name, id=name, marks=pytest.mark.slow if "," in name and name not in HEADS else ())
         for module, name in NAMES]  # fmt: skip
IDS = torch.tensor([[3, 7, 5, 2], [8, 6, 4, 2]])


def family_of(made):
    return families()[made.family] if isinstance(made.family, str) else made.family


@torch.no_grad()
@pytest.mark.parametrize(("module", "name"), spread(CASES, 3, pytest.mark.slow, pytest.mark.ci))
def test_transformers_computes_the_same_from_the_folder(module, name, tmp_path):
    import transformers

    made = module.case(name)
    family, kind = family_of(made), dict(made.config).get("model_type")
    if kind not in WRITERS:
        return  # from a folder of transformers alone
    own = family.load(made.tensors, made.config, "file")
    if getattr(getattr(own.model.config, "decoder", None), "head_bias", None) == "fixed":  # as one trained here
        own.model.config = replace(own.model.config, decoder=replace(own.model.config.decoder, head_bias=True))
    source = Checkpoint(own.model, source=name, card=own.card)
    assert write_folder(source, parts_of(source), tmp_path) == []
    assert not (tmp_path / "manifest.json").exists()
    told = getattr(transformers, optional_json(tmp_path / "config.json")["architectures"][0])
    told = type(made.reference) if name.endswith(", body") else told  # whose head is the embedding
    other, info = told.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("unexpected_keys", "mismatched_keys"))
    assert all("embed_positions" in key for key in info["missing_keys"])  # sinusoids
    given = {"input_ids": IDS}
    if hasattr(other, "get_image_features") or "ViT" in type(own.model).__name__:
        given = ({} if type(own.model).__name__ == "ViT" else given) | {
            "pixel_values": torch.randn(2, 3, *getattr(own.model.config, "image", own.model.config).image)}  # fmt: skip
        if "input_ids" in given:
            given["input_ids"] = torch.cat([IDS, torch.full((2, 1), own.model.config.text.vocabulary - 1)], 1)
    elif other.config.is_encoder_decoder and family.name not in ("t5-encoder", "umt5-encoder"):
        given["decoder_input_ids"] = IDS[:, :3]
    if type(other).__name__.endswith("ForMultipleChoice"):
        given = {key: value[None] for key, value in given.items()}
    wanted, found = (model.eval()(**given) for model in (made.reference, other))
    assert torch.allclose(found[0], wanted[0], atol=1e-5)


def test_a_gemma_that_sees_both_sides_has_a_class_there():
    made = causal.case("Gemma 3")
    own = family_of(made).load(made.tensors, made.config | {"use_bidirectional_attention": True}, "file")
    config = parts_of(Checkpoint(own.model, source="m", card=own.card))[0]
    assert (own.model.config.causal, config["architectures"]) == (False, ["Gemma3ForCausalLM"])


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
@torch.no_grad()
def test_timms_vit_of_one_size_is_transformers(name, tmp_path):
    import timm
    from timm.models import save_for_hf
    from transformers import AutoModelForImageClassification

    args = {"embed_dim": 32, "depth": 1, "num_heads": 2, "img_size": 32}
    model = vision.randomized(timm.create_model(name, num_classes=5, **args)).eval()
    save_for_hf(model, tmp_path / "timm", model_args=args, safe_serialization=True)
    export(tmp_path / "timm", tmp_path / "out", to="hf")
    images = torch.randn(2, 3, 32, 32)
    found = AutoModelForImageClassification.from_pretrained(tmp_path / "out")(images).logits
    assert torch.allclose(found, model(images), atol=1e-5)


def test_a_folder_of_transformers_keeps_its_files(hf_folder, tmp_path):
    source = shutil.copytree(hf_folder, tmp_path / "source")
    for name in ("spm.model", "vocab.txt", "target_vocab.json", "normalizer.json"):
        (source / name).touch()
    export(source, tmp_path / "out", to="hf", store="float16")
    assert load(tmp_path / "out").model.config == load(hf_folder).model.config
    held = {path.name for path in (tmp_path / "out").iterdir()}
    assert held >= {path.name for path in source.iterdir()}


def test_given_preprocessing_takes_the_place_of_a_folders(tmp_path):
    from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification, ViTImageProcessor

    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ViTForImageClassification(ViTConfig(**sizes, image_size=32)).save_pretrained(tmp_path / "hf")
    for _ in range(2):  # without an image processor, then with one
        export(tmp_path / "hf", tmp_path / "out", to="hf", preprocessing="imagenet", overwrite=True)
        made, own = AutoImageProcessor.from_pretrained(tmp_path / "out"), load(tmp_path / "out").preprocessing
        assert (tuple(made.image_mean), made.size["shortest_edge"]) == (own.mean, 36)
        assert (own.crop, own.offset) == (0.875, "round")
        processor = ViTImageProcessor(size={"height": 32, "width": 32}).to_dict()
        (tmp_path / "hf" / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
        warnings.filterwarnings("ignore", "preprocessing imagenet: replaces that of")


@pytest.mark.ci
def test_an_export_keeps_our_tokenizer_when_it_is_exported_in_place(tmp_path):
    for model, store in (("translator-mini", "float32"), (tmp_path / "out", "float16")):
        export(model, tmp_path / "out", to="hf", store=store, overwrite=True)
    own, again = (load(model).required_tokenizer() for model in ("translator-mini", tmp_path / "out"))
    assert own.language_ids == again.language_ids != {}
    assert own.encode("A dog") == again.encode("A dog")


def test_dense_modules_stay_files_of_their_own(tmp_path):
    from transformers import BertConfig, BertModel

    folder, words = tmp_path / "bert", wordpieces.WORDS
    BertModel(BertConfig(**wordpieces.SIZES, vocab_size=len(words))).save_pretrained(folder)
    wordpieces.wordpiece(words).save_pretrained(folder)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "maps/first"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    dense = {"in_features": 24, "out_features": 7, "bias": False, "activation_function": "torch.nn.Tanh"}
    for name, record in (("modules.json", modules), ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True}),
                         ("maps/first/config.json", dense)):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(record))
    save_file({"linear.weight": torch.randn(7, 24)}, folder / "maps" / "first" / "model.safetensors")
    export(folder, tmp_path / "out", to="hf")
    assert np.array_equal(embed(["the dog"], load(tmp_path / "out")), embed(["the dog"], load(folder)))
    save_folder(load(folder), tmp_path / "own")
    with pytest.raises(UsageError, match="Dense modules have no place in a model of transformers; export the folder"):
        export(tmp_path / "own", tmp_path / "other", to="hf")


def test_the_vectors_of_a_sentence_model_are_described_there(tmp_path):
    made, prompts = load(encoders.bert_folder(tmp_path / "hf")), {"query": "the dog ", "text": ""}
    card = {"pooling": "max", "normalize": True, "prompts": prompts, "prompt": "query", "similarity": "dot"}
    made.tokenizer.context = 6
    save_folder(replace(made, card=made.card | card), tmp_path / "own")
    export(tmp_path / "own", tmp_path / "out", to="hf")
    models = [load(tmp_path / name) for name in ("own", "out")]
    assert {name: models[1].card[name] for name in card} == card
    with pytest.warns(TextCut, match="cut to 6 tokens"):
        vectors = [embed(["sea", "dog dog dog dog"], one) for one in models]
    assert np.array_equal(*vectors)
    save_folder(replace(made, card=made.card | card | {"pooling": "weightedmean"}), tmp_path / "other")
    with pytest.raises(UsageError, match="pooling 'weightedmean' has no place in a model of transformers"):
        export(tmp_path / "other", tmp_path / "no", to="hf")


def test_a_token_that_a_template_alone_begins_with_is_there(tmp_path):
    from transformers import AutoTokenizer

    root, config = hub_folder(tmp_path, "chatml")
    template, begin = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "<|begin|>"
    chat, tokenizer = ChatFormat(template, tokens={"bos_token": begin}), hub_tokenizer(root, config)
    model = TextTransformer(replace(TEXTS["llama"], vocabulary=config["vocab_size"], tied=False))
    save_folder(Checkpoint(model, tokenizer, chat=chat), tmp_path / "own")
    export(tmp_path / "own", tmp_path / "out", to="hf")
    given, made = [{"role": "user", "content": "Hi"}], AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = made.apply_chat_template(given, return_dict=False)
    assert ids == chat.ids(read_messages(given), [], tokenizer, "")[0]
    records = [optional_json(tmp_path / "out" / f"{name}.json") for name in ("config", "generation_config")]
    assert [one["bos_token_id"] for one in records] == [ids[0]] * 2 == [made.convert_tokens_to_ids(begin)] * 2
    assert made("Hi").input_ids == ids[1:-1]  # texts begin with none


@pytest.mark.parametrize(("name", "model", "told"), [
    ("byte-level", replace(ENCODER, segments=0), ("<s>", "</s>", "<s>", "</s>", "<unk>", "<pad>", "<mask>")),
    ("wordpiece", ENCODER, ("[CLS]", "[SEP]", "[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]")),
    ("neox", TEXTS["llama"], ("<|endoftext|>", "<|endoftext|>", None, None, "<|endoftext|>", "<|endoftext|>", None)),
])  # fmt: skip
def test_tokens_keep_their_roles_and_pairs_their_segments(name, model, told, tmp_path):
    from transformers import PreTrainedTokenizerFast

    root, config = hub_folder(tmp_path, name)
    hub_tokenizer(root, config).save(tmp_path)
    own = TextTransformer(replace(model, vocabulary=config["vocab_size"]))
    assert write_tokenizer(Checkpoint(own, tokenizer_from(tmp_path)), tmp_path)
    made = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    roles = (made.bos_token, made.eos_token, made.cls_token, made.sep_token, made.unk_token)
    assert (*roles, made.pad_token, made.mask_token) == told
    segments = hub_tokenizer(root, config).pair("The cat", "a dog")[1] if model.segments else None
    assert made("The cat", "a dog").get("token_type_ids") == segments


@pytest.mark.ci
@pytest.mark.parametrize("own", [{"max_length": 33, "num_beams": 3}, {"max_new_tokens": 9, "length_penalty": 2.0}])
def test_the_search_of_a_card_is_that_of_the_folder(own, tmp_path):
    from transformers import GenerationConfig

    made = load("translator-mini")
    save_folder(replace(made, card=made.card | {"generation": own}), tmp_path / "own")
    export(tmp_path / "own", tmp_path / "out", to="hf")
    found = GenerationConfig.from_pretrained(tmp_path / "out").to_dict()
    assert {key: found[key] for key in own} == own
    assert found["max_length"] == own.get("max_length")


@pytest.mark.parametrize(("beams", "texts"), [(1, None), (2, None), (3, 3)])
def test_generate_takes_the_search_of_a_folder_that_samples(beams, texts, tmp_path):
    """Its samplers are dropped, without which it has fewer texts than it asks for."""
    from transformers import AutoModelForCausalLM

    tokenizer = hub_tokenizer(*(given := hub_folder(tmp_path, "chatml")))
    model = TextTransformer(replace(TEXTS["llama"], vocabulary=given[1]["vocab_size"], tied=False))
    odd = {"num_beam_groups": beams, "diversity_penalty": 0.5, "penalty_alpha": 0.6, "top_k": 4}
    asked = {"do_sample": True, "num_return_sequences": 3, "num_beams": beams, "no_repeat_ngram_size": 2} | odd
    save_folder(Checkpoint(model, tokenizer, card={"generation": searched(asked)}), tmp_path / "own")
    export(tmp_path / "own", tmp_path / "out", to="hf")
    found = optional_json(tmp_path / "out" / "generation_config.json")
    assert not {"num_beam_groups", "diversity_penalty", "penalty_alpha"} & {*found}
    assert optional_json(tmp_path / "out" / "tokenizer_config.json")["padding_side"] == "left"
    assert (found["num_beams"], found["no_repeat_ngram_size"], found.get("num_return_sequences")) == (beams, 2, texts)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(made.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)) == (texts or 1)


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_what_logits_of_classes_are_for_stays(problem, tmp_path):
    """Several labels that may be true, a number, or a cross-encoder's activation, which has a file of its own from
    version 6 of sentence-transformers on."""
    from transformers import BertConfig, BertForSequenceClassification

    names, activation = {0: "rude", 1: "false", 2: "long"}, {"activation_fn": "torch.nn.modules.linear.Identity"}
    own = {"sentence_transformers": activation} if problem != "regression" else {}
    config = BertConfig(**wordpieces.SIZES, vocab_size=20, id2label=names, problem_type=problem, **own)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "config_sentence_transformers.json").write_text(json.dumps({} if own else activation))
    save_folder(load(tmp_path / "hf"), tmp_path / "own")
    export(tmp_path / "own", tmp_path / "out", to="hf")
    made = BertForSequenceClassification.from_pretrained(tmp_path / "out").config
    assert (made.problem_type, made.id2label, made.sentence_transformers) == (problem, names, activation)


@pytest.mark.ci
def test_a_shipped_vocabulary_has_the_same_ids_there(tmp_path):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    text = "A dog, it's <eos> naïve"
    for name in ("gpt-mini", "bert-mini", "translator-mini"):
        export(name, tmp_path / name, to="hf")
        made, own = AutoTokenizer.from_pretrained(tmp_path / name), load(name)
        text = text.replace("<eos>", "")  # a control token there
        wanted = own.required_tokenizer().batch([text]).ids[0].tolist()
        parts = {"gpt-mini": wanted[:-1], "bert-mini": wanted, "translator-mini": wanted[1:]}  # a language precedes
        assert made(text).input_ids == parts[name]
        if name == "bert-mini":  # which has no segments
            ids = torch.tensor([own.required_tokenizer().pair("A dog", "the sea")[0]])
            theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / name)
            found = theirs(**made("A dog", "the sea", return_tensors="pt")).logits
            assert torch.allclose(found, own.model(ids), atol=1e-4)
    model = load(tmp_path / "gpt-mini")
    assert multimodal.generate("The", model, max_new_tokens=8, temperature=0) == multimodal.generate(
        "The", "gpt-mini", max_new_tokens=8, temperature=0)  # fmt: skip


@pytest.mark.parametrize("legacy", [True, False, {"add_prefix_space": False, "add_eos_token": True}])
def test_tokens_added_to_a_sentencepiece_model_are_there(legacy, tmp_path):
    """As fine-tunes of Llama have them, from our folder."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=408, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                         num_attention_heads=4, bos_token_id=1, eos_token_id=2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    llama_pieces(tmp_path / "hf")
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    added = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_start|>": 400, "<|im_end|>": 401, "<think>": 402}
    template = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content + eos_token }}\n{% endfor %}"
    record = {
        "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>",
        "eos_token": "<|im_end|>", "unk_token": "<unk>", "chat_template": template, "added_tokens_decoder": {
            i: flags | {"content": name, "special": name != "<think>"} for name, i in added.items()}}  # fmt: skip
    record |= legacy if isinstance(legacy, dict) else {"legacy": legacy}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(record))
    save_folder(load(tmp_path / "hf"), tmp_path / "own")
    export(tmp_path / "own", tmp_path / "out", to="hf")
    models = [load(tmp_path / name) for name in ("own", "out")]
    theirs = [AutoTokenizer.from_pretrained(tmp_path / name) for name in ("hf", "out")]
    assert {one.eos_token_id for one in theirs} == {one.tokenizer.eos_id for one in models} == {401}
    given = [{"role": "user", "content": "the cat <think>the dog [403]"}]
    ids = [one.apply_chat_template(given, return_dict=False) for one in theirs]
    ids += [one.chat.ids(read_messages(given), [], one.tokenizer, "")[0] for one in models]
    assert ids == ids[:1] * 4
    for text in ("the cat", "a<think>b", "<think>the"):
        ids = [one(text).input_ids for one in theirs]
        ids += [[1, *one.tokenizer.encode(text), *[401] * one.tokenizer.puts_end] for one in models]
        assert ids == ids[:1] * 4


@pytest.mark.ci
def test_a_translator_translates_there_as_the_guide_says(tmp_path, monkeypatch):
    export("translator-mini", tmp_path / "translator-hf", to="hf")
    monkeypatch.chdir(tmp_path)
    (lines,) = re.findall(r"(?s)```py\n(.*?)```", (ROOT / "docs" / "exports.md").read_text())
    exec(lines, names := {})
    wanted = multimodal.translate("A dog runs on the beach.", "translator-mini", source="en", target="de", beam_size=1)
    assert names["text"] == wanted == "Ein Hund rennt am Strand."


def test_control_tokens_take_blanks_there_too(tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = hub_tokenizer(*hub_folder(tmp_path, "phi3"))
    assert write_tokenizer(Checkpoint(TextTransformer(TEXTS["llama"]), tokenizer), tmp_path)
    text = "<|user|>\n The cat<|end|> \n"
    made = PreTrainedTokenizerFast.from_pretrained(tmp_path)(text, add_special_tokens=False)
    assert made.input_ids == tokenizer.encode_template(text)


def test_m2m100s_languages_are_control_tokens_there(tmp_path):
    from transformers import AutoTokenizer

    size = translation.m2m100(tmp_path)
    own = m2m100_tokenizer(tmp_path, {"vocab_size": size})
    (tmp_path / "out").mkdir()
    assert write_tokenizer(Checkpoint(seq2seq.case("Hugging Face M2M100").reference, own), tmp_path / "out")
    theirs, ids = AutoTokenizer.from_pretrained(tmp_path / "out", src_lang="de"), own.encode("the cat sat")
    assert theirs("the cat sat").input_ids == [own.language_ids["de"], *ids, own.eos_id]
    assert theirs.decode([2, own.language_ids["fr"], *ids, 2], skip_special_tokens=True) == "the cat sat"


@pytest.mark.ci
def test_what_transformers_lacks_is_refused_before_anything_is_written(tmp_path):
    save_folder(Checkpoint(checkpoint("shaw").model, BYTES), tmp_path / "model")
    with pytest.raises(UsageError, match="no family of transformers has all of its options"):
        export(tmp_path / "model", tmp_path / "out", to="hf")
    bert = encoders.case("ModernBERT")
    save_folder(families()["modernbert"].load(bert.tensors, bert.config, "file"), tmp_path / "bert")
    with pytest.raises(UsageError, match="a modernbert is exported from the folder of transformers that it came from"):
        export(tmp_path / "bert", tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(("model", "to", "named"), [
    ("clip-vit-16", "gguf", "GGUF takes text decoder (got CLIP, which onnx and hf can hold)"),
    ("clip-vit-16", "ctranslate2", "CTranslate2 takes Whisper or text encoder or text decoder or text-to-text"),
    ("asr-conformer-en", "hf", "(got speech recognizer with CTC, which onnx can hold)"),
    ("any-mini", "onnx", "(got model of several inputs)"),
    ("captioner-mini", "hf", "(got captioner, which onnx can hold)"),
    ("bert-mini", "gguf", "(got text encoder, which onnx and hf and ctranslate2 can hold)"),
])  # fmt: skip
def test_a_kind_that_a_format_lacks_is_named_with_those_that_hold_it(model, to, named, tmp_path):
    with pytest.raises(UsageError, match=rf"{model}: .*{re.escape(named)}"):
        export(model, tmp_path / "out", to=to)
    assert list(tmp_path.iterdir()) == []
