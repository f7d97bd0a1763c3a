"""Beam search by transformers' rules against its `generate`: decoder-only and encoder-decoder, on the same random
weights, several prompts padded on the left against each alone."""

from collections.abc import Sequence
from itertools import takewhile

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    StoppingCriteriaList,
    logging,
)

from multimodal.blocks.cache import Cache
from multimodal.decoding import logits, sampling
from multimodal.decoding.beam_search import STEPS_AHEAD, beam_search, per_token
from tests.helpers.spread import thin

PAD, EOS, VOCABULARY, MOST = 0, 2, 13, 10
ENDS = [EOS, 7, 11]  # where a model has several; 7 is in a prompt
STOPPING = ([8], [9])  # ids that a stop rule stops at
PROMPTS = [[5], [3, 4, 5, 6, 7, 3, 4], [8, 9, 3], [10, 3]]
logging.set_verbosity_error()


def steep(model, bias: float = 0.0):
    """So that choices differ; `bias` of the end, so that answers end sooner or later."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 2:
                tensor.mul_(18 if "wte" in name or "shared" in name else 8)
    head = torch.nn.Linear(model.config.hidden_size, VOCABULARY)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape) * 0.25)
        head.bias.zero_()
        head.bias[EOS] = bias
    model.lm_head = head
    return model.eval()


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    return steep(GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_positions=40, n_embd=16, n_layer=2, n_head=2, pad_token_id=PAD, eos_token_id=EOS,
        bos_token_id=EOS, tie_word_embeddings=False)), 0.6)  # fmt: skip


@pytest.fixture(scope="module")
def bart() -> BartForConditionalGeneration:
    torch.manual_seed(2)
    return steep(BartForConditionalGeneration(BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=40, pad_token_id=PAD,
        bos_token_id=1, eos_token_id=EOS, decoder_start_token_id=EOS, forced_eos_token_id=None,
        tie_word_embeddings=False)), 0.8)  # fmt: skip


def held(ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """All ids so far: they are kept in the cache's place for rows."""
    values = ids[:, None, :, None].float()
    return cache.self_attention[0].append(values, values)[0][:, 0, :, 0].long()


def step_of(model):
    def step(ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        every = held(ids, cache)
        mask = torch.ones_like(every)
        if cache.start is not None:
            mask = (torch.arange(every.shape[1]) >= cache.start[:, None]).long()
        places = (mask.cumsum(1) - 1).clamp(min=0)
        return model(every, attention_mask=mask, position_ids=places).logits[:, -1:]

    return step


def answering(model, sources: list[list[int]]):
    """A step of an encoder-decoder over sources that are padded on the right."""
    size = max(map(len, sources))
    ids = torch.tensor([own + [PAD] * (size - len(own)) for own in sources])
    valid = torch.tensor([[1] * len(own) + [0] * (size - len(own)) for own in sources])

    def step(new: torch.Tensor, cache: Cache) -> torch.Tensor:
        every, crossed = held(new, cache), cache.cross_attention[0]
        if crossed.key is None:
            crossed.append(*(x[:, None, :, None].float() for x in (ids, valid)))
        rows, mask = (x[:, 0, :, 0].long() for x in (crossed.key, crossed.value))
        each = len(every) // len(rows)
        rows, mask = rows.repeat_interleave(each, 0), mask.repeat_interleave(each, 0)
        return model(rows, attention_mask=mask, decoder_input_ids=every).logits[:, -1:]

    return step


def reference(model, prompt: list[int], ends: list[int], **options) -> tuple[list[list[int]], list[float]]:
    """New ids of transformers' `generate` without the end, for this prompt alone, and their scores."""
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MOST,
                           eos_token_id=ends, return_dict_in_generate=True, output_scores=True, **options)  # fmt: skip
    made = found.sequences[:, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist()
    scores = found.sequences_scores.tolist() if options.get("num_beams", 1) > 1 else []
    return [list(takewhile(lambda token: token not in ends, row)) for row in made], scores


def processors_of(options: dict, start: int) -> list[sampling.LogitsProcessor]:
    """In the order that transformers has them."""
    made = {
        "repetition_penalty": logits.repetition_penalty,
        "no_repeat_ngram_size": logits.no_repeat_ngram,
        "min_new_tokens": lambda count: logits.suppress_first([EOS], start, count),
        "forced_bos_token_id": lambda token: logits.force([token], start),
        "forced_eos_token_id": lambda token: logits.force([token], start + MOST - 1),
    }
    return [rule(options[name]) for name, rule in made.items() if name in options]


STOPS = [(3, False, 1.0), (3, True, 1.0), (2, "never", 1.0), (4, False, -0.7), (4, "never", 2.0), (2, True, 0.0)]
EACH_RULE = [STOPS[0], STOPS[1], STOPS[4]]
OPTIONS = [
    {},
    {"no_repeat_ngram_size": 2, "min_new_tokens": 5},
    {"repetition_penalty": 1.7},
]


def searching(beams: int, early: bool | str, alpha: float):
    """Ours, and how transformers is asked for the same."""

    def decode(*given, **more):
        return beam_search(*given, beams=beams, early_stopping=early, length_penalty=per_token(alpha), keep=2, **more)

    return decode, {"num_beams": beams, "early_stopping": early, "length_penalty": alpha, "num_return_sequences": 2}


def compare(
    model, decode, options: dict, sources: list[list[int]] | None = None, ends: Sequence[int] = (EOS,), **asked
) -> list[list[int]]:  # fmt: skip
    """Ours for all prompts together, and transformers' for each alone."""
    if sources is None:
        (ids, start), step = sampling.left_pad(PROMPTS), step_of(model)
    else:
        ids, start, step = torch.full((len(sources), 1), EOS), None, answering(model, sources)
    more = {"stops": stopping} if "stopping_criteria" in asked else {}
    together = decode(
        step, ids, Cache(1, start), eos=ends, max_new=MOST, processors=processors_of(options, ids.shape[1]), **more
    )
    keep = asked.get("num_return_sequences", 1)
    for row, prompt in enumerate(PROMPTS if sources is None else sources):
        expected, scores = reference(model, prompt, list(ends), **options, **asked)
        own = slice(row * keep, (row + 1) * keep)
        assert together.ids[own] == expected
        for ids, total, score in zip(expected, together.logprobs[own], scores, strict=bool(scores)):
            size = len(ids) + (len(ids) < MOST and not ("stopping_criteria" in asked and ids[-1:] in STOPPING))
            assert total / size ** asked["length_penalty"] == pytest.approx(score, abs=1e-4)
    return together.ids


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["gpt2", "bart"])
def test_greedy_equals_transformers_generate(kind, options, request):
    model = request.getfixturevalue(kind)
    compare(model, sampling.greedy, options, PROMPTS if kind == "bart" else None)


@pytest.mark.ci
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2]])
def test_several_ends_equal_transformers(gpt2, options):
    """Each keeps its own logit, and in a beam search each is an ending of its own."""
    assert any(len(ids) < MOST for ids in compare(gpt2, sampling.greedy, options, ends=ENDS))
    for stop in EACH_RULE:
        decode, asked = searching(*stop)
        compare(gpt2, decode, options, ends=ENDS, **asked)


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(("beams", "early", "alpha"), STOPS)
@pytest.mark.parametrize("kind", ["gpt2", "bart"])
def test_beams_equal_transformers_generate(kind, beams, early, alpha, request):
    model, (decode, asked) = request.getfixturevalue(kind), searching(beams, early, alpha)
    found = compare(model, decode, OPTIONS[beams % 3], PROMPTS if kind == "bart" else None, **asked)
    assert len(set(map(tuple, found))) > 2


def stopping(ids: torch.Tensor, scores: torch.Tensor | None = None) -> torch.Tensor:
    return (ids[:, -1:] == torch.tensor(STOPPING).T).any(1)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["gpt2", "bart"])
def test_stop_rules_equal_transformers_stopping_criteria(kind, request):
    """A sequence that one stops has no end, and its last token is a candidate among the others."""
    model, sources = request.getfixturevalue(kind), PROMPTS if kind == "bart" else None
    asked = {"stopping_criteria": StoppingCriteriaList([stopping])}
    found = compare(model, sampling.greedy, {}, sources, **asked)
    for stop in EACH_RULE:
        decode, more = searching(*stop)
        found += compare(model, decode, {}, sources, **asked, **more)
    assert {ids[-1:] in STOPPING for ids in found} == {True, False}


@pytest.mark.parametrize(("beams", "early", "alpha"), [(2, True, 1.0), (2, "never", -0.7)])
def test_only_endings_among_the_best_continuations_count(gpt2, beams, early, alpha):
    """A likely end token gives many finished beams."""
    with torch.no_grad():
        before = gpt2.lm_head.bias[EOS].item()
        gpt2.lm_head.bias[EOS] = 1.8
    try:
        decode, asked = searching(beams, early, alpha)
        compare(gpt2, decode, {}, **asked)
    finally:
        with torch.no_grad():
            gpt2.lm_head.bias[EOS] = before


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("beams", [1, 3])
def test_first_and_last_tokens_that_are_forced_equal_transformers(bart, beams):
    options = {"forced_bos_token_id": 9, "forced_eos_token_id": EOS, "min_new_tokens": MOST}
    decode, asked = sampling.greedy, {}
    if beams > 1:
        asked = {"num_beams": beams, "early_stopping": False, "length_penalty": 1.0}

        def decode(*given, **more):
            return beam_search(*given, beams=beams, early_stopping=False, length_penalty=per_token(1.0), **more)

    found = compare(bart, decode, options, PROMPTS, **asked)
    assert all(ids[0] == 9 and len(ids) == MOST - 1 for ids in found)


def test_where_endings_are_held_the_three_rules_stop_at_three_times(gpt2):
    steps = {}
    for early in (True, False, "never"):
        ids, start = sampling.left_pad(PROMPTS)
        calls, step = [], step_of(gpt2)
        beam_search(lambda new, cache, calls=calls, step=step: (calls.append(len(new)), step(new, cache))[1], ids,
             Cache(1, start), eos=EOS, max_new=20, beams=3, early_stopping=early,
             length_penalty=per_token(1.0))  # fmt: skip
        steps[early] = sum(calls)
    assert steps[True] < steps[False] < steps["never"]


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("early", [None, True, False, "never"])
def test_beams_that_a_gpu_chooses_ahead_of_the_host_are_the_same(gpt2, early, monkeypatch):
    def found():
        ids, start = sampling.left_pad(PROMPTS)
        return beam_search(step_of(gpt2), ids, Cache(1, start), eos=EOS, max_new=[20, 3, 12, 0], beams=3, keep=2,
                    early_stopping=early, length_penalty=per_token(0.7))  # fmt: skip

    right = found()
    monkeypatch.setattr("multimodal.decoding.beam_search.ASYNC_DEVICES", ("cpu", "cuda"))
    ahead = found()
    assert ahead.ids == right.ids
    assert ahead.logprobs == pytest.approx(right.logprobs, abs=1e-5)
    assert {len(row) for row in right.ids} - {0, 20}  # some end by themselves


def test_beams_that_a_gpu_chooses_leave_it_steps_to_go_on_with(monkeypatch):
    """On the meta device each look at a value is an error, as it is a wait on an accelerator."""
    monkeypatch.setattr("multimodal.decoding.beam_search.ASYNC_DEVICES", ("meta",))
    seen = []

    def step(ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        seen.append(len(ids))
        return torch.empty(len(ids), 1, VOCABULARY, device="meta")

    prompt = torch.ones(2, 3, dtype=torch.long, device="meta")
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        beam_search(step, prompt, Cache(1), eos=EOS, max_new=40, beams=3)
    assert seen == [2] + [6] * STEPS_AHEAD  # then the note of the first step is read


def test_what_is_no_rule_of_stopping_is_refused(gpt2):
    for wrong in ("always", ""):
        with pytest.raises(ValueError, match="early_stopping must be True, False or 'never'"):
            beam_search(step_of(gpt2), torch.tensor([[5]]), Cache(1), eos=EOS, max_new=3, beams=2, early_stopping=wrong)
