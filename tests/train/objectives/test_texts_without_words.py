"""Recordings whose transcripts have no words, in the training of recognizers."""

import json

import pytest
import torch

from multimodal.data.batching import UtteranceGroup
from multimodal.data.datasets.speech import SpeechCorpus
from multimodal.data.datasets.speech_windows import SpeechWindows, WindowSample
from multimodal.data.loader import generator
from multimodal.models.conformer import ConformerCTC
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.whisper_small import SmallWhisperTokenizer
from multimodal.train.objectives.augment_speech import collate
from multimodal.train.objectives.multitask import PrepareWindow
from multimodal.train.objectives.recognizer import Recognition, joint_config
from tests.helpers.data.sets import wav


@pytest.fixture
def manifest(tmp_path):
    """A recording of a word, and two without."""
    rows = []
    for number, text in enumerate(("low", "", " ")):
        (tmp_path / f"{number}.wav").write_bytes(wav(0.5, rate=16000))
        rows.append({"audio_filepath": f"{number}.wav", "language": "en", "text": text})
    path = tmp_path / "list.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_they_have_no_tokens_for_ctc_and_the_end_alone_for_attention(manifest, tmp_path, caplog):
    corpus, tokenizer = SpeechCorpus([str(manifest)], tmp_path / "cache"), BytePairTokenizer.train([" low"] * 2, 262)
    corpus.encode(tokenizer)
    assert corpus.ids == [tokenizer.encode(" low"), [], []]
    assert "2 of 3 texts have no words: taken for no speech" in caplog.text
    objective = Recognition(ConformerCTC(joint_config(tokenizer.vocab_size, 16, 1, 1, 20, 0.0)), tokenizer)
    for numbers in ((0, 1), (1, 2)):  # the second batch has no token at all
        read = [corpus.read(UtteranceGroup((number,), False)) for number in numbers]
        sums = objective(collate([(one.features, one.ids) for one in read]))
        sum(sums.values()).backward()
        assert all(torch.isfinite(one) for one in sums.values())
        assert all(p.grad.isfinite().all() for p in objective.parameters() if p.grad is not None)


def test_their_windows_have_whispers_token_of_no_speech(manifest, tmp_path, caplog):
    clips = SpeechWindows([manifest], tmp_path / "cache")
    assert "2 of 3 texts are empty: taken for no speech" in caplog.text
    tokenizer = SmallWhisperTokenizer.train([" low"] * 2, 262, ["en"], 101)
    prepare = PrepareWindow(tokenizer, "low", 80, timestamps=0.0)
    silent = [tokenizer.sot, tokenizer.no_speech, tokenizer.eot]
    texts = {}
    for numbers in ((1,), (1, 2), (0,), (1, 0), (0, 2)):
        window = prepare(clips.read(WindowSample(numbers, 128)), generator(numbers))
        texts[numbers] = [row.ids for row in window.rows], len(window.letters)
    assert texts[1,] == texts[1, 2] == ([silent], 0)
    assert texts[1, 0] == texts[0, 2] == texts[0,]
    assert texts[0,][1] == len("low")
