"""The speech recipe end to end on tones, its batches, and the CTC best path."""

import json
import shutil
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from multimodal.data.batching import Batching, UtteranceGroup, bucketed, padding_share, speech_plan
from multimodal.data.datasets.speech import SpeechCorpus, SpeechFrames, load_features, plain, transcript_ids
from multimodal.data.loader import Loader
from multimodal.data.sources import open_source
from multimodal.decoding.ctc import ctc_greedy
from multimodal.errors import DataError, UsageError
from multimodal.models.conformer import ConformerCTC
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.train.loop import Loop
from multimodal.train.objectives.augment_speech import PrepareSpeech, SpeechAugmentation, collate
from multimodal.train.objectives.recognizer import Recognition, joint_config
from multimodal.train.optim import OptimSettings
from multimodal.train.recipe_cli import start
from multimodal.train.settings import LoopSettings
from multimodal.weights.folder import load_folder
from tests.helpers.spread import thin

TONES = {"low": 300, "high": 2500}
SMALL = ["--width", "32", "--layers", "2", "--decoder_layers", "1", "--vocabulary", "270", "--precision", "float32"]


@pytest.fixture
def recipe(load_recipe):
    return load_recipe("train_asr")


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
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes((sound * 32767).astype("<i2").tobytes())
        seconds = 0.4 * len(words)
        lines.append(json.dumps({"audio_filepath": f"{number}.wav", "duration": seconds, "text": " ".join(words)}))
    path = tmp_path / "tones.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(recipe, manifest: Path, folder: Path, *options: str) -> list[dict]:
    """Train; return the lines of metrics.jsonl."""
    data = ["--train", manifest, "--valid", manifest, "--run", folder / "run", "--out", folder / "out"]
    rates = ["--steps", "16", "--warmup", "4", "--rate", "3e-3", "--log_every", "4", "--save_every", "8"]
    rates += ["--evaluate_every", "16", "--budget", "1200", "--easy", "1"]
    start(recipe.main, [*map(str, data), *rates, *SMALL, *options])
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ci
def test_training_lowers_the_loss_and_a_resumed_run_equals_an_unbroken_one(recipe, manifest, tmp_path):
    lines = run(recipe, manifest, tmp_path)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4
    assert losses[-1] < 0.6 * losses[0]
    assert lines[-1]["eval/wer"] <= 1.5
    unbroken = (tmp_path / "out" / "model.safetensors").read_bytes()
    newest = max((tmp_path / "run" / "states").iterdir())
    assert "16" in newest.name
    shutil.rmtree(newest)
    again = run(recipe, manifest, tmp_path, "--resume")
    assert [line["loss"] for line in again if "loss" in line] == losses
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == unbroken
    report = (tmp_path / "run" / "report" / "report.md").read_text()
    assert "tones.jsonl: sha256:" in report


@pytest.mark.ci
def test_training_goes_on_from_a_checkpoint_with_its_tokenizer(recipe, manifest, tmp_path, caplog):
    first = run(recipe, manifest, tmp_path / "a")
    init = ["--init", str(tmp_path / "a" / "out"), "--vocabulary", "280", "--easy", "0"]  # 280 has no effect
    begun = load_folder(tmp_path / "a" / "out")
    second = run(recipe, f"{manifest}=2", tmp_path / "b", *init, "--steps", "4", "--terms", "attention")
    trained = load_folder(tmp_path / "b" / "out")
    assert trained.tokenizer.encode(" low high") == begun.tokenizer.encode(" low high")
    assert second[0]["attention"] < first[0]["attention"]
    assert set(second[0]).isdisjoint({"ctc", "middle"})
    assert "the CTC output stays as it is" in caplog.text
    changed = {name for name, t in trained.model.state_dict().items() if not t.equal(begun.model.state_dict()[name])}
    assert {name.split(".")[0] for name in changed} == {"encoder", "decoder"}


def test_ctc_alone_has_no_decoder(recipe, manifest, tmp_path):
    lines = run(recipe, manifest, tmp_path, "--terms", "ctc", "--steps", "4", "--no-cache")
    assert set(lines[0]).isdisjoint({"attention"})
    assert load_folder(tmp_path / "out").model.decoder is None
    with pytest.raises(SystemExit, match="1"):
        run(recipe, manifest, tmp_path / "b", "--init", str(tmp_path / "out"), "--steps", "4")


@pytest.mark.ci
def test_a_chunked_model_is_trained_for_streams(recipe, manifest, tmp_path):
    run(recipe, manifest, tmp_path / "whole", "--chunk", "100", "--dynamic", "--steps", "1")
    options = ["--init", str(tmp_path / "whole" / "out"), "--chunk", "4", "--left", "8", "--dynamic", "--steps", "4"]
    assert run(recipe, manifest, tmp_path, *options)[0]["loss"] > 0
    model = load_folder(tmp_path / "out").model
    assert (model.encoder.chunked, model.config.encoder.chunk, model.config.encoder.left) == (False, 4, 8)
    model.encoder.chunked, features = True, torch.randn(1, 100, 80)
    with torch.no_grad():
        whole, _ = model.encoder(features, torch.tensor([100]))
    stream = model.encoder.stream()
    parts = [stream.push(features[:, :50]), stream.push(features[:, 50:], last=True)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-4)


@pytest.mark.ci
def test_a_model_of_whole_utterances_starts_one_for_streams(recipe, manifest, tmp_path):
    run(recipe, manifest, tmp_path / "whole", "--steps", "1")
    known, impulse = load_folder(tmp_path / "whole" / "out"), torch.eye(31)[15].expand(1, 32, 31)
    chunked = recipe.rechunked(known, recipe.RecognizerModelSettings(chunk=4, dynamic=True))
    parts = [one.model.encoder.blocks[0].convolution for one in (known, chunked)]
    first, second = (part.depthwise(torch.nn.functional.pad(impulse, part.pad))[:, :, 15:] for part in parts)
    assert torch.allclose(first, second)  # what was heard before counts as it did
    run(recipe, manifest, tmp_path, "--init", str(tmp_path / "whole" / "out"), "--chunk", "4", "--dynamic")
    assert load_folder(tmp_path / "out").model.config.encoder.block.conv_causal
    known.model.config = replace(known.model.config, encoder=replace(known.model.config.encoder, near=(4, 4)))
    with pytest.raises(UsageError, match=r"--chunk 4: .* cannot have chunks: near \(4, 4\)"):
        recipe.rechunked(known, recipe.RecognizerModelSettings(chunk=4))


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(("options", "code", "message"), [
    (["--terms", "rnnt"], 2, "rnnt"), (["--left", "8"], 2, "--left must be 0 without chunk (got 8)"),
    (["--train", "absent.jsonl"], 1, "absent.jsonl"), (["--train", "tones.jsonl=0"], 1, "tones.jsonl=0"),
    (["--init", "absent"], 1, "absent"), (["--noise", "-1"], 2, "--noise must be a number of at least 0 (got -1.0)"),
    (["--attention", "1.5"], 2, "--attention must be a number in [0, 1] (got 1.5)"),
    (["--width", "30"], 1, "--width must be a multiple of 8, for 4 heads of even width (got 30)"),
    (["--budget", "0"], 2, "--budget must be an integer of at least 1 (got 0)"),
])  # fmt: skip
def test_what_cannot_be_used_is_said_in_one_line(recipe, manifest, tmp_path, capsys, options, code, message):
    with pytest.raises(SystemExit) as end:
        run(recipe, manifest, tmp_path, *options)
    assert end.value.code == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("train_asr.py: error: ")
    assert message in last


def test_help_shows_the_command_and_every_group_of_settings(recipe, capsys):
    with pytest.raises(SystemExit, match="0"):
        start(recipe.main, ["--help"])
    text = capsys.readouterr().out
    assert "python recipes/speech/train_asr.py --train" in text
    assert all(flag in text for flag in ("--init", "--terms", "--budget", "--freq_masks", "--schedule", "--resume"))


def realistic(count: int = 4000) -> list[int]:
    """Frames as in mixed corpora: single words, and sentences of about 4 s with a long tail."""
    random = torch.Generator().manual_seed(0)
    words = (45 + 10 * torch.randn(count // 8, generator=random)).clamp(12, 200)
    sentences = (5.85 + 0.45 * torch.randn(count - count // 8, generator=random)).exp().clamp(60, 2000)
    return torch.cat([words, sentences]).int().tolist()


def test_padding_is_under_eight_percent():
    lengths = realistic()
    plan = speech_plan(lengths, [(len(lengths), 1.0)], Batching(easy=2), 0)
    for epoch in (8, 9):
        assert padding_share(plan(epoch), lengths) < 0.08


@pytest.mark.ci
def test_padding_is_under_eight_percent_on_real_manifests(shared_data):
    lengths, times = [], []
    for name in ("speechocean762", "an4", "fsdd"):
        source = open_source(shared_data / "speech" / name / "train.jsonl")
        lengths += [round(100 * source.row(i).fields["duration"]) - 2 for i in range(len(source))]
        times.append((len(source), 1.0))
    plan = speech_plan(lengths, times, Batching(), 1)
    assert padding_share(plan(30), lengths) < 0.08


def test_the_plan_is_a_pure_function_of_the_epoch_with_a_curriculum():
    lengths = realistic(800)
    b = Batching(budget=4000, easy=2)
    plan, other = (speech_plan(lengths, [(800, 1.0)], b, seed=3) for _ in range(2))
    assert plan(5) == other(5)
    assert plan(5) != plan(6)
    assert other(0) == plan(0)
    easy = [group for batch in plan(1) for group in batch]
    assert sorted(n for group in easy for n in group.numbers) == [i for i, x in enumerate(lengths) if x < 200]
    assert not any(group.augment for group in easy)
    late = [group for batch in plan(9) for group in batch]
    assert all(group.augment for group in late)
    assert sorted(n for group in late for n in group.numbers) == list(range(800))
    sizes = [sum(lengths[n] for n in group.numbers) for group in late if len(group.numbers) == 2]
    assert len(sizes) > 40
    assert max(sizes) <= b.longest
    for batch in plan(9):
        assert len(batch) == 1 or max(sum(lengths[n] for n in g.numbers) for g in batch) * len(batch) <= b.budget
    # nothing is short: no such epochs
    assert len([g for batch in speech_plan([900] * 8, [(8, 1.0)], b, 0)(0) for g in batch]) <= 8


def test_parts_are_heard_as_often_as_is_said():
    plan = speech_plan([100] * 30, [(10, 1.0), (10, 2.0), (10, 0.5)], Batching(easy=0, join=0.0), 0)
    numbers = [group.numbers[0] for batch in plan(0) for group in batch]
    assert len(set(numbers)) == len(numbers)  # a copy is its own item, and so has its own augmentation
    counts = np.bincount([n % 30 for n in numbers], minlength=30)
    assert counts[:20].tolist() == [1] * 10 + [2] * 10
    assert counts[20:].sum() == 5


def test_batches_for_evaluation_are_in_order_of_length():
    batches = bucketed([50, 500, 60, 5000], 1200)
    assert batches == [[0, 2], [1], [3]]


# recordings


def test_features_are_cached_and_changed_recordings_are_read_again(manifest, tmp_path):
    cache = tmp_path / "cache"
    first = load_features(open_source(manifest), cache)
    assert [len(f) for f in first] == [len(f) for f in load_features(open_source(manifest), cache)]
    assert len(list(cache.iterdir())) == 2  # frames and lengths
    (tmp_path / "0.wav").write_bytes((tmp_path / "1.wav").read_bytes() + b"\0" * 2)
    again = load_features(open_source(manifest), cache)
    assert torch.equal(again[0], first[1])
    for path in cache.iterdir():
        path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(DataError, match=r"frames-\w+\.\w+: damaged cache"):
        load_features(open_source(manifest), cache)


@pytest.mark.parametrize("cached", [True, False])
def test_a_broken_recording_is_left_out_with_its_transcript(manifest, tmp_path, caplog, cached):
    (tmp_path / "2.wav").write_bytes(b"RIFF nothing")
    (tmp_path / "5.wav").unlink()
    tokenizer = BytePairTokenizer.train([" low high"], 270)
    corpus = SpeechCorpus([str(manifest)], tmp_path / "cache" if cached else None, most_broken=0.3)
    corpus.encode(tokenizer)
    plan = speech_plan(corpus.lengths, corpus.times, Batching(budget=10**5, easy=0, join=0.0), 0)
    loader = Loader(corpus, plan, PrepareSpeech(SpeechAugmentation(), 199), collate)
    step = next(loader.start(0))
    assert step.count == 6
    assert step.broken == (0 if cached else 2)
    for name in ("2.wav", "5.wav"):
        assert any(name in record.getMessage() for record in caplog.records)
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    found = sorted(tokenizer.decode(ids[:n].tolist()).strip()
                   for ids, n in zip(step.batches[0].ids, step.batches[0].id_lengths, strict=True))  # fmt: skip
    assert found == sorted(line["text"] for i, line in enumerate(lines) if i not in (2, 5))
    # each text lies beside its own sound: 0.4 s a word
    for length, ids in zip(step.batches[0].lengths, step.batches[0].id_lengths, strict=True):
        assert ids > 0
        assert length > 30


def test_too_many_broken_recordings_stop_the_training(manifest, tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.wav").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"tones\.jsonl: 1 of the first \d recordings are broken, more than 5\.0% of its 8"
    ):
        SpeechCorpus([str(manifest)], tmp_path / "cache")


def test_a_manifest_that_is_none_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"audio_filepath": "a.wav", "duration": 1}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl.*no text"):
        SpeechCorpus([str(path)])
    path.write_text('{"audio_filepath": "a.wav", "text": "x"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl.*no duration"):
        SpeechCorpus([str(path)])
    with pytest.raises(UsageError, match=r"x\.jsonl=-1"):
        SpeechCorpus(["x.jsonl=-1"])


def test_joined_utterances_are_those_after_each_other(manifest, tmp_path):
    corpus = SpeechCorpus([str(manifest)], tmp_path / "cache")
    corpus.encode(BytePairTokenizer.train([" low high"], 270))
    a, b, both = (corpus.read(UtteranceGroup(numbers, False)) for numbers in ((1,), (10,), (1, 10)))
    assert torch.equal(both.features, torch.cat([a.features, b.features]))
    assert both.ids == a.ids + b.ids
    assert b.ids == corpus.ids[2]  # a copy
    assert corpus.name(UtteranceGroup((1, 10), False)) == f"{manifest} line 2 + {manifest} line 3"


def test_transcripts_are_plain_and_words_are_the_same_tokens_anywhere():
    assert plain("It’s  2\to'clock,\x1fMr._Smith!") == "it's 2 o'clock mr smith"
    assert plain("काला, ที่ می\u200cخواهم ක්\u200dෂ") == "काला ที่ می\u200cخواهم ක්\u200dෂ"  # vowel signs and tones are marks
    assert plain("\ufeffCo\u00adop a\u200bb 👩\u200d💻 \u200ec\u200c cafe\u0301") == "coop a b c caf\u00e9"
    tokenizer = BytePairTokenizer.train([" the cat", " a the cat"] * 5, 280)
    whole = transcript_ids(tokenizer, "the cat the cat")
    assert whole == transcript_ids(tokenizer, "the cat") * 2


def test_a_text_beyond_the_decoders_context_is_a_broken_item(manifest, tmp_path):
    corpus = SpeechCorpus([str(manifest)], tmp_path / "cache")
    corpus.encode(BytePairTokenizer.train([" low high"], 270))
    with pytest.raises(DataError, match="more than the 1 "):
        PrepareSpeech(SpeechAugmentation(), 1)(corpus.read(UtteranceGroup((0, 1), True)), torch.Generator())


def test_collated_rows_keep_their_values():
    batch = collate([(torch.ones(70, 80), [5, 6, 7]), (torch.ones(9, 80), [])])
    assert batch.features.sum() == 79 * 80
    assert batch.lengths.tolist() == [70, 9]
    assert batch.ids[0, :3].tolist() == [5, 6, 7]
    assert batch.id_lengths.tolist() == [3, 0]
    assert batch.padding == pytest.approx(1 - 79 / 144)


# objective


class Items:
    """Utterances that are there already."""

    def __init__(self, items: list[SpeechFrames]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def name(self, key: int) -> str:
        return str(key)

    def read(self, key: int) -> SpeechFrames:
        return self.items[key]


def looped(items: list[SpeechFrames], folder: Path, steps: int) -> Loop:
    """A loop over one batch of all items."""
    torch.manual_seed(0)
    tokenizer = BytePairTokenizer.train([" low high"], 260)
    model = ConformerCTC(joint_config(tokenizer.vocab_size, 16, 2, 1, 40, 0.0)).to(items[0].features.dtype)
    loader = Loader(
        Items(items), lambda epoch: [list(range(len(items)))], PrepareSpeech(SpeechAugmentation(), 39), collate
    )
    optim = OptimSettings(1e-2, warmup=5, clip=3.0)
    settings = LoopSettings(folder, steps, optim, precision="float32", log_every=1, save_every=100)
    return Loop(settings, Recognition(model, tokenizer), loader)


def utterances(count: int) -> list[SpeechFrames]:
    random = torch.Generator().manual_seed(0)
    made = []
    for number, size in enumerate(torch.randint(40, 120, (count,), generator=random).tolist()):
        ids = torch.randint(3, 260, (2 + 2 * number,), generator=random).tolist()
        made.append(SpeechFrames(torch.randn(size, 80, generator=random), ids, False))
    return made


def test_accumulation_is_exact(tmp_path):
    """The gradient of three micro-batches is that of the whole batch, for every term."""
    items = [item._replace(features=item.features.double()) for item in utterances(5)]
    loop = looped(items, tmp_path, 1)

    def gradients(parts: list[list[SpeechFrames]]) -> tuple[dict, dict]:
        loop.objective.zero_grad()
        batches = []
        for part in parts:
            batch = collate([(item.features, item.ids) for item in part])
            batches.append(batch._replace(features=batch.features.double()))
        metrics = {name: value.item() for name, value in loop.objective.backward(loop, batches).items()}
        return metrics, {name: p.grad.clone() for name, p in loop.objective.model.named_parameters()}

    metrics, whole = gradients([items])
    again, parts = gradients([items[:1], items[1:3], items[3:]])
    assert metrics.keys() == {"loss", "attention", "ctc", "middle"}
    assert again == pytest.approx(metrics, rel=1e-6)
    for name, gradient in whole.items():
        # a key's bias has no gradient but rounding
        bound = max(1e-6 * gradient.abs().max().item(), 1e-12)
        assert torch.allclose(parts[name], gradient, atol=bound, rtol=0), name


@pytest.mark.ci
def test_all_three_terms_fall(tmp_path):
    looped(utterances(2), tmp_path, 30).fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for term in ("attention", "ctc", "middle"):
        assert lines[-1][term] < 0.7 * lines[0][term]


def test_best_path_joins_repeats_and_keeps_them_across_a_blank():
    winners = torch.tensor([[2, 2, 3, 1, 1, 3, 1, 0], [3, 0, 0, 0, 2, 2, 2, 2]])
    logits = torch.nn.functional.one_hot(winners, 4).float()
    assert ctc_greedy(logits, torch.tensor([8, 4]), blank=3) == [[2, 1, 1, 0], [0]]
    assert ctc_greedy(logits[:, :0], torch.tensor([0, 0]), blank=3) == [[], []]
