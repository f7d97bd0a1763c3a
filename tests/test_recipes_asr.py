"""The speech recipe end to end on tones, its batches, and the CTC best path."""

import json
import runpy
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from multimodal.ctc import ctc_greedy, ctc_paths
from multimodal.errors import UsageError
from multimodal.tokens.bytepair import BytePairTokenizer
from multimodal.train.speech import (
    augment,
    bucketed,
    collate,
    greedy_texts,
    join_some,
    load_features,
    padding_share,
    plain,
    read_manifest,
    training_batches,
    transcript_ids,
)  # fmt: skip
from multimodal.weights.folder import load_folder

RECIPE = Path(__file__).parent.parent / "recipes" / "train_asr.py"
TONES = {"low": 300, "high": 2500}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Eight recordings of one to three tones, each of which has a name."""
    rng, lines = np.random.default_rng(0), []
    for number in range(8):
        words = rng.choice(list(TONES), rng.integers(1, 4)).tolist()
        times = np.arange(6400) / 16000
        sound = np.concatenate([np.sin(2 * np.pi * TONES[word] * times) for word in words])
        sound = 0.3 * sound + 0.01 * rng.standard_normal(len(sound))
        with wave.open(str(tmp_path / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes((sound * 32767).astype("<i2").tobytes())
        lines.append(json.dumps({"audio_filepath": f"{number}.wav", "duration": 1.0, "text": " ".join(words)}))
    path = tmp_path / "tones.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_training_lowers_the_loss_and_writes_a_checkpoint(manifest: Path, tmp_path: Path):
    recipe = runpy.run_path(str(RECIPE))
    sizes = "--steps 24 --warmup 4 --rate 3e-3 --every 6 --save 12 --budget 1200 --width 32 --layers 2 --easy 0"
    sizes += " --vocabulary 270"
    folders = ["--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    data = [
        "--train",
        str(manifest),
        "--valid",
        str(manifest),
        *folders,
        "--no-autocast",
        *sizes.split(),
        "--vocabulary",
        "270",
    ]
    recipe["train"](recipe["arguments"](data))
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]
    saved = load_folder(tmp_path / "out")
    features = load_features(manifest, tmp_path / "run" / "cache")
    assert len(greedy_texts(saved.model, saved.tokenizer, features)) == 8
    longer = [*data, "--resume", "--steps", "30"]
    recipe["train"](recipe["arguments"](longer))
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [6, 12, 18, 24, 30]


def test_batches_do_not_depend_on_where_the_training_resumes(manifest: Path, tmp_path: Path):
    features, ids = load_features(manifest, tmp_path / "cache"), [[3 + i] for i in range(8)]
    whole = training_batches(features, ids, 300, seed=5)
    later = training_batches(features, ids, 300, seed=5, start=4)
    for _ in range(4):
        next(whole)
    for _ in range(5):
        (epoch, a), (other, b) = next(whole), next(later)
        assert epoch == other
        assert torch.equal(a.features, b.features)
        assert torch.equal(a.ids, b.ids)


def test_every_utterance_comes_once_an_epoch_within_the_budget():
    lengths = torch.randint(20, 900, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    generator = torch.Generator().manual_seed(1)
    groups = join_some(lengths, 0.3, 1200, generator)
    batches = bucketed(groups, lengths, 8000, generator)
    assert sorted(i for batch in batches for group in batch for i in group) == list(range(400))
    joined = [sum(lengths[i] for i in group) for group in groups if len(group) == 2]
    assert len(joined) > 20
    assert max(joined) <= 1200
    assert all(max(sum(lengths[i] for i in g) for g in b) * len(b) <= 8000 for b in batches)
    assert padding_share(batches, lengths) < 0.2


def test_features_are_cached_and_changed_recordings_are_read_again(manifest: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    first = load_features(manifest, cache)
    assert [len(f) for f in first] == [len(f) for f in load_features(manifest, cache)]
    assert len(list(cache.iterdir())) == 1
    (tmp_path / "0.wav").write_bytes((tmp_path / "1.wav").read_bytes() + b"\0" * 2)
    again = load_features(manifest, cache)
    assert torch.equal(again[0], first[1])


def test_augmented_frames_stay_finite_and_near_the_pace():
    for seed in range(20):
        made = augment(torch.randn(200, 80), torch.Generator().manual_seed(seed))
        assert 180 <= len(made) <= 220
        assert made.isfinite().all()
    assert len(augment(torch.randn(1, 80), torch.Generator().manual_seed(0))) == 1


def test_collated_rows_keep_their_values():
    batch = collate([torch.ones(70, 80), torch.ones(9, 80)], [[5, 6, 7], []])
    assert batch.features.sum() == 79 * 80
    assert batch.lengths.tolist() == [70, 9]
    assert batch.ids[0, :3].tolist() == [5, 6, 7]
    assert batch.id_lengths.tolist() == [3, 0]


def test_transcripts_are_plain_and_words_are_the_same_tokens_anywhere():
    assert plain("It’s  2 o'clock, Mr. Smith!") == "it's 2 o'clock mr smith"
    tokenizer = BytePairTokenizer.train([" the cat", " a the cat"] * 5, 280)
    whole = transcript_ids(tokenizer, "the cat the cat")
    assert whole == transcript_ids(tokenizer, "the cat") * 2


def test_a_damaged_manifest_is_named(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"audio_filepath": "a.wav"}\n')
    with pytest.raises(UsageError, match=r"bad\.jsonl.*text"):
        read_manifest(path)


def test_best_path_joins_repeats_and_keeps_them_across_a_blank():
    winners = torch.tensor([[2, 2, 3, 1, 1, 3, 1, 0], [3, 0, 0, 0, 2, 2, 2, 2]])
    logits = torch.nn.functional.one_hot(winners, 4).float()
    assert ctc_greedy(logits, torch.tensor([8, 4]), blank=3) == [[2, 1, 1, 0], [0]]
    path = ctc_paths(logits, torch.tensor([8, 4]), blank=3)[0]
    assert path.spans == [(0, 2), (3, 5), (6, 7), (7, 8)]
