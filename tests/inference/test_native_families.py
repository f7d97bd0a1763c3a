"""Text models of every family in compiled maps, which leave a tower few parameters, or none."""

import pytest
import torch
from torch import Tensor, nn

from multimodal.inference import prepare
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import families
from tests.helpers.references import causal, decoders, encoders, seq2seq
from tests.helpers.spread import thin

FAMILIES = {(name, kind.__name__): kind for kind in (causal, decoders, encoders, seq2seq) for name in kind.CASES}


@pytest.mark.usefixtures("compiled")
@thin(6, pytest.mark.ci)
@thin(2, pytest.mark.slow)
@pytest.mark.parametrize("name", FAMILIES, ids=lambda name: name[0])
def test_a_text_model(name: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare, "prefers_native", lambda: True)
    monkeypatch.setattr(prepare, "prefers_native_attention", lambda: True)
    monkeypatch.setattr(prepare, "prefers_int8", lambda dtype: True)
    made = FAMILIES[name].case(name[0])
    family = families()[made.family] if isinstance(made.family, str) else made.family
    model = family.load(made.tensors, made.config, "file").model
    ids = torch.randint(3, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    valid = torch.arange(8) < torch.tensor([[8], [5]])

    def states(one: nn.Module, real: Tensor | None) -> Tensor:
        if isinstance(one, EncoderDecoder):
            found = one.decoder.states(ids, one.encode(ids, real), real)
        else:
            found = one.states(ids, valid=real)
        return found if real is None else found[real]

    with torch.inference_mode():
        right = [states(model, real) for real in (None, valid)]
        for kind, most in (("float32", 1e-5), ("int8", 0.15)):
            quick = prepare_for_inference(Checkpoint(model, source="tiny"), kind).model
            for real, wanted in zip((None, valid), right, strict=True):
                assert (states(quick, real) - wanted).norm() <= most * wanted.norm(), kind
