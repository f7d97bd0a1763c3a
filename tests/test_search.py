"""Search against openai-whisper's decoder on the same random weights, and against enumeration."""

import itertools

import pytest
import torch
from tiny_whisper import whispers

from multimodal import rules, search
from multimodal.blocks.stack import transformer
from multimodal.models.text import TextConfig, TextTransformer

# openai-whisper leaves its vocabulary file open and calls numpy in an old way
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("beam_size", [None, 5])
@pytest.mark.parametrize("without_timestamps", [False, True])
def test_tokens_equal_openai_whisper(beam_size, without_timestamps):
    from whisper.decoding import DecodingOptions, decode

    from multimodal.tasks.whisper_windows import WhisperOptions, decode_window

    theirs, checkpoint = whispers()
    options = {"language": "en", "beam_size": beam_size, "without_timestamps": without_timestamps, "sample_len": 16}
    for seed in range(4):
        mel = torch.randn(80, 3000, generator=torch.Generator().manual_seed(seed)) * seed
        expected = decode(theirs, mel, DecodingOptions(fp16=False, **options))
        with torch.no_grad():
            features = checkpoint.model.encoder(mel[None])
        found = decode_window(checkpoint, features, [], WhisperOptions(**options), 0.0, torch.Generator())
        assert found.tokens == expected.tokens
        assert found.avg_logprob == pytest.approx(expected.avg_logprob, abs=1e-4)
        assert found.no_speech_prob == pytest.approx(expected.no_speech_prob, abs=1e-6)


def language_model(vocabulary=7, context=12):
    torch.manual_seed(5)
    model = TextTransformer(TextConfig(vocabulary, context, transformer(16, 2, 2, 32), causal=True, tied=False))
    with torch.no_grad():
        model.embed.weight.mul_(50)
        model.head.weight.mul_(4)
    return model.eval()


def step_of(model):
    return lambda ids, cache: model(ids, cache=cache)


def logprob_of(model, prompt, ids):
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt + ids])).log_softmax(-1)[0, len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(ids)[:, None]).sum().item()


def test_wide_beam_finds_the_best_of_all_sequences():
    model, eos = language_model(vocabulary=4), 0
    every = [list(ids) for n in range(4) for ids in itertools.product(range(1, 4), repeat=n)]
    scored = {tuple(ids): logprob_of(model, [1], [*ids, eos]) for ids in every}
    best = max(scored, key=scored.get)
    # 4 steps reach every sequence of up to 3 tokens and its end; the pool then also holds unfinished ones
    found = search.beam(step_of(model), torch.tensor([[1]]), model.new_cache(), eos=eos, max_new=4, beams=200,
                        length_penalty=0.0)  # fmt: skip
    assert len(found.ids[0]) < 4
    assert tuple(found.ids[0]) == best
    assert found.logprobs[0] == pytest.approx(scored[best], abs=1e-4)


@pytest.mark.parametrize("decode", [search.greedy, lambda *a, **k: search.beam(*a, beams=3, **k)])
def test_batched_equals_alone_and_logprobs_are_the_models(decode):
    model = language_model()
    prompts = torch.tensor([[1, 2], [3, 4], [5, 6]])
    together = decode(step_of(model), prompts, model.new_cache(), eos=0, max_new=8)
    for row, prompt in enumerate(prompts):
        alone = decode(step_of(model), prompt[None], model.new_cache(), eos=0, max_new=8)
        ids = together.ids[row]
        assert alone.ids[0] == ids
        ended = [*ids, 0] if len(ids) < 8 else ids
        assert together.logprobs[row] == pytest.approx(logprob_of(model, prompt.tolist(), ended), abs=1e-4)


def test_one_beam_is_greedy():
    model, prompt = language_model(), torch.tensor([[2, 3]])
    arguments = {"eos": 0, "max_new": 9}
    found = search.beam(step_of(model), prompt, model.new_cache(), beams=1, **arguments)
    assert found.ids == search.greedy(step_of(model), prompt, model.new_cache(), **arguments).ids


def test_sampling_follows_the_seed_and_the_distribution():
    model, prompt = language_model(), torch.tensor([[1]]).repeat(4000, 1)

    def draw(seed, rules=(), temperature=1.0):
        generator = torch.Generator().manual_seed(seed)
        return search.sample(step_of(model), prompt, model.new_cache(), eos=0, max_new=1, temperature=temperature,
                             generator=generator, rules=rules).ids  # fmt: skip

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    with torch.no_grad():
        expected = (model(prompt[:1])[0, -1] / 2).softmax(-1)
    counts = torch.tensor([row[0] if row else 0 for row in draw(1, temperature=2.0)]).bincount(minlength=7) / 4000
    assert (counts - expected).abs().max() < 0.03
    assert not any(row == [3] for row in draw(1, rules=[rules.suppress([3])]))
    with pytest.raises(ValueError, match="temperature"):
        draw(1, temperature=0.0)


def test_a_vocabulary_smaller_than_the_beam_is_searched():
    model = language_model(vocabulary=3)
    found = search.beam(step_of(model), torch.tensor([[1]]), model.new_cache(), eos=0, max_new=5, beams=8)
    assert found.logprobs[0] > -torch.inf


def test_timestamp_rule_equals_openai_whispers():
    from whisper.decoding import ApplyTimestampRules
    from whisper.tokenizer import get_tokenizer

    tokenizer = get_tokenizer(True, language="en")
    begin, eot = tokenizer.timestamp_begin, tokenizer.eot
    ours = rules.timestamps(begin, eot, tokenizer.no_timestamps, start=2, latest_first=50)
    theirs = ApplyTimestampRules(tokenizer, 2, 50)
    generator = torch.Generator().manual_seed(0)
    tails = [[], [begin], [begin, 5], [begin, 5, begin + 9], [begin, 5, begin + 9, begin + 9], [begin, 5, 6]]
    for tail in tails:
        ids = torch.tensor([[1, 2, *tail]] * 3)
        logits = torch.randn(3, 51865, generator=generator)
        logits[1, begin:] += 12  # times are likely
        logits[2, begin:] -= 12
        expected = logits.clone()
        theirs.apply(expected, ids)
        assert torch.equal(ours(ids, logits), expected)
