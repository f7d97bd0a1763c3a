"""SigLIP 2 at fixed resolutions: SigLIP's weights with Gemma's tokenizer, beside transformers."""

import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from multimodal.errors import CheckpointError
from multimodal.weights.folder import load_folder, save_folder
from multimodal.weights.load import load
from tests.helpers.data.gemma_text import gemma_tokenizer
from tests.helpers.references.vision import HF_TEXT, HF_VISION, randomized

TEXTS = ["A photo of a DOG.", "Zwei Hunde am Strand", "<eos> naïve ☃", "", "cats and dogs and cats and dogs on the mat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

    folder = tmp_path_factory.mktemp("siglip2")
    size = max(gemma_tokenizer(folder).get_vocab().values()) + 1
    text = HF_TEXT | {"vocab_size": size, "projection_size": 32, "max_position_embeddings": 12}
    randomized(SiglipModel(SiglipConfig(text_config=text, vision_config=HF_VISION))).save_pretrained(folder)
    SiglipImageProcessor(size={"height": 24, "width": 24}).save_pretrained(folder)
    return folder


@pytest.mark.ci
@torch.no_grad()
def test_ids_and_features_of_texts_equal_transformers(folder, tmp_path):
    from transformers import AutoTokenizer, SiglipModel

    expected = AutoTokenizer.from_pretrained(folder)(
        TEXTS, padding="max_length", max_length=12, truncation=True, return_tensors="pt"
    )["input_ids"]
    save_folder(load(folder), tmp_path / "ours")
    for checkpoint in (load(folder), load_folder(tmp_path / "ours")):
        with pytest.warns(UserWarning, match="is cut to 12 tokens"):
            ids = checkpoint.required_tokenizer().batch(TEXTS).ids
        for number in (0, 1, 3, 4):
            assert ids[number].tolist() == expected[number].tolist(), TEXTS[number]
        assert ids[2].tolist().count(1) <= 1  # "<eos>" in a text is text
        reference = SiglipModel.from_pretrained(folder).eval().get_text_features(ids)
        reference = getattr(reference, "pooler_output", reference)
        own = checkpoint.model.encode_text(ids)
        assert_close(own, torch.nn.functional.normalize(reference, dim=-1), atol=1e-5, rtol=1e-5)


def test_another_vocabulary_is_refused(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    pipeline = json.loads((tmp_path / "tokenizer.json").read_text())
    pipeline["model"]["vocab"] |= {"<eos>": 2, "<bos>": 1}
    for token in pipeline["added_tokens"]:
        token["id"] = pipeline["model"]["vocab"][token["content"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(pipeline))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected SigLIP 2's pad 0, no bos and eos 1"):
        load(tmp_path)
