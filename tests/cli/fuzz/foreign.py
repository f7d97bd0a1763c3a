"""Seeds in foreign layouts: tiny folders and pickled files from the references of the parity tests."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from .seeds import Seeds


def _folder(folder: Path, case: object, weights: str = "model.safetensors", config: str = "config.json") -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / config).write_text(json.dumps(case.config, default=str))
    save_file({name: tensor.contiguous().clone() for name, tensor in case.tensors.items()}, folder / weights)
    return folder


BERT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40,
        "max_position_embeddings": 26}  # fmt: skip
DISTIL = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40, "max_position_embeddings": 26}
LLAMA = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 40, "max_position_embeddings": 32}  # fmt: skip
FACES = (  # folder, model, configuration, its values, tokenizer
    ("bert", "BertForMaskedLM", "BertConfig", BERT, "words"),
    ("roberta", "RobertaForMaskedLM", "RobertaConfig", BERT | {"type_vocab_size": 1}, "byte-level"),
    ("albert", "AlbertForMaskedLM", "AlbertConfig", BERT | {"embedding_size": 16}, "unigram"),
    ("distilbert", "DistilBertForMaskedLM", "DistilBertConfig", DISTIL, "words"),
    ("electra", "ElectraForMaskedLM", "ElectraConfig", BERT | {"embedding_size": 16}, "words"),
    ("gpt2", "GPT2LMHeadModel", "GPT2Config", {"n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3}, "gpt2"),
    ("llama", "LlamaForCausalLM", "LlamaConfig", LLAMA, "llama2"),
    ("mistral", "MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": 8}, "llama3"),
)


def _faces(folder: Path) -> None:
    import transformers

    from tests.helpers.folders import WORDS
    from tests.helpers.references.hub import hub_folder, merges_folder

    for name, model, config, values, tokens in FACES:
        target = folder / name
        target.mkdir()
        if tokens == "words":
            (target / "vocab.txt").write_text("\n".join(WORDS) + "\n")
            (target / "tokenizer_config.json").write_text('{"do_lower_case": true, "tokenizer_class": "BertTokenizer"}')
            size = len(WORDS)
        else:
            made, record = (merges_folder if tokens == "gpt2" else hub_folder)(folder.parent, tokens)
            size = record["vocab_size"]
            for path in made.iterdir():
                shutil.copy(path, target)
            shutil.rmtree(made)
        ids = {} if tokens == "words" else {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        settings = getattr(transformers, config)(vocab_size=size, **values, **ids)
        getattr(transformers, model)(settings).save_pretrained(target)


def _translators(folder: Path) -> None:
    from multimodal.weights.text import m2m100, marian
    from tests.helpers.references import seq2seq as seq2seq_references
    from tests.helpers.references import translation as translation_references
    from tests.helpers.references.seq2seq import named

    for name, make, family, kind in (
        ("m2m100", translation_references.m2m100, m2m100.FAMILY, ("M2M100", "M2M100ForConditionalGeneration")),
        ("marian", lambda to: translation_references.marian(to, source_lang="en", target_lang="de"), marian.FAMILY,
         ("Marian", "MarianMTModel")),
    ):  # fmt: skip
        spare = folder.parent / f"{name}-tokens"
        spare.mkdir()
        size = make(spare)
        options = {"vocab_size": size}
        if name == "marian":
            options |= {"decoder_start_token_id": size - 1, "pad_token_id": size - 1}
        case = named(family, *kind, ("embed_positions.weight",) if name == "marian" else (), **options)
        repeats = ("embed_tokens.weight", "embed_positions.weight", "lm_head.weight")
        target = _folder(folder / name, case)
        _without(target / "model.safetensors", repeats)
        for path in spare.iterdir():
            shutil.copy(path, target)
        shutil.rmtree(spare)
    spare = folder.parent / "t5-tokens"
    spare.mkdir()
    seq2seq_references.VOCABULARY = translation_references.t5(spare) + 20
    target = _folder(folder / "t5", seq2seq_references.CASES["Hugging Face T5"]())
    for path in spare.iterdir():
        shutil.copy(path, target)
    shutil.rmtree(spare)


def _without(path: Path, endings: tuple[str, ...]) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name: t for name, t in load_file(path).items() if not name.endswith(endings)}, path)


def _vision(folder: Path) -> None:
    from tests.helpers.references import vision as vision_references

    for name, ours, weights, config in (
        ("OpenCLIP", "open_clip", "open_clip_model.safetensors", "open_clip_config.json"),
        ("Hugging Face CLIP", "clip_hf", "model.safetensors", "config.json"),
        ("Hugging Face SigLIP", "siglip", "model.safetensors", "config.json"),
        ("timm ViT, class token", "timm", "model.safetensors", "config.json"),
    ):
        target = _folder(folder / ours, vision_references.case(name), weights, config)
        if ours == "clip_hf":
            (target / "preprocessor_config.json").write_text(json.dumps({
                "size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}, "resample": 3,
                "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": True, "do_center_crop": True,
            }))  # fmt: skip


def _whisper(folder: Path) -> None:
    import torch

    from tests.helpers.tiny_whisper import DIMS, whispers

    whisper = whispers()[0]
    target = folder / "whisper"
    target.mkdir()
    content = {"dims": DIMS, "model_state_dict": {name: t.half() for name, t in whisper.state_dict().items()}}
    torch.save(content, target / "tiny.pt")


def _pickled(folder: Path) -> None:
    """A state dict as zip and in the old layout, with sparse tensors, and TorchScript, each beside a configuration."""
    import torch

    from tests.helpers.references import vision as vision_references

    case = vision_references.case("OpenCLIP")
    for name, options in (("zip", {}), ("old", {"_use_new_zipfile_serialization": False})):
        target = folder / name
        target.mkdir()
        (target / "open_clip_config.json").write_text(json.dumps(case.config, default=str))
        torch.save({"state_dict": dict(case.tensors)}, target / "bad.pt", **options)
    sparse = folder / "sparse"
    sparse.mkdir()
    torch.save({"weight": torch.eye(8).to_sparse(), "other": torch.ones(3)}, sparse / "bad.pt")
    script = folder / "script"
    script.mkdir()
    holder = torch.nn.Module()
    for name, tensor in case.tensors.items():
        *path, last = name.split(".")
        inner = holder
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, torch.nn.Module())
            inner = getattr(inner, part)
        inner.register_buffer(last, tensor.clone())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(holder), script / "bad.pt")


def _maker(make: Callable[[Path], None]) -> Callable[[Path, Seeds], None]:
    def quiet(folder: Path, _: Seeds) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make(folder)

    return quiet


FOREIGN = {
    "faces": _maker(_faces), "translators": _maker(_translators), "vision": _maker(_vision),
    "whisper": _maker(_whisper), "pickled": _maker(_pickled),
}  # fmt: skip
