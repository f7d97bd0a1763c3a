"""Transcription: Whisper's loop against openai-whisper's, the joint model against its own parts."""

import itertools
from dataclasses import replace

import pytest
import torch
from tiny_whisper import whispers

from multimodal import search
from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.cache import Cache
from multimodal.blocks.conv import ConformerConfig
from multimodal.blocks.stack import transformer
from multimodal.ctc_prefix import PrefixScorer
from multimodal.errors import AudioError, CheckpointError, UsageError
from multimodal.models.seq2seq import JointConformer, JointConformerConfig
from multimodal.models.speech import ConformerEncoderConfig
from multimodal.models.text import TextConfig
from multimodal.tasks import joint_windows, whisper_windows
from multimodal.tasks.transcribe import transcribe
from multimodal.tokens.text import BytePairTokenizer
from multimodal.weights.folder import Checkpoint

# openai-whisper leaves its vocabulary file open and calls numpy in an old way
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Performing inference on CPU:UserWarning"),
]
KEYS = {"id", "seek", "start", "end", "text", "tokens", "temperature", "avg_logprob", "compression_ratio",
        "no_speech_prob"}  # fmt: skip
# a random model writes language tokens, which only openai-whisper would then show as text
SUPPRESSED = [-1, *range(50259, 50358)]
SENTENCES = ["the cat sat on the mat", "a dog ran over the hill", "seven birds sang", "we went home", "rain fell"]


def sound(seconds, seed=0):
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(int(seconds * 16000)) / 16000
    loudness = (0.5 + 0.5 * torch.sin(2 * torch.pi * 0.7 * time)) * 0.3
    return loudness * (torch.sin(2 * torch.pi * 300 * time) + 0.3 * torch.randn(len(time), generator=generator))


@pytest.mark.parametrize(
    "options",
    [
        {"language": "en"},
        {"language": "en", "without_timestamps": True, "condition_on_previous_text": False},
        {"language": "de", "task": "translate", "beam_size": 3, "initial_prompt": "hello there"},
        {"language": None, "no_speech_threshold": 1e-8},
    ],
)
def test_whisper_segments_equal_openai_whispers(options):
    from whisper.transcribe import transcribe as reference

    theirs, checkpoint = whispers()
    wave = sound(50)
    common = {"temperature": 0.0, "sample_len": 12, "suppress_tokens": SUPPRESSED, **options}
    expected = reference(theirs, wave.numpy(), fp16=False, **{k: _copied(v) for k, v in common.items()})
    found = transcribe(wave, checkpoint, **common)
    assert found["language"] == expected["language"]
    assert found["text"] == expected["text"]
    assert len(found["segments"]) == len(expected["segments"])
    assert bool(found["segments"]) != ("no_speech_threshold" in options)
    for ours, other in zip(found["segments"], expected["segments"], strict=True):
        assert ours.keys() == KEYS
        for key in ("id", "seek", "start", "end", "text", "tokens", "temperature", "compression_ratio"):
            assert ours[key] == other[key], key
        assert ours["avg_logprob"] == pytest.approx(other["avg_logprob"], abs=1e-4)
        assert ours["no_speech_prob"] == pytest.approx(other["no_speech_prob"], abs=1e-6)


def _copied(value):
    return list(value) if isinstance(value, list) else value  # openai-whisper appends to the list it is given


def test_fallback_temperatures_are_tried_until_one_fits():
    checkpoint = whispers()[1]
    common = {"language": "en", "sample_len": 5, "temperature": (0.0, 0.4, 0.9), "no_speech_threshold": None}
    used = [
        transcribe(sound(3), checkpoint, logprob_threshold=threshold, **common)["segments"][0]["temperature"]
        for threshold in (-100.0, 100.0)
    ]
    assert used == [0.0, 0.9]
    again = [transcribe(sound(3), checkpoint, logprob_threshold=100.0, **common) for _ in range(2)]
    assert again[0] == again[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 2.0}, "patience"),
        ({"temperature": ()}, "temperature"),
        ({"beams": 3}, "'beams'"),
        ({"beam_size": 0}, "beam_size"),
        ({"task": "summarise"}, "summarise"),
        ({"language": "klingon"}, "klingon"),
    ],
)
def test_whisper_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        transcribe(sound(1), whispers()[1], **options)


def test_whisper_without_its_vocabulary_is_refused():
    with pytest.raises(CheckpointError, match="vocabulary"):
        transcribe(sound(1), replace(whispers()[1], tokenizer=None), language="en")


@pytest.fixture(scope="module")
def joint():
    tokenizer = BytePairTokenizer.train(SENTENCES, 280)
    size = tokenizer.vocab_size
    block = ConformerConfig(AttentionConfig(16, 2, relative=True), 32, 7)
    encoder = ConformerEncoderConfig(bands=40, block=block, layers=2, subsample=4, channels=8)
    decoder = TextConfig(size, 600, transformer(16, 1, 2, 32, source_width=16), causal=True, tied=True)
    torch.manual_seed(2)
    model = JointConformer(JointConformerConfig(encoder, size, decoder)).eval()
    with torch.no_grad():
        model.ctc.weight.mul_(4)
        model.ctc.bias[-1] += 2.5  # blanks between the tokens
    return Checkpoint(model, tokenizer, None, "joint", {"language": "en"})


def test_joint_transcript_has_whispers_shape(joint):
    result = transcribe(sound(45), joint)
    assert result["language"] == "en"
    assert result["text"] == " ".join(segment["text"] for segment in result["segments"])
    assert [segment["id"] for segment in result["segments"]] == list(range(len(result["segments"])))
    assert len(result["segments"]) >= 3
    last = 0.0
    for segment in result["segments"]:
        assert segment.keys() == KEYS
        assert last <= segment["start"] < segment["end"] <= 45
        assert segment["text"] == joint.tokenizer.decode(segment["tokens"]).strip()
        assert segment["avg_logprob"] < 0 <= segment["no_speech_prob"] <= 1
        last = segment["end"]


def test_joint_greedy_is_the_ctc_best_path(joint):
    from multimodal.tokens.mel import filterbank

    wave, model = sound(4), joint.model
    features = filterbank(wave, 40)[None]
    with torch.no_grad():
        winners = model(features, torch.tensor([features.shape[1]]), torch.tensor([[1]]))[0][0].argmax(-1).tolist()
    expected = [token for token, _ in itertools.groupby(winners) if token != model.config.blank]
    (segment,) = transcribe(wave, joint)["segments"]
    assert segment["tokens"] == expected
    spoken = [frame for frame, token in enumerate(winners) if token != model.config.blank]
    assert segment["start"] == pytest.approx(spoken[0] * 0.04)
    assert segment["end"] == pytest.approx((spoken[-1] + 1) * 0.04)


@pytest.mark.parametrize("beam_size", [None, 3])
def test_batched_equals_alone(joint, beam_size):
    waves = [sound(seconds, seed) for seed, seconds in enumerate((0.02, 0.9, 2.5, 1.7))]
    together = joint_windows.decode_windows(waves, joint, beam_size)
    for wave, found in zip(waves, together, strict=True):
        (alone,) = joint_windows.decode_windows([wave], joint, beam_size)
        assert found.ids == alone.ids
        assert found.span == alone.span
        assert found[2:] == pytest.approx(alone[2:], abs=1e-4)
    long = sound(70)
    assert transcribe(long, joint, batch_size=1)["text"] == transcribe(long, joint, batch_size=5)["text"]


def test_windows_join_to_the_recording_and_are_cut_where_it_is_quiet():
    wave = torch.randn(16000 * 47)
    wave[16000 * 15 : 16000 * 15 + 6400] *= 0.01
    for chunk in (16000 * 47, 16000 * 30, 7001):
        windows = list(joint_windows.cut_windows(wave.split(chunk)))
        assert torch.equal(torch.cat([part for _, part in windows]), wave)
        assert [start for start, _ in windows] == [0, *itertools.accumulate(len(p) for _, p in windows)][:-1]
        assert max(len(part) for _, part in windows) <= 16000 * 20
        assert 16000 * 15 < windows[1][0] < 16000 * 15 + 6400
    assert [len(part) for _, part in joint_windows.cut_windows([wave[:1]])] == [1]


def test_silence_gives_no_text(joint):
    assert transcribe(torch.zeros(16000 * 25), joint) == {"text": "", "segments": [], "language": "en"}
    deaf = JointConformer(joint.model.config).eval()
    deaf.load_state_dict(joint.model.state_dict())
    with torch.no_grad():
        deaf.ctc.bias[-1] += 100
    for beam_size in (None, 2):
        assert transcribe(sound(2), replace(joint, model=deaf), beam_size=beam_size)["segments"] == []


def test_files_give_the_same_as_samples(joint, tmp_path):
    import wave as wav

    samples = (sound(33) * 20000).round().to(torch.int16)
    with wav.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples.numpy().tobytes())
    assert transcribe(tmp_path / "a.wav", joint) == transcribe(samples / 32768, joint)


@pytest.mark.parametrize(
    "wave", [torch.zeros(0), torch.tensor([0.1, float("nan")]), torch.zeros(2, 100), torch.zeros(9, dtype=torch.int16)]
)
def test_unusable_samples_are_refused(joint, wave):
    for checkpoint in (joint, whispers()[1]):
        with pytest.raises(AudioError, match="samples"):
            transcribe(wave, checkpoint)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": "de"}, "'de'"),
        ({"task": "translate"}, "translate"),
        ({"initial_prompt": "x"}, "initial_prompt"),
        ({"temperature": 0.5}, "temperature"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_joint_options_that_it_has_not_are_refused(joint, options, message):
    with pytest.raises(UsageError, match=message):
        transcribe(sound(1), joint, **options)
    assert transcribe(sound(1), joint, temperature=0.0, language="English") == transcribe(sound(1), joint)


def test_a_ctc_model_has_no_beam(joint):
    model = JointConformer(replace(joint.model.config, decoder=None)).eval()
    with pytest.raises(UsageError, match="beam_size"):
        transcribe(sound(1), replace(joint, model=model), beam_size=4)


def ctc_probability(logprobs, blank):
    """{text: probability} by enumeration of all alignments."""
    found = {}
    for path in itertools.product(range(logprobs.shape[1]), repeat=len(logprobs)):
        text = tuple(token for token, _ in itertools.groupby(path) if token != blank)
        found[text] = found.get(text, 0.0) + logprobs[torch.arange(len(path)), list(path)].sum().exp().item()
    return found


def test_ctc_prefix_scores_equal_enumeration():
    """Of two sources at once, one of which is shorter."""
    torch.manual_seed(0)
    logits, eos, blank, lengths = torch.randn(2, 5, 4), 0, 3, [5, 3]
    logits[..., eos] = -30.0  # the end is no CTC output
    logprobs = logits.log_softmax(-1)
    texts = [ctc_probability(rows[:length], blank) for rows, length in zip(logprobs, lengths, strict=True)]

    def starting(source, prefix):
        return sum(p for text, p in texts[source].items() if text[: len(prefix)] == prefix)

    scorer = PrefixScorer(logprobs, torch.tensor(lengths), eos, prompt=1, weight=1.0)
    for rows in ([()], [(1,), (2,)], [(1, 1), (1, 2), (2, 1)], [(1, 2, 1), (1, 1, 2)]):
        ids = torch.tensor([[9, *row] for row in rows]).repeat(2, 1)
        scores = scorer(ids, torch.zeros(len(ids), 3)).exp().unflatten(0, (2, -1))
        for source, row, score in ((s, row, scores[s, i]) for s in range(2) for i, row in enumerate(rows)):
            if not starting(source, row):  # longer than its frames allow
                assert score.max() == 0
                continue
            assert score[eos].item() == pytest.approx(texts[source].get(row, 0) / starting(source, row), rel=1e-4)
            for token in (1, 2):
                expected = starting(source, (*row, token)) / starting(source, row)
                assert score[token].item() == pytest.approx(expected, rel=1e-4)


def test_joint_beam_with_full_ctc_weight_finds_the_likeliest_text():
    torch.manual_seed(1)
    logits = torch.randn(5, 4) * 2
    logits[:, 0] = -30.0
    logprobs = logits.log_softmax(-1)
    texts = ctc_probability(logprobs, 3)
    model_free = lambda ids, cache: torch.zeros(*ids.shape, 3)
    scorer = PrefixScorer(logprobs[None], torch.tensor([5]), 0, 1, 1.0)
    found = search.beam(model_free, torch.tensor([[1]]), Cache(1), eos=0, max_new=6, beams=30,
                        length_penalty=0.0, scorer=scorer)  # fmt: skip
    best = max(texts, key=texts.get)
    assert tuple(found.ids[0]) == best
    assert found.logprobs[0] == pytest.approx(torch.tensor(texts[best]).log().item(), abs=1e-3)


def test_a_text_beyond_the_decoders_context_is_not_lost(joint):
    config = joint.model.config
    small = JointConformer(replace(config, decoder=replace(config.decoder, context=4))).eval()
    state = joint.model.state_dict()
    state["decoder.positions"] = state["decoder.positions"][:4]
    small.load_state_dict(state)
    assert transcribe(sound(4), replace(joint, model=small), beam_size=3) == transcribe(sound(4), joint)


def test_compression_ratio_equals_openai_whispers():
    from whisper.utils import compression_ratio

    for text in ("", "a", "la la la la la la la la la", "ünïcode"):
        assert whisper_windows.compression_ratio(text) == compression_ratio(text)
