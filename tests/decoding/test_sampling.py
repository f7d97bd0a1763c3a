"""Search against openai-whisper's decoder on the same random weights, and against enumeration."""

import itertools
import math
from functools import partial

import pytest
import torch

from multimodal.blocks.cache import Cache
from multimodal.blocks.stack import transformer
from multimodal.decoding import logits as processors
from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam_search, best_row, per_token
from multimodal.decoding.beams import _top
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.tasks.transcribe.options import WhisperOptions
from multimodal.tasks.transcribe.whisper import decode as whisper_decode
from tests.helpers.spread import thin
from tests.helpers.tiny_whisper import whispers

# openai-whisper leaves its vocabulary file open and calls numpy in an old way
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("beam_size", [None, 5])
@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("without_timestamps", [False, True])
def test_tokens_equal_openai_whisper(beam_size, without_timestamps):
    from whisper.decoding import DecodingOptions, decode

    theirs, checkpoint = whispers()
    options = {"language": "en", "beam_size": beam_size, "without_timestamps": without_timestamps, "sample_len": 16}
    for seed in (1, 3):
        mel = torch.randn(80, 3000, generator=torch.Generator().manual_seed(seed)) * seed
        expected = decode(theirs, mel, DecodingOptions(fp16=False, **options))
        with torch.no_grad():
            features = checkpoint.model.encoder(mel[None])[0]
        request = whisper_decode.Decode(features, [], "en", 0.0, 0)
        (found,) = whisper_decode.decode(checkpoint, WhisperOptions(**options), [request])
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
    found = beam_search(step_of(model), torch.tensor([[1]]), model.new_cache(), eos=eos, max_new=4, beams=200,
                        length_penalty=0.0)  # fmt: skip
    assert len(found.ids[0]) < 4
    assert tuple(found.ids[0]) == best
    assert found.logprobs[0] == pytest.approx(scored[best], abs=1e-4)


@pytest.mark.parametrize("decode", [sampling.greedy, lambda *a, **k: beam_search(*a, beams=3, **k)])
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


def seeded(numbers):
    return [torch.Generator().manual_seed(number) for number in numbers]


def drawn(*arguments, numbers, **options):
    return sampling.sample(*arguments, temperature=1.5, copies=3, generators=seeded(numbers), **options)


def unnumbered(decode):
    return lambda *arguments, numbers, **options: decode(*arguments, **options)


SEARCHES = {
    "greedy": unnumbered(sampling.greedy),
    "sample": drawn,
    "beam": unnumbered(partial(beam_search, beams=3)),
    "impatient": unnumbered(partial(beam_search, beams=3, patience=0.4)),
    "patient": unnumbered(partial(beam_search, beams=3, patience=math.inf, length_penalty=0.6)),
}
UNEQUAL = [12, 8, 2, 5, 10, 1]
PROMPTS = [[1], [2, 3, 4, 5, 6], [3, 4], [6, 5, 4, 3], [5, 1, 1], [2]]


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(("limits", "heard"), [(UNEQUAL, False), (UNEQUAL, True), (7, True)])
@pytest.mark.parametrize("name", SEARCHES)
def test_prompts_of_any_length_and_limit_are_decoded_as_each_alone(name, limits, heard):
    decode, model, sizes = SEARCHES[name], listener() if heard else language_model(), []
    sources, valid = torch.randn(6, 9, 5), torch.arange(9) < torch.tensor([9, 4, 7, 9, 1, 5])[:, None]

    def search_rows(rows, limits):
        prompt, start = sampling.left_pad([PROMPTS[row] for row in rows])
        step = sampling.cross_attention_step(model, sources[rows], valid[rows]) if heard else step_of(model)

        def counted(ids, cache):
            sizes.append(len(ids))
            return step(ids, cache)

        rule = processors.suppress_first([0], prompt.shape[1])
        return decode(counted, prompt, model.new_cache(start), eos=0, max_new=limits, processors=[rule], numbers=rows)

    together = search_rows(range(6), limits)
    if limits == UNEQUAL:
        assert sizes[-1] < max(sizes)  # those that end first are left out
    copies = len(together.ids) // 6
    for row, limit in enumerate(limits if isinstance(limits, list) else [limits] * 6):
        alone, own = search_rows([row], limit), slice(row * copies, (row + 1) * copies)
        assert alone.ids == together.ids[own]
        assert together.logprobs[own] == pytest.approx(alone.logprobs, abs=1e-5)
        assert max(map(len, alone.ids)) <= limit


def listener():
    torch.manual_seed(5)
    config = transformer(16, 2, 2, 32, source_width=5)
    model = TextTransformer(TextConfig(7, 12, config, causal=True, tied=False))
    with torch.no_grad():
        model.embed.weight.mul_(50)
        model.head.weight.mul_(4)
    return model.eval()


def test_left_padding_changes_no_logits_and_stays_finite():
    model, (prompt, start) = language_model(), sampling.left_pad(PROMPTS)
    cache, more = (
        model.new_cache(start, capacity=8),
        torch.randint(7, (6, 4), generator=torch.Generator().manual_seed(2)),
    )
    with torch.no_grad():
        first, second = model(prompt, cache=cache), model(more[:, :2], cache=cache)
        rows = torch.tensor([4, 0, 0, 1])
        cache.cut(6)
        cache.reorder(rows)
        third = model(more[rows, 1:], cache=cache)
        assert first.isfinite().all()
        for row, own in enumerate(PROMPTS):
            alone = model(torch.tensor([own + more[row, :2].tolist()]))[0]
            assert (torch.cat([first, second], 1)[row, start[row] :] - alone).abs().max() < 1e-5
        for row, number in enumerate(rows.tolist()):
            ids = [*PROMPTS[number], more[number, 0].item(), *more[number, 1:].tolist()]
            alone = model(torch.tensor([ids]))[0, -3:]
            assert (third[row] - alone).abs().max() < 1e-5
    assert model.new_cache(torch.tensor([0, 0])).start is None  # nothing is padded, so nothing is masked


def test_logits_of_the_last_positions_are_those_of_all():
    torch.manual_seed(5)
    model = TextTransformer(TextConfig(50, 12, transformer(16, 2, 2, 32), causal=True, tied=True)).eval()
    for rows, count in itertools.product((1, 2, 3), (1, 2, 5)):
        ids = torch.randint(50, (rows, count))
        with torch.no_grad():
            full = model.states(ids) @ model.embed.weight.T
            assert (model(ids) - full).abs().max() < 1e-6
            for last in (1, 2, 9):
                assert (model(ids, last=last) - full[:, -last:]).abs().max() < 1e-6


def test_draws_do_not_depend_on_when_the_neighbours_end():
    model, prompt = language_model(), torch.tensor([[1], [2], [3]])
    states = []
    for numbers, limits in (([0, 1, 2], [3, 11, 5]), ([0], [3]), ([1], [11]), ([2], [5])):
        generators = seeded(numbers)
        sampling.sample(step_of(model), prompt[numbers], model.new_cache(), eos=0, max_new=limits, temperature=1.0,
                      generators=generators, copies=2)  # fmt: skip
        states += [generator.get_state() for generator in generators]
    for together, alone in zip(states[:3], states[3:], strict=True):
        assert torch.equal(together, alone)


def test_a_limit_beyond_the_context_and_missing_limits_are_refused():
    model, (prompt, start) = language_model(), sampling.left_pad([[1, 2, 3], [1]])
    with pytest.raises(ValueError, match="max_new 11 after 3 ids leaves the context 12"):
        sampling.greedy(step_of(model), prompt, model.new_cache(start), eos=0, max_new=11)
    with pytest.raises(ValueError, match="1 limits for 2 prompts"):
        sampling.greedy(step_of(model), prompt, model.new_cache(start), eos=0, max_new=[3])
    with pytest.raises(ValueError, match="1 generators for 2 prompts"):
        drawn(step_of(model), prompt, model.new_cache(start), eos=0, max_new=3, numbers=[1])
    for name, decode in SEARCHES.items():
        none = decode(step_of(model), prompt, model.new_cache(start), eos=0, max_new=0, numbers=[0, 1])
        assert none.ids == [[]] * (6 if name == "sample" else 2)


@pytest.mark.ci
def test_drawn_tokens_equal_openai_whispers():
    from whisper.decoding import DecodingOptions, decode

    theirs, checkpoint = whispers()
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    prompt = list(tokenizer.sot_sequence("en", "transcribe", True))
    options = WhisperOptions(language="en")
    mels = torch.stack([torch.randn(80, 3000, generator=torch.Generator().manual_seed(i)) * i for i in range(3)])
    with torch.no_grad():
        features = model.encoder(mels)
    for temperature in (0.4, 1.0):
        found = sampling.sample(
            sampling.cross_attention_step(model.decoder, features), torch.tensor([prompt] * 3),
            model.decoder.new_cache(),
            eos=tokenizer.eot, max_new=10, temperature=temperature, generators=seeded(range(3)), copies=4,
            processors=whisper_decode.window_processors(tokenizer, len(prompt), options),
        )  # fmt: skip
        for i, mel in enumerate(mels):
            torch.manual_seed(i)
            expected = decode(theirs, mel, DecodingOptions(
                fp16=False, language="en", temperature=temperature, best_of=4, sample_len=10))  # fmt: skip
            own = slice(4 * i, 4 * i + 4)
            tokens, logprob = best_row(sampling.SampledTokens(found.ids[own], found.logprobs[own]))
            assert tokens == expected.tokens
            assert logprob / (len(tokens) + 1) == pytest.approx(expected.avg_logprob, abs=1e-4)


@pytest.mark.parametrize("vocabulary", [50, 128 * 12, 5000])
def test_the_greatest_of_a_long_row_are_found(vocabulary):
    torch.manual_seed(0)
    scores = torch.randn(40, vocabulary)
    scores[:10, torch.randperm(vocabulary)[5:]] = -torch.inf  # five tokens stay allowed
    scores[20:30, 17] = torch.nan
    values, indices = _top(scores, 6)
    torch.testing.assert_close(values, scores.topk(6).values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(scores.gather(1, indices).nan_to_num(9), values.nan_to_num(9))
    assert all(len(set(row)) == 6 for row in indices.tolist())


def test_one_beam_is_greedy():
    model, prompt = language_model(), torch.tensor([[2, 3]])
    arguments = {"eos": 0, "max_new": 9}
    found = beam_search(step_of(model), prompt, model.new_cache(), beams=1, **arguments)
    assert found.ids == sampling.greedy(step_of(model), prompt, model.new_cache(), **arguments).ids


def test_sampling_follows_the_seed_and_the_distribution():
    model, prompt = language_model(), torch.tensor([[1]])

    def draw(seed, processors=(), temperature=1.0):
        generator = torch.Generator().manual_seed(seed)
        return sampling.sample(step_of(model), prompt, model.new_cache(), eos=0, max_new=1, temperature=temperature,
                             generators=[generator], copies=4000, processors=processors).ids  # fmt: skip

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    with torch.no_grad():
        expected = (model(prompt[:1])[0, -1] / 2).softmax(-1)
    counts = torch.tensor([row[0] if row else 0 for row in draw(1, temperature=2.0)]).bincount(minlength=7) / 4000
    assert (counts - expected).abs().max() < 0.03
    assert not any(row == [3] for row in draw(1, processors=[processors.suppress([3])]))
    with pytest.raises(ValueError, match="temperature"):
        draw(1, temperature=0.0)


@thin(5, pytest.mark.ci)
@pytest.mark.parametrize(
    ("temperature", "narrow", "share"),
    [
        (1.0, None, 0.6),
        (0.25, None, 0.39),
        (1.0, processors.SamplingFilter(top_k=1), 0.0),
        (1.0, processors.SamplingFilter(top_p=0.35), 0.0),
        (1.0, processors.SamplingFilter(min_p=0.8), 0.0),
    ],
)
def test_each_of_several_ends_has_its_own_probability(temperature, narrow, share):
    """As in transformers, filters see 0.4, 0.3 and 0.3, not the ends' sum of 0.6."""
    step = lambda ids, cache: torch.tensor([0.4, 0.3, 0.3, 0.0]).log().expand(*ids.shape, -1)
    found = sampling.sample(step, torch.tensor([[0]]), Cache(1), eos=[1, 2], max_new=1, temperature=temperature,
                            generators=seeded([0]), copies=8000, narrow=narrow)  # fmt: skip
    assert sum(not ids for ids in found.ids) / 8000 == pytest.approx(share, abs=0.01 * (share > 0))
    assert found.logprobs == pytest.approx([math.log(0.4 if ids else 0.3) for ids in found.ids])


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("alpha", [0.0, 1.0, 1.7, -0.5])
def test_a_wide_beam_keeps_the_best_of_all_sequences_in_order(alpha):
    """With every stopping rule's bound: none of the best may be missed by stopping early."""
    model, eos, most = language_model(vocabulary=4), 0, 4
    every = [list(ids) for n in range(most) for ids in itertools.product(range(1, 4), repeat=n)]
    scores = {tuple(ids): logprob_of(model, [1], [*ids, eos]) / (len(ids) + 1) ** alpha for ids in every}
    best = sorted(scores, key=scores.get, reverse=True)[:6]
    found = beam_search(step_of(model), torch.tensor([[1]]), model.new_cache(), eos=eos, max_new=most, beams=100,
                        keep=6, patience=math.inf, length_penalty=per_token(alpha))  # fmt: skip
    assert [tuple(ids) for ids in found.ids] == best
    assert [score / (len(ids) + 1) ** alpha for ids, score in zip(*found, strict=True)] == pytest.approx(
        [scores[ids] for ids in best], abs=1e-4
    )


def scripted(steps):
    """A step of one source that gives these probabilities of the end, 1 and 2 at each position, whatever came."""

    def step(ids, cache):
        layer = cache.self_attention[0]
        layer.append(ids[:, None, :, None].float(), ids[:, None, :, None].float())
        return torch.tensor(steps[min(layer.length, len(steps)) - 1]).log().expand(len(ids), 1, 3)

    return step


def test_a_search_does_not_stop_before_what_is_better_ends():
    """A length penalty that favours short answers stops the search only when all kept beams have ended."""
    late = scripted([[0.1, 0.9, 1e-9], [1.0, 1e-9, 1e-9]])
    options = {"eos": 0, "max_new": 30, "beams": 2, "patience": math.inf}
    found = beam_search(late, torch.tensor([[1]]), Cache(1), length_penalty=per_token(-1.0), **options)
    assert found.ids == [[1]]
    sure = scripted([[0.99, 0.01, 1e-9], [1e-9, 1e-9, 1.0], [1.0, 1e-9, 1e-9]])
    found = beam_search(sure, torch.tensor([[1]]), Cache(1), length_penalty=per_token(1.0), keep=2, **options)
    assert found.ids == [[], [1, 2]]


def test_places_that_no_sequence_takes_are_empty():
    """Two tokens and the end, in one step: there are three sequences and no fourth."""
    model = language_model(vocabulary=3)
    found = beam_search(step_of(model), torch.tensor([[1], [2]]), model.new_cache(), eos=0, max_new=1, beams=4, keep=4,
                        patience=math.inf)  # fmt: skip
    for own in (slice(0, 4), slice(4, 8)):
        assert sorted(map(tuple, found.ids[own])) == [(), (), (1,), (2,)]
        assert [score > -math.inf for score in found.logprobs[own]] == [True, True, True, False]
        assert found.ids[own][0] == []  # what has ended comes first
    with pytest.raises(ValueError, match="got 4, keep 5"):
        beam_search(step_of(model), torch.tensor([[1]]), model.new_cache(), eos=0, max_new=1, beams=4, keep=5)


def test_a_vocabulary_smaller_than_the_beam_is_searched():
    model = language_model(vocabulary=3)
    found = beam_search(step_of(model), torch.tensor([[1]]), model.new_cache(), eos=0, max_new=5, beams=8)
    assert found.logprobs[0] > -torch.inf


def test_timestamp_rule_equals_openai_whispers():
    from whisper.decoding import ApplyTimestampRules
    from whisper.tokenizer import get_tokenizer

    tokenizer = get_tokenizer(True, language="en")
    begin, eot = tokenizer.timestamp_begin, tokenizer.eot
    generator = torch.Generator().manual_seed(0)
    tails = [[], [begin], [begin, 5], [begin, 5, begin + 9], [begin, 5, begin + 9, begin + 9], [begin, 5, 6]]
    tails += [[7], [7, 8], [begin, 5, begin + 1500], [begin, 5, begin + 1500, begin + 1500], [7, begin]]
    for tail, latest in itertools.product(tails, [50, None]):
        ours = processors.timestamps(begin, eot, tokenizer.no_timestamps, start=2, latest_first=latest)
        theirs = ApplyTimestampRules(tokenizer, 2, latest)
        ids = torch.tensor([[1, 2, *tail]] * 3)
        logits = torch.randn(3, 51865, generator=generator)
        logits[1, begin:] += 12  # times are likely
        logits[2, begin:] -= 12
        expected = logits.clone()
        theirs.apply(expected, ids)
        assert torch.equal(ours(ids, logits), expected)


@pytest.mark.parametrize("size", [5, 256, 700])
def test_the_most_probable_token_is_the_first_of_the_best(size: int):
    logits = torch.randint(-3, 3, (40, size)).float()  # with many ties
    logits[0], logits[1, size // 2], logits[2, -1] = -torch.inf, torch.nan, 9.0
    assert torch.equal(sampling.most_probable(logits), logits.argmax(-1))
