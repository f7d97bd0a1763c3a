"""Text vectors: equal to each text padded to the whole context, in the order given, whatever goes together."""

import warnings
from dataclasses import replace

import pytest
import torch

from multimodal.errors import TextError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.clip import CLIP
from multimodal.models.vision.resnet import ResNetConfig
from multimodal.tokens.text.tokenizer import TextCut
from multimodal.weights import encode
from multimodal.weights.encode import image_features, text_features
from multimodal.weights.folder import Checkpoint
from tests.helpers import tiny
from tests.helpers.data.letters import Letters
from tests.helpers.spread import thin

TEXTS = ["a", "bb bbb", "abcdefghi", "bb bbb", "", "abc", "cab", "ab" * 5, "b"]


class Seen(CLIP):
    """Keeps the shapes that the text tower was given."""

    def encode_text(self, ids, valid=None):
        self.shapes.append(tuple(ids.shape))
        return super().encode_text(ids, valid)


def model(name: str, **changes) -> Seen:
    made = tiny.randomized(Seen(replace(tiny.CLIPS[name], **changes)))
    made.shapes = []
    return made


@torch.inference_mode()
def one_by_one(clip: CLIP) -> torch.Tensor:
    batches = [Letters().batch([text], 12, pad_to_length=True) for text in TEXTS]
    return torch.cat([clip.encode_text(batch.ids, batch.mask) for batch in batches])


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", tiny.CLIPS)
@pytest.mark.parametrize("batch_size", [1, 3, 256])
def test_equal_to_each_text_alone_in_its_whole_context(name: str, batch_size: int):
    clip = model(name)
    right = one_by_one(clip)
    clip.shapes.clear()
    assert torch.allclose(text_features(clip, Letters(), TEXTS, batch_size), right, atol=1e-6)
    assert sum(rows for rows, _ in clip.shapes) == len(set(TEXTS))
    widths = [width for _, width in clip.shapes]
    assert torch.allclose(text_features(clip, Letters(), TEXTS[:1]), right[:1], atol=1e-6)
    if name == "sigmoid":  # pooled at the last position, which has seen all of the padding
        assert set(widths) == {12}
    elif batch_size == 1:
        assert widths == [12, 11, 8, 5, 5, 3, 3, 2]
    else:
        assert widths[0] == 12


def test_no_mask_and_no_causality_needs_the_padding_of_training():
    clip = model("masked", text_valid=False)
    right = one_by_one(clip)
    clip.shapes.clear()
    assert torch.allclose(text_features(clip, Letters(), TEXTS), right, atol=1e-6)
    assert clip.shapes == [(len(set(TEXTS)), 12)]


def test_batches_on_a_cpu_hold_few_tokens(monkeypatch: pytest.MonkeyPatch):
    clip = model("softmax")
    right = one_by_one(clip)
    clip.shapes.clear()
    monkeypatch.setattr(encode, "TOKENS", 12)
    assert torch.allclose(text_features(clip, Letters(), TEXTS), right, atol=1e-6)
    assert clip.shapes == [(1, 12), (1, 11), (1, 8), (2, 5), (3, 3)]


@pytest.mark.parametrize(
    ("name", "compute_type"), [("softmax", "float32"), ("softmax", "bfloat16"), ("sigmoid", "auto")]
)
def test_the_same_in_another_format(name: str, compute_type: str):
    clip = model(name)
    found = text_features(prepare_for_inference(Checkpoint(clip), compute_type).model, Letters(), TEXTS)
    assert found.dtype == torch.float32
    if compute_type == "bfloat16":
        assert (found * one_by_one(clip)).sum(1).min() > 0.999
    else:
        assert torch.allclose(found, one_by_one(clip), atol=1e-5)


def test_texts_that_are_cut_are_told_of_once():
    with pytest.warns(TextCut, match="'c{11}' is cut to 12 tokens, 1 lost; 2 more of 5 texts were cut too") as caught:
        text_features(model("softmax"), Letters(), ["a", "c" * 11, "b", "d" * 12, "e" * 13], batch_size=1)
    assert len(caught) == 1


@pytest.mark.parametrize("wrong", [[], "one text"])
def test_no_list_of_texts(wrong: object):
    with pytest.raises(TextError, match=r"texts: expected at least one|texts: expected a list of texts"):
        text_features(model("softmax"), Letters(), wrong)


def test_a_long_context_is_the_models():
    tokenizer = Letters()
    tokenizer.context = 40
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TextCut)
        assert text_features(model("softmax"), tokenizer, ["a" * 30]).shape == (1, 6)


def test_a_model_in_training_is_encoded_in_eval_mode_and_keeps_its_modes_and_statistics():
    text = replace(tiny.CLIPS["softmax"].text, stem_dropout=0.5)
    clip = model("softmax", image=ResNetConfig((32, 32), (1, 1, 1, 1), 8, 2, 16), text=text)
    encoded = lambda: torch.cat([image_features(clip, tiny.noise(2, 3, 32, 32)), text_features(clip, Letters(), TEXTS)])
    right, statistics = encoded(), [buffer.clone() for buffer in clip.buffers()]
    clip.train().text.dropout.eval()
    modes = [part.training for part in clip.modules()]
    assert torch.equal(encoded(), right)
    assert [part.training for part in clip.modules()] == modes
    assert all(map(torch.equal, clip.buffers(), statistics))
    assert statistics
