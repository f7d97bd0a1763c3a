"""Error rates of a Conformer's four decoders."""

import json
from dataclasses import replace

import pytest

from multimodal.errors import UsageError
from multimodal.tasks.evaluate.speech import decoders
from multimodal.tasks.evaluate.speech.decoders import DecoderOptions, encode, evaluate_decoders, transcripts
from multimodal.tasks.transcribe.conformer.decode import HybridBeam, hybrid_beam_search
from multimodal.tasks.transcribe.transcribe import transcribe
from multimodal.tokens.audio.log_mel import filterbank
from multimodal.tokens.audio.reading import read_audio
from multimodal.weights.folder import Checkpoint, load_folder
from tests.helpers.data.audio_files import first_words
from tests.helpers.paths import ROOT

SAMPLE = ROOT / "assets" / "sample" / "speech.flac"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_folder(ROOT / "assets" / "asr-conformer-en")


@pytest.mark.ci
def test_each_decoder_has_its_error_rates(checkpoint, tmp_path):
    line = json.dumps({"audio_filepath": "speech.flac", "text": SAMPLE.with_suffix(".txt").read_text()})
    (tmp_path / "speech.flac").write_bytes(SAMPLE.read_bytes())
    (tmp_path / "sample.jsonl").write_text(f"{line}\n" * 2)
    figures = evaluate_decoders(checkpoint, str(tmp_path / "sample.jsonl"), DecoderOptions(beam_size=4))
    assert figures["utterances"] == 2
    for decoder in ("greedy", "ctc", "attention", "joint"):
        assert 0 <= figures[decoder]["wer"] < 1.5
        assert 0 <= figures[decoder]["cer"] < 1.5
    assert figures["joint"]["wer"] < 0.2


@pytest.mark.ci
def test_joint_and_greedy_texts_are_those_of_transcribe(checkpoint):
    options = DecoderOptions(("greedy", "joint"), beam_size=3)
    texts, seconds = transcripts(checkpoint, [filterbank(read_audio(first_words()))], options)
    assert texts["greedy"] == [transcribe(first_words(), checkpoint, beam_size=1)["text"]]
    assert texts["joint"] == [transcribe(first_words(), checkpoint, beam_size=3)["text"]]
    assert seconds.keys() == {"encoder", "greedy", "joint"}


@pytest.mark.ci
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_batched_beam_search_equals_single(checkpoint, weight):
    features = filterbank(read_audio(SAMPLE))
    parts = [features[:150], features[:70], features[100:200]]
    together = hybrid_beam_search(*encode(checkpoint.model, parts), checkpoint, HybridBeam(3, weight))
    for number, part in enumerate(parts):
        alone = hybrid_beam_search(*encode(checkpoint.model, [part]), checkpoint, HybridBeam(3, weight))
        assert alone.ids[0] == together.ids[number]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[number], abs=1e-3)


@pytest.mark.parametrize(("language", "normalizer", "wer"), [
    ("en", None, 0.0), ("de", None, 1.0), (None, None, 1.0), ("de", "english", 0.0), ("en", "none", 1.0),
])  # fmt: skip
def test_error_rates_are_of_texts_in_the_model_s_language(checkpoint, tmp_path, monkeypatch, language, normalizer, wer):
    (tmp_path / "speech.flac").write_bytes(SAMPLE.read_bytes())
    (tmp_path / "a.jsonl").write_text(json.dumps({"audio_filepath": "speech.flac", "text": "fünf"}))
    monkeypatch.setattr(decoders, "transcripts", lambda *_: ({"greedy": ["Funf"]}, {"encoder": 0, "greedy": 0}))
    stated = replace(checkpoint, card={"language": language} if language else {})
    figures = evaluate_decoders(stated, str(tmp_path / "a.jsonl"), DecoderOptions(("greedy",), normalizer=normalizer))
    assert figures["greedy"]["wer"] == wer
    if normalizer is None:
        assert decoders.ErrorRates(stated, ["fünf"], [], "greedy")(stated.model)["wer"] == wer


@pytest.mark.parametrize(("options", "message"), [
    ({"ctc_weight": 1.5}, r"ctc_weight must be between 0 and 1 \(got 1\.5\)"),
    ({"normalizer": "english", "keep_marks": True}, "keep_marks: is for the normalizer 'basic' or 'letters', not"),
])  # fmt: skip
def test_unfit_options_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        DecoderOptions(**options)
