"""Answers to messages about images: the ids of transformers' processor and the tokens of its `generate`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal import load
from multimodal.errors import CheckpointError
from multimodal.tasks.ask.asker import Asker
from multimodal.tokens.chat.messages import MessagePart, read_messages
from tests.helpers.data.video_files import numbered, video
from tests.helpers.spread import thin
from tests.helpers.tiny import randomized
from tests.weights.any.test_any_folders import processor

NAMES = ("<image>", "<video>", "<pad>", "</s>", "<s>", "<|im_start|>", "<|im_end|>", "<end_of_utterance>",
         "<fake_token_around_image>", "<global-img>",
         *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)))  # fmt: skip
IDS = {name: 256 + i for i, name in enumerate(NAMES)}
TEXT = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": IDS["</s>"], "pad_token_id": 258,
        "bos_token_id": 260}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 7}  # fmt: skip
TEMPLATES = {
    "LLaVA": "{% for m in messages %}{{ m['role'].upper() }}: {% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image>\n{% elif p['type'] == 'text' %}{{ p['text'] }} {% endif %}{% endfor %}"
    "{% endfor %}ASSISTANT:",
    "LLaVA-OneVision": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' }}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>' }}{% endfor %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + p['text'] }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{{ '<|im_start|>assistant\n' }}",
    "Idefics3": "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}:{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{{ 'Assistant:' }}",
}


def tokenizer(bos: str | None = None) -> Any:
    """`bos`: put before each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
                                merges=[]))  # fmt: skip
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(list(NAMES))
    if bos:
        made.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, IDS[bos])])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=bos, eos_token="</s>", pad_token="<pad>")
    assert fast.convert_tokens_to_ids(list(NAMES)) == list(IDS.values())
    return fast


def reference(name: str) -> tuple[torch.nn.Module, Any]:
    """Model and processor."""
    import transformers

    image, words = processor(name), tokenizer({"LLaVA": "<s>", "Idefics3": "<|im_start|>"}.get(name))
    if name == "Idefics3":
        config = transformers.Idefics3Config(
            vision_config=VISION, text_config={"model_type": "llama", **TEXT}, image_token_id=IDS["<image>"],
            scale_factor=2, pad_token_id=258,
        )  # fmt: skip
        model = transformers.Idefics3ForConditionalGeneration(config)
        made = transformers.Idefics3Processor(image, words, image_seq_len=4, chat_template=TEMPLATES[name])
    elif name == "LLaVA":
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**VISION), text_config=transformers.LlamaConfig(**TEXT),
            image_token_index=IDS["<image>"],
        )  # fmt: skip
        model = transformers.LlavaForConditionalGeneration(config)
        made = transformers.LlavaProcessor(
            image, words, patch_size=7, vision_feature_select_strategy="default", chat_template=TEMPLATES[name],
            num_additional_image_tokens=1,
        )  # fmt: skip
    else:
        config = transformers.LlavaOnevisionConfig(
            vision_config=transformers.SiglipVisionConfig(**VISION, vision_use_head=False),
            text_config=transformers.Qwen2Config(**TEXT), image_token_index=IDS["<image>"],
            video_token_index=IDS["<video>"], image_grid_pinpoints=image.image_grid_pinpoints,
        )  # fmt: skip
        model = transformers.LlavaOnevisionForConditionalGeneration(config)
        made = transformers.LlavaOnevisionProcessor(
            image,
            words,
            transformers.LlavaOnevisionVideoProcessor(size={"height": 28, "width": 28}),
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            chat_template=TEMPLATES[name],
        )
    return randomized(model), made


def saved(name: str, folder: Path, model: torch.nn.Module, made: Any) -> Path:
    model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    made.image_processor.save_pretrained(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATES[name]}))
    return folder


SEARCH = {"num_beams": 3, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "length_penalty": 0.5}


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(("name", "asked"), [*((name, {}) for name in TEMPLATES), ("Idefics3", SEARCH)])
@torch.no_grad()
def test_answers_are_transformers(name, asked, tmp_path):
    """`asked`: in generation_config.json."""
    torch.manual_seed(0)
    model, made = reference(name)
    model.generation_config.update(**asked)
    asker = Asker(saved(name, tmp_path, model, made), compute_type="float32", max_new_tokens=6)
    images = [Image.fromarray(np.arange(h * w * 3, dtype=np.uint8).reshape(h, w, 3)) for h, w in ((31, 70), (50, 20))]
    said = lambda role, text: {"role": role, "content": [{"type": "text", "text": text}]}
    for given in (images[:1], images, []):
        parts = [{"type": "image", "image": image} for image in given] + [{"type": "text", "text": "What is this? "}]
        messages = [{"role": "user", "content": parts}, said("assistant", "a dog"), said("user", "Why?")]
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        theirs = made.apply_chat_template(messages, **options)
        prompt = asker.writer.prompt(read_messages(messages))
        assert prompt.ids == theirs["input_ids"][0].tolist()
        plain = [{**one, "content": one["content"][-1]["text"]} for one in messages[1:]]
        assert asker.writer.prompt(read_messages([messages[0], *plain])).ids == prompt.ids
        expected = model.generate(**theirs, do_sample=False, max_new_tokens=6)[0, len(prompt.ids) :].tolist()
        expected = expected[: expected.index(IDS["</s>"])] if IDS["</s>"] in expected else expected
        text = asker.writer.tokenizer.decode(expected).rstrip("\ufffd")
        assert asker.writer.answers([prompt])[0][0].text == text


def test_media_stand_where_the_template_puts_them(tmp_path):
    """LLaVA-OneVision's writes images before videos."""
    model, made = reference("LLaVA-OneVision")
    asker = Asker(saved("LLaVA-OneVision", tmp_path, model, made), compute_type="float32", max_frames=2)
    path, image = tmp_path / "a.mp4", Image.new("RGB", (40, 30), "red")
    path.write_bytes(video(list(numbered(3))))
    parts = [{"type": "video", "path": path}, {"type": "image", "image": image}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": parts}]
    prompt = asker.writer.prompt(read_messages(messages))
    frames = [np.zeros((2, 30, 40, 3), np.uint8)]
    text = made.apply_chat_template(messages, add_generation_prompt=True)
    given = made(text=text, images=[[image]], videos=frames, do_sample_frames=False)
    assert prompt.ids == given["input_ids"][0]
    assert [one.markup[:7] for one in prompt.media] == ["<image>", "<video>"]


def test_an_answer_ends_at_the_eos_of_the_whole_model_too(tmp_path):
    from transformers import GenerationConfig

    folder = saved("LLaVA", tmp_path, *reference("LLaVA"))
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": IDS["<|im_end|>"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    theirs = GenerationConfig.from_pretrained(folder, "config.json").eos_token_id
    assert theirs == IDS["<|im_end|>"]
    assert Asker(folder).writer.ends == [IDS["</s>"], theirs]


@pytest.mark.ci
def test_the_token_of_an_image_has_the_models_id_and_any_name(tmp_path):
    model, made = reference("LLaVA")
    folder, image = saved("LLaVA", tmp_path, model, made), Image.new("RGB", (40, 30), "red")
    expected = Asker(folder, compute_type="float32")
    tokens, settings = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    pipeline, record = json.loads(tokens.read_text()), json.loads(settings.read_text())
    for token in pipeline["added_tokens"]:
        if token["id"] == IDS["<image>"]:
            token |= {"special": False, "normalized": True}
    tokens.write_text(json.dumps(pipeline))
    typed = Asker(folder, compute_type="float32").message("an <image>?", [image])
    assert Asker(folder, compute_type="float32").writer.prompt([typed]).ids == expected.writer.prompt([typed]).ids
    settings.write_text(json.dumps(record | {"image_token": "<pad>"}))
    with pytest.raises(CheckpointError, match=r"image token '<pad>' with id 258, the model expects 256"):
        Asker(folder)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"image_token_index": 258}))
    template = {"chat_template": TEMPLATES["LLaVA"].replace("<image>", "<pad>")}
    (tmp_path / "chat_template.json").write_text(json.dumps(template))
    given = Asker(folder, compute_type="float32").writer.prompt([expected.message("What?", [image])])
    assert given.ids.count(258) == 16


@pytest.mark.ci
@torch.no_grad()
def test_frames_of_a_video_are_those_of_the_references_video_processor(tmp_path):
    """Up to the rounding of its resize, which is torchvision's. Each frame is stretched, not padded."""
    model, made = reference("LLaVA-OneVision")
    folder = saved("LLaVA-OneVision", tmp_path, model, made)
    path, config = tmp_path / "a.mp4", tmp_path / "video_preprocessor_config.json"
    path.write_bytes(video(list(numbered(3))))
    own = made.video_processor.to_dict()
    for wrong, cause in (
        ({"video_processor_type": "OtherVideoProcessor"}, "video processor 'OtherVideoProcessor' is not supported"),
        (
            {"size": {"height": 7, "width": 7}},
            r"videos in other steps than images are not supported \(size \(7, 7\)\)$",
        ),
    ):
        config.write_text(json.dumps(own | wrong))
        with pytest.raises(CheckpointError, match=cause):
            load(folder)
    for deviation in (0.5, 0.25):  # that of the images, and another
        chosen = {"image_mean": [0.5] * 3, "image_std": [deviation] * 3}
        config.write_text(json.dumps(own | chosen))
        asker = Asker(folder, compute_type="float32")
        medium = asker.writer.media.read(MessagePart("video", path), False)
        assert medium.shown[0].width != medium.shown[0].height
        given = np.stack([np.asarray(image) for image in medium.shown])
        expected = made.video_processor([given], return_tensors="pt", **chosen)["pixel_values_videos"][0]
        assert (medium.tensors - expected).abs().max() <= 1.01 / 255 / deviation
