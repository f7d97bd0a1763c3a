"""`multimodal evaluate asr`: error rates, the errors themselves, the report, and manifests with broken lines."""

import json
import random
import re
import shutil
from pathlib import Path

import jiwer
import pytest

from multimodal.errors import UsageError
from multimodal.tasks.evaluate.reports.transcripts import record, summary, text_rows, write_report
from multimodal.tasks.evaluate.scores import normalizer, word_errors
from multimodal.tasks.evaluate.transcripts import TranscribedItem, TranscriptEvaluation, aligned, compared
from multimodal.tasks.report.page import columns
from tests.helpers.commands import Page, one_line, run
from tests.helpers.data.sets import lines, wav
from tests.helpers.paths import ROOT
from tests.helpers.spread import thin
from tests.weights.speech.test_moonshine import folder

SAMPLE = ROOT / "assets" / "sample"


def evaluation(*pairs: tuple[str, str], language: str = "en", **options) -> TranscriptEvaluation:
    heard = [TranscribedItem(n, f"a.jsonl line {n}", a, b, 2.0, language, 0) for n, (a, b) in enumerate(pairs, 1)]
    return compared(heard, [], 4.0, **options)


def test_figures_are_those_of_jiwer_over_the_corpus():
    chooser = random.Random(0)
    texts = [[" ".join(chooser.choices("abcd", k=chooser.randint(1, 9))) for _ in range(40)] for _ in range(2)]
    result, expected = evaluation(*zip(*texts, strict=True), name="none"), jiwer.process_words(*texts)
    figures = result.figures()
    assert figures["wer"] == pytest.approx(expected.wer)
    assert figures["cer"] == pytest.approx(jiwer.cer(*texts))
    for name in ("substitutions", "deletions", "insertions"):
        assert figures[name] == getattr(expected, name)
    assert figures["words"] == sum(len(text.split()) for text in texts[0])
    assert figures["wer"] == pytest.approx(sum(one.errors for one in result.utterances) / figures["words"])
    for one, wanted, found in zip(result.utterances, *texts, strict=True):
        assert [edit.wanted for edit in one.edits if edit.wanted] == wanted.split()
        assert [edit.found for edit in one.edits if edit.found] == found.split()
    rounded = {"wer": round(result.wer, 4), "cer": round(result.cer, 4)}
    assert rounded == word_errors(*texts, language="de")  # letters pass the basic normalizer as they are


def test_speed_is_sound_over_computing():
    assert evaluation(("a", "a"), ("b", "b")).figures()["rtfx"] == 1.0


def test_texts_without_words():
    result = evaluation(("", ""), ("", "two words"), ("gone", ""), ("...", "!"), name="basic")
    assert [one.rate for one in result.utterances] == [0, 2, 1, 0]
    figures = result.figures()
    assert (figures["words"], figures["wer"]) == (1, 3.0)
    assert (figures["insertions"], figures["deletions"]) == (2, 1)
    for found in ("", "two words"):
        nothing = evaluation(("...", found), name="basic")
        assert word_errors(["..."], [found], "de") == {"wer": None, "cer": None}
        assert (nothing.figures()["wer"], nothing.figures()["cer"]) == (None, None)
        assert summary(nothing)[0].startswith("WER –   CER –   (1 utterances, 0 words;")


def test_errors_by_kind_and_the_worst_first():
    result = evaluation(("a b c", "a x c"), ("a b", "a x"), ("one", "won one"), ("x y z w", "x y z"), name="none")
    assert result.common("substitution") == [("b → x", 2)]
    assert result.common("insertion") == [("won", 1)]
    assert result.common("deletion") == [("w", 1)]
    assert [one.name[-1] for one in result.worst()] == ["3", "2", "1", "4"]


def test_the_normalizer_is_that_of_the_language_and_is_named():
    pair = ("It's two colours!", "it is 2 colors")
    english, german = evaluation(pair), evaluation(pair, language="de")
    assert (english.wer, english.normalizer) == (0, "whisper english")
    assert (german.wer > 0, german.normalizer) == (True, "whisper basic")
    assert evaluation(pair, name="basic").normalizer == "whisper basic"
    assert evaluation(("A", "a"), name="none").figures()["wer"] == 1
    with pytest.raises(UsageError, match="'english'"):
        evaluation(pair, name="english", keep_marks=True)
    with pytest.raises(UsageError, match="one of english, basic, letters, none"):
        normalizer("french")


@pytest.mark.parametrize("language", ["zh", "yue", "ja", "th", "lo", "my"])
def test_letters_are_the_words_of_languages_without_blanks(language):
    from whisper.normalizers import BasicTextNormalizer

    theirs = BasicTextNormalizer(split_letters=True)
    for text in ("你好, 世界!", "สวัสดี ชาวโลก", "GPT 3 です。"):
        assert normalizer("letters")(text) == theirs(text).strip()
    result = evaluation(("我们去北京", "我们去 南京"), language=language)
    assert (result.wer, result.cer, result.normalizer) == (0.2, 0.2, "whisper letters")
    assert result.common("substitution") == [("北 → 南", 1)]
    figures = word_errors(["我们去北京", "a b"], ["我们去南京", "ab"], language)
    assert figures == {"wer": round(1 / 7, 4), "cer": round(1 / 7, 4)}
    assert evaluation(("我们去北京", "我们去 南京"), language=language, name="basic").wer == 2


@pytest.mark.parametrize(("with_mark", "without"), [("कि", "क"), ("கி", "க")])
def test_vowel_signs_stay_on_request(with_mark, without):
    dropped = evaluation((with_mark, without), language="hi")
    kept = evaluation((with_mark, without), language="hi", keep_marks=True)
    assert (dropped.wer, kept.wer) == (0, 1)
    assert kept.normalizer == "whisper basic, marks kept"
    assert kept.common("substitution") == [(f"{with_mark} → {without}", 1)]


def test_words_stand_under_each_other():
    rows = [*text_rows(aligned("the cat sat", "a the cats"))]
    assert rows == ["wanted  * the cat  sat", "found   a the cats ***", "error   I     S    D"]
    wide = [*text_rows(aligned("水 a", "b a"))]
    assert wide == ["wanted  水 a", "found   b  a", "error   S"]
    assert columns("कि") == 2  # a spacing sign
    assert columns("é") == columns("é") == 1
    long = [*text_rows(aligned("word " * 50, "word " * 50))]
    assert len(long) > 4
    assert max(map(len, long)) < 120


EVIL = "``` <script>alert(1)</script> & \x1b[31m ~~~~ | ````"


def hostile() -> TranscriptEvaluation:
    result = evaluation((EVIL, "a"), ("a b", f"a {EVIL.split()[1]}"), name="none")
    result.broken.append(f"a.jsonl line 3: {EVIL}")
    return result


def test_html_escapes_what_comes_from_texts(tmp_path):
    write_report(hostile(), tmp_path / "a.HTML", {"manifest": EVIL, "options": {"beam_size": 5}})
    page = Page.of(tmp_path / "a.HTML")
    assert "script" not in page.tags
    assert "\x1b" not in (tmp_path / "a.HTML").read_text()
    assert "<script>alert(1)</script>" in page.text
    for part in ("b → <script>alert(1)</script> (1)", "a.jsonl line 3", '"beam_size": 5', "wer"):
        assert part in page.text


def test_markdown_fences_what_comes_from_texts(tmp_path):
    write_report(hostile(), tmp_path / "a.md", {"manifest": EVIL})
    text = (tmp_path / "a.md").read_text()
    assert "\x1b" not in text
    fence = None
    for line in text.split("\n"):
        ticks = re.match("`{3,}", line)
        if fence is None and ticks:
            fence = ticks[0]
        elif fence is not None and line == fence:
            fence = None
        elif fence is None:
            assert "<script>" not in line
    assert fence is None
    assert "| normalizer | none |" in text


@pytest.fixture
def manifest(tmp_path: Path, tone: Path) -> Path:
    shutil.copy(SAMPLE / "speech.flac", tmp_path / "speech.flac")
    good = {"audio_filepath": "speech.flac", "text": (SAMPLE / "speech.txt").read_text().strip()}
    (tmp_path / "cut.flac").write_bytes((SAMPLE / "speech.flac").read_bytes()[:30])
    rows = [
        good, b'{"audio_filepath": ', good | {"text": 5}, good | {"audio_filepath": "nowhere.wav"},
        {"audio_filepath": "tone.wav", "text": "\U0001f600"}, b'{"text": "\xff"}',
        good | {"audio_filepath": "cut.flac"}, {"audio_filepath": "speech.flac"},
        b'{"audio_filepath": "speech.flac", "text": "\\ud800"}',
        good | {"text": ["a", "b"]}, {"audio_filepath": "tone.wav", "text": ""},
    ]  # fmt: skip
    return lines(tmp_path / "list.jsonl", rows)


@pytest.mark.ci
def test_broken_lines_and_recordings_are_named_by_their_line_and_the_others_evaluated(capsys, tmp_path, manifest):
    report = tmp_path / "new" / "report.md"
    code, out, err = run(capsys, "evaluate", "asr", manifest, "-q", "--report", report, "--batch_size", 3)
    assert code == 1
    told = [re.match(r"multimodal: error: \S+/list\.jsonl line (\d+): ", line) for line in err.splitlines()]
    assert [match and int(match[1]) for match in told] == [2, 3, 4, 6, 7, 8, 9, 10]
    assert "3 utterances" in out
    assert "left out as broken: 8" in out
    assert "normalizer: whisper english" in out
    text = report.read_text()
    assert "| utterances | 3 |" in text
    assert "list.jsonl line 4: " in text
    assert "asr-conformer-en" in text


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*the text was cut")
def test_a_report_of_a_model_without_times_of_words(capsys, tmp_path):
    (tmp_path / "a.wav").write_bytes(wav(1.0))
    manifest = lines(tmp_path / "list.jsonl", [{"audio_filepath": "a.wav", "duration": 1.0, "text": "one"}])
    flags = ["--model", folder(tmp_path / "moonshine"), "--vad_filter", "False", "-q", "--report", tmp_path / "a.html"]
    code, _, err = run(capsys, "evaluate", "asr", manifest, *flags)
    assert (code, err) == (0, "")
    assert "<audio" in (tmp_path / "a.html").read_text()


@pytest.mark.ci
def test_json_and_the_flags_of_transcription(capsys, tmp_path, manifest):
    flags = ["--format", "json", "--limit", 1, "--beam_size", 1, "--compute_type", "float32", "--vad_filter"]
    code, out, err = run(capsys, "evaluate", "asr", manifest, *flags, "-q", "--report", tmp_path / "a.html")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["utterances"] == 1
    assert 0 <= found["wer"] < 0.5
    assert found["rtfx"] > 0
    assert found["left_out"] == []
    page = Page.of(tmp_path / "a.html")
    assert '"beam_size": 1' in page.text
    assert '"vad_filter": true' in page.text


@pytest.mark.ci
@pytest.mark.filterwarnings("default:--")
def test_a_flag_without_effect_is_told(capsys, manifest):
    code, _, err = run(capsys, "evaluate", "asr", manifest, "--limit", 1, "--vad_threshold", 0.3)
    assert (code, "--vad_threshold: has no effect without --vad_filter" in err) == (0, True)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("more", [(), ("--whole_recordings",)])
def test_a_list_with_columns_of_other_names(capsys, tmp_path, more):
    (tmp_path / "a.wav").write_bytes(wav(1.0))
    (tmp_path / "list.csv").write_text("sound,said\na.wav,two words\n")
    named = ["--path_column", "sound", "--text_column", "said", *more]
    code, out, err = run(capsys, "evaluate", "asr", tmp_path / "list.csv", "--beam_size", 1, *named, "--format", "json")
    assert (code, '"utterances": 1' in out) == (0, True), err


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["empty.jsonl"], "empty.jsonl: no usable item (0 found)"),
        (["nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["only.jsonl"], "only.jsonl: no utterance could be evaluated (only.jsonl line 1: "),
        (["list.jsonl", "--report", "a.txt"], "--report a.txt: must end in .md or .html"),
        (["list.jsonl", "--report", "folder.md"], "--report folder.md: cannot be written (a folder)"),
        (["list.jsonl", "--report", "list.jsonl/a.md"], "--report list.jsonl/a.md: its folder cannot be made"),
        (["list.jsonl", "--normalizer", "none", "--keep_marks"], "keep_marks: is for the normalizer 'basic'"),
        (["list.jsonl", "--language", "de"], "knows 'en' only"),
        (["list.jsonl", "--temperature", "0.5"], "temperature"),
        (["list.jsonl", "-m", "clip-vit-16"], "expected a speech model, got clip"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(capsys, tmp_path, monkeypatch, manifest, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    lines(tmp_path / "only.jsonl", [{"audio_filepath": "cut.flac", "text": "a"}])
    (tmp_path / "folder.md").mkdir()
    code, out, err = run(capsys, "evaluate", "asr", *flags)
    assert (code, out) == (1, "")
    assert message in one_line(err)


def test_summary_and_record_hold_the_same_figures():
    result = evaluation(("a b", "a c"), name="none")
    text = "\n".join(summary(result))
    assert "WER 50.00 %" in text
    assert "most frequent substitutions: b → c (1)" in text
    assert record(result)["frequent_substitutions"] == [["b → c", 1]]
