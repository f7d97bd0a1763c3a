"""Any-to-text training: what is written is what `ask` reads, and the loss is that of the answers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from multimodal import Asker
from multimodal.data.datasets.captions import CaptionAugmentSettings
from multimodal.data.datasets.chats import open_chats
from multimodal.data.datasets.text import IGNORED
from multimodal.data.examples import SizedCache
from multimodal.data.sources import Source
from multimodal.errors import TextError
from multimodal.tokens.chat.messages import read_messages
from multimodal.tokens.video.options import VideoOptions
from multimodal.train.lora import freeze
from multimodal.train.objectives.any_to_text import Answering, PrepareChat, alike, collate
from multimodal.train.objectives.augment_speech import SpeechAugmentation
from multimodal.weights.folder import Checkpoint
from tests.helpers.data.audio_files import chirp, wav
from tests.helpers.data.chats import checkpoint
from tests.helpers.data.video_files import ramp, video

PLAIN = CaptionAugmentSettings(1.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def tiny() -> Checkpoint:
    return checkpoint()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Source:
    folder = tmp_path_factory.mktemp("chats")
    Image.new("RGB", (12, 8), "red").save(folder / "a.png")
    (folder / "b.wav").write_bytes(wav(chirp(16000, 1.6)))
    (folder / "c.mp4").write_bytes(video(ramp(8), sound=1.0))
    user = lambda *parts: {"role": "user", "content": [*parts]}
    said = lambda text: {"role": "assistant", "content": text}
    image, sound, clip = ({"type": kind, "path": name} for kind, name in
                          (("image", "a.png"), ("audio", "b.wav"), ("video", "c.mp4")))  # fmt: skip
    text = lambda words: {"type": "text", "text": words}
    rows = [
        [user(image, text("which?")), said("red")],
        [user(sound, image, text("and?")), said("a chirp")],
        [user(clip, text("what?")), said("grey")],
        [user(text("1 + 1")), said("2"), user(text("and 1")), said("3")],
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return open_chats(folder / "rows.jsonl")


def prepared(tiny: Checkpoint, source: Source) -> list:
    prepare = PrepareChat(tiny, VideoOptions(max_frames=2), PLAIN)
    return [prepare(source.read(key), torch.Generator().manual_seed(0)) for key in range(len(source))]


def test_training_writes_a_conversation_as_asking_does(tiny, source):
    asker = Asker(tiny, compute_type="float32", max_frames=2)
    for key, example in enumerate(prepared(tiny, source)):
        row = source.read(key)
        prompt = asker.writer.prompt(read_messages(row.fields["messages"]))
        answer = [*tiny.tokenizer.encode(row.texts[0]), tiny.tokenizer.eos_id]
        assert example.ids == [*prompt.ids, *answer[:-1]]
        assert example.targets[-len(answer) :] == answer
        named = {asker.writer.media._encoded(one.medium).digest for one in example.inputs if one.name is not None}
        assert named <= {one.digest for one in prompt.media}  # an image without a name is augmented
        assert len(example.inputs) == len(prompt.media)


def test_recordings_are_augmented_where_asked(source):
    tiny = checkpoint("any-conformer")
    prepare = PrepareChat(tiny, VideoOptions(max_frames=2), PLAIN, SpeechAugmentation(speed=0.5))
    draw = lambda seed: prepare(source.read(1), torch.Generator().manual_seed(seed))
    first, again, other = draw(0), draw(0), draw(3)
    sound = first.inputs[0]
    assert sound.name is None
    torch.testing.assert_close(sound.medium.tensors, again.inputs[0].medium.tensors, rtol=0, atol=0)
    assert sound.medium.tensors.shape != other.inputs[0].medium.tensors.shape  # of another speed
    assert len(first.ids) != len(other.ids)
    batch = collate([first, other])
    objective = Answering(tiny.model, tiny.preprocessing)
    together = objective(batch)["loss"]
    alone = sum(objective(collate([one]))["loss"] for one in (first, other))
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_answers_of_every_turn_are_learned(tiny, source):
    example = prepared(tiny, source)[3]
    learned = [target for target in example.targets if target != IGNORED]
    ends = [tiny.tokenizer.eos_id]  # which the template writes after an answer
    assert learned == [*tiny.tokenizer.encode("2"), *ends, *tiny.tokenizer.encode("3"), *ends]
    assert all(t in (IGNORED, n) for t, n in zip(example.targets, [*example.ids[1:], *ends], strict=True))


def test_turns_are_as_a_template_of_parts_writes_them(tiny, source):
    """As SmolVLM's, with a blank before an answer, and LLaVA's, which writes no end."""
    parts = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    turn = "{% for m in messages %}{{ '<|' + m.role + '|>: ' }}" + parts + "{END}{% endfor %}<|assistant|>:"
    prepare = lambda end: PrepareChat(
        replace(tiny, chat=replace(tiny.chat, template=turn.replace("{END}", end))), VideoOptions(), PLAIN
    )
    example = prepare("<|end|>")(source.read(3), torch.Generator())
    written = tiny.tokenizer.decode(example.ids, skip_control=False)
    assert written == "<|user|>: 1 + 1<|end|><|assistant|>: 2<|end|><|user|>: and 1<|end|><|assistant|>: 3"
    assert tiny.tokenizer.decode([i for i in example.targets if i != IGNORED]) == " 2 3"
    endless = prepare("")
    assert (endless.before, endless.end) == ("", tiny.chat.end_ids(tiny.tokenizer)[0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_each_row_alone(tiny, source, smoothing):
    examples = prepared(tiny, source)
    objective = Answering(tiny.model, tiny.preprocessing, smoothing).eval()
    batch = collate(examples)
    total = objective(batch)["loss"]
    expected, weight, model = torch.tensor(0.0), 0.0, tiny.model
    for example in examples:
        media = objective._rows(example.inputs)
        logits = model(torch.tensor([example.ids]), [torch.cat(media) if media else torch.zeros(0, 16)])[0]
        targets = torch.tensor(example.targets)
        count = int((targets != IGNORED).sum())
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
        expected = expected + loss / count**0.5
        weight += count**0.5
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)
    assert float(objective.counts(batch)["loss"]) == pytest.approx(weight)


def test_a_full_cache_keeps_what_it_has():
    cache, made = SizedCache(5, len), []
    for key in ("abc", "defg", "abc", "defg"):
        assert cache.get_or_make(key, lambda key=key: made.append(key) or key) == key
    assert made == ["abc", "defg", "defg"]


def test_kept_states_of_frozen_encoders_change_nothing(tiny, source):
    made = checkpoint()
    batch = collate(prepared(made, source))
    fresh = Answering(made.model, made.preprocessing).eval()(batch)["loss"]
    freeze(made.model, ("image", "audio"))
    objective = Answering(made.model, made.preprocessing).train()
    assert not made.model.image.training
    assert made.model.decoder.training
    losses = [objective(batch)["loss"] for _ in range(2)]
    assert len(objective.kept) == 4  # a recording, two frames and the sound of the video; the image is augmented
    assert torch.equal(*losses)
    torch.testing.assert_close(losses[0], fresh, rtol=1e-5, atol=1e-4)
    losses[0].backward()
    assert made.model.image.embed.weight.grad is None
    assert made.model.image_connector.out.weight.grad.abs().sum() > 0
    assert made.model.audio_connector.out.weight.grad.abs().sum() > 0


def test_a_conversation_beyond_the_context_is_refused(tiny, tmp_path: Path):
    row = {"messages": [{"role": "user", "content": "a" * 500}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "long.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(TextError, match=r"has 50\d tokens, the model's context is 400"):
        prepared(tiny, open_chats(tmp_path / "long.jsonl"))


def test_rows_of_like_length_go_together():
    assert alike([30, 200, 31, 130, 70]) == [[0, 2], [1, 3], [4]]
