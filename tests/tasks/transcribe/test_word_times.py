"""Words with times: Whisper's against openai-whisper's, the CTC's against what was written into it, both on sound."""

import gzip
import json
import random
from base64 import b85decode
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.studies.words import align_text
from multimodal.errors import CheckpointError
from multimodal.tasks.transcribe.conformer.words import align_tokens, ctc_words
from multimodal.tasks.transcribe.whisper import words as whisper_words
from multimodal.tasks.transcribe.whisper.words import (
    add_words,
    alignment_heads,
    dtw,
    find_alignment,
    split_to_word_tokens,
)
from multimodal.tasks.transcribe.word_times import WordTiming, mel_level, snap_to_audio, wave_level
from multimodal.tokens.audio.log_mel import log_mel
from multimodal.tokens.audio.reading import read_audio
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.tokens.text.whisper_small import SmallWhisperTokenizer
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load
from tests.helpers.spread import thin
from tests.helpers.tiny_whisper import DIMS, whispers

# openai-whisper leaves its vocabulary file open
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TEXTS = {
    "en": " Hello, it's 42 dogs' $5.50 — \"quoted\" (and) 50% more! 🎉",
    "de": " Größe: 3,5 km², ¿nicht wahr?",
    "zh": "你好，世界。今天是2024年",
    "ja": "こんにちは、世界！「はい」",
    "th": "สวัสดีชาวโลก",
    "lo": "ສະບາຍດີ",
    "my": "မင်္ဂလာပါ",
    "ar": " مرحبا بالعالم، ١٢٣",
    "hi": " नमस्ते दुनिया। क्या हाल है?",
    "ko": " 안녕하세요 👩‍👩‍👧 여러분",
}


def their_tokenizer(language):
    from whisper.tokenizer import get_tokenizer

    return get_tokenizer(True, language=language, num_languages=99)


@pytest.mark.parametrize("kind", ["random", "ties"])
def test_dtw_takes_openai_whispers_path(timing, kind):
    random = np.random.default_rng(0)
    for rows, columns in [(1, 1), (1, 9), (9, 1), (3, 3), (7, 30), (30, 7), (25, 60)]:
        costs = random.standard_normal((rows, columns)) if kind == "random" else random.integers(-1, 2, (rows, columns))
        costs = costs.astype(np.float32)
        expected = timing.dtw_cpu(costs.astype(np.float64))
        np.testing.assert_array_equal(dtw(costs), expected)


@pytest.mark.parametrize("positions", [2, 3, 4, 50])
def test_median_filter(timing, positions):
    x = torch.randint(0, 9, (2, 5, positions), generator=torch.Generator().manual_seed(0)).float()
    assert whisper_words.median_filter(x).equal(timing.median_filter(x, 7))


@thin(5, pytest.mark.ci)
@pytest.mark.parametrize("language", TEXTS)
def test_words_equal_openai_whispers(timing, language):
    theirs, checkpoint = whispers()
    tokenizer = their_tokenizer(language)
    ids = tokenizer.encode(TEXTS[language])[: DIMS["n_text_ctx"] - 5]
    mel = torch.randn(80, 3000, generator=torch.Generator().manual_seed(len(ids)))
    with torch.no_grad():
        features = theirs.encoder(mel[None])[0]
    frames = 1237
    expected = timing.find_alignment(theirs, tokenizer, ids, mel, frames)
    found = find_alignment(
        checkpoint.model, checkpoint.tokenizer, features, ids, frames, language, heads=alignment_heads(checkpoint)
    )
    assert [(w.word, w.tokens) for w in found] == [(w.word, w.tokens) for w in expected]
    for own, their in zip(found, expected, strict=True):
        assert (own.start, own.end) == (their.start, their.end)
        assert own.probability == pytest.approx(their.probability, abs=1e-4)
    assert "".join(word.word for word in found) == checkpoint.tokenizer.decode(ids)  # digits, marks and all


def test_wanted_heads_alone_count(timing):
    theirs, checkpoint = whispers()
    mel = torch.randn(80, 3000, generator=torch.Generator().manual_seed(1))
    ids = checkpoint.tokenizer.encode(" one two three four")
    mask = torch.zeros(2, 2, dtype=torch.bool)
    mask[0, 1] = mask[1, 0] = True
    before = theirs.alignment_heads
    theirs.register_buffer("alignment_heads", mask.to_sparse(), persistent=False)
    try:
        expected = timing.find_alignment(theirs, their_tokenizer("en"), ids, mel, 800)
    finally:
        theirs.register_buffer("alignment_heads", before, persistent=False)
    with torch.no_grad():
        features = theirs.encoder(mel[None])[0]
    common = (checkpoint.model, checkpoint.tokenizer, features, ids, 800, "en", "transcribe")
    found = find_alignment(*common, heads=[(1, 0), (0, 1)])
    assert [w.start for w in found] == pytest.approx([w.start for w in expected], abs=0.01)
    assert [w.start for w in found] != [w.start for w in find_alignment(*common, heads=alignment_heads(checkpoint))]


def test_what_cannot_be_aligned_is_spread():
    _, checkpoint = whispers()
    features, ids = torch.zeros(1500, 16), checkpoint.tokenizer.encode(" a b c d")
    heads = alignment_heads(checkpoint)
    for tokens, frames, end in ((ids, 1, 0.0), (ids * 12, 400, 4.0)):
        found = find_alignment(checkpoint.model, checkpoint.tokenizer, features, tokens, frames, "en", heads=heads)
        assert [token for word in found for token in word.tokens] == tokens
        assert found[0].start == 0
        assert found[-1].end == pytest.approx(end)
        assert {word.probability for word in found} == {0.0}
    assert find_alignment(checkpoint.model, checkpoint.tokenizer, features, [], 400, "en", heads=heads) == []


@pytest.mark.parametrize("language", ["en", "ja"])
def test_no_token_is_lost_in_broken_text(language):
    tokenizer, chooser = WhisperTokenizer(multilingual=True), random.Random(0)
    broken = [tokenizer.encode("�")[:1], [0xE3 - 0x21, *tokenizer.encode("a")]]
    for ids in [chooser.choices(range(50257), k=60) for _ in range(5)] + broken:
        words = split_to_word_tokens(tokenizer, ids, language)
        assert [token for _, part in words for token in part] == ids
        assert "".join(word for word, _ in words) == tokenizer.decode(ids)


def test_words_of_a_small_vocabulary():
    tokenizer = SmallWhisperTokenizer.train(["zwei große Hunde laufen über die Straße"] * 3, 300, ["de", "ja"], 301)
    ids = tokenizer.encode(" Zwei über-große 3 Straßen")
    assert [word for word, _ in split_to_word_tokens(tokenizer, ids, "de")] == [
        " Zwei", " über", "-große", " 3", " Straßen",
    ]  # fmt: skip
    assert [word for word, _ in split_to_word_tokens(tokenizer, tokenizer.encode("これ"), "ja")] == ["こ", "れ"]


def made_up(chooser):
    """Segments of a window and the times of their words: long ones, pauses, marks of all kinds."""
    begin, now, segments, timings = 50364, 0.0, [], []
    for _ in range(chooser.randint(1, 4)):
        start = now + chooser.choice([0, 0, 1.5])
        words = chooser.choices(
            [" a", " bb", ' "', '"', ".", ",", " (", ")", " -", "cc", "。"], k=chooser.randint(0, 7)
        )
        tokens = [begin + int(start * 50)]
        for word in words:
            length = chooser.choice([0, 0.1, 0.2, 0.3, 0.4, 2.0, 3.1])
            part = chooser.choices(range(1000), k=chooser.randint(1, 3))
            timings.append((word, part, now, now + length, chooser.random()))
            tokens, now = tokens + part, now + length
        end = now + chooser.choice([0, 0, -0.8, 0.7])
        segments.append({"seek": 1234, "start": 12.34 + start, "end": 12.34 + end, "tokens": [*tokens, begin + 9]})
    return segments, timings


def test_words_of_segments_equal_openai_whispers(timing, monkeypatch):
    chooser = random.Random(0)
    marks = ("\"'“¿([{-", "\"'.。,，!！?？:：”)]}、")
    for _ in range(300):
        segments, timings = made_up(chooser)
        expected, last = json.loads(json.dumps(segments)), chooser.choice([0.0, 5.0, 12.34])
        monkeypatch.setattr(timing, "find_alignment", lambda *a, t=timings: [timing.WordTiming(*w) for w in t])
        timing.add_word_timestamps(
            segments=expected, model=None, tokenizer=SimpleNamespace(eot=50257), mel=None, num_frames=3000,
            last_speech_timestamp=last, prepend_punctuations=marks[0], append_punctuations=marks[1],
        )  # fmt: skip
        add_words(segments, [WordTiming(*w) for w in timings], *marks, last)
        for own, their in zip(segments, expected, strict=True):
            times = [value for word in own["words"] for value in (word["start"], word["end"], word["probability"])]
            theirs = [value for word in their["words"] for value in (word["start"], word["end"], word["probability"])]
            assert [word["word"] for word in own["words"]] == [word["word"] for word in their["words"]]
            assert times == pytest.approx(theirs)
            assert (own["start"], own["end"]) == pytest.approx((their["start"], their["end"]))


def test_known_heads_are_openais():
    import whisper
    from whisper import _ALIGNMENT_HEADS as TABLE

    sizes = {"tiny": (4, 6), "base": (6, 8), "small": (12, 12), "medium": (24, 16), "large": (32, 20), "turbo": (4, 20)}
    sizes["large-v3-turbo"] = sizes["turbo"]
    for name in set(whisper._MODELS) - {"large-v1"}:  # it has large-v2's sizes
        layers, heads = sizes.get(name) or sizes[name.split(".")[0].split("-")[0]]
        newest = name in ("large", "large-v3") or "turbo" in name
        vocabulary = 51864 if name.endswith(".en") else 51865 + newest
        mask = np.frombuffer(gzip.decompress(b85decode(TABLE[name])), dtype=bool).reshape(layers, heads)
        assert alignment_heads(sized(layers, heads, vocabulary)) == [tuple(pair) for pair in np.argwhere(mask).tolist()]
    assert alignment_heads(sized(3, 2, 700)) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def sized(layers, heads, vocabulary, **card):
    """Checkpoint fields that `alignment_heads` reads."""
    block = SimpleNamespace(cross=SimpleNamespace(heads=heads))
    decoder = SimpleNamespace(stack=SimpleNamespace(layers=layers, block=block), vocabulary=vocabulary)
    model = torch.nn.Identity()
    model.config = SimpleNamespace(decoder=decoder)
    return Checkpoint(model, source="some/model", card=card)


def test_a_card_names_heads():
    assert alignment_heads(sized(4, 6, 51865, alignment_heads=[[1, 5], [3, 0]])) == [(1, 5), (3, 0)]
    for wrong in ([[4, 0]], [[0, 6]], [[0]], [], "all", [[0, True]], [[-1, 0]]):
        with pytest.raises(CheckpointError, match=r"some/model card: alignment_heads"):
            alignment_heads(sized(4, 6, 51865, alignment_heads=wrong))


def peaks(ids, frames, blank, tokenizer):
    """Log-probabilities [T W] in which each id is written at its frame, with probability 0.9."""
    probabilities = torch.full((len(frames) and frames[-1] + 10, blank + 1), 0.1 / blank)
    probabilities[:, blank] = 0.9
    for token, frame in zip(ids, frames, strict=True):
        probabilities[frame] = 0.1 / blank
        probabilities[frame, token] = 0.9
    return probabilities.log()


@pytest.fixture(scope="module")
def letters():
    return BytePairTokenizer.train(["one two three"] * 3, 270)


def test_ctc_words_are_where_their_tokens_are(letters):
    ids = letters.encode(" one two, 33 'tis 🎉")
    frames = [10 + 3 * i for i in range(len(ids))]
    blank = letters.vocab_size
    words = ctc_words(peaks(ids, frames, blank, letters), ids, letters, blank, 0.04)
    assert [word.word for word in words] == [" one", " two,", " 33", " 'tis", " 🎉"]
    assert [token for word in words for token in word.tokens] == ids
    first = 0
    for word in words:
        last = first + len(word.tokens) - 1
        assert word.start == pytest.approx((frames[first] - 0.5) * 0.04)
        assert word.end == pytest.approx((frames[last] + 0.5) * 0.04)
        assert word.probability == pytest.approx(0.9, abs=1e-3)
        first = last + 1


def test_ctc_token_written_before_it_was_heard_is_no_begin(letters):
    ids = letters.encode(" zx")
    words = ctc_words(peaks(ids, [0, 50, 53][: len(ids)], 270, letters), ids, letters, 270, 0.04)
    assert [word.word for word in words] == [" zx"]
    assert words[0].start == pytest.approx(49.5 * 0.04)


def test_ctc_text_without_a_path_is_spread(letters):
    ids = letters.encode(" one two")
    logprobs = torch.zeros(len(ids) - 1, letters.vocab_size + 1).log_softmax(-1)
    assert align_tokens(logprobs, ids, letters.vocab_size) is None
    words = ctc_words(logprobs, ids, letters, letters.vocab_size, 0.04)
    assert [word.word for word in words] == [" one", " two"]
    assert (words[0].start, words[-1].end) == pytest.approx((0, len(logprobs) * 0.04))
    assert {word.probability for word in words} == {0.0}
    narrow = torch.zeros(40, 6).log_softmax(-1)
    assert align_tokens(narrow, [7], 5) is None
    assert align_tokens(narrow, [5], 5) is None
    assert align_tokens(narrow, [3, 3], 5) is not None
    assert align_tokens(torch.zeros(2, 6), [3, 3], 5) is None  # a repeat needs a blank between
    assert ctc_words(logprobs, [], letters, letters.vocab_size, 0.04) == []


def bursts(*spans, seconds=4.0, noise=1e-4):
    generator = torch.Generator().manual_seed(0)
    wave = noise * torch.randn(int(seconds * 16000), generator=generator)
    for start, end in spans:
        piece = wave[round(start * 16000) : round(end * 16000)]
        piece += 0.2 * torch.randn(len(piece), generator=generator)
    return wave


def word(start, end, text=" w"):
    return WordTiming(text, [1], start, end, 0.5)


@pytest.mark.parametrize("noise", [0.0, 1e-4, 0.02])
@pytest.mark.parametrize("level", [wave_level, lambda wave: mel_level(log_mel(wave))], ids=["wave", "mel"])
def test_words_move_to_their_sound(level, noise):
    wave = bursts((0.5, 1.0), (1.5, 2.4), (3.0, 3.2), noise=noise)
    wave[int(1.25 * 16000) :][:80] = 0.5  # a click
    found = snap_to_audio([word(0.0, 0.6), word(1.6, 1.7), word(2.0, 2.1), word(2.9, 3.1)], level(wave))
    times = [time for w in found for time in (w.start, w.end)]
    assert times == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.4, 3.0, 3.2], abs=0.04)
    assert found[2].start == 2.0  # within sound, no pause beside it
    assert snap_to_audio([word(1.5, 2.9)], level(wave))[0].end == pytest.approx(2.4, abs=0.04)


def test_words_on_silence_stay_in_order():
    words = [word(0.1, 0.2), word(0.2, 0.2), word(1.0, 3.0), word(9.0, 9.1)]
    for level in (wave_level(torch.zeros(64000)), wave_level(bursts((1.1, 1.2))), torch.zeros(0)):
        found = snap_to_audio(words, level)
        assert all(w.start <= w.end for w in found)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(found))
    assert snap_to_audio([], wave_level(torch.zeros(16000))) == []


@pytest.mark.ci
def test_digits_of_joined_clips_begin_within_100_ms(shared_data):
    folder, joint = shared_data / "speech" / "fsdd", load("asr-conformer-en")
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()][5::12]
    parts, begins, seconds = [], [], 0.0
    for row in rows:
        wave = read_audio(folder / row["audio_filepath"])
        level = wave_level(wave)
        loud = [int(sum(value > level.max() - 30 for value in level[i : i + 5]) >= 4) for i in range(len(level))]
        begins.append(seconds + 0.4 + loud.index(1) / 100)
        parts += [torch.zeros(6400), wave]
        seconds += 0.4 + len(wave) / 16000
    found = align_text(torch.cat(parts), " ".join(row["text"] for row in rows), joint.model, joint.tokenizer)
    errors = [abs(own.start - begin) for own, begin in zip(found, begins, strict=True)]
    assert sum(error <= 0.1 for error in errors) >= 0.95 * len(errors)
    assert sorted(errors)[len(errors) // 2] <= 0.03
