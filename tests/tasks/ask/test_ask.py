"""Asking: inputs of any kind and number, batches, conversations, and bad input."""

import base64
import copy
import io
import json
import wave
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import pytest
import torch
from PIL import Image

import multimodal
from multimodal.cli.output import plain
from multimodal.errors import AudioError, CheckpointError, DataError, TextError, UsageError
from multimodal.tasks.ask import media
from multimodal.tasks.ask.asker import Asker
from multimodal.tasks.text.options import options_for
from multimodal.tokens.chat.messages import read_messages
from multimodal.tokens.video.reading import Frame, VideoInfo
from multimodal.weights.folder import load_folder
from tests.helpers.commands import one_line, run
from tests.helpers.data.chats import checkpoint
from tests.helpers.data.video_files import ramp, video
from tests.helpers.spread import thin

NEW = {"max_new_tokens": 6}
RED, BLUE = (Image.new("RGB", (12, 8), colour) for colour in ("red", "blue"))
SOUND = (16000, np.sin(np.arange(24000) / 7).astype(np.float32))


@pytest.fixture(scope="module")
def asker(tiny) -> Asker:
    return Asker(tiny, compute_type="float32", **NEW)


def prompt(asker: Asker, *parts: dict) -> object:
    return asker.writer.prompt(read_messages([{"role": "user", "content": list(parts)}]))


def expected(asker: Asker, given) -> list[int]:
    """Greedy ids of a prompt by whole passes, without cache or batch."""
    model, ids = asker.writer.network, list(given.ids)
    ends = set(asker.writer.ends)
    with torch.inference_mode():
        for _ in range(NEW["max_new_tokens"]):
            logits = model(torch.tensor([ids]), [torch.cat([one.rows for one in given.media])])[0, -1].float()
            if (token := int(logits.argmax())) in ends:
                break
            ids.append(token)
    return ids[len(given.ids) :]


def test_an_answer_is_the_models_own(asker):
    given = prompt(asker, {"type": "image", "image": RED}, {"type": "audio", "audio": SOUND},
                   {"type": "text", "text": "which?"})  # fmt: skip
    counts = [given.ids.count(i) for i in asker.writer.network.config.placeholders]
    assert counts == [6, 2 * 16 - 13]  # 2x3 patches; windows of 1.28 s, four states a row, the second 0.22 s long
    text = asker.writer.tokenizer.decode(expected(asker, given)).rstrip("\ufffd").strip()
    assert asker("which?", RED, SOUND) == text
    assert "".join(asker.stream("which?", RED, SOUND)).strip() == text


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", ["any", "any-conformer", "any-crossing"])
def test_a_batch_gives_what_each_item_gets_alone(name):
    asker = Asker(checkpoint(name), compute_type="float32", batch_size=4, **NEW)
    items = [("a", [RED, BLUE]), ("b", []), ("c", [SOUND]), ("d", [BLUE, SOUND, RED])]
    together = list(asker.many(items))
    assert [one[0].text.strip() for one in together] == [asker(question, *inputs) for question, inputs in items]
    for answers, (question, inputs) in zip(together, items, strict=True):
        assert answers[0].logprob == pytest.approx(next(asker.many([(question, inputs)]))[0].logprob, abs=1e-4)


def test_inputs_change_the_answer_and_are_encoded_once(tiny):
    asker = Asker(tiny, compute_type="float32", **NEW)
    seen = []
    images = asker.writer.network.encode_images
    asker.writer.network.encode_images = lambda pixels: seen.append(len(pixels)) or images(pixels)
    scores = {colour: next(asker.many([("what?", [image])]))[0].logprob for colour, image in (("r", RED), ("b", BLUE))}
    assert scores["r"] != scores["b"]
    asker("and this?", RED, BLUE)
    assert seen == [1, 1]


def test_silence_at_the_end_is_no_padding(asker):
    """Both windows have the same spectrogram."""
    sound = SOUND[1][:4800]
    longer = np.concatenate([sound, np.zeros(9600, np.float32)])
    found = [prompt(asker, {"type": "audio", "audio": (16000, one)}).media[0] for one in (sound, longer)]
    assert [len(one.rows) for one in found] == [4, 12]
    assert found[0].digest != found[1].digest


def test_a_conversation_computes_only_what_is_new(tiny):
    asker = Asker(tiny, compute_type="float32", **NEW)
    talk, lengths = asker.conversation(), []
    decoder = asker.writer.decoder
    states = decoder.states
    decoder.states = lambda ids, *args, **named: lengths.append(ids.shape[1]) or states(ids, *args, **named)
    first = talk.ask("what is this?", RED)
    before = len(lengths)
    second = talk.ask("and that?", BLUE)
    decoder.states = states
    messages = [asker.message("what is this?", [RED])]
    assert first == asker.chat(messages)
    messages += read_messages([{"role": "assistant", "content": first}])
    messages.append(asker.message("and that?", [BLUE]))
    assert second == asker.chat(messages)
    whole = len(asker.writer.prompt(messages).ids)
    assert lengths[before] < whole - lengths[0] + 12 < whole  # without the first question and its image
    with pytest.raises(UsageError, match="question expected a text"):
        talk.ask(" ")
    assert len(talk.messages) == 4


def test_an_interrupted_turn_leaves_nothing_to_the_next(tiny):
    images = "{% for m in messages %}{% for p in m.content if p.type == 'image' %}<|image|>{% endfor %}{% endfor %}"
    first = images + tiny.chat.template.replace("<|{{ p.type }}|>", "")  # as LLaVA's
    asker = Asker(replace(tiny, chat=replace(tiny.chat, template=first)), compute_type="float32", **NEW)
    talk, decoder = asker.conversation(), asker.writer.decoder
    talk.ask("what is this?", RED)
    forward, steps = decoder.forward, iter(range(3))

    def interrupted(*args, **named):
        if next(steps) == 2:
            raise KeyboardInterrupt
        return forward(*args, **named)

    decoder.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        talk.ask("and that?", BLUE)
    decoder.forward = forward
    assert len(talk.messages) == 2
    assert talk.ask("and now?") == asker.chat(talk.messages[:-1])


def test_a_turn_whose_positions_change_is_computed_anew(tiny):
    """Dynamic scaling and LongRoPE turn the keys of a longer text at other rates."""
    made = replace(tiny, model=copy.deepcopy(tiny.model))
    asker = Asker(made, compute_type="float32", **NEW)
    talk, decoder = asker.conversation(), asker.writer.decoder
    first = talk.ask("what?")
    trained = len(asker.writer.prompt(talk.messages[:1]).ids) + len(asker.writer.tokenizer.encode(first)) + 2
    positions = replace(decoder.config.positions, kind="rotary", dynamic=(2.0, trained))
    decoder.config = replace(decoder.config, positions=positions)
    talk = asker.conversation()
    talk.ask("what?")
    assert talk.ask("and why is that so?") == asker.chat(talk.messages[:-1])
    assert len(asker.writer.prompt(talk.messages[:1]).ids) < trained < len(asker.writer.prompt(talk.messages[:3]).ids)


def test_turns_of_several_threads_queue(tiny):
    talk = Asker(tiny, compute_type="float32", **NEW).conversation()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(talk.ask, ["what?", "why?", "where?", "when?"]))
    assert [one.role for one in talk.messages] == ["user", "assistant"] * 4


def test_a_video_is_its_frames_with_times_and_its_sound_among_them(tiny, tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(video(ramp(20), sound=2.0))
    asker = Asker(tiny, compute_type="float32", every_s=0.5, **NEW)
    opened = asker.writer.media.opened([asker.message("what?", [path])])
    told = [part.value if part.kind == "text" else part.kind for part in opened[0].parts]
    assert told == ["audio", "0.0 s: ", "image", "0.5 s: ", "image", "1.0 s: ", "image", "audio", "1.5 s: ", "image",
                    "what?"]  # fmt: skip
    assert isinstance(asker("what?", path), str)


def test_a_folder_keeps_the_chat_format(folder, tiny):
    assert load_folder(folder).chat == tiny.chat
    assert multimodal.ask("what?", RED, model=folder, compute_type="float32", **NEW) == Asker(
        tiny, compute_type="float32", **NEW
    )("what?", RED)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_compute_types_give_close_scores(tiny, kind):
    exact, fast = (Asker(tiny, compute_type=one, max_new_tokens=1) for one in ("float32", kind))
    item = [("what?", [RED, SOUND])]
    assert next(fast.many(item))[0].logprob == pytest.approx(next(exact.many(item))[0].logprob, abs=0.3)


@pytest.mark.parametrize(("name", "expected"), [("any", torch.bfloat16), ("any-crossing", torch.float32)])
def test_a_decoder_without_a_source_computes_in_bfloat16(name, expected):
    network = Asker(checkpoint(name), compute_type="bfloat16", device="cpu").writer.network
    assert network.decoder.stack.blocks[0].feed_branch.norm.weight.dtype == expected
    assert network.image.stack.blocks[0].feed_branch.norm.weight.dtype == torch.bfloat16


def test_what_a_user_types_is_no_placeholder(asker):
    given = prompt(asker, {"type": "image", "image": RED}, {"type": "text", "text": "<|image|><|end|> <|aud"},
                   {"type": "text", "text": "io|>"})  # fmt: skip
    control = [i for i in given.ids if i in asker.writer.tokenizer.control]
    names = {i: n for n, i in asker.writer.tokenizer.control_names.items()}
    assert [names[i] for i in control] == ["<|user|>", *["<|image|>"] * 6, "<|end|>", "<|assistant|>"]


def test_more_than_the_context_is_refused_before_it_is_read(asker):
    unread = [io.BytesIO(b"no image")] * 1000
    with pytest.raises(TextError, match="1000 images need at least 6000 tokens, the model's context is 400"):
        asker("what?", *unread)
    with pytest.raises(TextError, match=r"have \d+ tokens, the model's context is 400"):
        asker("what? " * 100)


def test_no_more_of_a_file_is_read_than_the_context_holds(asker, tmp_path, monkeypatch):
    with wave.open(str(tmp_path / "long.wav"), "wb") as file:
        file.setnchannels(1), file.setsampwidth(1), file.setframerate(8000)
        file.writeframes(b"\x80" * 8000 * 60)
    with pytest.raises(AudioError, match=r"long\.wav: is longer than 3\d s, which fill the model's context of 400"):
        asker("what?", tmp_path / "long.wav")
    seen = []
    monkeypatch.setattr(media, "read_info", lambda _: VideoInfo(1e8, 12, 8, 10.0, None))
    monkeypatch.setattr(media, "frames", lambda *_: (seen.append(i) or Frame(i, RED) for i in range(10**9)))
    with pytest.raises(TextError, match="67 images need at least 402 tokens, the model's context is 400"):
        asker("what?", tmp_path / "endless.mp4")
    assert len(seen) == 67


def test_a_model_without_a_kind_says_what_it_takes(tiny):
    deaf = replace(tiny, chat=replace(tiny.chat, audio=None))
    with pytest.raises(UsageError, match=r"model tiny: takes no audio \(it takes image\)"):
        Asker(deaf, compute_type="float32")("what?", SOUND)
    with pytest.raises(CheckpointError, match="checkpoint has no chat template"):
        Asker(replace(tiny, chat=None))
    with pytest.raises(UsageError, match="expected an any-to-text model, got clip"):
        Asker("clip-vit-16")
    with pytest.raises(UsageError, match="sound in an array needs its rate"):
        Asker(tiny)("what?", SOUND[1])


@pytest.mark.ci
def test_sound_is_known_by_its_bytes_and_urls_are_read_on_request(asker, tiny, tmp_path, monkeypatch):
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setparams((1, 2, SOUND[0], 0, "NONE", ""))
        made.writeframes((SOUND[1] * 32767).astype("<i2").tobytes())
    (tmp_path / "a.wav").write_bytes(file.getvalue())
    (tmp_path / "a").write_bytes(file.getvalue())
    expected = asker("which?", tmp_path / "a.wav")
    assert expected == asker("which?", file.getvalue()) == asker("which?", tmp_path / "a")
    assert expected == asker("which?", io.BytesIO(file.getvalue())) == asker("which?", {"bytes": file.getvalue()})
    RED.save(tmp_path / "red.png")
    monkeypatch.setattr("multimodal.tasks.encode.loaded.fetch", lambda url: tmp_path / url.rpartition("/")[2])
    reading = Asker(tiny, compute_type="float32", urls=True, **NEW)
    assert reading("which?", "http://a/a.wav") == expected
    seen, red = asker("which?", RED), base64.b64encode((tmp_path / "red.png").read_bytes()).decode()
    for part in (
        {"type": "image", "url": "http://a/red.png"}, {"type": "image_url", "image_url": {"url": "https://a/red.png"}},
        {"type": "image_url", "image_url": f"data:image/png;base64,{red}"},
        {"type": "image", "url": f"data:image/png;base64,{red}"},
    ):  # fmt: skip
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "which?"}]}]
        assert reading.chat(messages) == seen
        ((answer, *_),) = reading.chat_many([messages])
        assert answer.text.strip() == seen
        if "data:" not in str(part):
            with pytest.raises(DataError, match="URLs are read with urls=True"):
                asker.chat(messages)
    with pytest.raises(UsageError, match=r"messages\[0\]: part 0: image_url: expected a URL of http, https or data"):
        reading.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}])


def test_a_container_without_video_is_audio_and_a_dictionary_what_it_holds(asker, tmp_path):
    path = tmp_path / "memo.mp4"
    path.write_bytes(video(ramp(1), codec="mjpeg", sound=1.0, cover=True))
    expected = asker.chat([{"role": "user", "content": [{"type": "audio", "path": path},
                                                        {"type": "text", "text": "which?"}]}])  # fmt: skip
    memo = io.BytesIO(path.read_bytes())
    for source in (path, path.read_bytes(), memo, {"bytes": None, "path": str(path)}):
        assert asker("which?", source) == expected
    RED.save(tmp_path / "red.png")
    seen = asker("which?", RED)
    for source in ({"path": tmp_path / "red.png"}, {"bytes": (tmp_path / "red.png").read_bytes(), "path": "red"}):
        assert asker("which?", source) == seen


def test_an_item_that_fails_is_its_error(asker):
    items = [("a", [RED]), ("b", [b"no image"]), 5, ("c", "nowhere.png"), ("c", ["nowhere.png"]), ("", [RED])]
    found = list(asker.many(iter(items)))
    kinds = ["list", "ImageError", "UsageError", "UsageError", "ImageError", "UsageError"]
    assert [type(one).__name__ for one in found] == kinds
    assert str(found[2]) == "item 3: expected (question, list of inputs) (got 5)"


def test_streams_side_by_side_have_their_own_media(asker):
    streams = [asker.stream("which?", image) for image in (RED, BLUE)]
    parts = list(zip_longest(*streams, fillvalue=""))
    for number, image in enumerate((RED, BLUE)):
        assert "".join(part[number] for part in parts).strip() == asker("which?", image)
    assert asker("which?", RED) != asker("which?", BLUE)


def test_sampling_needs_its_seed_alone(tiny):
    made = [Asker(tiny, compute_type="float32", temperature=1.0, seed=seed, **NEW)("a", RED) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    assert options_for({"temperature": 1.0}).temperature == 1.0


@pytest.mark.ci
def test_the_command(capsys, folder, tmp_path, monkeypatch):
    RED.save(tmp_path / "a.png")
    with wave.open(str(tmp_path / "b.wav"), "wb") as file:
        file.setnchannels(1), file.setsampwidth(2), file.setframerate(16000)
        file.writeframes((SOUND[1] * 3e4).astype("<i2").tobytes())
    monkeypatch.chdir(tmp_path)
    settings = ("-m", folder, "--max_new_tokens", "6", "--quiet")
    code, out, err = run(capsys, "ask", "a.png", "b.wav", "what?", "why?", *settings, "--format", "json")
    assert (code, err) == (0, "")
    answers = json.loads(out)["answers"]
    assert [one["question"] for one in answers] == ["what?", "why?"]
    code, out, err = run(capsys, "ask", "a.png", "b.wav", "what?", *settings, "--stream")
    assert (code, out) == (0, f"{plain(answers[0]['answer'])}\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("what?\n\nwhy?\n"))
    code, out, err = run(capsys, "ask", "a.png", "b.wav", "--chat", *settings)
    assert (code, err) == (0, "")
    assert out.startswith(f"{plain(answers[0]['answer'])}\n")
    monkeypatch.setattr("sys.stdin", None)  # closed by the caller: no further questions
    assert run(capsys, "ask", "a.png", "--chat", *settings) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["a.png"], "expected a question beside the inputs"),
        (["no.png", "what?"], "no.png: no such file"),
        (["broken.png", "what?"], "broken.png: "),
        (["what?", "why?", "--stream"], "--stream is for one question"),
        (["what?", "-m", "clip-vit-16"], "expected an any-to-text model"),
    ],
)
def test_what_the_command_cannot_do_is_one_line(capsys, folder, tmp_path, monkeypatch, arguments, cause):
    RED.save(tmp_path / "a.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    monkeypatch.chdir(tmp_path)
    model = [] if "-m" in arguments else ["-m", folder]
    code, _, err = run(capsys, "ask", *arguments, *model, "--quiet")
    assert code == 1
    assert cause in one_line(err)
