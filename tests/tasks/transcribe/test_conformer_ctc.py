"""The joint model over recordings: windows, beams with CTC prefix scores and language models, segments."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from multimodal.blocks.cache import Cache
from multimodal.blocks.stack import transformer
from multimodal.decoding.beam_search import beam_search
from multimodal.decoding.ctc import ctc_beam, ctc_greedy
from multimodal.decoding.ctc_prefix import CTCPrefixScorer
from multimodal.decoding.lm_fusion import NeuralScorer, ShallowFusion, WordStarts
from multimodal.errors import CheckpointError, UsageError
from multimodal.models.conformer import ConformerCTC
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.system.assets import asset
from multimodal.tasks.transcribe import scheduler
from multimodal.tasks.transcribe.conformer import windows
from multimodal.tasks.transcribe.conformer.decode import HybridBeam, decode_windows, hybrid_beam_search
from multimodal.tasks.transcribe.conformer.transducer import fused
from multimodal.tasks.transcribe.options import RecognizerOptions, SpeechDecodingOptions
from multimodal.tasks.transcribe.timeline import tiled
from multimodal.tasks.transcribe.word_times import WordTiming
from multimodal.tokens.audio.log_mel import filterbank
from multimodal.tokens.audio.reading import read_audio
from multimodal.tokens.text.hub.recognizers import LetterTokenizer
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.load import load
from tests.helpers.spread import thin
from tests.helpers.tiny_whisper import RATE, sound, tiny_hybrid

BEST_PATH = SpeechDecodingOptions(beam_size=1)


@pytest.fixture(scope="module")
def joint():
    return tiny_hybrid()


def transcribed(wave, checkpoint, options, width=4, longest=windows.LONGEST):
    """Results of the streams of a recording's windows."""
    pieces = zip(range(0, len(wave), longest), wave.split(longest), strict=True)
    streams = (windows.stream(*piece, checkpoint, options, "a.wav") for piece in pieces)
    found = scheduler.run(streams, lambda waves: decode_windows(waves, checkpoint, options), width)
    return sorted(found, key=lambda result: result.coverage[0].start)


def test_greedy_is_the_ctc_best_path(joint):
    wave, model = sound(4), joint.model
    features = filterbank(wave, 40)[None]
    with torch.no_grad():
        winners = model(features, torch.tensor([features.shape[1]]), torch.tensor([[1]]))[0][0].argmax(-1).tolist()
    (heard,) = decode_windows([wave], joint, BEST_PATH)
    assert heard.ids == [token for token, _ in itertools.groupby(winners) if token != model.config.blank]
    assert [token for word in heard.words for token in word.tokens] == heard.ids
    spoken = [frame for frame, token in enumerate(winners) if token != model.config.blank]
    assert heard.words[0].start == pytest.approx(spoken[0] * 0.04, abs=0.05)
    assert heard.words[-1].end == pytest.approx((spoken[-1] + 1) * 0.04, abs=0.25)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("beam_size", [1, 3])
def test_batched_equals_alone(joint, beam_size):
    options = RecognizerOptions(beam_size=beam_size)
    waves = [sound(seconds, seed) for seed, seconds in enumerate((0.02, 0.9, 1.6))]
    for wave, found in zip(waves, decode_windows(waves, joint, options), strict=True):
        (alone,) = decode_windows([wave], joint, options)
        assert found == alone
    texts = [[s["text"] for part in transcribed(sound(2), joint, options, width, RATE) for s in part.segments]
             for width in (1, 5)]  # fmt: skip
    assert texts[0] == texts[1] != []


def test_windows_tile_the_recording_and_segments_lie_in_them(joint):
    wave = torch.cat([sound(8), torch.zeros(RATE * 16), sound(1)])
    found = transcribed(wave, joint, RecognizerOptions(beam_size=1, word_timestamps=True))
    spans = [span for part in found for span in part.coverage]
    assert tiled(spans, len(wave))
    assert {span.reason for span in spans} == {None, "silence"}
    for part in found:
        ((start, stop, reason),) = part.coverage
        last = start / RATE
        assert bool(part.segments) == (reason is None)
        for segment in part.segments:
            assert last <= segment["start"] < segment["end"] <= stop / RATE
            assert segment["text"] == joint.tokenizer.decode(segment["tokens"]).strip()
            assert segment["text"] == "".join(word["word"] for word in segment["words"]).strip()
            assert segment["words"][0]["start"] == segment["start"]
            assert segment["avg_logprob"] < 0 <= segment["no_speech_prob"] <= 1
            last = segment["end"]


@pytest.mark.ci
def test_times_of_words_are_whole_milliseconds():
    wave = read_audio(asset("sample", "speech.flac"))
    (found,) = transcribed(wave, load("asr-conformer-en"), RecognizerOptions(word_timestamps=True))
    words = [word for segment in found.segments for word in segment["words"]]
    assert len(words) > 20
    assert all(time == round(time, 3) for word in words for time in (word["start"], word["end"]))


def test_segments_end_at_pauses_and_are_not_long():
    def words(*times):
        return [WordTiming(f" w{i}", [i], start, start + 0.2, 0.9) for i, start in enumerate(times)]

    assert windows.phrases([]) == []
    assert [len(part) for part in windows.phrases(words(0, 0.3, 1.1, 1.4))] == [2, 2]
    assert [len(part) for part in windows.phrases(words(*(0.5 * i for i in range(12))))] == [12]
    long = words(*(0.5 * i + 0.1 * (i > 6) for i in range(30)))
    assert all(part[-1].end - part[0].start <= windows.LONG_SEGMENT for part in windows.phrases(long))
    assert len(windows.phrases(long)[0]) == 7
    assert list(itertools.chain(*windows.phrases(long))) == long


def test_a_sure_blank_and_unlikely_text_are_gated(joint):
    deaf = ConformerCTC(joint.model.config).eval()
    deaf.load_state_dict(joint.model.state_dict())
    with torch.no_grad():
        deaf.ctc.bias[-1] += 100
    for beam_size in (1, 2):
        (part,) = transcribed(sound(2), replace(joint, model=deaf), RecognizerOptions(beam_size=beam_size))
        assert part.segments == []
        assert part.coverage[0].reason == "no_speech"
    for threshold, gated in ((-100.0, False), (-0.01, True)):
        (part,) = transcribed(sound(2), joint, RecognizerOptions(beam_size=1, logprob_threshold=threshold))
        assert (part.coverage[0].reason == "unlikely") == gated


def test_a_ctc_model_has_a_best_path_and_a_prefix_beam(joint):
    bare = ConformerCTC(replace(joint.model.config, decoder=None)).eval()
    bare.load_state_dict({k: v for k, v in joint.model.state_dict().items() if not k.startswith("decoder.")})
    bare = replace(joint, model=bare)
    wide = SpeechDecodingOptions(beam_size=8)
    (path,), (alone,), (beam,) = (
        decode_windows([sound(1.5)], *rest) for rest in ((joint, BEST_PATH), (bare,), (bare, wide))
    )
    assert path == alone
    assert beam.avg_logprob == path.avg_logprob
    frames, _, lengths = bare.model.encode(filterbank(sound(1.5), 40)[None], torch.tensor([148]))
    logprobs = bare.model.ctc_logits(frames).log_softmax(-1)
    assert [beam.ids] == hybrid_beam_search(frames, logprobs, lengths, bare, HybridBeam(8, 1.0)).ids
    # a small beam is no less likely than the best path, however long the text
    noise = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 200, logprobs.shape[2], generator=noise)
    peaks = torch.randint(20, 250, (1, 200, 1), generator=noise)
    logprobs = logits.scatter_add(2, peaks, 2 + 8 * torch.rand(peaks.shape, generator=noise)).log_softmax(-1)
    count, blank = torch.tensor([200]), bare.model.config.blank
    frames = frames.new_zeros(1, 200, frames.shape[2])
    found = hybrid_beam_search(frames, logprobs, count, bare, HybridBeam(3, 1.0)), ctc_greedy(logprobs, count, blank)
    beam, path = (
        float(F.ctc_loss(logprobs[0], torch.tensor(ids), count[0], torch.tensor(len(ids)), blank, reduction="sum"))
        for ids in (found[0].ids[0], found[1][0])
    )
    assert beam <= path + 1e-3


def test_a_text_beyond_the_decoders_context_is_not_lost(joint):
    config = joint.model.config
    small = ConformerCTC(replace(config, decoder=replace(config.decoder, context=4))).eval()
    state = joint.model.state_dict()
    state["decoder.positions"] = state["decoder.positions"][:4]
    small.load_state_dict(state)
    small = replace(joint, model=small)
    (beam,), (path,) = (decode_windows([sound(4)], small, SpeechDecodingOptions(beam_size=size)) for size in (3, 1))
    assert beam == path


@pytest.mark.parametrize(("options", "message"), [
    ({"beam_size": 0}, "beam_size"), ({"beam_size": 1, "lm": "x"}, "lm x"), ({"lm_weight": -1.0}, "lm_weight"),
    ({"lm_bonus": float("nan")}, "lm_bonus"),
])  # fmt: skip
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        SpeechDecodingOptions(**options)


def ctc_probability(logprobs, blank):
    """{text: probability} by enumeration of all alignments."""
    found = {}
    for path in itertools.product(range(logprobs.shape[1]), repeat=len(logprobs)):
        text = tuple(token for token, _ in itertools.groupby(path) if token != blank)
        found[text] = found.get(text, 0.0) + logprobs[torch.arange(len(path)), list(path)].sum().exp().item()
    return found


def test_ctc_prefix_scores_equal_enumeration():
    """Windows of two sources at once, one of them shorter."""
    torch.manual_seed(0)
    logits, eos, blank, lengths = torch.randn(2, 5, 4), 0, 3, [5, 3]
    logits[..., eos] = -30.0  # the end is no CTC output
    logprobs = logits.log_softmax(-1)
    texts = [ctc_probability(rows[:length], blank) for rows, length in zip(logprobs, lengths, strict=True)]

    def starting(source, prefix):
        return sum(p for text, p in texts[source].items() if text[: len(prefix)] == prefix)

    scorer = CTCPrefixScorer(logprobs, torch.tensor(lengths), eos, prompt=1, weight=1.0)
    before = [()]
    for rows in ([()], [(1,), (2,)], [(1, 1), (1, 2), (2, 1)], [(1, 2, 1), (1, 1, 2)]):
        ids = torch.tensor([[9, *row] for row in rows]).repeat(2, 1)
        if rows[0]:
            parents = torch.tensor([before.index(row[:-1]) for row in rows])
            scorer.reorder_rows(torch.cat([parents, parents + len(before)]))
        before = rows
        scores = scorer(ids, torch.zeros(len(ids), 3)).exp().unflatten(0, (2, -1))
        for source, row, score in ((s, row, scores[s, i]) for s in range(2) for i, row in enumerate(rows)):
            if not starting(source, row):  # longer than its frames allow
                assert score.max() == 0
                continue
            assert score[eos].item() == pytest.approx(texts[source].get(row, 0) / starting(source, row), rel=1e-4)
            for token in (1, 2):
                expected = starting(source, (*row, token)) / starting(source, row)
                assert score[token].item() == pytest.approx(expected, rel=1e-4)


def tiny_lm(vocabulary, context=9, seed=0):
    torch.manual_seed(seed)
    model = TextTransformer(TextConfig(vocabulary, context, transformer(8, 2, 2, 16), causal=True, tied=False)).eval()
    with torch.no_grad():
        model.head.weight.mul_(4)
    return model


def lm_score(model, text, bos, eos):
    with torch.no_grad():
        logprobs = model(torch.tensor([[bos, *text]]))[0].log_softmax(-1)
    return sum(logprobs[i, token].item() for i, token in enumerate((*text, eos)))


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(("weight", "bonus"), [(0.0, 0.0), (0.7, 0.0), (0.7, 1.5)])
def test_ctc_with_a_language_model_finds_the_best_text_of_all(weight, bonus, monkeypatch):
    """A prefix beam as wide as all texts against their enumeration: CTC + weight·lm + bonus·words, of letters."""
    torch.manual_seed(1)
    logits, eos, bos, blank = torch.randn(2, 5, 4) * 2, 0, 0, 3
    logits[..., eos] = -30.0
    logprobs, lengths = logits.log_softmax(-1), [5, 4]
    model, letters = tiny_lm(3), LetterTokenizer(["</s>", "|", "A"], "|", ["</s>"], None)
    starts = WordStarts(letters, torch.device("cpu"))

    def search():
        scorer = CTCPrefixScorer(logprobs, torch.tensor(lengths), eos, 1, 1.0)
        scorer = ShallowFusion(scorer, NeuralScorer(model, bos), weight, 1, bonus, starts)
        return beam_search(lambda ids, cache: torch.zeros(*ids.shape, 3), torch.full((2, 1), bos), Cache(0), eos=eos,
                           max_new=6, beams=40, patience=1e9, length_penalty=0.0, scorer=scorer)  # fmt: skip

    found = search()
    monkeypatch.setattr("multimodal.decoding.beam_search.ASYNC_DEVICES", ("cpu",))
    assert search() == found  # of a host that is some steps behind
    for row in range(2):
        texts = ctc_probability(logprobs[row, : lengths[row]], blank)
        scores = {
            text: torch.tensor(p).log().item() + weight * lm_score(model, text, bos, eos)
            + bonus * len(letters.decode(text).split())
            for text, p in texts.items() if p and eos not in text
        }  # fmt: skip
        best = max(scores, key=scores.get)
        assert tuple(found.ids[row]) == best
        assert found.logprobs[row] == pytest.approx(scores[best], abs=1e-3)
        fuse = fused(NeuralScorer(model, bos), weight, bonus, starts, logits.device)
        ids, score = ctc_beam(logprobs[row, : lengths[row]], blank, 40, fuse, eos)
        assert (tuple(ids), score) == (best, pytest.approx(scores[best], abs=1e-3))


def test_a_neural_scorer_equals_the_model_on_each_text():
    model = tiny_lm(7)
    scorer = NeuralScorer(model, bos=1)
    # of one text or more each, which go on from those before or not
    turns = ["", "2 3 4", "35 36 22", "224 224 352", "55 35", "556 352"]
    for rows in ([tuple(map(int, text)) for text in turn.split()] or [()] for turn in turns):
        ids = torch.tensor(rows, dtype=torch.long).reshape(len(rows), -1)
        with torch.no_grad():
            whole = model(torch.cat([torch.ones(len(rows), 1, dtype=torch.long), ids], 1))[:, -1].log_softmax(-1)
        assert torch.allclose(scorer(ids), whole, atol=1e-5)
        assert torch.allclose(torch.stack([scorer.after(row) for row in rows]), whole, atol=1e-5)
    for length in range(1, 40):  # far beyond the context
        assert scorer(torch.full((2, length), 3)).exp().sum(-1).tolist() == pytest.approx([1, 1])
        assert scorer.after((3,) * length).exp().sum().item() == pytest.approx(1)


def test_a_neural_scorer_computes_one_token_of_a_text_that_it_knows(monkeypatch):
    model, counts = tiny_lm(7), []
    scorer, whole = NeuralScorer(model, bos=1), model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **options: counts.append(ids.shape[1]) or whole(ids, **options))
    for text in ("", "2", "3", "24", "35", "241", "352", "243", "66"):
        scorer.after(tuple(map(int, text)))
    assert counts == [1, 1, 1, 1, 1, 1, 1, 1, 3]


@pytest.mark.ci
def test_a_language_model_changes_the_text_of_a_recording(joint, tmp_path):
    model = tiny_lm(joint.tokenizer.vocab_size, 64)
    save_folder(Checkpoint(model, joint.tokenizer), tmp_path / "lm")
    bare = ConformerCTC(replace(joint.model.config, decoder=None)).eval()
    bare.load_state_dict({k: v for k, v in joint.model.state_dict().items() if not k.startswith("decoder.")})
    score = partial(lm_score, model, bos=joint.tokenizer.bos_id, eos=joint.tokenizer.eos_id)
    for checkpoint in (joint, replace(joint, model=bare)):
        with_lm = SpeechDecodingOptions(beam_size=4, lm=tmp_path / "lm", lm_weight=1.0)
        (plain,), (found,) = (
            decode_windows([sound(1)], checkpoint, options) for options in (SpeechDecodingOptions(beam_size=4), with_lm)
        )
        assert score(found.ids) > score(plain.ids)
        texts = [decode_windows([sound(1), sound(0.5, 3)], checkpoint, with_lm)[0].ids, found.ids]
        assert texts[0] == texts[1]


def test_each_word_begins_once(joint):
    tokenizer, starts = joint.tokenizer, WordStarts(joint.tokenizer, torch.device("cpu"))
    (space,) = tokenizer.encode(" ")
    for ids in (tokenizer.encode(" the cat sat"), tokenizer.encode("the cat sat"), tokenizer.encode("the  cat sat ")):
        for text in (ids, [space, *ids], [*ids, space], [*ids, tokenizer.eos_id]):
            begun = [starts(torch.tensor([text[:at]], dtype=torch.long))[0, token] for at, token in enumerate(text)]
            assert sum(begun) == 3


def test_an_unfit_language_model_is_refused(joint, tmp_path):
    save_folder(Checkpoint(tiny_lm(50)), tmp_path / "other")
    save_folder(joint, tmp_path / "joint")
    for name, message in (("other", "expected the recognizer's"), ("joint", "expected a causal text model")):
        with pytest.raises(CheckpointError, match=message):
            decode_windows([sound(1)], joint, SpeechDecodingOptions(lm=tmp_path / name))
