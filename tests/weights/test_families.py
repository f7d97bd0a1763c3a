"""Every family of foreign checkpoints: recognized alone, exact through our folder and back, faults named."""

import re

import pytest
import torch

from multimodal.errors import CheckpointError
from multimodal.weights.folder import Checkpoint, load_folder, save_folder
from multimodal.weights.load import families, recognize
from tests.helpers.references import any_to_text, decoders, encoders, seq2seq, speech, vision
from tests.helpers.references.captions import CAPTIONERS
from tests.helpers.spread import spread

NAMES = {any_to_text: any_to_text.CASES, decoders: decoders.CASES, encoders: encoders.CASES, seq2seq: seq2seq.CASES,
         speech: speech.CASES, vision: [*vision.CASES, *CAPTIONERS]}  # fmt: skip
CASES = [pytest.param(module, name, id=name) for module, names in NAMES.items() for name in names]
FIRST = {case.id.partition(",")[0]: case.id for case in reversed(CASES)}.values()  # of "BERT", "BERT, masked" and such
FIRSTS = [case if case.id in FIRST else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
          for case in CASES]  # fmt: skip


def first_cases(every: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("references", "name"), spread(FIRSTS, every, pytest.mark.slow, pytest.mark.ci))


def family_of(made):
    return families()[made.family] if isinstance(made.family, str) else made.family


@first_cases(1)
def test_a_file_is_recognized_as_its_family_alone_and_exported_exactly(references, name, tmp_path):
    made = references.case(name)
    family = family_of(made)
    assert recognize(made.tensors, made.config, "file").name == family.name
    model = family.load(made.tensors, made.config, "file").model
    for tensor in model.state_dict().values():  # else fused AdamW goes wrong, FSDP2 and safetensors refuse it
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    save_folder(Checkpoint(model), tmp_path / "ours")
    read = load_folder(tmp_path / "ours").model
    assert read.config == model.config
    dropped = getattr(made, "dropped", ()) or "none"
    expected = {k: v for k, v in getattr(made, "held", made.tensors).items() if not k.endswith(dropped)}
    exported = family.export(read)
    assert exported.keys() == expected.keys()
    assert all(exported[key].shape == value.shape and exported[key].equal(value) for key, value in expected.items())


@first_cases(3)
def test_missing_extra_misshapen_and_infinite_tensors_are_named(references, name):
    made = references.case(name)
    tensors, family = made.tensors, family_of(made)
    of_layer = next(k for at in (r"\.1\.", r"\.0\.") for k, v in tensors.items() if re.search(at, k) and v.ndim == 2)
    faults = {
        f"tensor {of_layer!r} is missing": {key: value for key, value in tensors.items() if key != of_layer},
        f"tensor {of_layer!r} has shape [3, 3], not ": tensors | {of_layer: torch.zeros(3, 3)},
        f"tensor {of_layer!r} holds values that are not finite":
            tensors | {of_layer: torch.full_like(tensors[of_layer], torch.nan)},
    }  # fmt: skip
    for extra in ("visual.extra", f"{of_layer}.extra", re.sub(r"\.[01]\.", ".99.", of_layer)):
        faults[f"unexpected tensor {extra!r}"] = tensors | {extra: torch.zeros(2)}
    for cause, changed in faults.items():
        with pytest.raises(CheckpointError, match=re.escape(f"file: {cause}")):
            family.load(changed, made.config, "file")
