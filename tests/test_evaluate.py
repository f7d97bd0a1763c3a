"""evaluate.py: figures of the four decoders, their place in the card, and one line for what cannot be scored."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from multimodal.data.datasets.class_names import evenly
from multimodal.tasks.evaluate.scores import top_shares, word_errors
from multimodal.tasks.transcribe.conformer.windows import JointBeam, joint_beam
from multimodal.tasks.transcribe.transcribe import transcribe
from multimodal.train.recipe_cli import start
from multimodal.weights.folder import load_folder

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "assets" / "asr-conformer-en"
SAMPLE = ROOT / "assets" / "sample" / "speech.flac"


@pytest.fixture
def recipe(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    import evaluate

    return evaluate


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """The sample that ships, twice."""
    line = {"audio_filepath": str(SAMPLE), "text": (SAMPLE.with_suffix(".txt")).read_text()}
    path = tmp_path / "sample.jsonl"
    path.write_text((json.dumps(line) + "\n") * 2)
    return path


def test_four_decoders_are_scored_and_the_card_gets_the_figures(recipe, manifest, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED, folder)
    facts = tmp_path / "facts.json"
    facts.write_text('{"summary": "another"}')
    options = ["--trust_paths", "--write", "--card", str(facts), "--report", str(tmp_path / "report.md"), "--beam", "4"]
    start(recipe.main, recipe.Settings, ["--model", str(folder), "--data", f"sample={manifest}", *options])
    figures = json.loads(capsys.readouterr().out)
    assert figures["sample"]["utterances"] == 2
    for decoder in ("greedy", "ctc", "attention", "joint"):
        assert 0 <= figures["sample"][decoder]["cer"] < 1.5
        assert 0 <= figures["sample"][decoder]["wer"] < 1.5
    assert figures["sample"]["joint"]["wer"] < 0.2
    written = load_folder(folder)
    assert written.card["figures"] == figures
    assert written.card["summary"] == "another"
    assert written.card["language"] == "en"
    assert (folder / "model.safetensors").read_bytes() == (SHIPPED / "model.safetensors").read_bytes()
    assert "| joint wer |" in (tmp_path / "report.md").read_text()


def test_joint_and_greedy_texts_are_those_of_transcribe(recipe, manifest):
    from evaluate_speech import SpeechOptions, transcripts

    from multimodal.tokens.audio.log_mel import filterbank
    from multimodal.tokens.audio.reading import read_audio

    checkpoint = load_folder(SHIPPED)
    options = SpeechOptions(("greedy", "joint"), beam=3)
    texts, seconds = transcripts(checkpoint, [filterbank(read_audio(SAMPLE))], options)
    assert texts["greedy"] == [transcribe(SAMPLE, checkpoint)["text"]]
    assert texts["joint"] == [transcribe(SAMPLE, checkpoint, beam_size=3)["text"]]
    assert seconds.keys() == {"encoder", "greedy", "joint"}


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_beams_of_a_batch_are_those_of_each_alone(recipe, weight):
    from evaluate_speech import encode

    from multimodal.tokens.audio.log_mel import filterbank
    from multimodal.tokens.audio.reading import read_audio

    checkpoint, features = load_folder(SHIPPED), filterbank(read_audio(SAMPLE))
    parts = [features[:150], features[:70], features[100:200]]
    together = joint_beam(*encode(checkpoint.model, parts), checkpoint, JointBeam(3, weight))
    for number, part in enumerate(parts):
        alone = joint_beam(*encode(checkpoint.model, [part]), checkpoint, JointBeam(3, weight))
        assert alone.ids[0] == together.ids[number]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[number], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--data", "absent.jsonl"], 1, "absent.jsonl"),
        (["--data", "a=x/y.jsonl", "a=x/z.jsonl"], 1, "second set of the name 'a'"),
        (["--model", "absent"], 1, "absent"),
        (["--decoders", "rnnt"], 2, "rnnt"),
        (["--ctc_weight", "1.5"], 2, "--ctc_weight 1.5"),
    ],
)
def test_what_cannot_be_scored_is_said_in_one_line(recipe, manifest, capsys, options, code, message):
    with pytest.raises(SystemExit) as end:
        start(recipe.main, recipe.Settings, ["--model", str(SHIPPED), "--data", str(manifest), *options])
    assert end.value.code == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("evaluate.py: error: ")
    assert message in last


def test_help_names_the_command(recipe, capsys):
    with pytest.raises(SystemExit, match="0"):
        start(recipe.main, recipe.Settings, ["--help"])
    assert "python recipes/evaluate.py --model" in capsys.readouterr().out


def test_word_errors_are_those_of_the_corpus_after_the_normaliser():
    # "It's" and "it is" are one for the normaliser; one of 3 + 1 words is wrong
    assert word_errors(["It's here!", "one"], ["it is here", "two"])["wer"] == 0.25
    assert word_errors(["", "a"], ["", "a"]) == {"wer": 0.0, "cer": 0.0}


def test_top_shares_and_even_parts():
    scores = torch.eye(7)[:4] + torch.arange(7) * 0.01
    assert top_shares(scores, torch.tensor([0, 1, 5, 0])) == {"top1": 0.5, "top5": 0.75}
    assert evenly(range(10), 3) == [0, 3, 6]
    assert list(evenly(range(2), 5)) == [0, 1]
