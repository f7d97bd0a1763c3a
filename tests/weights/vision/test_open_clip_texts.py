"""Tokenizers of OpenCLIP's folders that hold a `tokenizer.json`, beside OpenCLIP's HFTokenizer."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from multimodal.errors import CheckpointError
from multimodal.tokens.text.clip import CLIPTokenizer
from multimodal.weights.fit import check_vocabulary
from multimodal.weights.vision.open_clip import open_clip_tokenizer
from tests.helpers.data.gemma_text import gemma_tokenizer

TEXTS = ["A photo of a DOG.", "zwei_Hunde,  am Strand!", " two cats\n\t(on) the mat ", "cats and dogs " * 6]
LEARNED = ["a photo of a dog .", "two cats on the mat", "zwei hunde am strand", "cats and dogs"] * 9


def gemma(folder: Path) -> dict:
    gemma_tokenizer(folder)
    return {"tokenizer_kwargs": {"clean": "canonicalize"}}


def gemma_of_another_class(folder: Path, ends: str = "$A <eos>") -> dict:
    """Gemma's vocabulary without lower case. `ends`: a text with what the post-processor puts around it."""
    from tokenizers import Tokenizer, normalizers, processors

    gemma_tokenizer(folder)
    path, config = str(folder / "tokenizer.json"), folder / "tokenizer_config.json"
    made = Tokenizer.from_file(path)
    made.normalizer = normalizers.NFC()
    made.post_processor = processors.TemplateProcessing(single=ends, special_tokens=[("<eos>", 1), ("<bos>", 2)])
    made.save(path)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return {"tokenizer_kwargs": {}}


def gemma_with_a_start(folder: Path) -> dict:
    return gemma_of_another_class(folder, "<bos> $A")


def gemma_without_ends(folder: Path) -> dict:
    return gemma_of_another_class(folder, "$A") | {"tokenizer_kwargs": {"clean": "canonicalize"}}


def pieces_without_kwargs(folder: Path) -> dict:
    return pieces(folder) | {"tokenizer_kwargs": {}}


def pieces(folder: Path) -> dict:
    """SigLIP's: T5's kind, padded with its end."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    made.train_from_iterator(LEARNED, trainers.UnigramTrainer(
        vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False))  # fmt: skip
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return {"tokenizer_kwargs": {"clean": "canonicalize"}}


def words(folder: Path) -> dict:
    """CLIPA's: BERT's, without the token that ends a text."""
    from transformers import BertTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"), *".,()!_", "photo"]
    (folder / "vocab.txt").write_text("\n".join([*special, *letters]) + "\n")
    vocab = {token: i for i, token in enumerate([*special, *letters])}
    BertTokenizerFast(vocab=vocab).save_pretrained(folder)
    return {"tokenizer_kwargs": {"strip_sep_token": True}}


def test_a_tokenizer_that_ends_or_pads_texts_otherwise_than_the_model_expects_is_refused():
    from tests.helpers import tiny

    tokenizer = CLIPTokenizer(12)
    clip, coca = (replace(config, text=replace(config.text, vocabulary=49408))
                  for config in (tiny.CLIPS["softmax"], tiny.COCA))  # fmt: skip
    check_vocabulary(tokenizer, replace(clip, eos_id=49407), "model")
    check_vocabulary(tokenizer, replace(coca, pad_id=0), "model")
    with pytest.raises(CheckpointError, match=r"^model: the tokenizer ends texts with id 49407, the model .* at id 2$"):
        check_vocabulary(tokenizer, replace(clip, eos_id=2), "model")
    with pytest.raises(CheckpointError, match=r"^model: the tokenizer pads with id 0, the model expects 1$"):
        check_vocabulary(tokenizer, replace(coca, pad_id=1), "model")


@pytest.mark.parametrize(
    "make",
    [gemma, gemma_of_another_class, gemma_with_a_start, gemma_without_ends, pieces, pieces_without_kwargs, words],
)
def test_ids_equal_open_clips(make, tmp_path):
    from open_clip.tokenizer import HFTokenizer

    text = make(tmp_path) | {"hf_tokenizer_name": "elsewhere", "context_length": 12}
    size = 1 + max(HFTokenizer(str(tmp_path)).tokenizer.get_vocab().values())
    own = open_clip_tokenizer(tmp_path, {"model_cfg": {"text_cfg": text | {"vocab_size": size}}})
    expected = HFTokenizer(str(tmp_path), context_length=12, **text["tokenizer_kwargs"])(TEXTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the last is cut
        ids = own.batch(TEXTS).ids
    assert torch.equal(ids, expected)


def test_cleaning_of_texts_for_clips_vocabulary():
    for lower in ({}, {"tokenizer_kwargs": {"clean": "lower"}}, {"tokenizer_kwargs": None}):  # open_clip's own way
        assert isinstance(open_clip_tokenizer(None, {"text_cfg": lower}), CLIPTokenizer)
    with pytest.raises(CheckpointError, match=r"text_cfg\.tokenizer_kwargs \{'clean': 'canonicalize'\} is not support"):
        open_clip_tokenizer(None, {"text_cfg": {"tokenizer_kwargs": {"clean": "canonicalize"}}})


@pytest.mark.parametrize("kind", ["GemmaTokenizer", "Siglip2Tokenizer", "LlamaTokenizerFast"])
def test_a_class_that_pads_on_the_left_must_state_the_side(kind, tmp_path):
    from open_clip.tokenizer import HFTokenizer

    text = gemma(tmp_path) | {"hf_tokenizer_name": "elsewhere", "vocab_size": 400}
    path = tmp_path / "tokenizer_config.json"
    record = json.loads(path.read_text()) | {"tokenizer_class": kind}
    path.write_text(json.dumps(record))
    assert open_clip_tokenizer(tmp_path, {"text_cfg": text}) is not None
    del record["padding_side"]
    path.write_text(json.dumps(record))
    assert HFTokenizer(str(tmp_path), context_length=12)("cats")[0, 0] == 0  # its pad
    with pytest.raises(CheckpointError, match="without padding_side pads on the left"):
        open_clip_tokenizer(tmp_path, {"text_cfg": text})
    pipeline = json.loads((tmp_path / "tokenizer.json").read_text())
    for side in ("Left", "Right"):  # counts where the record says nothing
        padding = {"strategy": "BatchLongest", "direction": side, "pad_to_multiple_of": None, "pad_id": 0}
        padding |= {"pad_type_id": 0, "pad_token": "<pad>"}
        (tmp_path / "tokenizer.json").write_text(json.dumps(pipeline | {"padding": padding}))
        assert (HFTokenizer(str(tmp_path), context_length=12)("cats")[0, 0] == 0) == (side == "Left")
        if side == "Left":
            with pytest.raises(CheckpointError, match="padding_side 'left' is not supported"):
                open_clip_tokenizer(tmp_path, {"text_cfg": text})
        else:
            assert open_clip_tokenizer(tmp_path, {"text_cfg": text}) is not None


def test_options_without_an_equal_are_refused_by_name(tmp_path):
    text = words(tmp_path) | {"hf_tokenizer_name": "elsewhere", "vocab_size": 70}
    for changed in ({"tokenizer_kwargs": {"clean": "lower"}}, {"tokenizer_kwargs": {"language": "de"}},
                    {"tokenizer_mode": "clips"}):  # fmt: skip
        with pytest.raises(CheckpointError, match=rf"text_cfg\.{next(iter(changed))} .* is not supported"):
            open_clip_tokenizer(tmp_path, {"text_cfg": text | changed})
    path = tmp_path / "tokenizer_config.json"
    record = json.loads(path.read_text())
    for side in ("padding_side", "truncation_side"):
        path.write_text(json.dumps(record | {side: "left"}))
        with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {side} 'left' is not supported"):
            open_clip_tokenizer(tmp_path, {"text_cfg": text})
    path.write_text(json.dumps(record))
    pipeline = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(pipeline | {"post_processor": None}))
    assert open_clip_tokenizer(tmp_path, {"text_cfg": text}) is not None  # BertTokenizer puts its own
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(CheckpointError, match="strip_sep_token needs a token before"):
        open_clip_tokenizer(tmp_path, {"text_cfg": text})
