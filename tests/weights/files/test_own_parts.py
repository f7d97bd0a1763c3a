"""Our tokenizer in a folder of another program, which may have changed it since."""

import pytest

from multimodal.export.export import export
from multimodal.weights.load import load


@pytest.mark.ci
def test_tokens_that_transformers_added_to_an_export_are_read(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    export("gpt-mini", tmp_path / "out", to="hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs.add_tokens(["zebra crossing"])
    model.resize_token_embeddings(len(theirs), mean_resizing=False)
    for one in (theirs, model):
        one.save_pretrained(tmp_path / "out")
    text = "at a zebra crossing now"
    assert load(tmp_path / "out").required_tokenizer().encode(text) == theirs.encode(text, add_special_tokens=False)
