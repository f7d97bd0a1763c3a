"""CoCa, BLIP and GIT checkpoints: foreign folders and ours, the commands on them, refused configurations."""

import csv
import functools
import io
import json
import re
import shutil
import string
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from multimodal import load as load_path
from multimodal.errors import CheckpointError
from multimodal.tasks.caption.caption import CaptionWriter, prepared
from multimodal.tokens.text.clip import CLIPTokenizer
from multimodal.weights.encode import text_features
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import families
from tests.helpers.commands import one_line, run
from tests.helpers.references.captions import coca_case
from tests.helpers.references.vision import CONTEXT, HF_TEXT, HF_VISION, case
from tests.helpers.spread import thin
from tests.helpers.tiny import made as tiny

LETTERS = [*string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase)]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "the", "dog", "##s", "sea", *LETTERS[1:18], *LETTERS[26:44]]
WORDS = list(dict.fromkeys(WORDS))
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.2, 0.25]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """`blip`, `git` and `coca` in the layouts of Hugging Face and open_clip, as their own libraries write them."""
    from transformers import BertTokenizer, BlipConfig, BlipForConditionalGeneration, GitConfig, GitForCausalLM

    root = tmp_path_factory.mktemp("foreign")
    text = HF_TEXT | {"vocab_size": len(WORDS) + 2, "pad_token_id": 0}
    blip = BlipConfig(text_config=text | {"bos_token_id": len(WORDS), "sep_token_id": 3}, vision_config=HF_VISION)
    git = GitConfig(**text | {"vocab_size": len(WORDS), "bos_token_id": 2, "eos_token_id": 3}, vision_config=HF_VISION)
    pixels = {"image_mean": MEAN, "image_std": STD, "resample": 3, "do_resize": True, "do_normalize": True}
    square = {"height": 24, "width": 24}
    sizes = {"blip": {"size": square},
             "git": {"size": {"shortest_edge": 24}, "crop_size": square, "do_center_crop": True}}  # fmt: skip
    torch.manual_seed(3)
    for name, model in (("blip", BlipForConditionalGeneration(blip)), ("git", GitForCausalLM(git))):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(root / name)
        BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(root / name)
        (root / name / "preprocessor_config.json").write_text(json.dumps(pixels | sizes[name]))
    made = coca_case(vision={"image_size": 24}, text={"vocab_size": 49408, "context_length": 16},
                     decoder={"vocab_size": 49408, "context_length": 16})  # fmt: skip
    (root / "coca").mkdir()
    record = made.config | {"preprocess_cfg": {"mean": MEAN, "std": STD}}
    (root / "coca" / "open_clip_config.json").write_text(json.dumps(record))
    save_file(made.tensors, root / "coca" / "open_clip_model.safetensors")
    return root


@pytest.fixture
def pair(tmp_path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for name, size, colour in (("red.jpg", (50, 40), "red"), ("blue.png", (30, 60), "blue")):
        Image.new("RGB", size, colour).save(folder / name)
    return folder


@pytest.mark.ci
@pytest.mark.parametrize(("name", "kind"), [("blip", "captioner"), ("git", "git"), ("coca", "coca")])
def test_a_foreign_folder_captions_and_converts(capsys, folders, pair, tmp_path, name, kind):
    code, out, err = run(capsys, "caption", pair, "-m", folders / name, "--format", "json", "--max_new_tokens", 6)
    first = json.loads(out)
    assert code == 0, err
    assert [Path(row["file"]).name for row in first] == ["blue.png", "red.jpg"]
    assert all("[" not in row["caption"] and "<" not in row["caption"] for row in first)
    code, out, err = run(capsys, "convert", folders / name, tmp_path / "ours")
    assert (code, err) == (0, "")
    code, out, err = run(capsys, "info", tmp_path / "ours")
    assert (code, err) == (0, "")
    assert kind in out
    assert {path.name for path in (tmp_path / "ours").iterdir()} >= {"tokenizer_config.json", "preprocessing.json"}
    code, out, err = run(capsys, "caption", pair, "-m", tmp_path / "ours", "--format", "json", "--max_new_tokens", 6)
    assert code == 0, err
    assert json.loads(out) == first


@pytest.mark.parametrize(("name", "family"), [("blip", "blip"), ("git", "git"), ("coca", "open_clip-coca")])
def test_a_foreign_folder_goes_back_to_its_own_names(capsys, folders, tmp_path, name, family):
    from safetensors.torch import load_file

    code, _, err = run(capsys, "convert", folders / name, tmp_path / "back.safetensors", "--format", family)
    assert (code, err) == (0, "")
    made = load_file(tmp_path / "back.safetensors")
    (weights,) = (folders / name).glob("*.safetensors")
    held = load_file(weights)
    again = {key for key in made.keys() - held.keys() if "predictions.decoder" in key}  # which safetensors leaves out
    assert made.keys() - again == held.keys()
    assert all(torch.equal(made[key], held[key]) for key in held)


def test_images_and_texts_are_prepared_as_the_folder_says(folders):
    blip, git = load_path(folders / "blip"), load_path(folders / "git")
    assert (blip.tokenizer.bos_id, blip.tokenizer.eos_id) == (len(WORDS), 3)
    assert (git.tokenizer.bos_id, git.tokenizer.eos_id) == (2, 3)
    assert (blip.preprocessing.resize, git.preprocessing.resize) == ("squash", "shortest")
    assert blip.preprocessing.mean == tuple(MEAN)
    assert git.tokenizer.context == blip.model.caption_context == CONTEXT


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("name", ["blip", "git"])
def test_what_is_done_to_images_may_stand_in_the_file_of_the_whole_processor(folders, tmp_path, name):
    """As transformers writes it since version 5."""
    images = json.loads((folders / name / "preprocessor_config.json").read_text())
    for file in (folders / name).iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert load_path(tmp_path).preprocessing is None
    whole = tmp_path / "processor_config.json"
    whole.write_text(json.dumps({"image_processor": images, "processor_class": "Processor"}))
    assert load_path(tmp_path).preprocessing == load_path(folders / name).preprocessing
    whole.write_text(json.dumps({"image_processor": images | {"rescale_factor": 1 / 127.5}}))
    with pytest.raises(CheckpointError, match=r"processor_config\.json: rescale_factor .* not supported"):
        load_path(tmp_path)


SEARCHES = [
    ({}, {}),
    ({"no_repeat_ngram": 2}, {"no_repeat_ngram_size": 2}),
    ({"repetition_penalty": 1.4, "num_captions": 3}, {"repetition_penalty": 1.4, "num_return_sequences": 3}),
    ({"min_tokens": 6, "length_penalty": 2.0}, {"min_new_tokens": 6, "length_penalty": 2.0}),
    ({"num_captions": 3, "length_penalty": 0.0}, {"num_return_sequences": 3, "length_penalty": 0.0}),
]


@pytest.fixture(scope="module")
def pairs(folders):
    """The model of transformers and ours in a folder of `folders`."""
    from transformers import BlipForConditionalGeneration, GitForCausalLM

    kinds = {"blip": BlipForConditionalGeneration, "git": GitForCausalLM}
    return functools.cache(lambda name: (kinds[name].from_pretrained(folders / name).eval(), load_path(folders / name)))


@thin(3, pytest.mark.ci)
@thin(2, pytest.mark.slow)
@pytest.mark.parametrize(("options", "theirs"), SEARCHES)
@pytest.mark.parametrize("name", ["blip", "git"])
@torch.no_grad()
def test_beams_have_the_texts_and_scores_of_transformers(pairs, name, options, theirs):
    reference, ours = pairs(name)
    write = CaptionWriter(*prepared(ours, "float32", None, {"beam_size": 4, "max_new_tokens": 8, **options}))
    pixels = torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(7)) * 3
    for one, found in zip(pixels, write(pixels), strict=True):
        prompt = {} if name == "blip" else {"input_ids": torch.tensor([write.prompt])}
        made = reference.generate(
            pixel_values=one[None], **prompt, num_beams=4, max_new_tokens=8, do_sample=False,
            return_dict_in_generate=True, output_scores=True, **theirs,
        )  # fmt: skip
        expected: dict[str, float] = {}  # of equal texts the best
        for row, score in zip(made.sequences.tolist(), made.sequences_scores.tolist(), strict=True):
            ids = row[1 : row.index(3)] if 3 in row else row[1:]
            expected.setdefault(ours.tokenizer.decode([*write.prompt, *ids]).strip(), score)
        assert [caption.text for caption in found] == [*expected]
        assert [caption.score for caption in found] == pytest.approx([*expected.values()], abs=1e-5)


@pytest.mark.ci
@torch.no_grad()
def test_a_git_follows_its_generation_config(folders, tmp_path):
    """As of `generate()` without arguments."""
    from transformers import GitForCausalLM

    reference = GitForCausalLM.from_pretrained(folders / "git").eval()
    reference.generation_config.update(num_beams=3, repetition_penalty=1.4, no_repeat_ngram_size=2, max_new_tokens=8)
    shutil.copytree(folders / "git", tmp_path / "git")
    reference.generation_config.save_pretrained(tmp_path / "git")
    write = CaptionWriter(*prepared(tmp_path / "git", "float32", "cpu", {"max_new_tokens": 8}))
    pixels = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(7)) * 3
    for one, (best, *_) in zip(pixels, write(pixels), strict=True):
        row = reference.generate(pixel_values=one[None])[0].tolist()
        assert best.ids == (row[1 : row.index(3)] if 3 in row else row[1:])
    path = tmp_path / "git" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bad_words_ids": [[5]]}))
    with pytest.warns(UserWarning, match=r"asks for bad_words_ids \[\[5\]\], which is not followed"):
        options = prepared(tmp_path / "git", "float32", "cpu", {"beam_size": 1, "repetition_penalty": 2.0})[1]
    assert (options.beam_size, options.repetition_penalty, options.no_repeat_ngram) == (1, 2.0, 2)


@pytest.mark.ci
def test_coca_classifies_and_gives_text_vectors(capsys, folders, pair):
    code, out, err = run(capsys, "classify", pair, "--labels", "red,blue", "-m", folders / "coca", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert (code, err) == (0, "")
    assert len(rows) == 4
    read = load_path(folders / "coca")
    assert isinstance(read.tokenizer, CLIPTokenizer)
    texts = ["a dog", "two dogs at the sea! and a house", "a dog at the sea"]
    together = text_features(read.model, read.tokenizer, texts)
    padded = read.tokenizer.batch(texts, 16, pad_to_length=True).ids
    with torch.inference_mode():
        assert (read.model.encode_text(padded) - together).abs().max() < 1e-6


def _changed(config: dict, path: str, value: object) -> dict:
    config = json.loads(json.dumps(config))
    *parts, last = path.split(".")
    inner = config
    for part in parts:
        inner = inner[part]
    inner[last] = value
    return config


@pytest.mark.parametrize(
    ("name", "path", "value", "cause"),
    [
        ("OpenCLIP CoCa", "model_cfg.vision_cfg.attentional_pool", "parallel", "attentional_pool 'parallel'"),
        ("OpenCLIP CoCa", "model_cfg.text_cfg.embed_cls", False, "embed_cls False"),
        ("OpenCLIP CoCa", "model_cfg.text_cfg.no_causal_mask", True, "no_causal_mask is not supported for CoCa"),
        ("OpenCLIP CoCa", "model_cfg.text_cfg.hf_model_name", "roberta-base", "hf_model_name 'roberta-base'"),
        ("OpenCLIP CoCa", "model_cfg.multimodal_cfg.qk_norm", True, "multimodal_cfg.qk_norm True"),
        ("OpenCLIP CoCa", "model_cfg.multimodal_cfg.context_length", 8, "context_length 9 in text_cfg, 8"),
        ("OpenCLIP CoCa", "model_cfg.multimodal_cfg.width", 32, "must have equal widths"),
        ("OpenCLIP CoCa", "model_cfg.vision_cfg.new_thing", 3, "vision_cfg.new_thing 3 is not supported"),
        ("OpenCLIP CoCa", "model_cfg.vision_cfg.final_ln_after_pool", True, "final_ln_after_pool"),
        ("OpenCLIP CoCa", "model_cfg.multimodal_cfg", None, "invalid .* configuration"),
        ("OpenCLIP CoCa", "model_cfg.embed_dim", 40, "must have equal widths"),
        ("Hugging Face BLIP", "text_config.hidden_act", "swish2", "hidden_act 'swish2'"),
        ("Hugging Face BLIP", "text_config.position_embedding_type", "relative_key", "'relative_key'"),
        ("Hugging Face BLIP", "text_config.is_decoder", False, "is_decoder must be true"),
        ("Hugging Face BLIP", "text_config.num_attention_heads", 7, "not divisible"),
        ("Hugging Face BLIP", "vision_config.patch_size", 4, "embeddings.p.* has shape"),
        ("Hugging Face GIT", "num_image_with_embedding", 6, "num_image_with_embedding 6"),
        ("Hugging Face GIT", "hidden_size", "24", "invalid .* configuration"),
        ("Hugging Face GIT", "num_hidden_layers", 4, "is missing"),
    ],
)
def test_configurations_that_do_not_fit_are_refused_in_one_line(name, path, value, cause):
    made = case(name)
    with pytest.raises(CheckpointError, match=f"^file: .*{cause}") as error:
        made.family.load(made.tensors, _changed(made.config, path, value), "file")
    assert "\n" not in str(error.value)


def test_a_bias_of_two_names_that_differ_is_refused():
    made = case("Hugging Face BLIP")
    name = "text_decoder.cls.predictions.decoder.bias"
    with pytest.raises(CheckpointError, match=re.escape(f"file: tensor {name!r} differs from")):
        made.family.load(made.tensors | {name: made.tensors[name] + 1}, made.config, "file")


def test_blips_model_for_questions_is_named():
    made = case("Hugging Face BLIP")
    other = {"text_encoder.embeddings.LayerNorm.bias": torch.zeros(8)}  # of BlipForQuestionAnswering
    with pytest.raises(CheckpointError, match=r"^file: BLIP for questions"):
        made.family.load(made.tensors | other, made.config, "file")


@pytest.mark.parametrize("name", ["Hugging Face BLIP", "Hugging Face GIT", "Hugging Face GIT, tied"])
def test_logits_go_through_the_embedding_only_where_the_file_says_so(name):
    made = case(name)
    head = "output.weight" if "GIT" in name else "text_decoder.cls.predictions.decoder.weight"
    shorter = {key: value for key, value in made.tensors.items() if key != head}
    if name == "Hugging Face GIT":
        with pytest.raises(CheckpointError, match=f"tensor '{head}' is missing"):
            made.family.load(shorter, made.config, "file")
        return
    assert made.family.load(shorter, made.config, "file").model.config.decoder.tied
    if name == "Hugging Face BLIP":  # transformers ties by either configuration
        config = made.config | {"tie_word_embeddings": False}
        assert made.family.load(shorter, config, "file").model.config.decoder.tied
        config["text_config"] = made.config["text_config"] | {"tie_word_embeddings": False}
        with pytest.raises(CheckpointError, match=f"tensor '{head}' is missing"):
            made.family.load(shorter, config, "file")
    other = made.family.load(made.tensors | {head: made.tensors[head] + 1}, made.config, "file").model
    assert other.config.decoder.tied is False


def test_without_their_configuration_they_are_refused(capsys, folders, tmp_path):
    for name in ("blip", "git", "coca"):
        (weights,) = (folders / name).glob("*.safetensors")
        (tmp_path / name).mkdir()
        (tmp_path / name / weights.name).write_bytes(weights.read_bytes())
        code, _, err = run(capsys, "info", tmp_path / name)
        assert code == 1
        assert "configuration" in one_line(err) or "config.json" in one_line(err)


@pytest.mark.ci
def test_no_family_takes_the_model_of_another(capsys, folders, tmp_path):
    """A CoCa is a CLIP, and a BLIP a captioner as any, but not in their tables."""
    made = case("OpenCLIP CoCa")
    assert [f.name for f in families().values() if f.recognizes(made.tensors, made.config)] == ["open_clip-coca"]
    plain = Checkpoint(tiny("captioner"))
    with pytest.raises(CheckpointError, match=r"export: .* needs 'decoder\.norm\.weight', which the"):
        families()["blip"].export(plain.model)
    for to in ("open_clip-custom-text", "clip-hf", "blip"):
        code, _, err = run(capsys, "convert", folders / "coca", tmp_path / "out.safetensors", "--format", to)
        assert code == 1
        assert f"--format {to}: holds " in one_line(err)
