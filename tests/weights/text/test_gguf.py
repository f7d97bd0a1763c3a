"""GGUF files, written by the `gguf` library from tiny random models, beside the models that they were written from, and
transformers' reading of the same file."""

import json
import re
import struct
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer as Backend
from torch import Tensor

from multimodal.errors import CheckpointError
from multimodal.export.export import export
from multimodal.tasks.text.embedder import Embedder
from multimodal.tasks.text.generate import Generator, end_ids
from multimodal.tokens.text.hub.gguf_vocabulary import gguf_tokenizer
from multimodal.weights.files import gguf_file
from multimodal.weights.files.gguf_file import read_gguf
from multimodal.weights.folder import load_folder, save_folder
from multimodal.weights.load import load
from tests.helpers.references import causal
from tests.helpers.references.hub import llama_pieces, pipeline
from tests.helpers.spread import thin

gguf = pytest.importorskip("gguf")
# of causal.CASES, with options that a GGUF can state; and if transformers reads it
CASES = {
    "llama": ("Llama", {}), "qwen2": ("Qwen2", {}), "qwen3": ("Qwen3", {"head_dim": 8}),
    "gemma": ("Gemma", {"head_dim": 6}),
    "gemma2": ("Gemma2", causal.GEMMA | {"query_pre_attn_scalar": 6, "layer_types": None, "head_dim": 6}),
    "gemma3": ("Gemma3Text", causal.GEMMA | {"query_pre_attn_scalar": 6, "layer_types": None, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 500.0}}}),
    "phi3": ("Phi3", {"tie_word_embeddings": True}), "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"tie_word_embeddings": True, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
                            "residual_multiplier": 0.22, "attention_multiplier": 0.4}),
    "smollm3": ("SmolLM3", {}), "starcoder2": ("Starcoder2", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
}  # fmt: skip
TURNED = ("llama", "granite", "smollm3")


def reference(arch: str, kind: str | None = None, **more) -> torch.nn.Module:
    import transformers

    own, options = CASES[arch]
    kind = kind or own
    torch.manual_seed(0)
    sizes = causal.SIZES | {"hidden_size": 48, "vocab_size": len(vocabulary()) + 5, "intermediate_size": 64,
                            "max_position_embeddings": 64}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes | options | more)
    config._attn_implementation = "eager" if arch == "gemma2" else "sdpa"
    return causal.randomized(getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config))


def vocabulary() -> dict[str, int]:
    return pipeline("chatml").get_vocab()


def written(path, arch: str, model: torch.nn.Module, kind=gguf.GGMLQuantizationType.F32, pieces=None, **changes):
    """As llama.cpp's convert_hf_to_gguf.py does it."""
    config = model.config.to_dict()
    out = gguf.GGUFWriter(path, arch)
    names = gguf.get_tensor_name_map(
        next(one for one in gguf.MODEL_ARCH if gguf.MODEL_ARCH_NAMES[one] == arch), config["num_hidden_layers"]
    )
    ropes = config["rope_parameters"]
    theta = ropes.get("full_attention", ropes)["rope_theta"]
    out.add_uint32(f"{arch}.context_length", config["max_position_embeddings"])
    for key, own in (("embedding_length", "hidden_size"), ("block_count", "num_hidden_layers"),
                     ("feed_forward_length", "intermediate_size"), ("attention.head_count", "num_attention_heads"),
                     ("attention.head_count_kv", "num_key_value_heads"), ("attention.key_length", "head_dim"),
                     ("attention.sliding_window", "sliding_window"), *changes.pop("more", ())):  # fmt: skip
        if config.get(own) is not None:
            out.add_uint32(f"{arch}.{key}", config[own])
    for key, own in (("attention.layer_norm_rms_epsilon", "rms_norm_eps"), ("embedding_scale", "embedding_multiplier"),
                     ("attention.layer_norm_epsilon", "layer_norm_eps" if arch == "stablelm" else "norm_epsilon"),
                     ("residual_scale", "residual_multiplier"), ("logit_scale", "logits_scaling"),
                     ("attention.scale", "attention_multiplier"),
                     ("attn_logit_softcapping", "attn_logit_softcapping"),
                     ("final_logit_softcapping", "final_logit_softcapping")):  # fmt: skip
        if config.get(own) is not None:
            out.add_float32(f"{arch}.{key}", config[own])
    out.add_float32(f"{arch}.rope.freq_base", theta)
    if arch == "stablelm":
        out.add_uint32(f"{arch}.rope.dimension_count", 2)
        out.add_bool(f"{arch}.use_parallel_residual", False)
    kinds = {int: out.add_uint32, float: out.add_float32, str: out.add_string, list: out.add_array,
             bool: out.add_bool}  # fmt: skip
    for key, value in changes.items():
        out.kv_data[0].pop(f"{arch}.{key}", None)
        if value is not None:
            kinds[type(value)](f"{arch}.{key}", value)
    (byte_level if pieces is None else partial(sentencepieces, pieces))(out)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        own = as_converted(arch, name, tensor, config).numpy()
        quantized = kind if own.ndim == 2 and own.shape[1] % 32 == 0 else gguf.GGMLQuantizationType.F32
        out.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), gguf.quants.quantize(own, quantized),
                       raw_dtype=quantized)  # fmt: skip
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def byte_level(out) -> None:
    chatml = json.loads(pipeline("chatml").to_str())
    special = {one["id"]: one["special"] for one in chatml["added_tokens"]}
    tokens = sorted(vocabulary(), key=vocabulary().get)
    kinds = [1 if i not in special else 3 if special[i] else 4 for i in range(len(tokens))]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(tokens + [f"[PAD{i}]" for i in range(5)])
    out.add_token_types(kinds + [5] * 5)
    out.add_token_merges([" ".join(pair) for pair in chatml["model"]["merges"]])
    out.add_eos_token_id(vocabulary()["<|im_end|>"])
    out.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")


def sentencepieces(path, out) -> None:
    """As Llama 2's: pieces with scores and types, in the numbers of SentencePiece."""
    import sentencepiece
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    model = ModelProto.FromString(path.read_bytes())
    assert sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString()).vocab_size() == 400
    out.add_tokenizer_model("llama")
    out.add_token_list([one.piece for one in model.pieces])
    out.add_token_scores([one.score for one in model.pieces])
    out.add_token_types([one.type for one in model.pieces])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_add_space_prefix(True)


def as_converted(arch: str, name: str, tensor: Tensor, config) -> Tensor:
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    found = re.search(r"\.([qk])_proj\.weight", name)
    if arch in TURNED and found:
        heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("arch", CASES)
@torch.no_grad()
def test_logits_equal_the_model_that_was_written(arch, tmp_path):
    model = reference(arch)
    ids = torch.randint(3, 400, (2, 20), generator=torch.Generator().manual_seed(1))
    made = load(written(tmp_path / "model.gguf", arch, model))
    assert (made.model(ids) - model(ids).logits).abs().max() <= 1e-5
    assert made.tokenizer.encode("The cat, 1999 日") == pipeline("chatml").encode("The cat, 1999 日").ids
    assert not made.tokenizer.control & set(made.tokenizer.encode("a<|im_end|>b"))
    assert {made.tokenizer._tokens[i] for i in end_ids(made)} == {"<|im_end|>", "<|endoftext|>", "<|end|>"}
    save_folder(made, tmp_path / "ours")
    assert torch.equal(load_folder(tmp_path / "ours").model(ids), made.model(ids))


def test_an_end_by_its_name_is_a_control_token_whatever_its_type(tmp_path):
    """As in llama.cpp, which overrides the type."""
    fields = read_gguf(written(tmp_path / "model.gguf", "llama", reference("llama")))[1]
    end = vocabulary()["<|im_end|>"]
    fields["tokenizer.ggml.token_type"][end] = 4
    del fields["tokenizer.ggml.eos_token_id"]
    made = gguf_tokenizer(tmp_path, fields, len(vocabulary()) + 5, 64)
    assert end in made.control & {*made.end_ids}


def test_sentencepieces_of_a_file_are_those_of_llamas_model(tmp_path):
    import sentencepiece

    pieces = llama_pieces(tmp_path)
    path = written(tmp_path / "model.gguf", "llama", reference("llama", vocab_size=405), pieces=pieces)
    made, theirs = load(path).tokenizer, sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    save_folder(load(path), tmp_path / "ours")
    for tokenizer in (made, load_folder(tmp_path / "ours").tokenizer):
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 405)
        for text in ("The cat sat", "  two  blanks\n\t", "日本語 😀 é", "a</s>b<s>", ""):
            assert tokenizer.encode(text) == theirs.encode(text)
            assert tokenizer.decode(tokenizer.encode(text)) == theirs.decode(theirs.encode(text))
            assert not tokenizer.control & set(tokenizer.encode(text))
    fields = read_gguf(path)[1]
    fields["tokenizer.ggml.token_type"][cat := theirs.piece_to_id("▁c")] = 4  # as llama.cpp splits a text at these
    named = gguf_tokenizer(tmp_path, fields, 405, 64)
    assert named.encode("a▁cb") == [*theirs.encode("a"), cat, *theirs.encode("b")]


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_an_embedding_model_says_its_pooling_and_direction(causal, tmp_path):
    model = reference("qwen3", is_causal=causal)
    states = model.model(torch.tensor([pipeline("chatml").encode("The cat sat").ids])).last_hidden_state[0]
    for number, vector in ((1, states.mean(0)), (3, states[-1])):
        path = written(tmp_path / "model.gguf", "qwen3", model, pooling_type=number, **{"attention.causal": causal})
        found = Embedder(load(path), normalize=None).texts(["The cat sat"])[0]
        assert abs(found - (vector / vector.norm()).numpy()).max() <= 1e-5
    with pytest.raises(CheckpointError, match=r"qwen3\.pooling_type 4 is not supported \(0 to 3\)"):
        load(written(tmp_path / "model.gguf", "qwen3", model, pooling_type=4))


def test_an_end_that_a_file_adds_is_put_after_texts_to_embed(tmp_path):
    pieces, model = llama_pieces(tmp_path), reference("llama", vocab_size=405)
    files = (
        written(tmp_path / "bytes.gguf", "llama", model),
        written(tmp_path / "p.gguf", "llama", model, pieces=pieces),
    )
    for path in files:
        fields = read_gguf(path)[1]
        for added in (False, True):
            fields["tokenizer.ggml.add_eos_token"] = added
            assert gguf_tokenizer(path, fields, 405, 64).puts_end is added


@pytest.mark.ci
@torch.no_grad()
def test_quantized_files_are_read_as_transformers_reads_them(tmp_path):
    from transformers import AutoModelForCausalLM

    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.F16):
        path = tmp_path / f"{kind.name}.gguf"
        written(path, "llama", reference("llama", hidden_size=96), kind)
        ids = torch.randint(3, 400, (2, 20), generator=torch.Generator().manual_seed(1))
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
        mine = load(path)
        assert (mine.model(ids) - theirs(ids).logits).abs().max() <= 1e-5, kind
        assert isinstance(Generator(mine, chat=True, max_new_tokens=3)("Why?"), str)


@pytest.mark.ci
@torch.no_grad()
def test_a_rope_factor_without_a_type_is_linear_as_in_llama_cpp(tmp_path):
    model = reference("llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})
    ids = torch.randint(3, 400, (2, 20), generator=torch.Generator().manual_seed(1))
    path, factor = tmp_path / "model.gguf", "rope.scaling.factor"
    for more in ({factor: 4.0}, {factor: 4.0, "rope.scaling.type": "linear", "rope.scaling.attn_factor": 1.0}):
        assert (load(written(path, "llama", model, **more)).model(ids) - model(ids).logits).abs().max() <= 1e-5
    plain = reference("llama")
    for more in ({factor: 0.0}, {factor: 4.0, "rope.scaling.type": "none"}, {"rope.scaling.type": "yarn"}):
        assert (load(written(path, "llama", plain, **more)).model(ids) - plain(ids).logits).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize(
    ("arch", "rope", "fields"),
    [
        ("gemma3", {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (
            ("sliding_attention", 77.0), ("full_attention", 500.0))}, {"rope.freq_base_swa": 77.0}),
        ("llama", {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0,
                   "original_max_position_embeddings": 16},
         {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
          "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0}),
    ],
)  # fmt: skip
def test_rates_are_those_that_llama_cpps_converter_writes(arch, rope, fields, tmp_path):
    model = reference(arch, rope_parameters=rope)
    ids = torch.randint(3, 400, (2, 20), generator=torch.Generator().manual_seed(1))
    made = load(written(tmp_path / "model.gguf", arch, model, **fields)).model
    assert (made(ids) - model(ids).logits).abs().max() <= 1e-5


@torch.no_grad()
@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(
    ("arch", "kind", "options", "fields"),
    [
        ("phi3", None, {}, {"attention.sliding_window": 0}),  # Phi-4's
        ("llama", None, {"mlp_bias": True}, {}),
        ("granite", None, {"attention_multiplier": 8**-0.5, "embedding_multiplier": 1.0, "residual_multiplier": 1.0},
         {"attention.scale": 0.0, "embedding_scale": 0.0, "residual_scale": None}),
        ("olmo2", "Olmo3", {"sliding_window": 4, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "attention_factor": 1.5,
                               "original_max_position_embeddings": 16}},
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
         {"attention.sliding_window_pattern": [False, True, True], "rope.freq_base_swa": 500.0,
          "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
          "rope.scaling.yarn_attn_factor": 1.5}),
    ],
)  # fmt: skip
def test_options_are_those_that_llama_cpps_converter_writes(arch, kind, options, fields, tmp_path):
    """A multiplier of 0, or none, is llama.cpp's own. Files of OLMo 3 say olmo2."""
    model = reference(arch, kind, **options)
    ids = torch.randint(3, 400, (2, 20), generator=torch.Generator().manual_seed(1))
    made = load(written(tmp_path / "model.gguf", arch, model, **fields)).model
    assert (made(ids) - model(ids).logits).abs().max() <= 1e-5


def test_words_of_a_file_that_names_no_split_are_llama_cpps(tmp_path):
    fields = read_gguf(written(tmp_path / "model.gguf", "llama", reference("llama")))[1]
    for name, words in (("", "don|'|t|Ġwait|Ġ|123|45|.)"), ("default", "don|'|t|Ġwait|Ġ|123|45|.)"),
                        ("smaug-bpe", "don|'t|Ġwait|Ġ|123|45|.)"),
                        ("tekken", "don|'t|Ġwait|Ġ|1|2|3|4|5|.)")):  # fmt: skip
        own = {key: value for key, value in fields.items() if key != "tokenizer.ggml.pre"}
        own |= {"tokenizer.ggml.pre": name} if name else {}
        split = Backend.from_str(json.dumps(gguf_tokenizer(tmp_path, own, 440, 64).pipeline())).pre_tokenizer
        assert "|".join(word for word, _ in split.pre_tokenize_str("don't wait 12345.)")) == words


@pytest.mark.ci
def test_a_tied_head_is_written_where_llama_cpp_ties_none(tmp_path):
    for arch in ("olmo2", "llama"):
        made = written(tmp_path / f"{arch}.gguf", arch, reference(arch, tie_word_embeddings=True))
        export(made, tmp_path / "phi-3.gguf", to="gguf", overwrite=True)
        assert ("output.weight" in read_gguf(tmp_path / "phi-3.gguf")[0]) is (arch == "olmo2")


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope.freq_base_swa": 77.0}, r"llama\.rope\.freq_base_swa 77\.0 is not supported"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 3.0},
         r"rope\.scaling\.attn_factor 3\.0 is not supported \(must be 1\)"),
        ({"rope.scaling.type": "su", "rope.scaling.factor": 4.0}, r"rope\.scaling\.type 'su' is not supported"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, r"factor 4\.0 beside rates in tensors"),
        ({"block_count": 2**32 - 1}, r"llama\.block_count: 4294967295, more than its \d+ tensors can fill"),
        ({"block_count": None}, r"llama\.block_count: expected a number above 0 \(got None\)"),
        ({"embedding_length": None}, r"llama\.embedding_length: expected a number above 0 \(got None\)"),
        ({"attention.head_count": 0}, r"llama\.attention\.head_count: expected a number above 0 \(got 0\)"),
        ({"attention.head_count": "4"}, r"llama\.attention\.head_count: expected a number above 0 \(got '4'\)"),
        ({"attention.head_count_kv": [2, 2]}, r"model\.gguf: invalid llama-hf configuration"),
        ({"context_length": None}, r"llama\.context_length: expected a number above 0 \(got None\)"),
    ],
)  # fmt: skip
def test_metadata_that_says_no_model_of_ours_is_refused_by_name(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message) as caught:
        load(written(tmp_path / "model.gguf", "llama", reference("llama"), **changes))
    assert str(caught.value).count("model.gguf") == 1


def test_what_is_not_supported_or_damaged_is_one_line(tmp_path):
    path = written(tmp_path / "model.gguf", "llama", reference("llama"))
    data = path.read_bytes()
    for share in (0.001, 0.02, 0.3, 0.9, 0.9999):
        (tmp_path / "cut.gguf").write_bytes(data[: int(len(data) * share)])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: .*(GGUF|tensor|list)"):
            load(tmp_path / "cut.gguf")
    written(tmp_path / "experts.gguf", "llama", reference("llama"), expert_count=8)
    with pytest.raises(CheckpointError, match=r"llama\.expert_count 8 is not supported"):
        load(tmp_path / "experts.gguf")
    (tmp_path / "other.gguf").write_bytes(data.replace(b"llama", b"rwkv6"))
    with pytest.raises(CheckpointError, match=r"architecture 'rwkv6' is not supported \(one of llama"):
        load(tmp_path / "other.gguf")


def test_a_header_that_claims_more_values_than_there_are_is_refused_at_once(tmp_path, monkeypatch):
    path, name = tmp_path / "model.gguf", b"general.x"
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(name)) + name
    path.write_bytes(head + struct.pack("<IIQ", 9, 0, 100_000))  # an array of bytes
    with pytest.raises(CheckpointError, match=r"is cut \(buffer is too small"):
        read_gguf(path)
    path.write_bytes(head + struct.pack("<IIQ", 9, 0, 30) + bytes(30))
    assert read_gguf(path)[1]["general.x"] == [0] * 30
    monkeypatch.setattr(gguf_file, "MOST_VALUES", 20)
    with pytest.raises(CheckpointError, match="more than 20 values"):
        read_gguf(path)
