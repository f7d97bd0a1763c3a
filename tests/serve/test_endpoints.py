"""Endpoints give what the library gives, in OpenAI's form, to OpenAI's client."""

import asyncio
import base64
import io
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

import multimodal
from multimodal.cli.main import main
from multimodal.system.assets import asset
from multimodal.weights.folder import save_folder
from multimodal.weights.load import load
from tests.helpers.data.audio_files import first_words
from tests.helpers.data.video_files import ramp, video
from tests.helpers.tiny_checkpoints import checkpoint
from tests.serve.conftest import MODELS

SPEECH = asset("sample", "speech.flac")


@pytest.fixture(scope="module")
def asked(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def heard() -> dict:
    return multimodal.transcribe(SPEECH, "asr-conformer-en", compute_type="float32", word_timestamps=True)


def png(colour: str = "red", size: tuple[int, int] = (40, 32)) -> bytes:
    made = io.BytesIO()
    Image.new("RGB", size, colour).save(made, "PNG")
    return made.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.mark.ci
def test_transcriptions_have_openais_forms(asked, client, heard):
    create = asked.audio.transcriptions.create
    first = heard["segments"][0]["text"].strip()
    with io.BytesIO(first_words()) as file:
        assert create(file=file, model="asr-conformer-en").text == first
    verbose = create(file=SPEECH, model="asr-conformer-en", response_format="verbose_json",
                     timestamp_granularities=["word", "segment"])  # fmt: skip
    assert verbose.language == "english"
    assert verbose.duration == pytest.approx(heard["duration"])
    assert [one.text for one in verbose.segments] == [one["text"] for one in heard["segments"]]
    assert [one.avg_logprob for one in verbose.segments] == [one["avg_logprob"] for one in heard["segments"]]
    words = [word for one in heard["segments"] for word in one["words"]]
    assert [(one.word, one.start) for one in verbose.words] == [(one["word"].strip(), one["start"]) for one in words]
    for style, mark in (("text", first), ("srt", "00:00:"), ("vtt", "WEBVTT")):
        assert mark in create(file=first_words(), model="asr-conformer-en", response_format=style)
    events = list(create(file=SPEECH, model="asr-conformer-en", stream=True))
    assert "".join(one.delta for one in events[:-1]) == events[-1].text == heard["text"]
    form = {"stream": "true", "response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    streamed = client.post("/v1/audio/transcriptions", data=form, files={"file": first_words()}).text
    done = json.loads(streamed.strip().rpartition("data: ")[2])
    assert [one["text"] for one in done["segments"]] == [one["text"] for one in heard["segments"][:1]]
    assert [one["word"] for one in done["words"]] == [one["word"].strip() for one in heard["segments"][0]["words"]]


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*ends early")
def test_a_truncated_recording_tells_its_damage(client):
    whole = first_words()
    cut = whole[: len(whole) // 2]
    form = {"response_format": "verbose_json"}
    ask = lambda data: client.post("/v1/audio/transcriptions", data=form, files={"file": data}).json()
    (span,) = ask(cut)["damaged"]
    assert [span] == multimodal.transcribe(cut, "asr-conformer-en", compute_type="float32")["damaged"]
    assert span["what"] == "missing: the recording ends early"
    assert ask(whole)["damaged"] == []


@pytest.mark.ci
def test_transcriptions_have_log_probabilities(asked, heard):
    create = lambda **more: asked.audio.transcriptions.create(
        file=first_words(), model="asr-conformer-en", include=["logprobs"], **more
    )
    found = create().logprobs
    assert "".join(one.token for one in found).strip() == heard["segments"][0]["text"].strip()
    assert all(one.logprob <= 0 and one.bytes == list(one.token.encode()) for one in found)
    events = list(create(stream=True))
    assert [one.logprob for one in events[-1].logprobs] == [one.logprob for one in found]
    assert sum(len(one.logprobs) for one in events[:-1]) == len(found)
    verbose = create(response_format="verbose_json")
    assert sum(len(one.tokens) for one in verbose.segments) == len(found)


@pytest.mark.ci
def test_an_asynchronous_client_is_served(served, heard):
    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as made:
            return (await made.audio.transcriptions.create(file=first_words(), model="asr-conformer-en")).text

    assert asyncio.run(run()) == heard["segments"][0]["text"].strip()


@pytest.mark.ci
def test_simultaneous_recordings_share_batches_and_keep_their_text(client, heard):
    other = asset("sample", "german.flac").read_bytes()
    expected = [heard["segments"][0]["text"].strip(), multimodal.transcribe(other, compute_type="float32")["text"]]
    send = lambda data: client.post("/v1/audio/transcriptions", files={"file": data}).json()["text"]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(send, [first_words(), other] * 3)) == expected * 3


def test_embeddings_are_the_librarys(asked):
    texts = ["a dog runs", "two cats", "a dog runs"]
    made = asked.embeddings.create(input=texts, model="sentence-mini")  # the client asks for base64
    expected = multimodal.Embedder("sentence-mini", compute_type="float32").texts(texts)
    np.testing.assert_allclose([one.embedding for one in made.data], expected, atol=1e-6)
    tokenizer = load("sentence-mini").required_tokenizer()
    assert made.usage.prompt_tokens == sum(len(tokenizer.encode(text)) + 2 for text in texts)  # with [CLS] and [SEP]
    ids = [tokenizer.encode(texts[0]), [tokenizer.bos_id, *tokenizer.encode(texts[1]), tokenizer.eos_id], texts[2]]
    short = asked.embeddings.create(input=ids, model="sentence-mini", dimensions=20)
    kept = expected[:, :20] / np.linalg.norm(expected[:, :20], axis=1, keepdims=True)
    np.testing.assert_allclose([one.embedding for one in short.data], kept, atol=1e-6)
    clip = video(ramp(6), 2.0)
    images = asked.embeddings.create(
        input=[data_url(clip), data_url(png())], model="clip-vit-16", encoding_format="float"
    )
    expected = multimodal.Embedder("clip-vit-16", compute_type="float32", per_clip=True).images([clip, png()])
    np.testing.assert_allclose([one.embedding for one in images.data], expected, atol=1e-6)


def test_a_decoder_whose_card_has_a_pooling_gives_embeddings(serve, tmp_path):
    """As folders and GGUF files of Qwen3-Embedding."""
    save_folder(replace(checkpoint("llama"), card={"pooling": "mean"}), tmp_path / "model")
    url = f"{serve(models=(str(tmp_path / 'model'),)).url}/v1/embeddings"
    answer = httpx.post(url, json={"input": ["a dog runs"]}, timeout=60).json()
    expected = multimodal.Embedder(str(tmp_path / "model")).texts(["a dog runs"])[0]
    assert np.allclose(answer["data"][0]["embedding"], expected, atol=1e-6)


def test_chat_answers_as_the_library_does(asked):
    content = [{"type": "image_url", "image_url": {"url": data_url(png())}}, {"type": "text", "text": "What is this?"}]
    options = {"messages": [{"role": "user", "content": content}], "model": "any-mini", "max_tokens": 12}
    made = asked.chat.completions.create(**options)
    asker = multimodal.Asker("any-mini", compute_type="float32", max_new_tokens=12)
    assert made.choices[0].message.content == asker("What is this?", png())
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    pieces = list(asked.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(one.choices[0].delta.content or "" for one in pieces if one.choices)
    assert text == made.choices[0].message.content
    assert pieces[-1].usage == made.usage
    assert pieces[-2].choices[0].finish_reason == made.choices[0].finish_reason


@pytest.mark.ci
def test_chat_takes_sound(asked):
    sound = {"data": base64.b64encode(SPEECH.read_bytes()).decode(), "format": "flac"}
    content = [{"type": "input_audio", "input_audio": sound}, {"type": "text", "text": "Which language is spoken?"}]
    made = asked.chat.completions.create(messages=[{"role": "user", "content": content}], model="any-mini")
    assert made.choices[0].message.content == multimodal.ask(
        "Which language is spoken?", SPEECH, compute_type="float32"
    )


@pytest.mark.ci
def test_chat_takes_a_video(asked):
    clip = video(ramp(6), 2.0)
    url = f"data:video/mp4;base64,{base64.b64encode(clip).decode()}"
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "How many blinks?"}]
    made = asked.chat.completions.create(messages=[{"role": "user", "content": content}], model="any-mini")
    answer = multimodal.ask("How many blinks?", clip, compute_type="float32")
    assert made.choices[0].message.content == answer


def test_a_language_model_continues_with_choices_and_stops(asked):
    messages = [{"role": "user", "content": "A man"}]
    make = lambda **more: asked.chat.completions.create(messages=messages, model="gpt-mini", max_tokens=12, **more)
    first = make().choices[0]
    assert first.finish_reason == "length"
    expected = multimodal.generate("A man", compute_type="float32", temperature=0, max_new_tokens=12)
    assert first.message.content == expected == " " + expected.strip()  # a continuation begins with a blank
    word = first.message.content.split()[3]
    stopped = make(stop=[word]).choices[0]
    assert (stopped.finish_reason, word in stopped.message.content) == ("stop", False)
    several = make(n=3, temperature=1.0, seed=5).choices
    assert [one.message.content for one in several] == [
        one.message.content for one in make(n=3, temperature=1.0, seed=5).choices
    ]
    assert len({one.message.content for one in several}) > 1


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:messages. has")
def test_an_answer_ends_at_the_context_of_its_model(client):
    """Rotary positions have no table to end it: one request would hold the model for long."""
    ask = lambda text, stream=False: client.post("/v1/chat/completions", json={
        "messages": [{"role": "user", "content": text}], "model": "gpt-mini", "max_tokens": 20_000, "stream": stream,
        "logit_bias": {str(load("gpt-mini").tokenizer.eos_id): -100}})  # fmt: skip
    context = load("gpt-mini").model.config.context
    answer = ask("A man in").json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == context + 1
    for stream in (False, True):
        refused = ask("a dog " * context, stream)
        assert refused.status_code == 400
        assert f"the model's context is {context}" in refused.json()["error"]["message"]


@pytest.mark.ci
@pytest.mark.parametrize("given", [{"temperature": 1}, {"seed": 5}, {"top_p": 0.9}, {"temperature": 1, "seed": -5}])
def test_chat_samples_anew_without_a_seed(client, given):
    message = {"messages": [{"role": "user", "content": "A man"}], "model": "gpt-mini", "max_tokens": 12}
    ask = lambda more: client.post("/v1/chat/completions", json=message | more).json()["choices"][0]["message"]
    with ThreadPoolExecutor(4) as pool:  # neighbours in a batch draw for themselves
        drawn = [one["content"] for one in pool.map(ask, [given] * 4)]
    assert len(set(drawn)) == (1 if "seed" in given else 4)
    assert ask({})["content"] not in drawn
    assert ask(given | {"seed": 5}) == ask(given | {"seed": 5})
    assert ask(given | {"temperature": 0}) == ask(dict.fromkeys(given) | dict.fromkeys(["n", "stream", "logprobs"]))


@pytest.mark.ci
def test_chat_penalties_and_biases(asked):
    messages = [{"role": "user", "content": "A man"}]
    make = lambda **more: asked.chat.completions.create(
        messages=messages, model="gpt-mini", max_tokens=24, response_format={"type": "text"}, **more
    )
    tokenizer = load("gpt-mini").required_tokenizer()
    (token,) = tokenizer.encode(" dog")
    assert make(logit_bias={str(token): 100}).choices[0].message.content.split() == ["dog"] * 24
    varied = {"logit_bias": {str(token): 6}, "frequency_penalty": 2, "presence_penalty": 1}
    text = make(**varied).choices[0].message.content
    assert 0 < text.split().count("dog") < make(logit_bias={str(token): 6}).choices[0].message.content.count("dog")
    pieces = [one.choices[0].delta.content or "" for one in make(stream=True, **varied)]
    assert "".join(pieces) == text


def test_chat_takes_fields_that_ask_for_nothing(client):
    body = {"messages": [{"role": "user", "content": "A man"}], "model": "gpt-mini", "max_tokens": 3}
    unused = {"tools": [], "tool_choice": "none", "parallel_tool_calls": False, "modalities": ["text"], "store": False,
              "service_tier": "auto", "metadata": {"job": "1"}, "user": "me", "max_completion_tokens": 3}  # fmt: skip
    first, second = (client.post("/v1/chat/completions", json=body | more).json() for more in ({}, unused))
    assert first["choices"] == second["choices"]


@pytest.mark.ci
def test_chat_has_log_probabilities(asked):
    messages = [{"role": "user", "content": "A man"}]
    ask = lambda **more: asked.chat.completions.create(
        messages=messages, model="gpt-mini", max_tokens=9, logprobs=True, top_logprobs=3, **more
    )
    made = ask().choices[0]
    scores = made.logprobs.content
    assert "".join(one.token for one in scores) == made.message.content
    generator = multimodal.Generator("gpt-mini", compute_type="float32", temperature=0, max_new_tokens=9)
    (expected,) = next(generator.many(["A man"]))
    assert sum(one.logprob for one in scores) == pytest.approx(expected.logprob, abs=1e-4)
    assert all(one.top_logprobs[0].token == one.token and len(one.top_logprobs) == 3 for one in scores)  # greedy
    pieces = [one.choices[0] for one in ask(stream=True)]
    assert [one.logprob for one in pieces[-1].logprobs.content] == [one.logprob for one in scores]
    content = [{"type": "image_url", "image_url": {"url": data_url(png())}}, {"type": "text", "text": "What is this?"}]
    seen = asked.chat.completions.create(
        messages=[{"role": "user", "content": content}], model="any-mini", logprobs=True, max_tokens=12
    ).choices[0]
    assert "".join(one.token for one in seen.logprobs.content) == seen.message.content
    lead = load("gpt-mini").required_tokenizer().encode("ё")[0]  # a token each byte
    part = ask(logit_bias={str(lead): 100}).choices[0].logprobs.content
    assert [(one.token, one.bytes) for one in part] == [("\\xd1", [0xD1])] * 9


def test_images_are_classified_from_forms_and_json(client):
    labels = ["a red square", "a blue sea"]
    form = client.post("/v1/classify", files=[("images", png()), ("images", png("blue"))], data={"labels": labels})
    body = {"images": [data_url(png()), data_url(png("blue"))], "labels": labels}
    assert form.json() == client.post("/v1/classify", json=body).json()
    head, _, code = data_url(png()).partition(",")
    body["images"][0] = f"{head.upper()},{code[:40]}\r\n{code[40:]}\n"
    assert form.json() == client.post("/v1/classify", json=body).json()
    several = [{"templates": "a photo of {}."}, {"templates": ["a photo of {}.", "art of {}"]}]
    made = [client.post("/v1/classify", files=[("images", png())], data={"labels": labels} | more).json()
            for more in several]  # fmt: skip
    assert made == [client.post("/v1/classify", json=body | more | {"images": body["images"][:1]}).json()
                    for more in several]  # fmt: skip
    assert made[0]["data"] != made[1]["data"] != form.json()["data"][:1]
    quoted, listed = (client.post("/v1/classify", json=body | {"templates": one}).json()["data"]
                      for one in ("['a blue sea without any {}']", ["a blue sea without any {}"]))  # fmt: skip
    assert quoted != listed
    expected = multimodal.classify([png(), png("blue")], labels, compute_type="float32")
    for own, right in zip(form.json()["data"], expected, strict=True):
        assert own["scores"] == right["scores"]


@pytest.mark.ci
def test_heat_maps_are_drawn_of_the_best_labels(client):
    labels = ["a red square", "a blue sea", "a cat"]
    body = {"images": [data_url(png())], "labels": labels, "heatmaps": 2}
    (found,) = client.post("/v1/classify", json=body).json()["data"]
    assert [one["label"] for one in found["heatmaps"]] == [one["label"] for one in found["scores"][:2]]
    for one in found["heatmaps"]:
        head, _, data = one["image"].partition(",")
        assert head == "data:image/jpeg;base64"
        assert Image.open(io.BytesIO(base64.b64decode(data))).size == (320, 256)


def test_texts_are_translated(client):
    made = client.post("/v1/translate", json={"input": ["A dog runs.", ""], "source": "en", "target": "de"}).json()
    translator = multimodal.Translator(source="en", target="de", compute_type="float32")
    assert [one["text"] for one in made["data"]] == translator(["A dog runs.", ""])


@pytest.mark.ci
def test_an_index_is_searched_by_text_and_image(serve, tmp_path):
    for colour in ("red", "green", "blue"):
        (tmp_path / f"{colour}.png").write_bytes(png(colour))
    (tmp_path / "clip.mp4").write_bytes(video(ramp(6), 2.0))
    with pytest.raises(SystemExit, match="0"):
        main(["index", str(tmp_path), "--output", str(tmp_path / "own.index"), "--max_frames", "1", "--quiet"])
    served = serve(models=("clip-vit-16",), index=(f"own={tmp_path / 'own.index'}",))
    long = httpx.post(f"{served.url}/v1/search", json={"text": "a red wall " * 30}, timeout=30)
    assert (long.status_code, "text: 'a red" in long.json()["error"]["message"]) == (400, True)
    found = httpx.post(f"{served.url}/v1/search", json={"image": data_url(png("green")), "top": 2}, timeout=30).json()
    assert Path(found["data"][0]["file"]).name == "green.png"
    assert found["data"][0]["score"] == pytest.approx(1, abs=1e-4)
    (tmp_path / "blue.png").unlink()
    body = {"text": "a red wall", "thumbnails": True}
    found = httpx.post(f"{served.url}/v1/search", json=body, timeout=30).json()["data"]
    small = {Path(one["file"]).stem: one["thumbnail"] for one in found}
    assert small.pop("blue") is None
    assert small.pop(next(name for name in small if name.startswith("clip"))).startswith("data:image/jpeg;base64,")
    sizes = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size for url in small.values()]
    assert sizes == [(40, 32)] * 2


def test_the_server_tells_what_it_has(client):
    listed = client.get("/v1/models").json()["data"]
    assert {one["id"]: one["tasks"] for one in listed}["clip-vit-16"] == ["classify", "embed-images", "embed"]
    assert {one["id"]: one["media"] for one in listed}["any-mini"] == ["image", "audio", "video"]
    assert [client.get(f"/v1/models/{one['id']}").json() for one in listed] == listed
    assert client.get("/v1/models/").json()["data"] == listed
    assert client.head("/health").status_code == 200
    assert client.get("/health").json() == {"status": "ready", "models": list(MODELS), "loading": []}
    assert 'multimodal_requests_total{path="/v1/models",status="200"}' in client.get("/metrics").text
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/audio/transcriptions", "/v1/embeddings", "/v1/chat/completions", "/v1/classify"} <= paths.keys()
    docs = client.get("/docs").text
    assert "//cdn" not in docs
    files = re.findall(r'(?:src|href)="(/[^"]+)"', docs)
    assert len(files) == 3 == sum(client.get(file).status_code == 200 for file in files)


def test_the_page_is_its_own_files_alone(client):
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    own, foreign = r"/page/[\w.]+", r"innerHTML|insertAdjacentHTML|document\.write|https?://(?!www\.w3\.org)"
    names = re.findall(own, page.text)
    for name in names:
        text = client.get(name).raise_for_status().text
        assert not re.search(foreign, text), name
        names += {*re.findall(own, text)} - {*names}
    assert {"/page/main.js", "/page/style.css", "/page/worklet.js"} <= {*names}
    assert not re.search(r"<script(?! type=\"module\" src=)|\son\w+=|\sstyle=", page.text)
