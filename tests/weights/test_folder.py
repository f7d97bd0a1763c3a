"""Checkpoint folders and training states: exact round trips, named damage, interrupted saves."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import prune

from multimodal.errors import CheckpointError
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.text.characters import CharacterTokenizer
from multimodal.weights import folder as folders
from multimodal.weights.folder import KINDS, Checkpoint, load_folder, save_folder
from tests.helpers.folders import sealed
from tests.helpers.spread import thin
from tests.helpers.tiny import ALL, made

RECORD = Preprocessing((8, 12), "squash", "bicubic", (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), 0, 1.0)
WEIGHTS, CONFIG = "model.safetensors", "config.json"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_folder(Checkpoint(made("joint")), tmp_path / "joint")
    return tmp_path / "joint"


def test_every_kind_is_among_the_tiny_models():
    assert {kind for kind, _ in ALL.values()} == {kind for kind, _ in KINDS.values()}


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", ALL)
def test_round_trip_is_exact(name, tmp_path):
    model = made(name)
    save_folder(Checkpoint(model), tmp_path / name)
    loaded = load_folder(tmp_path / name)
    assert type(loaded.model) is type(model)
    assert loaded.model.config == model.config
    assert not loaded.model.training
    own, theirs = model.state_dict(), loaded.model.state_dict()
    assert own.keys() == theirs.keys()
    for key in own:
        assert own[key].dtype == theirs[key].dtype
        assert torch.equal(own[key], theirs[key])
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, p in loaded.model.named_parameters() if not p.requires_grad}


def test_half_precision_halves_the_file_and_loads_as_float32(tmp_path):
    model = made("conformer-batch")
    save_folder(Checkpoint(model), tmp_path / "half", "float16")
    stored, loaded = load_file(tmp_path / "half" / WEIGHTS), load_folder(tmp_path / "half").model.state_dict()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            assert stored[name].dtype == torch.float16
            assert loaded[name].dtype == torch.float32
            assert torch.equal(loaded[name], tensor.half().float())
        else:
            assert torch.equal(stored[name], tensor)


def test_a_model_that_could_not_be_loaded_again_is_not_saved(tmp_path):
    average = torch.optim.swa_utils.AveragedModel(made("vit-token"))
    with pytest.raises(CheckpointError, match=r"expected a model of kind .* \(got AveragedModel\)"):
        save_folder(Checkpoint(average), tmp_path / "average")
    changed = made("vit-token")
    changed.head = nn.Linear(16, 3)
    with pytest.raises(CheckpointError, match=r"head.weight: expected shape \[5, 16\] .* got \[3, 16\]"):
        save_folder(Checkpoint(changed), tmp_path / "changed")
    pruned = made("vit-token")
    prune.l1_unstructured(pruned.head, "weight", 0.3)
    with pytest.raises(CheckpointError, match=r"head.weight: expected shape \[5, 16\] .* got none; merge adapters"):
        save_folder(Checkpoint(pruned), tmp_path / "pruned")
    assert not list(tmp_path.iterdir())


def test_what_goes_with_the_model_comes_back(tmp_path):
    card = {"licence": "MIT", "wer": 12.5, "trained_on": ["données"]}
    save_folder(Checkpoint(made("clip-sigmoid"), CharacterTokenizer("héa"), RECORD, card=card), tmp_path / "clip")
    loaded = load_folder(tmp_path / "clip")
    assert (loaded.preprocessing, loaded.card, loaded.kind) == (RECORD, card, "clip")
    assert loaded.tokenizer.encode("hé") == [1, 2]
    assert loaded.source == str(tmp_path / "clip")
    bare = tmp_path / "bare"
    save_folder(Checkpoint(made("vit-token")), bare)
    assert (load_folder(bare).tokenizer, load_folder(bare).preprocessing, load_folder(bare).card) == (None, None, {})
    assert sorted(p.name for p in bare.iterdir()) == [CONFIG, "manifest.json", WEIGHTS]


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
@pytest.mark.parametrize("at", [0.1, 0.5, 0.999])
def test_a_flipped_byte_is_found(saved, name, at):
    data = bytearray((saved / name).read_bytes())
    data[int(at * len(data))] ^= 1
    (saved / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name}: sha256 differs"):
        load_folder(saved)


@pytest.mark.parametrize(("name", "cause"), [
    (WEIGHTS, "model.safetensors: missing"), (CONFIG, "config.json: missing"),
    ("manifest.json", "manifest.json: cannot be read"),
])  # fmt: skip
def test_a_missing_file_is_named(saved, name, cause):
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=cause):
        load_folder(saved)


def test_a_manifest_that_lists_too_little_is_refused(saved):
    (saved / "manifest.json").write_text('{"sha256": {}}')
    with pytest.raises(CheckpointError, match=r"manifest.json: must list"):
        load_folder(saved)


def test_truncated_weights_are_refused(saved):
    data = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read as safetensors"):
        load_folder(sealed(saved))


BIAS = "ctc.bias"


@pytest.mark.parametrize(("change", "cause"), [
    (lambda t: t.pop(BIAS), "tensor 'ctc.bias' is missing"),
    (lambda t: t.update(other=torch.zeros(1)), "unexpected tensor 'other'"),
    (lambda t: t.update({BIAS: t[BIAS][1:].clone()}), r"tensor 'ctc.bias' has shape \[23\], not \[24\]"),
    (lambda t: t.update({BIAS: t[BIAS] * torch.nan}), "tensor 'ctc.bias' holds values that are not finite"),
    (lambda t: t[BIAS].__setitem__(3, torch.inf), "tensor 'ctc.bias' holds values that are not finite"),
])  # fmt: skip
def test_a_wrong_tensor_is_named(saved, change, cause):
    tensors = load_file(saved / WEIGHTS)
    change(tensors)
    save_file(tensors, saved / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: {cause}"):
        load_folder(sealed(saved))


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(("change", "cause"), [
    (lambda c: c["config"].update(colour=1), "unknown key 'colour' for ConformerCTCConfig"),
    (lambda c: c["config"]["encoder"]["block"].update(size=1), "encoder: block: unknown key 'size'"),
    (lambda c: c["config"].pop("vocabulary"), "missing key 'vocabulary' for ConformerCTCConfig"),
    (lambda c: c["config"]["encoder"]["block"]["attention"].pop("heads"), "attention: missing key 'heads'"),
    (lambda c: c["config"].update(vocabulary="23"), "vocabulary: expected a whole number .'23'."),
    (lambda c: c["config"].update(vocabulary=23.5), "vocabulary: expected a whole number"),
    (lambda c: c["config"].update(vocabulary=True), "vocabulary: expected a whole number"),
    (lambda c: c["config"].update(vocabulary=None), "vocabulary: expected a whole number"),
    (lambda c: c["config"]["encoder"].update(rotary=1), "rotary: expected true or false"),
    (lambda c: c["config"].update(encoder=[]), "encoder: expected an object"),
    (lambda c: c.update(config=None), "expected an object"),
    (lambda c: c.update(kind="os.system"), "unknown kind 'os.system'"),
    (lambda c: c.update(format=99), "expected format 1 .got 99"),
    (lambda c: c.pop("kind"), "missing key 'kind' for Record"),
])  # fmt: skip
def test_a_wrong_configuration_is_named(saved, change, cause):
    config = json.loads((saved / CONFIG).read_text())
    change(config)
    (saved / CONFIG).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"config.json: .*{cause}"):
        load_folder(sealed(saved))


def test_a_configuration_for_another_size_does_not_fit(saved):
    config = json.loads((saved / CONFIG).read_text())
    config["config"]["vocabulary"] += 1
    (saved / CONFIG).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"'ctc.(weight|bias)' has shape"):
        load_folder(sealed(saved))


@pytest.mark.parametrize("size", [(8,), (8, 12, 3), ("8", 12), 8])
def test_tuples_have_their_length_and_types(tmp_path, size):
    save_folder(Checkpoint(made("vit-token")), tmp_path / "vit")
    config = json.loads((tmp_path / "vit" / CONFIG).read_text())
    config["config"]["image"] = size
    (tmp_path / "vit" / CONFIG).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config.json: image.*: expected"):
        load_folder(sealed(tmp_path / "vit"))


class KilledError(BaseException):
    """Stands for a stop that nothing catches."""


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_stop_while_writing_leaves_the_old_folder(saved, monkeypatch, after):
    before, write, written = load_folder(saved).model.state_dict(), folders.write_durably, []

    def stopping(path: Path, data: bytes) -> None:
        if len(written) == after:
            path.write_bytes(data[: len(data) // 2])
            raise KilledError
        written.append(path)
        write(path, data)

    monkeypatch.setattr(folders, "write_durably", stopping)
    with pytest.raises(KilledError):
        save_folder(Checkpoint(made("vit-token")), saved)
    written.clear()
    with pytest.raises(KilledError):
        save_folder(Checkpoint(made("vit-token")), saved.with_name("new"))
    assert list(saved.parent.iterdir()) == [saved]  # no half of the new one, under any name
    now = load_folder(saved).model.state_dict()
    assert all(torch.equal(before[name], now[name]) for name in before)


def test_saving_again_replaces_the_folder(saved):
    save_folder(Checkpoint(made("vit-token")), saved)
    assert load_folder(saved).kind == "vit"
    assert list(saved.parent.iterdir()) == [saved]
