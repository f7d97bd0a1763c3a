"""The flags of `multimodal transcribe`: openai-whisper's and ours, and what becomes of them."""

import argparse
import ast
import re
import sys
from dataclasses import replace

import pytest

import multimodal
from multimodal.cli import main
from multimodal.cli.output import in_flags
from multimodal.cli.speech import transcribe
from multimodal.errors import CheckpointError, UsageError
from multimodal.weights.vision.open_clip import model_settings
from tests.helpers.commands import one_line, run
from tests.helpers.paths import ROOT
from tests.helpers.tiny_whisper import whispers

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # openai-whisper's open file


def given(*flags: str) -> dict:
    found = vars(main.parser().parse_args(["transcribe", "a.wav", *flags]))
    return {name: value for name, value in found.items() if name != "parser"}


def test_every_flag_of_openai_whisper_is_there_with_its_default(monkeypatch):
    from whisper.transcribe import cli as reference

    ours = main.parser()._subparsers._group_actions[0].choices["transcribe"].load()
    help_of = {name.lstrip("-"): action.help for action in ours._actions for name in action.option_strings}
    seen = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, *_: seen.append(self) or sys.exit())
    with pytest.raises(SystemExit):
        reference()
    theirs = {action.dest: action.default for action in seen[0]._actions if action.option_strings}
    assert len(theirs) > 30
    assert theirs.keys() <= help_of.keys()
    for name in theirs.keys() - {"model", "device", "help", "threads"}:
        value = theirs[name]
        if value is not None and not isinstance(value, bool):
            shown = f"{value:g}" if isinstance(value, int | float) else value
            assert f"default: {shown}" in help_of[name], name


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"beam_size": 5, "best_of": 5}),
        (["--beam_size", "None"], {"beam_size": None, "best_of": 5}),
        (["--temperature", "0.5"], {"temperature": [0.5, 0.7, 0.9]}),
        (["--temperature_increment_on_fallback", "0.5"], {"temperature": [0.0, 0.5, 1.0]}),
        (["--temperature_increment_on_fallback", "None"], {"temperature": [0.0]}),
        (["--temperature", "2"], {"temperature": [2.0]}),
        (["--fp16", "False"], {"compute_type": "float32"}),
        (["--fp16", "True"], {}),
        (["--logprob_threshold", "-2", "--no_speech_threshold", "None"], {"logprob_threshold": -2.0,
                                                                          "no_speech_threshold": None}),
        (["--suppress_tokens", "-1,7"], {"suppress_tokens": (-1, 7)}),
        (["--suppress_tokens", ""], {"suppress_tokens": ()}),
        (["--max_line_width", "20"], {"word_timestamps": True}),
        (["--max_line_width", "None", "--highlight_words", "False"], {}),
        (["--plot"], {"word_timestamps": True}),
        (["--plot", "--word_timestamps", "False"], {"word_timestamps": False}),
        (["--hallucination_silence_threshold", "2"], {"hallucination_silence_threshold": 2.0, "word_timestamps": True}),
        (["--clip_timestamps", "1,2.5"], {"clip_timestamps": (1.0, 2.5)}),
        (["--languages", "en, de", "--multilingual"], {"languages": ("en", "de"), "multilingual": True}),
        (["--vad_filter", "--vad_threshold", "0.3", "--split_channels", "False"],
         {"vad_filter": True, "vad_threshold": 0.3, "split_channels": False}),
        (["--decode_log", "x", "--verbose", "None", "--threads", "0"], {"decode_log": True}),
        (["--condition_on_previous_text", "False", "--device", "cpu", "--seed", "3", "--batch_size", "2"],
         {"condition_on_previous_text": False, "device": "cpu", "seed": 3, "batch_size": 2}),
    ],
)  # fmt: skip
def test_flags_become_options_and_only_those_that_were_given(flags, expected):
    from multimodal.tasks.transcribe.options import options_for

    checkpoint = whispers()[1]
    found = transcribe.api_options(given(*flags), checkpoint)
    assert found == {"beam_size": 5, "best_of": 5} | expected
    options_for(checkpoint, {name: value for name, value in found.items() if name != "batch_size"})


def test_a_models_own_defaults_hold_and_a_ctc_model_has_no_others(models):
    from multimodal.weights.load import load

    own = replace(whispers()[1], card={"transcribe": {"beam_size": 2}})
    assert transcribe.api_options(given(), own) == {"best_of": 5}
    assert transcribe.api_options(given("--beam_size", "3"), own) == {"best_of": 5, "beam_size": 3}
    asked = replace(own, card={"generation": {"num_beams": 3}})  # by its generation_config.json
    assert transcribe.api_options(given(), asked) == {"best_of": 5}
    ctc = load(models / "asr")
    assert transcribe.api_options(given(), ctc) == {}
    assert transcribe.api_options(given("--temperature", "0"), ctc) == {"temperature": [0.0]}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "AUDIO"), (["a.wav", "--beam_size", "0"], "--beam_size: must be an integer of at least 1 (got 0)"),
        (["a.wav", "--language", "klingon"], "klingon"), (["a.wav", "--verbose=yes"], "'yes'"),
        (["a.wav", "--patience", "nan"], "--patience"), (["a.wav", "--vad_threshold", "1.5"], "--vad_threshold"),
        (["a.wav", "--temperature", "-1"], "--temperature"), (["a.wav", "--suppress_tokens", "1,x"], "'1,x'"),
        (["a.wav", "--temperature_increment_on_fallback", "0"], "--temperature_increment_on_fallback"),
        (["a.wav", "--clip_timestamps", "1;2"], "'1;2'"), (["a.wav", "--languages", "en,"], "'en,'"),
        (["a.wav", "--max_line_width", "9", "--word_timestamps", "False"], "--max_line_width"),
        (["a.wav", "--fp16", "False", "--compute_type", "int8"], "int8"), (["a.wav", "--rate", "8000"], "--rate"),
        (["a.wav", "-o", "-", "-f", "all"], "--format"), (["a.wav", "-o", "-", "--plot"], "--plot"),
        (["a.wav", "-o", "-", "--skip_existing"], "--skip_existing"), (["a.wav", "--stream"], "a.wav"),
        (["--stream", "--split_channels"], "--split_channels"), (["--stream", "-f", "srt"], "srt"),
        (["https://x.test/a.wav"], "https://x.test/a.wav: URLs are not read"),
    ],
)  # fmt: skip
def test_flags_that_make_no_sense_are_one_line_and_exit_2(capsys, flags, named):
    code, out, err = run(capsys, "transcribe", *flags)
    assert (code, out) == (2, "")
    assert err.startswith("multimodal transcribe: error: ")
    assert err.count("\n") == 1
    assert named in err


@pytest.mark.parametrize(
    ("words", "prog", "cause"),
    [
        ("transcribe a.wav --lanuage en", "transcribe", "unknown flag --lanuage, did you mean --language?"),
        ("caption --modl captioner", "caption", "unknown flag --modl, did you mean --model?"),
        ("evaluate zeroshot d --labls_file=x", "evaluate zeroshot", "unknown flag --labls_file, did you mean "
         "--labels_file?"),
        ("transcibe a.wav", "", "unknown command 'transcibe', did you mean transcribe?"),
        ("evaluate zero-shot d", "evaluate", "unknown kind 'zero-shot', did you mean zeroshot?"),
        ("models -x --qqq", "models", "unknown flag -x"),
        ("caption a.png --beam_size 2 b.png", "caption", "unexpected argument 'b.png' (files and texts stand together, "
         "before the flags)"),
        ("transcribe a.wav --language germn", "transcribe", "argument --language: language 'germn' is not one of "
         "Whisper's 100, did you mean german?"),
    ],
)  # fmt: skip
def test_an_unknown_flag_or_command_names_the_nearest_and_the_help(capsys, words, prog, cause):
    prog = f"multimodal {prog}".strip()
    assert run(capsys, *words.split()) == (2, "", f"{prog}: error: {cause} (see {prog} --help)\n")


def test_values_that_look_like_flags_are_no_unknown_flags():
    parse = main.parser().parse_args
    assert parse(["transcribe", "a.wav", "--logprob_threshold", "-.5", "--beam", "2"]).logprob_threshold == -0.5
    assert parse(["transcribe", "-oout", "-", "--", "--x"]).audio == ["-", "--x"]
    assert parse(["generate", "-a text with spaces", "-m", "m"]).texts == ["-a text with spaces"]


def test_a_true_flag_alone_leaves_the_file_alone():
    parsed = main.parser().parse_args(["transcribe", "--skip_existing", "a.wav", "b.wav"])
    assert (parsed.skip_existing, parsed.audio) == (True, ["a.wav", "b.wav"])
    parsed = main.parser().parse_args(["transcribe", "--skip_existing", "False", "a.wav", "--plot"])
    assert (parsed.skip_existing, parsed.audio, parsed.plot) == (False, ["a.wav"], True)


@pytest.mark.ci
def test_library_errors_name_arguments_and_the_command_flags(capsys, models, images):
    with pytest.raises(UsageError, match=r"^threshold must be in \[0, 1\] for softmax scores \(got 2\)$"):
        multimodal.classify(images / "red.png", ["a", "b"], models / "clip", threshold=2.0)
    with pytest.raises(UsageError, match=r"^scores sigmoid: .* calibration='platt'"):
        multimodal.classify(images / "red.png", ["a", "b"], models / "clip", scores="sigmoid")
    labels = ("classify", images, "--labels", "a,b", "-m", models / "clip")
    assert "error: --threshold must be in [0, 1]" in one_line(run(capsys, *labels, "--threshold", 2)[2])
    assert "--calibration platt gives" in one_line(run(capsys, *labels, "--scores", "sigmoid")[2])
    with pytest.raises(CheckpointError) as error:
        model_settings({})
    assert "their architecture, such as --architecture ViT-B-32, since" in in_flags(error.value)


def test_the_name_of_a_file_in_the_place_of_the_folder_of_transcripts_is_refused(capsys, tmp_path):
    code, _, err = run(capsys, "transcribe", "absent.wav", "-o", tmp_path / "a.srt")
    assert (code, "a.srt: expected a folder, " in err) == (2, True)
    (tmp_path / "a.srt").mkdir()
    assert run(capsys, "transcribe", "absent.wav", "-o", tmp_path / "a.srt")[0] == 1


def texts_of(node: ast.AST) -> str:
    return " ".join(n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


@pytest.mark.ci
def test_no_error_or_warning_of_the_library_names_a_flag():
    flag = re.compile(r"(?<![\w-])--\w")
    for path in (ROOT / "multimodal").rglob("*.py"):
        if (ROOT / "multimodal" / "cli") in path.parents or not flag.search(text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and re.search(r"(Error|demand|warn)$", ast.unparse(node.func)):
                assert not flag.search(texts_of(node)), f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--patience", "2"], "patience"), (["--hotwords", "x"], "hotwords"), (["--device", "abacus"], "abacus"),
        (["--device", "meta"], "meta"), (["--task", "translate"], "translate"),
        (["--decode_log", "/nowhere/x"], "/nowhere/x"), (["--beam_size", "3", "--lm", "/nowhere"], "/nowhere"),
        (["--vad_speech_pad_ms", "5000"], "--vad_speech_pad_ms must be at most 3968 in a window of 8 s (got 5000)"),
    ],
)  # fmt: skip
def test_what_the_model_or_machine_cannot_do_is_one_line(say, tone, tmp_path, flags, named):
    code, out, err = say(tone, "-o", tmp_path / "out", *flags)
    assert (code, out) == (1, "")
    assert named in one_line(err)


@pytest.mark.filterwarnings("default:--")
@pytest.mark.parametrize(
    ("flags", "needed"),
    [(["--lm_weight", "2"], "--lm"), (["--vad_filter", "False", "--vad_threshold", "0.3"], "--vad_filter")],
)
def test_flags_without_effect_are_told(say, tone, flags, needed):
    code, _, err = say(tone, "-o", "-", *flags)
    assert code == 0
    assert err.startswith(f"multimodal: warning: {flags[-2]}: has no effect without {needed}\n")
