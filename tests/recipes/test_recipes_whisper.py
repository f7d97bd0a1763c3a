"""The multitask format, its batches and its recipe, on tones in place of speech; the small vocabulary."""

import json
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from multimodal.data.datasets.speech_windows import (
    NOISES,
    Curriculum,
    SpeechWindows,
    WindowSample,
    curriculum,
    noise,
    read_clips,
    trimmed,
)
from multimodal.data.datasets.text import IGNORED
from multimodal.data.loader import Loader, generator
from multimodal.errors import CheckpointError, DataError, UsageError
from multimodal.tasks.evaluate.speech.whisper_windows import evaluate_noise, evaluate_windows
from multimodal.tasks.transcribe.transcribe import transcribe
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.tokens.text.whisper_small import SmallWhisperTokenizer
from multimodal.train.objectives.multitask import (
    PrepareWindow,
    TextSegment,
    collate,
    letters_of,
    silent_row,
    speech_row,
    spelled,
)
from multimodal.weights.folder import load_folder
from tests.helpers.spread import thin

TONES = {"low": 300, "high": 2500}
WORDS = {"de": {"low": "tief", "high": "hoch"}, "en": {"low": "low", "high": "high"}}
LEAKS = ("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # openai-whisper's open file


@pytest.fixture(scope="module")
def tokenizer() -> SmallWhisperTokenizer:
    texts = [f" {a} {b}." for a in ("low", "high", "tief", "hoch", "während") for b in ("low", "high", "hoch")]
    return SmallWhisperTokenizer.train(texts, 280, ["de", "en"], 101)


@pytest.fixture(scope="module")
def manifests(tmp_path_factory) -> list[Path]:
    """Eight recordings each of German and English tones of one or two words, 0.3 s a word; the pitch is the word, and
    German tones waver."""
    folder, rng, found = tmp_path_factory.mktemp("speech"), np.random.default_rng(0), []
    for language, words in WORDS.items():
        rows = []
        for number in range(8):
            names = rng.choice(list(TONES), rng.integers(1, 3)).tolist()
            times = np.arange(4800) / 16000
            shake = np.sin(2 * np.pi * 20 * times) if language == "de" else 1
            sound = np.concatenate([0.3 * shake * np.sin(2 * np.pi * TONES[name] * times) for name in names])
            path = folder / language / f"{number}.wav"
            path.parent.mkdir(exist_ok=True)
            with wave.open(str(path), "wb") as file:
                file.setparams((1, 2, 16000, 0, "NONE", ""))
                file.writeframes((np.pad(sound, 800) * 32767).astype("<i2").tobytes())
            english = " ".join(WORDS["en"][name] for name in names)
            row = {"audio_filepath": f"{language}/{number}.wav", "language": language}
            row |= {"text": " ".join(words[name] for name in names)}
            rows.append(row | {"translation": None if language == "en" else english})
        found.append(folder / f"{language}.jsonl")
        found[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


@pytest.fixture
def clips(manifests, tmp_path) -> SpeechWindows:
    return SpeechWindows(manifests, tmp_path / "cache")


# the vocabulary


def test_small_vocabulary_gives_back_every_byte(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = tokenizer_from(tmp_path)
    for text in (" low hoch.", "", " während", "日本 <|nospeech|>", "\x00\xff" * 3, "  \n "):
        ids = tokenizer.encode(text)
        assert loaded.encode(text) == ids
        assert not tokenizer.control & set(ids)
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode(" low hoch")) == 2  # merges were learnt
    assert loaded.control_ids == tokenizer.control_ids
    assert loaded.vocab_size == tokenizer.vocab_size


def test_small_vocabulary_has_whispers_order(tokenizer):
    whisper = WhisperTokenizer(True)
    own = [token for token in whisper.control_ids if token in tokenizer.control_ids]
    languages = ["<|de|>", "<|en|>"]
    assert [t for t in tokenizer.control_ids if t not in languages] == [t for t in own if t not in languages]
    assert tokenizer.timestamp_begin + 100 == tokenizer.vocab_size - 1
    assert tokenizer.decode(tokenizer.sot_sequence("german", "translate", False), skip_control=False) == (
        "<|startoftranscript|><|de|><|translate|><|notimestamps|>"
    )
    with pytest.raises(UsageError, match="'fr' is not one of the 2"):
        tokenizer.language_token("fr")


def test_marks_of_no_speech_are_never_part_of_a_word(tokenizer):
    refused = set(tokenizer.non_speech_tokens())
    assert tokenizer.encode("#")[0] in refused
    for text in (" low hoch", " während", " x y", " l'eau", " a-b"):
        assert not refused & set(tokenizer.encode(text)), text


DAMAGES = {
    "not a list of tokens": lambda lines: [*lines[:-1], "?? x"],
    "lacks 1 of the 256 bytes": lambda lines: [*lines[:5], "bG93IGxvdw== 5", *lines[6:]],
    "must be 0 to": lambda lines: [*lines[:-1], lines[-1].split()[0] + " 900"],
    "a token of 3000 bytes, more than": lambda lines: [*lines, f"{'YWJj' * 1000} {len(lines)}"],
    "not a merge of two": lambda lines: [*lines, f"YWJjZGVmZ2hpams= {len(lines)}"],
}


@pytest.mark.parametrize("cause", DAMAGES)
def test_damaged_ranks_are_refused_by_name(tokenizer, tmp_path, cause):
    tokenizer.save(tmp_path)
    path = tmp_path / "ranks.tiktoken"
    path.write_text("\n".join(DAMAGES[cause](path.read_text().splitlines())))
    with pytest.raises(CheckpointError, match=cause) as error:
        tokenizer_from(tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(("change", "cause"), [
    ({"languages": ["de", "de"]}, "languages: "), ({"languages": ["klingon"]}, "languages: "),
    ({"languages": [3]}, r"languages\[0\]: expected a text"), ({"languages": []}, "languages: "),
    ({"timestamps": 1502}, "timestamps: must be 2 to 1501"),
    ({"timestamps": "9"}, "timestamps: expected a whole number"),
    ({"file": "../x"}, "unknown key 'file'"),
])  # fmt: skip
def test_damaged_record_of_a_small_vocabulary_is_refused(tokenizer, tmp_path, change, cause):
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=cause):
        tokenizer_from(tmp_path)


# the format


@pytest.mark.filterwarnings(*LEAKS)
def test_rows_are_openai_whispers_tokens():
    reference = pytest.importorskip("whisper.tokenizer")
    theirs = reference.get_tokenizer(True, language="fr", task="translate")
    ours = WhisperTokenizer(True)
    two = [TextSegment(20, 120, "A dog."), TextSegment(161, 300, "A cat.")]
    row = speech_row(ours, two, "fr", "translate", True, "Before that.")
    spoken = theirs.encode("<|0.20|> A dog.<|1.20|><|1.60|> A cat.<|3.00|>", allowed_special="all")
    before = [theirs.sot_prev, *theirs.encode(" Before that.")]
    assert row.ids == [*before, *theirs.sot_sequence, *spoken, theirs.eot]
    assert row.ids[row.scored - 1] == theirs.sot
    plain = speech_row(ours, two, "fr", "translate", False)
    sentences = theirs.encode(" A dog. A cat.")
    assert plain.ids == [*theirs.sot_sequence_including_notimestamps, *sentences, theirs.eot]
    cut = speech_row(ours, [two[0], TextSegment(161, None, "A cat.")], "fr", "transcribe", True)
    assert theirs.decode_with_timestamps(cut.ids[3:]) == "<|0.20|> A dog.<|1.20|><|1.60|><|endoftext|>"
    assert silent_row(ours).ids == [theirs.sot, theirs.no_speech, theirs.eot]


def test_previous_text_is_heard_but_not_scored(clips, tokenizer):
    alphabet = letters_of([clip.text for clip in clips.clips])
    prepare = PrepareWindow(tokenizer, alphabet, 80, timestamps=0.0)
    windows = [
        prepare(clips.read(WindowSample((i,), 128, previous)), generator(i)) for i, previous in ((0, 1), (9, -1))
    ]
    batch = collate(windows)
    assert batch.mel.shape == (2, 80, 128)
    assert batch.source.tolist() == [0, 0, 1]
    for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
        start = ids.index(tokenizer.sot)
        assert targets[:start] == [IGNORED] * start
        scored = [t for t in targets if t != IGNORED]
        assert scored[:-1] == ids[start + 1 : start + len(scored)]
        assert scored[-1] == tokenizer.eot
        assert tokenizer.decode(scored).strip() in {
            clips.clips[0].text,
            clips.clips[0].translation,
            clips.clips[9].text,
        }
    assert batch.ids[0, 0] == tokenizer.sot_prev
    assert batch.ids[2, 0] == tokenizer.sot
    letters = "".join(alphabet[i - 1] for i in batch.letters[0, : batch.letter_counts[0]].tolist())
    assert letters == spelled(clips.clips[0].text)


def test_a_text_that_the_decoder_cannot_hold_is_a_broken_item(clips, tokenizer):
    with pytest.raises(DataError, match=r"^\d+ tokens, more than the 5 of the model's context$"):
        PrepareWindow(tokenizer, "", 80, context=5)(clips.read(WindowSample((0,), 128)), generator(0))


def test_confused_tokens_are_read_but_never_wanted(clips, tokenizer):
    item = clips.read(WindowSample((0,), 128))
    plain, confused = (
        collate([PrepareWindow(tokenizer, "", 80, timestamps=1.0, confused=share)(item, generator(4))])
        for share in (0.0, 1.0)
    )
    assert confused.targets.equal(plain.targets)
    control = plain.ids >= tokenizer.eot
    assert confused.ids[control].equal(plain.ids[control])
    assert not confused.ids[0].equal(plain.ids[0])
    assert int(confused.ids.max()) < tokenizer.vocab_size


def test_times_are_where_the_sound_is(clips, tokenizer):
    item = clips.read(WindowSample((0, 1), 200, cut=True))
    for seed in range(20):
        window = PrepareWindow(tokenizer, "", 80, augmented=False, timestamps=1.0)(item, generator(seed))
        times = [2 * (i - tokenizer.timestamp_begin) for i in window.rows[0].ids if i >= tokenizer.timestamp_begin]
        loud = (window.mel.amax(0) > window.mel.max() - 1).nonzero()[:, 0].tolist()
        assert len(times) == 4
        assert times[0] <= loud[0] <= times[0] + 5
        assert times[-1] - 5 <= loud[-1] <= times[-1]
        assert window.mel[:, times[1] + 1 : times[2]].numel() == 0 or window.mel[:, times[1] + 1 : times[2]].max() < 0


def test_a_sentence_that_the_window_cuts_gives_its_begin_alone(clips, tokenizer):
    width = clips.lengths[0] + 20
    window = PrepareWindow(tokenizer, "", 80)(clips.read(WindowSample((0, 1), width, cut=True)), generator(0))
    assert len(window.rows) == 1
    assert not window.letters
    written = tokenizer.decode(window.rows[0].ids, skip_control=False)
    assert written.endswith(f"<|{clips.lengths[0] // 2 * 0.02:.2f}|><|endoftext|>") or written.count("<|0.") == 3


@pytest.mark.parametrize("kind", NOISES)
def test_noise_has_the_level_it_should(kind):
    wave = noise(kind, 16000, generator(1))
    assert wave.shape == (16000,)
    assert wave.isfinite().all()
    assert wave.abs().max() <= 1
    assert (wave.abs().max() >= 0.00099) == (kind != "silence")
    assert wave.equal(noise(kind, 16000, generator(1)))


def test_silence_around_a_clip_is_trimmed():
    sound = torch.cat([torch.zeros(8000), torch.ones(1600), torch.zeros(8000)])
    assert len(trimmed(sound)) == 1600 + 4 * 160 - 1
    assert len(trimmed(torch.zeros(300))) == 300


# the order


def test_curriculum_starts_short_and_holds_its_budget(clips):
    languages = [clip.language for clip in clips.clips]
    s = Curriculum(200, 640, epoch=16, easy=2, short=50, growth=2.0, pairs=0.5, noise=0.25, full=0.5)
    plan = curriculum(s, clips.lengths, languages, seed=3)
    assert plan(5) == plan(5) != plan(6)
    early, late = [sample for batch in plan(0) for sample in batch], [s for batch in plan(5) for s in batch]
    assert max(clips.lengths[i] for sample in early for i in sample.clips) <= 50
    assert sorted(i for sample in late for i in sample.clips) == list(range(16))  # every clip once an epoch
    pairs = [sample.clips for sample in late if len(sample.clips) == 2]
    assert pairs
    assert all(languages[a] == languages[b] for a, b in pairs)
    assert sum(not sample.clips for sample in late) >= 2
    for epoch in range(8):
        for batch in plan(epoch):
            assert len({sample.frames for sample in batch}) == 1
            assert sum(sample.frames for sample in batch) <= s.budget or len(batch) == 1
            assert all(clips.lengths[sample.clips[0]] <= sample.frames for sample in batch if sample.clips)
    widths = {sample.frames for epoch in range(4, 8) for batch in plan(epoch) for sample in batch}
    assert len(widths) > 1
    assert max(widths) == s.window


def test_manifest_without_language_is_refused_by_name(tmp_path):
    path = tmp_path / "data.jsonl"
    for more, fault in (("", "no language"), (', "language": "de", "translation": 5', r"not a string \(5\)")):
        path.write_text(f'{{"audio_filepath": "a.wav", "text": "a"{more}}}\n')
        with pytest.raises(DataError, match=fault):
            read_clips(path)
    path.write_text("")
    with pytest.raises(DataError, match="0 found"):
        read_clips(path)


def test_a_broken_recording_is_left_out_with_its_text(tmp_path, monkeypatch, caplog):
    sounds = [(300, "tief"), (2500, "hoch"), (300, "noch tief")]
    for number, (pitch, _) in enumerate(sounds):
        with wave.open(str(tmp_path / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes((9000 * np.sin(np.arange(8000) * pitch * 2 * np.pi / 16000)).astype("<i2").tobytes())
    (tmp_path / "1.wav").write_bytes(b"RIFF")
    rows = [{"audio_filepath": f"{i}.wav", "text": text, "language": "de"} for i, (_, text) in enumerate(sounds)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"language": "de"\n')
    with pytest.raises(
        DataError, match=r"data\.jsonl: 1 of the first 2 recordings are broken, more than 5\.0% of its 4"
    ):
        SpeechWindows([path], tmp_path / "cache")
    monkeypatch.setattr("multimodal.data.datasets.speech_windows.MOST_BROKEN", 0.5)
    for _ in range(2):  # computed, then from the cache
        clips = SpeechWindows([path], tmp_path / "cache")
        assert [clip.text for clip in clips.clips] == ["tief", "noch tief"]
        assert all(length > 0 for length in clips.lengths)
    assert all(place in caplog.text for place in ("1.wav", "line 4: not JSON"))


# the recipes


def flags(manifests: list[Path], folder: Path, steps: int) -> list[str]:
    names = [str(path) for path in manifests]
    sizes = {"steps": steps, "vocabulary": 280, "width": 32, "heads": 2, "layers": 1, "words": 1, "window": 200}
    order = {"short": 100, "budget": 800, "epoch": 16, "noise": 0.13, "warmup": 5, "rate": 0.01, "average": 0.9}
    every = {"evaluate_every": 1000, "save_every": 1000, "log_every": 10, "most_valid": 4}
    numbers = [part for name, value in (sizes | order | every).items() for part in (f"--{name}", str(value))]
    files = ["--run", str(folder / "run"), "--out", str(folder / "model")]
    return ["--train", *names, "--valid", *names, *files, *numbers]


@pytest.mark.ci
def test_recipe_learns_saves_and_the_model_transcribes(manifests, tmp_path, monkeypatch, load_recipe):
    recipe = load_recipe("train_whisper")
    losses, backward = [], recipe.Multitask.backward

    def watched(self, engine, batches):
        found = backward(self, engine, batches)
        losses.append(found["loss"])
        return found

    monkeypatch.setattr(recipe.Multitask, "backward", watched)
    (tmp_path / "card.json").write_text('{"name": "first", "transcribe": {"vad_filter": true}}')
    recipe.start(recipe.main, [*flags(manifests, tmp_path, 40), "--card", str(tmp_path / "card.json")])
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert 8 < first < 25, first
    assert last < 0.5 * first, (first, last)
    checkpoint = load_folder(tmp_path / "model")
    assert isinstance(checkpoint.tokenizer, SmallWhisperTokenizer)
    assert checkpoint.model.config.encoder.context == 100
    sound = torch.sin(torch.arange(40000) * 0.1)  # 2.5 s: two windows
    found = transcribe(sound, checkpoint, temperature=0.0, no_speech_threshold=None, vad_filter=False)
    assert found["language"] in ("de", "en")
    assert all(s["end"] <= 3.5 for s in found["segments"])
    more = [*flags(manifests, tmp_path / "more", 1), "--init", str(tmp_path / "model")]
    recipe.start(recipe.main, more)
    begun = load_folder(tmp_path / "more" / "model")
    assert begun.model.config == checkpoint.model.config  # not the flags'
    assert begun.tokenizer.ranks == checkpoint.tokenizer.ranks
    assert begun.card["transcribe"] == {"vad_filter": True}
    german, english = (evaluate_windows(checkpoint, str(path)) for path in manifests)
    assert german["utterances"] == english["utterances"] == 8
    assert german["bleu"] >= 0
    assert german["chrf"] >= 0
    assert english.keys() == {"utterances", "too_long", "wer", "cer", "language", "taken_for_no_speech"}
    assert evaluate_noise(checkpoint, windows=2).keys() == {"no_speech", *NOISES}


def test_loader_makes_the_same_batch_for_a_step_wherever_it_starts(clips, tokenizer):
    plan = curriculum(Curriculum(window=200, budget=640, epoch=16, short=100), clips.lengths, ["de"] * 8 + ["en"] * 8)
    loader = Loader(clips, plan, PrepareWindow(tokenizer, "adehilortw", 80), collate, seed=1)
    unbroken, resumed = loader.start(0), loader.start(3)
    for _ in range(3):
        next(unbroken)
    for _ in range(3):
        one, other = next(unbroken).batches[0], next(resumed).batches[0]
        assert one.mel.equal(other.mel)
        assert one.targets.equal(other.targets)


def test_validation_without_a_clip_that_fits_is_refused(clips, tokenizer, load_recipe):
    with pytest.raises(DataError, match=r"^valid holds no recording of \d+ that fits 0\.1 s$"):
        load_recipe("train_whisper").WhisperValidation(clips, tokenizer, 10, 4)
    english = SmallWhisperTokenizer.train([" low"], 260, ["en"], 101)
    with pytest.raises(DataError, match=r"^valid names the language 'de', not one of the model's \(en\)$"):
        load_recipe("train_whisper").WhisperValidation(clips, english, 200, 4)


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(("flag", "fault"), [
    (["--heads", "5"], "--width must be a multiple of heads (5) (got "),
    (["--init", "clip-vit-16"], "--init clip-vit-16: is a clip, not a whisper with its tokenizer"),
    (["--init", "whisper-mini"], "--init whisper-mini: hears 80 bands and windows of 600 frames; expected 80 and"),
    (["--init", "whisper-mini", "--window", "600", "--language", "es"], "whisper-mini: knows cs, de, en, fr, not es"),
])  # fmt: skip
def test_recipe_refuses_what_it_cannot_begin_with(flag, fault, manifests, tmp_path, load_recipe, capsys):
    names = manifests
    if "--language" in flag:
        row = json.loads(manifests[0].read_text().splitlines()[0])
        names = [manifests[0].with_name("unnamed.jsonl")] * 2
        names[0].write_text("".join(json.dumps(row | {"language": "es"}) + "\n" for _ in range(8)))
    recipe = load_recipe("train_whisper")
    with pytest.raises(SystemExit):
        recipe.start(recipe.main, [*flags(names, tmp_path, 1), *flag])
    assert fault in capsys.readouterr().err
