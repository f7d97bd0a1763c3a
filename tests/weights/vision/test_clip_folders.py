"""Folders of CLIP's kinds as transformers saves them, through the commands."""

import json

import pytest
import torch

from multimodal.errors import CheckpointError, UsageError
from multimodal.export.hf.configs import described
from multimodal.models.clip import CLIP
from multimodal.tokens.text.bytepair import byte_letters
from multimodal.tokens.text.clip import CLIPTokenizer
from multimodal.tokens.text.hub.added import FLAGS
from multimodal.weights.folder import Checkpoint, build
from multimodal.weights.load import families
from multimodal.weights.vision import clip_hf
from tests.helpers.commands import evaluated, run
from tests.helpers.data.sets import squares
from tests.helpers.references.vision import HF_TEXT, HF_VISION, randomized
from tests.helpers.spread import thin


def chinese(folder):
    from transformers import ChineseCLIPConfig, ChineseCLIPModel

    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"红蓝绿色方块一张的照片", "a", "red"]
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    text = HF_TEXT | {"vocab_size": len(vocab), "max_position_embeddings": 20}
    return ChineseCLIPModel(ChineseCLIPConfig(text_config=text, vision_config=HF_VISION, projection_dim=20))


def metaclip2(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import MetaClip2Config, MetaClip2Model, PreTrainedTokenizerFast

    names = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    made = Tokenizer(models.Unigram([(name, -1.0) for name in names], unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    text = HF_TEXT | {"vocab_size": len(names), "eos_token_id": 2, "max_position_embeddings": 40}
    return MetaClip2Model(MetaClip2Config(text_config=text, vision_config=HF_VISION, projection_dim=20))


@pytest.mark.ci
@pytest.mark.parametrize(("make", "labels"), [(chinese, ["红色", "蓝色"]), (metaclip2, ["red", "blue"])])
def test_folders_classify_search_and_probe(make, labels, capsys, tmp_path):
    from transformers import CLIPImageProcessor

    folder = tmp_path / "model"
    folder.mkdir()
    randomized(make(folder)).save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
    CLIPImageProcessor(**sizes).save_pretrained(folder)
    images, train = squares(tmp_path / "images", 2), squares(tmp_path / "train", 4)
    photos = sorted(map(str, images.rglob("*.png")))
    capsys.readouterr()  # what transformers says
    code, out, err = run(capsys, "classify", photos[0], "--labels", *labels, "-m", folder, "--format", "json")
    assert (code, err) == (0, ""), err
    assert {row["label"] for row in json.loads(out)[0]["scores"]} == set(labels)
    code, _, err = run(capsys, "index", images, "-o", tmp_path / "made", "-m", folder)
    assert (code, err) == (0, ""), err
    queries = [labels[0], photos[1]]
    code, out, err = run(capsys, "search", *queries, "--index", tmp_path / "made", "--top", 2, "--format", "json")
    assert (code, err) == (0, ""), err
    assert [row["kind"] for row in json.loads(out)] == ["text", "image"]
    assert json.loads(out)[1]["results"][0]["file"] == photos[1]
    assert evaluated(capsys, "linear-probe", images, "--train", train, "-m", folder, "--C", "1")["acc1"] > 0.5
    code, _, err = run(capsys, "inspect", folder, photos[0], "--format", "json")
    assert (code, err) == (0, ""), err


PAIRS = [("r", "e"), ("re", "d</w>"), ("b", "l"), ("bl", "u"), ("blu", "e</w>")]
TEXTS = ["A photo of a  red <new> square\n", "it\u2019s BLUE, 2x &amp; caf\u00e9", "猫 🙂 <new>red"]


def own_vocabulary():
    letters = list(byte_letters().values())
    names = [*letters, *(letter + "</w>" for letter in letters), *map("".join, PAIRS)]
    return {name: i for i, name in enumerate([*names[::-1], "<|startoftext|>", "<|endoftext|>"])}


@pytest.mark.parametrize("files", ["vocab.json and merges.txt", "tokenizer.json", "added tokens"])
def test_a_clip_folder_with_its_own_vocabulary_has_transformers_ids(files, tmp_path):
    from transformers import AutoTokenizer
    from transformers import CLIPTokenizer as Theirs

    made = Theirs(own_vocabulary(), PAIRS)
    if files == "added tokens":
        made.add_tokens(["<new>"])
    made.save_pretrained(tmp_path)
    if files == "vocab.json and merges.txt":
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "vocab.json").write_text(json.dumps(own_vocabulary()), encoding="utf-8")
        lines = ["#version: 0.2", *map(" ".join, PAIRS), ""]
        (tmp_path / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    theirs, size = AutoTokenizer.from_pretrained(tmp_path), len(made)
    tokenizer = clip_hf.tokenizer(tmp_path, {"text_config": {"vocab_size": size}})
    assert [tokenizer.frame[0] + tokenizer.encode(text) + tokenizer.frame[1] for text in TEXTS] == theirs(
        TEXTS
    ).input_ids
    assert tokenizer.decode(tokenizer.encode("a RED square")) == "a red square"
    with pytest.raises(CheckpointError, match=rf"has {size - (files == 'added tokens')} tokens, the model embeds 90"):
        clip_hf.tokenizer(tmp_path, {"text_config": {"vocab_size": 90}})


@pytest.mark.ci
def test_openais_vocabulary_with_an_added_token(tmp_path):
    names = ["<|startoftext|>", "<|endoftext|>"]
    added = [{"id": 49406 + i, "content": name, "special": True} for i, name in enumerate(names)]
    file = CLIPTokenizer().pipeline() | {"added_tokens": [FLAGS | token for token in added]}
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizer"}', encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    assert isinstance(clip_hf.tokenizer(tmp_path, {}), CLIPTokenizer)
    (tmp_path / "added_tokens.json").write_text('{"<new>": 49408}', encoding="utf-8")
    larger = clip_hf.tokenizer(tmp_path, {"text_config": {"vocab_size": 49409}})
    assert larger.encode("a <new> cat") == [320, 49408, 2368]


LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
HUGE = LARGE | {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32}
SHAPED = LARGE | {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
WORDS = {"vocab_size": 256000}
# sizes in public config.json files: family, projection, text, image, parameters
RELEASED = {
    "facebook/metaclip-2-worldwide-huge-quickgelu": (
        "clip-hf", 1024, LARGE | {"vocab_size": 901629, "eos_token_id": 2}, HUGE | {"patch_size": 14}, 1_858_783_745),
    "OFA-Sys/chinese-clip-vit-base-patch16": (
        "chinese-clip", 512, {"vocab_size": 21128}, {"patch_size": 16}, 188_262_913),
    "OFA-Sys/chinese-clip-vit-large-patch14": (
        "chinese-clip", 768, {"vocab_size": 21128}, LARGE | {"patch_size": 14}, 406_233_089),
    "google/siglip2-base-patch16-224": ("siglip-hf", None, WORDS, {}, 375_187_970),
    "google/siglip2-so400m-patch14-384": (
        "siglip-hf", None, SHAPED | WORDS, SHAPED | {"image_size": 384, "patch_size": 14}, 1_136_008_498),
    "google/siglip2-base-patch16-naflex": ("siglip2-hf", None, WORDS, {"num_patches": 256}, 375_234_050),
    "google/siglip2-so400m-patch16-naflex": (
        "siglip2-hf", None, SHAPED | WORDS, SHAPED | {"num_patches": 256}, 1_135_670_962),
}  # fmt: skip


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("name", RELEASED)
def test_released_configurations_build_models_of_their_size(name):
    kind, projection, text, image, count = RELEASED[name]
    family = families()[kind]
    config = {"text_config": text, "vision_config": image, "projection_dim": projection,
              "model_type": "metaclip_2" if "metaclip" in name else family.types[-1]}  # fmt: skip
    with torch.device("meta"):
        exported = family.export(build(CLIP, family.config_from(config, {})))
    assert sum(tensor.numel() for tensor in exported.values()) == count


@pytest.mark.parametrize(
    ("kind", "config", "named"),
    [("siglip2-hf", {"vision_config": {"num_patches": 250}}, "num_patches 250 is not a square"),
     ("chinese-clip", {"text_config": {"hidden_act": "mish"}}, "hidden_act 'mish' is not supported"),
     ("chinese-clip", {"text_config": {"position_embedding_type": "relative_key"}},
      "position_embedding_type 'relative_key' is not supported")],
)  # fmt: skip
def test_options_that_are_not_supported_are_refused_by_name_and_value(kind, config, named):
    with pytest.raises(CheckpointError, match=named):
        families()[kind].load({}, config, "file")


def test_images_of_unequal_sides_have_no_place_in_a_clip_of_transformers():
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    record = {"text_config": sizes | {"vocab_size": 20}, "vision_config": sizes | {"image_size": [32, 64]}}
    model = CLIP(families()["clip-hf"].config_from(record, {}))
    with pytest.raises(UsageError, match=r"the nearest, clip, lacks image.image \(32, 64\)"):
        described(Checkpoint(model, source="m"))
