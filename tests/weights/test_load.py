"""`load` and `convert`: every source of a checkpoint, and the refused ones."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import multimodal
from multimodal.errors import CheckpointError, UsageError
from multimodal.models.whisper import Whisper
from multimodal.system.assets import shipped
from multimodal.weights.convert import convert
from multimodal.weights.load import families, load
from tests.helpers.references import vision
from tests.helpers.references.seq2seq import case
from tests.helpers.spread import thin

DIMS = {
    "n_mels": 80, "n_audio_ctx": 20, "n_audio_state": 16, "n_audio_head": 2, "n_audio_layer": 1,
    "n_vocab": 51864, "n_text_ctx": 12, "n_text_state": 16, "n_text_head": 2, "n_text_layer": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def whisper_state() -> dict:
    from whisper.model import ModelDimensions, Whisper

    torch.manual_seed(0)
    model = Whisper(ModelDimensions(**DIMS))
    torch.nn.init.normal_(model.decoder.positional_embedding)  # which openai-whisper leaves as memory was
    return {"dims": dict(DIMS), "model_state_dict": model.state_dict()}


@pytest.fixture
def pickled(tmp_path, whisper_state) -> Path:
    path = tmp_path / "tiny.pt"
    torch.save(whisper_state, path)
    return path


def same_weights(one: torch.nn.Module, two: torch.nn.Module) -> bool:
    left, right = one.state_dict(), two.state_dict()
    return left.keys() == right.keys() and all(left[k].equal(right[k]) for k in left)


def test_tied_weights_are_written_under_both_of_their_names(hf_folder, tmp_path):
    convert(hf_folder, tmp_path / "back.safetensors", to="whisper-hf")
    actual = load_file(tmp_path / "back.safetensors")
    assert actual["proj_out.weight"].equal(actual["model.decoder.embed_tokens.weight"])


def test_a_pickled_file_is_only_read_by_convert(pickled, tmp_path, whisper_state):
    with pytest.raises(CheckpointError, match="multimodal convert"):
        load(pickled)
    convert(pickled, tmp_path / "ours")
    ours = load(tmp_path / "ours")
    assert ours.kind == "speech_to_text"
    assert ours.tokenizer is not None
    expected = whisper_state["model_state_dict"]["decoder.token_embedding.weight"]
    assert ours.model.decoder.embed.weight.equal(expected)
    with pytest.raises(UsageError, match="already exists, and convert overwrites nothing"):
        convert(pickled, tmp_path / "ours")


def test_export_gives_the_foreign_file_back_to_the_bit(pickled, tmp_path, whisper_state):
    convert(pickled, tmp_path / "back.safetensors", to="whisper")
    back = load_file(tmp_path / "back.safetensors")
    assert back.keys() == whisper_state["model_state_dict"].keys()
    assert all(back[k].equal(v) for k, v in whisper_state["model_state_dict"].items())
    with pytest.raises(UsageError, match="unknown format"):
        convert(pickled, tmp_path / "x.safetensors", to="onnx")
    with pytest.raises(UsageError, match="not Whisper"):
        convert(pickled, tmp_path / "x.safetensors", to="timm")


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("name", ["Hugging Face CLIP, GELU", "timm ViT, class token"])
def test_weights_are_read_with_the_configuration_of_their_layout(name, tmp_path):
    for number, made in enumerate((vision.case(name), vision.case("OpenCLIP"))):
        prefix, weights = ("", "open_clip_")[number], tmp_path / f"{('', 'open_clip_')[number]}model.safetensors"
        (tmp_path / "open_clip_config.json").write_text(json.dumps(vision.case("OpenCLIP").config))
        (tmp_path / f"{prefix}config.json").write_text(json.dumps(made.config))
        save_file({key: value.contiguous() for key, value in made.tensors.items()}, weights)
        expected = made.family.load(made.tensors, made.config, "file").model
        for path in (tmp_path, weights):
            assert load(path).model.config == expected.config
            assert same_weights(load(path).model, expected)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"weights without config\.json"):
        load(tmp_path / "model.safetensors")


class Evil:
    def __reduce__(self):
        return print, ("code ran",)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ({"weight": Evil()}, "cannot be read as plain tensors"),
        ([1, 2], "expected a state dict, got a list"),
        ({"weight": "text"}, "'weight' is a str"),
        ({"weight": torch.eye(2).to_sparse()}, "only dense tensors"),
        ({"weight": torch.eye(2)}, "unknown format"),
    ],
)
def test_pickles_that_are_no_plain_weights_are_refused_by_cause(tmp_path, capsys, content, cause):
    torch.save(content, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match=cause):
        convert(tmp_path / "bad.pt", tmp_path / "out")
    assert "code ran" not in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def scripted(tensors: dict) -> torch.nn.Module:
    """Modules nested as the names say, as TorchScript: what OpenAI's CLIP files are."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.Module())
            place = getattr(place, part)
        place.register_buffer(last, tensor)
    return torch.jit.script(root)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_an_openai_clip_archive_becomes_a_folder_that_classifies(tmp_path, kind):
    from open_clip.model import CLIP
    from PIL import Image

    torch.manual_seed(0)
    vision = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}
    text = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1}
    model = CLIP(16, vision, text, quick_gelu=True).half().eval()
    tensors = model.state_dict()
    numbers = {"input_resolution": 32, "context_length": 77, "vocab_size": 49408}
    numbers = {name: torch.tensor(value) for name, value in numbers.items()}
    if kind == "scripted":
        archive = scripted(tensors | numbers)
    else:  # as OpenAI's are, where these numbers are buffers, and the mask is none
        mask = model._buffers.pop("attn_mask")
        model.attn_mask = mask
        for name, value in numbers.items():
            vars(model).pop(name, None)
            model.register_buffer(name, value)
        inputs = torch.randn(1, 3, 32, 32).half(), torch.zeros(1, 77, dtype=torch.long)
        archive = torch.jit.trace(model, inputs, check_trace=False)
    archive.save(tmp_path / "ViT-tiny.pt")
    convert(tmp_path / "ViT-tiny.pt", tmp_path / "clip")
    ours = load(tmp_path / "clip")
    assert ours.model.text.embed.weight.equal(tensors["token_embedding.weight"].float())
    assert ours.preprocessing.size == (32, 32)
    assert ours.preprocessing.mean == (0.48145466, 0.4578275, 0.40821073)
    assert ours.model.config.image.stack.block.activation == "quick_gelu"
    (result,) = multimodal.classify(Image.new("RGB", (40, 30), "red"), ["red", "blue"], ours)
    assert sum(s["score"] for s in result["scores"]) == pytest.approx(1.0, abs=1e-5)


def test_truncated_and_missing_files_are_named(tmp_path, pickled):
    half = tmp_path / "half.pt"
    half.write_bytes(pickled.read_bytes()[:5000])
    for path in (half, tmp_path / "missing.pt"):
        with pytest.raises(CheckpointError, match=path.name):
            convert(path, tmp_path / "out")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not one")
    with pytest.raises(CheckpointError, match=r"broken\.safetensors"):
        load(broken)


def test_a_hugging_face_folder_a_bare_file_and_shards_are_one_model(hf_folder, tmp_path):
    whole = load(hf_folder)
    assert isinstance(whole.model, Whisper)
    assert same_weights(whole.model, load(hf_folder / "model.safetensors").model)
    tensors = load_file(hf_folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({n: tensors[n] for n in held}, tmp_path / shard)
    index = {"weight_map": {n: shard for shard, held in shards.items() for n in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((hf_folder / "config.json").read_text())
    assert same_weights(whole.model, load(tmp_path).model)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Callable[[str, Path], None]:
    """A function that puts a folder's files in the local hub cache as owner/NAME; the network is off."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def cache(name: str, folder: Path) -> None:
        repository = tmp_path / "hub" / f"models--owner--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        shutil.copytree(folder, repository / "snapshots" / ("0" * 40))

    return cache


def test_a_hub_repository_in_the_local_cache_loads_offline(hf_folder, hub):
    hub("tiny-whisper", hf_folder)
    assert same_weights(load("hf-hub:owner/tiny-whisper").model, load(hf_folder).model)
    with pytest.raises(CheckpointError, match="hf-hub:owner/other"):
        load("hf-hub:owner/other")
    with pytest.raises(CheckpointError, match="hf-hub:a/b/c"):
        load("hf-hub:a/b/c")


def pickled_folder(folder: Path, name: str, shards: int) -> Path:
    """A model of transformers with pickled weights alone, beside other pickles as trainers leave them."""
    made = case(name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(made.config))
    torch.save({"lr": 1.0}, folder / "training_args.bin")
    if shards == 1:
        torch.save(made.tensors, folder / "pytorch_model.bin")
        return folder
    names = sorted(made.tensors)
    parts = {f"pytorch_model-{i + 1:05}-of-{shards:05}.bin": names[i::shards] for i in range(shards)}
    for part, held in parts.items():
        torch.save({name: made.tensors[name] for name in held}, folder / part)
    index = {"weight_map": {name: part for part, held in parts.items() for name in held}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("shards", [1, 2])
@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("name", ["Hugging Face Marian", "Hugging Face M2M100"])
def test_a_folder_or_hub_repository_with_pickled_weights_alone_is_converted(tmp_path, hub, name, shards):
    folder, made = pickled_folder(tmp_path / "theirs", name, shards), case(name)
    expected = made.family.load(made.tensors, made.config, "file").model
    hub("pickled", folder)
    for source, out in ((folder, "one"), ("hf-hub:owner/pickled", "two")):
        with pytest.raises(CheckpointError, match=f"multimodal convert {source} FOLDER"):
            load(source)
        convert(source, tmp_path / out)
        assert same_weights(load(tmp_path / out).model, expected)


@pytest.mark.parametrize("content", [b"", b"\x06\x00\x00", b"no weights"])
def test_damaged_pickled_weights_are_not_sent_to_be_converted(tmp_path, content):
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.bin: .*neither a zip archive nor a pickle, begins with b'"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_that_is_a_pipe_is_refused_rather_than_missing(name, hf_folder, tmp_path):
    shutil.copytree(hf_folder, tmp_path / "made")
    path = tmp_path / "made" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(path))}: not a regular file"):
        load(tmp_path / "made")


def test_a_configuration_given_to_convert_goes_before_the_one_beside_the_weights(hf_folder, tmp_path):
    config = json.loads((hf_folder / "config.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps(config | {"decoder_attention_heads": 4}))
    made = convert(hf_folder, tmp_path / "made", config=tmp_path / "other.json")
    assert made.model.config.decoder.stack.block.attention.heads == 4


def ct2(path: Path) -> None:
    """The header as ctranslate2/specs/model_spec.py writes it."""
    name = b"WhisperSpec\0"
    path.write_bytes(struct.pack("<IH", 6, len(name)) + name + struct.pack("<II", 3, 100))
    (path.parent / "vocabulary.json").write_text("[]")


@pytest.mark.parametrize(
    ("name", "make", "what"),
    [
        ("model.gguf", lambda path: path.write_bytes(b"GGUF" + bytes(60)), "a GGUF file of llama.cpp"),
        ("ggml-base.bin", lambda path: path.write_bytes(struct.pack("<I", 0x67676D66) + bytes(60)), "a ggml file"),
        ("model.bin", ct2, "a CTranslate2 model, cut off"),
        ("model.onnx", lambda path: path.write_bytes(b"\x08\x08\x12\x07pytorch"), "an ONNX model"),
        ("tf_model.h5", lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n"), "an HDF5 file"),
        ("pytorch_model.bin", lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs"),
        ("model.safetensors", lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs"),
        ("flax_model.msgpack", lambda path: path.write_bytes(b"\x83\xa3abc"), "expected .safetensors or pickled"),
    ],
)
def test_files_of_other_programs_are_named_and_convert_never_advises_itself(tmp_path, name, make, what):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    make(folder / name)
    for source in (folder, folder / name):
        for read in (load, lambda source: convert(source, tmp_path / "out")):
            with pytest.raises(CheckpointError, match=f"^{re.escape(str(folder / name))}: .*{what}") as error:
                read(source)
            assert "multimodal convert" not in str(error.value)
            assert "\n" not in str(error.value)


def test_an_unknown_name_lists_near_ones():
    with pytest.raises(UsageError, match=r"near: .*clip-vit-16"):
        load("clip-vit-61")
    with pytest.raises(UsageError, match="ViT-B-32"):
        load(Path(__file__).parent, architecture="ViT-B-32-quikgelu")
    with pytest.raises(UsageError, match="tags: "):
        load("open_clip:ViT-B-32:no-such-tag")


def test_an_architecture_is_for_weights_of_openclip_and_timm(hf_folder):
    with pytest.raises(UsageError, match="expected OpenCLIP's or timm's weights, got whisper-hf"):
        load(hf_folder, architecture="ViT-B-32")


def test_folders_without_one_weights_file_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no weights files"):
        load(tmp_path)
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match="holds 2 weights files"):
        load(tmp_path)


def test_a_folder_of_an_adapter_is_told_to_be_merged(tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"adapter \(adapter_config.json\) without its model; merge"):
        load(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"adapter \(adapter_config.json\) beside the model; merge"):
        load(tmp_path)


def test_names_of_families_can_be_typed():
    assert all(name.replace("-", "").replace("_", "").isalnum() for name in families()), list(families())


def test_public_names():
    """The names that a type checker sees are those that are imported on first use."""
    stub = Path(multimodal.__file__).with_suffix(".pyi").read_text()
    assert re.findall(r"^from (\S+) import (\w+) as \2$", stub, re.M) == sorted(
        (home, name) for home, names in multimodal._HOMES.items() for name in names
    )
    assert all(callable(getattr(multimodal, name)) for name in multimodal.__all__)
    with pytest.raises(AttributeError, match="did you mean Classifier"):
        multimodal.Clasifier  # noqa: B018


def test_models_are_listed():
    listed = multimodal.list_models()
    assert "clip-vit-16" in listed["shipped"]
    assert "whisper-small" in [model["name"] for model in listed["public"]]


def test_a_checkpoint_prints_as_one_line():
    text = repr(multimodal.load("clip-vit-16"))
    assert text.endswith("clip-vit-16', CLIP, 4.6 M parameters)")


@pytest.mark.parametrize(("task", "nearest"), [("transcribe", "whisper-base"), ("translate", "t5-base")])
def test_an_unknown_name_suggests_models_of_the_task_first(task, nearest):
    with pytest.raises(multimodal.MultimodalError, match=rf"near: {nearest}"):
        multimodal.load("bas", task=task)


def test_an_architecture_for_a_folder_that_says_its_own_is_said_to_be_unused():
    for place in ("clip-vit-16", shipped()["clip-vit-16"] / "model.safetensors"):
        with pytest.warns(UserWarning, match="architecture ViT-B-32 is ignored") as warned:
            load(place, "ViT-B-32")
        assert len(warned) == 1
