"""The page does what its tabs promise, for mouse, keyboard, screen reader and phone."""

import json
import re
from pathlib import Path
from time import monotonic

import pytest

import multimodal
from multimodal.system.assets import asset
from tests.helpers.data.video_files import grey, video

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]
SPEECH = asset("sample", "speech.flac")
TABS = ("transcribe", "classify", "search", "ask", "models")
HOSTILE = "<img src=x onerror=alert(1)>"
CONTROLS = {"button", "tab", "textbox", "searchbox", "combobox", "slider", "meter", "Audio", "Video", "image"}
# keeps every text that the line of live text had
WATCH = """() => {
  window.seen = [];
  new MutationObserver(() => window.seen.push(document.getElementById("live").textContent))
    .observe(document.getElementById("live"), { childList: true });
}"""


# keeps the fields of forms, which Playwright does not tell beside files
FORM = """() => {
  const own = FormData.prototype.append;
  window.sent = {};
  FormData.prototype.append = function (name, ...more) { window.sent[name] = more[0]; own.call(this, name, ...more); };
}"""


def file(name: str, kind: str, data: bytes) -> dict:
    return {"name": name, "mimeType": kind, "buffer": data}


def transcribed(page):
    page.set_input_files("#sound", SPEECH)
    page.wait_for_selector("#transcript .word")
    return page


def downloaded(page, form: str) -> str:
    with page.expect_download() as waiting:
        page.click(f"[data-form={form}]")
    assert waiting.value.suggested_filename.endswith(f".{form}")
    return Path(waiting.value.path()).read_text()


def words(page) -> list[str]:
    return page.locator("#transcript .word").all_inner_texts()


def time(page) -> float:
    return page.evaluate("document.querySelector('audio').currentTime")


def drop(page, target: str, name: str, kind: str, data: bytes) -> None:
    """Let go of a file over an element."""
    made = page.evaluate_handle("""([name, type, bytes]) => {
      const transfer = new DataTransfer();
      transfer.items.add(new File([new Uint8Array(bytes)], name, { type }));
      return transfer;
    }""", [name, kind, list(data)])  # fmt: skip
    page.dispatch_event(target, "drop", {"dataTransfer": made})


def walk(page) -> None:
    """Go through a paused recording by its words."""
    from playwright.sync_api import expect

    every = page.locator("#transcript .word")
    page.evaluate("document.querySelector('audio').currentTime = 0")
    page.focus("#transcript")
    expect(every.first).to_contain_class("now")  # the first begins at 0
    for n in range(1, every.count()):  # a player that is sent to 2.05 says 2.049999
        page.keyboard.press("ArrowRight")
        expect(every.nth(n)).to_contain_class("now")
    page.keyboard.press("ArrowLeft")
    expect(every.nth(n - 1)).to_contain_class("now")
    page.evaluate("document.querySelector('audio').currentTime -= 0.005")  # of the word before
    page.keyboard.press("ArrowRight")
    expect(every.nth(n - 1)).to_contain_class("now")


def test_a_recording_becomes_words_that_play(open_page):
    page = open_page()
    page.evaluate(WATCH)
    transcribed(page)
    right = multimodal.transcribe(SPEECH, compute_type="float32")["text"]
    assert " ".join(words(page)) == right
    seen = [text for text in page.evaluate("window.seen") if text]
    assert seen  # while it ran
    assert all(right.startswith(text) for text in seen)
    third = page.locator("#transcript .word").nth(3)
    third.click()
    page.wait_for_selector("#transcript .word.now")
    assert 0.3 < time(page) < 6
    page.evaluate("document.querySelector('audio').pause()")
    walk(page)
    page.evaluate("document.querySelector('audio').currentTime = 1")
    page.keyboard.press("Space")
    deadline = monotonic() + 20
    while time(page) <= 1 and monotonic() < deadline:
        page.wait_for_timeout(50)
    page.keyboard.press("Space")
    assert time(page) > 1
    assert page.evaluate("document.querySelector('audio').paused")
    page.click("button.time >> nth=0")
    assert time(page) < 1


def test_edits_are_in_every_download(open_page):
    page = transcribed(open_page())
    page.click("#edit")
    text = page.get_by_role("textbox", name="Text of the segment").first
    text.press("Control+Home")
    text.press_sequentially("NEW <b>&")
    page.click("#edit")
    assert downloaded(page, "txt").startswith("NEW <b>&")
    assert re.match(r"1\n00:00:00,\d{3} --> 00:00:\d\d,\d{3}\nNEW <b>&", downloaded(page, "srt"))
    assert re.match(r"WEBVTT\n\n00:00:00\.\d{3} --> 00:00:\d\d\.\d{3}\nNEW &lt;b&gt;&amp;", downloaded(page, "vtt"))
    made = json.loads(downloaded(page, "json"))
    assert made["text"].startswith("NEW <b>&")
    assert " ".join(one["text"] for one in made["segments"]) == made["text"]
    assert made["words"][1]["word"] == words(page)[1]
    page.click("#copy")
    assert page.evaluate("navigator.clipboard.readText()").startswith("NEW <b>&")


def test_whisper_takes_a_language_or_translates(open_page):
    page = open_page()
    page.evaluate(FORM)
    language = page.get_by_role("combobox", name="Language")
    assert not language.is_visible()
    page.select_option("#transcribe-model", "whisper-mini")
    assert language.locator("option").all_inner_texts() == ["detect", "Czech", "English", "French", "German"]
    language.select_option("German")
    for path, task in (("transcriptions", None), ("translations", "Translate into English")):
        if task is not None:
            page.get_by_role("checkbox", name=task).check()
        with page.expect_request(lambda one: "/v1/audio/" in one.url) as sent:
            page.set_input_files("#sound", asset("sample", "german.flac"))
        assert sent.value.url.endswith(path)
        assert page.evaluate("window.sent.language") == "de"
        page.wait_for_selector(f"#transcribe-state:has-text('{path[:5].title()}')")
        page.wait_for_selector("#transcribe-stop", state="hidden")
        assert page.locator("#fault-text").inner_text() == ""
    page.select_option("#transcribe-model", "asr-conformer-en")
    assert not language.is_visible()


def test_the_microphone_is_written_along(open_page):
    page = open_page()
    page.click("#record")
    page.wait_for_selector("#live:has-text('women')")
    assert page.get_by_role("button", name="Stop recording").is_visible()
    assert page.get_by_role("meter", name="Level of the microphone").is_visible()
    page.wait_for_timeout(1500)
    page.click("#record")
    page.wait_for_selector("#transcript .word")
    assert "women are walking" in " ".join(words(page))
    assert "Transcribed" in page.get_by_role("status").nth(1).inner_text()
    assert 2 < page.evaluate("document.querySelector('audio').duration") < 20  # a player knows how long it is
    with page.expect_download() as waiting:
        page.click("#as-wav")
    assert Path(waiting.value.path()).read_bytes()[:4] == b"RIFF"


def test_images_get_bars_and_none_of_these(open_page, pictured):
    page = open_page("classify")
    requests = []
    page.on("request", lambda one: requests.append(one.url))
    page.fill("#labels", f"a red wall\n{HOSTILE}\n\na dog")
    red = (pictured / "red.png").read_bytes()
    page.set_input_files("#images", [file(f"{HOSTILE}.png", "image/png", red), file("b.png", "image/png", red)])
    page.wait_for_selector("#scores li >> nth=1")
    scores = multimodal.classify([red], ["a red wall", HOSTILE, "a dog"], compute_type="float32")[0]["scores"]
    card = page.locator("#scores li").first
    assert card.locator(".bar .name").all_inner_texts() == [one["label"] for one in scores]
    assert card.locator(".bar .number").all_inner_texts() == [f"{one['score']:.2f}" for one in scores]
    assert card.locator("img").get_attribute("alt") == f"{HOSTILE}.png"
    assert page.locator("#scores img").count() == 2  # none was made of a name or a label
    sent = [url for url in requests if "/v1/classify" in url]
    for least, title in ((0, scores[0]["label"]), (1, "none of these")):
        page.fill("#threshold", str(least))
        assert card.locator("h3").inner_text() == title
    assert [url for url in requests if "/v1/classify" in url] == sent  # the slider asks nothing
    label = card.get_by_role("button", name=HOSTILE)
    label.click()
    page.wait_for_selector("#scores [aria-pressed=true]")
    assert card.locator("img").get_attribute("src").startswith("data:image/jpeg;base64,")
    assert card.locator("img").evaluate("one => one.decode().then(() => one.naturalWidth)") == 320
    assert page.evaluate("document.activeElement.textContent") == HOSTILE
    label.click()
    assert card.locator("img").get_attribute("alt") == f"{HOSTILE}.png"
    page.evaluate("document.querySelectorAll('#scores li').forEach(one => one.dataset.old = '')")
    page.click("#score")
    page.wait_for_selector("#scores:not(:has([data-old])) li >> nth=1")
    both = page.locator("#scores li").all()
    for one in both:  # the second is asked for while the first is drawn
        one.get_by_role("button", name="a dog").click()
    page.wait_for_selector("#scores li:first-child:has([aria-pressed=true]) + li:has([aria-pressed=true])")
    assert all(one.locator("img").get_attribute("src").startswith("data:image/jpeg") for one in both)
    page.set_input_files("#images", file("notes.png", "image/png", b"no image"))
    page.wait_for_selector("#fault:visible")
    assert page.locator("#fault-text").inner_text().startswith("notes.png: ")


def test_an_index_is_a_grid_by_text_and_image(open_page, pictured):
    page = open_page("search")
    page.fill("#query", "a green wall")
    page.press("#query", "Enter")
    page.wait_for_selector("#hits li >> nth=3")
    drop(page, "#search .drop", "sky.png", "image/png", (pictured / "blue.png").read_bytes())
    page.wait_for_selector("#search-state:has-text('sky.png, best')")
    first = page.locator("#hits li").first
    assert first.locator(".name").inner_text() == "blue.png"
    assert first.locator(".number").inner_text() == "1.000"
    assert first.locator("img").evaluate("one => one.naturalWidth") == 80
    page.get_by_role("button", name="More like this: red.png").click()
    page.wait_for_selector("#search-state:has-text('like red.png, best')")
    assert page.locator("#hits .name").first.inner_text() == "red.png"


def ask(page, question: str, turns: int) -> str:
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.wait_for_selector(f".turn >> nth={turns - 1}")
    page.wait_for_selector("#ask-state:empty", state="attached")
    assert page.locator("#fault-text").inner_text() == ""
    return page.locator(".turn.assistant p").last.inner_text()


def test_a_conversation_holds_images_sound_and_video(open_page, pictured):
    page, (red, clip) = open_page("ask"), ((pictured / "red.png").read_bytes(), video([grey(50), grey(200)] * 3, 2.0))
    asked = []
    page.on("request", lambda one: asked.append(one.post_data_json) if "completions" in one.url else None)
    library = lambda question, source: multimodal.ask(question, source, compute_type="float32")
    page.set_input_files("#medium", [file("red.png", "image/png", red), file("away.png", "image/png", red)])
    page.get_by_role("button", name="Remove away.png").click()
    assert ask(page, "What is this?", 2) == library("What is this?", red)
    page.click("#ask-record")
    page.get_by_role("button", name="Stop recording").click()
    page.wait_for_selector("#attached :has-text('recording.wav')")
    assert ask(page, "Which language is spoken?", 4)
    kinds = [[part["type"] for part in one["content"]] for one in asked[1]["messages"] if one["role"] == "user"]
    assert kinds == [["image_url", "text"], ["input_audio", "text"]]
    page.click("#new-talk")
    page.set_input_files("#medium", file("clip.mp4", "video/mp4", clip))
    assert ask(page, "How many blinks?", 2) == library("How many blinks?", clip)
    page.set_input_files("#medium", file("notes.pdf", "application/pdf", b"%PDF"))
    assert page.locator("#fault-text").inner_text() == "notes.pdf: this model takes image, audio, video."
    page.set_input_files("#medium", file("bad.png", "image/png", b"no image"))
    page.fill("#question", "What is this?")
    page.click("#send")
    page.wait_for_selector("#fault-text:has-text('image')")
    assert page.input_value("#question") == "What is this?"  # to ask again
    assert page.locator(".turn").count() == 2


def test_models_and_their_state(open_page):
    page = open_page(ready=False, key=None)  # the key is asked for
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-wrong:visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#state.failed:has-text('needs a key')")
    page.click("#tab-search")
    page.fill("#query", "a wall")
    page.press("#query", "Enter")  # asks again
    page.fill("#key", "a-key-of-the-tests")
    page.get_by_role("button", name="Continue").click()
    page.wait_for_selector("#hits li")
    page.wait_for_selector("#state.ready")
    page.click("#tab-models")
    listed = page.locator("#model-list li").all_inner_texts()
    assert [text.partition("\n")[0] for text in listed] == [
        "asr-conformer-en",
        "clip-vit-16",
        "any-mini",
        "gpt-mini",
        "whisper-mini",
        "own",
    ]
    assert "transcribes speech" in listed[0]
    assert "takes image, audio, video" in listed[2]
    told = {"status": "loading", "models": ["clip-vit-16"], "loading": ["any-mini"]}
    page.route("**/health", lambda route: route.fulfill(status=503, json=told))
    page.reload()
    page.wait_for_selector("#state:has-text('loading models')")
    assert page.locator("#model-list .state").all_inner_texts() == ["ready", "loading"]
    page.unroute("**/health")
    page.wait_for_selector("#state.ready")


def test_errors_are_in_plain_words(open_page):
    page = open_page()
    page.set_input_files("#sound", file(f"{HOSTILE}.wav", "audio/wav", b"PK\x03\x04" + bytes(200)))
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert alert.locator("p").inner_text().startswith(f"{HOSTILE}.wav: not a readable recording")
    page.keyboard.press("Shift+Tab")
    page.click("#fault-close")
    assert not alert.is_visible()
    page.context.set_offline(True)
    page.set_input_files("#sound", SPEECH)
    alert.wait_for()
    assert alert.locator("p").inner_text() == "The server cannot be reached. Does it still run?"


def test_the_keyboard_reaches_everything(open_page):
    page = open_page()
    page.focus("#tab-transcribe")
    for key, tab in (("ArrowRight", 1), ("End", 4), ("ArrowRight", 0), ("ArrowLeft", 4), ("Home", 0)):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.id") == f"tab-{TABS[tab]}"
        assert page.locator("main > section:visible").get_attribute("id") == TABS[tab]
    order = {"transcribe": ["sound", "record"], "classify": ["images", "labels", "threshold", "score"],
             "search": ["query", "find", "example"],
             "ask": ["ask-model", "medium", "ask-record", "question", "send"]}  # fmt: skip
    for tab, expected in order.items():
        page.focus(f"#tab-{tab}")
        page.click(f"#tab-{tab}")
        for name in expected:
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.id") == name
            ring = "one => getComputedStyle(one.closest('.drop') ?? one).outlineStyle"
            assert page.locator(f"#{name}").evaluate(ring) == "solid"


def test_a_screen_reader_gets_names_for_all_controls(open_page, pictured):
    page = transcribed(open_page())
    page.click("#tab-classify")
    page.set_input_files("#images", pictured / "red.png")
    page.wait_for_selector("#scores li")
    session = page.context.new_cdp_session(page)
    for tab in TABS:
        page.click(f"#tab-{tab}")
        nodes = session.send("Accessibility.getFullAXTree")["nodes"]
        found = [(one["role"]["value"], one.get("name", {}).get("value")) for one in nodes if not one["ignored"]]
        assert [one for one in found if one[0] in CONTROLS and not one[1]] == []
        roles = {role for role, _ in found}
        assert {"banner", "navigation", "main", "tablist", "tabpanel", "heading", "status"} <= roles


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_the_colours_asked_for(open_page, scheme):
    page = transcribed(open_page(viewport={"width": 390, "height": 844}, color_scheme=scheme, has_touch=True))
    for tab in TABS:
        page.click(f"#tab-{tab}")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    right = page.locator("[role=tab]").evaluate_all("all => all.map((one) => one.getBoundingClientRect().right)")
    assert max(right) <= 390
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground))) < 64) == (scheme == "dark")
