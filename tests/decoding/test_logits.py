"""Rules of captions against transformers' logits processors, and searches with them against its `generate`."""

import math

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, logging
from transformers.generation import logits_process as theirs

from multimodal.blocks.cache import Cache
from multimodal.decoding import logits as processors
from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam_search, per_token
from tests.helpers.spread import thin

BOS, EOS, VOCABULARY, WIDTH = 1, 2, 11, 16
logging.set_verbosity_error()


def rows(seed: int, count: int = 6, length: int = 9) -> torch.Tensor:
    return torch.randint(3, 7, (count, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(4))
def test_each_rule_equals_transformers_processor(seed):
    ids, logits = rows(seed), torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
    pairs = [
        *((processors.no_repeat_ngram(size), theirs.NoRepeatNGramLogitsProcessor(size)) for size in (1, 2, 3, 9, 10)),
        *((processors.repetition_penalty(p), theirs.RepetitionPenaltyLogitsProcessor(p)) for p in (0.8, 1.0, 1.7)),
        *((processors.suppress_first([EOS], 5, count),
           theirs.MinNewTokensLengthLogitsProcessor(5, count, EOS, device="cpu"))
          for count in (0, 4, 5)),
        *((lambda _, x, k=k: processors.top_k(x, k), theirs.TopKLogitsWarper(k)) for k in (1, 3, 99)),
        *((lambda _, x, p=p: processors.top_p(x, p), theirs.TopPLogitsWarper(p)) for p in (0.0, 0.3, 0.9, 1.0)),
        *((lambda _, x, p=p: processors.min_p(x, p), theirs.MinPLogitsWarper(p)) for p in (0.0, 0.05, 0.4, 1.0)),
        (processors.force([3, 7], 9),
         lambda _, x: torch.full_like(x, -math.inf).index_fill_(1, torch.tensor(3), 0.0)),
        (processors.force([EOS], 9), theirs.ForcedEOSTokenLogitsProcessor(10, EOS, device="cpu")),
        *((rule, lambda _, x: x) for rule in (processors.force([3], 8),
          processors.force([3], 10), processors.force([EOS], 10))),
    ]  # fmt: skip
    for ours, reference in pairs:
        assert torch.equal(ours(ids, logits.clone()), reference(ids, logits.clone()))


def test_penalties_are_openais_formula():
    ids, logits = rows(0), torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0))
    counts = torch.stack([torch.bincount(row, minlength=VOCABULARY) for row in ids[:, 4:]])
    expected = logits - 0.7 * counts - 0.3 * counts.gt(0)
    expected[:, 5] += 9
    found = processors.Penalties(0.3, 0.7, ((5, 9.0),)).processor(4)(ids, logits.clone())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("seed", range(3))
def test_padding_before_a_row_counts_for_no_rule(seed):
    """A padded row gets what transformers' processors give to it alone, whatever id pads."""
    ids, starts = rows(seed), [0, 3, 7, 8, 5, 1]
    ids[:, 4] = 0
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
    seen = ids.masked_fill(torch.arange(9) < torch.tensor(starts)[:, None], sampling.PADDING)
    pairs = [
        *((processors.no_repeat_ngram(size), theirs.NoRepeatNGramLogitsProcessor(size)) for size in (1, 2, 3)),
        *((processors.repetition_penalty(p), theirs.RepetitionPenaltyLogitsProcessor(p)) for p in (0.8, 1.7)),
    ]  # fmt: skip
    for ours, reference in pairs:
        found = ours(seen, logits.clone())
        for row, start in enumerate(starts):
            assert torch.equal(
                found[row : row + 1], reference(ids[row : row + 1, start:], logits[row : row + 1].clone())
            )


def test_the_nucleus_is_the_smallest_set_with_its_mass():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert processors.top_p(logits, 0.75).isfinite().tolist() == [[True, True, False, False]]
    assert processors.top_p(logits, 0.85).isfinite().tolist() == [[True, True, True, False]]


def test_where_every_token_is_forbidden_only_the_end_is_left():
    logits = torch.full((2, 5), -torch.inf)
    logits[0, 3] = -9.0
    found = processors.end_if_all_forbidden(EOS)(torch.zeros(2, 1, dtype=torch.long), logits)
    assert found[0].tolist() == [-math.inf] * 3 + [-9.0, -math.inf]
    assert found[1].tolist() == [-math.inf, -math.inf, 0.0, -math.inf, -math.inf]


@pytest.fixture(scope="module")
def decoder() -> BertLMHeadModel:
    """A random decoder with cross-attention, as BLIP's; steep, so that its choices differ."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=40, is_decoder=True, add_cross_attention=True, pad_token_id=0, bos_token_id=BOS,
        eos_token_id=EOS,
    )  # fmt: skip
    model = BertLMHeadModel(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 2:
                tensor.mul_(25 if "embeddings" in name else 12)
        model.cls.predictions.decoder.bias[EOS] = END  # so that answers end sooner or later
    return model


SOURCES = torch.randn(12, 5, WIDTH, generator=torch.Generator().manual_seed(0)) * 2
MOST, END = 14, 3.0


def reference(decoder: BertLMHeadModel, prompt: torch.Tensor, **options) -> tuple[list[list[int]], list[float]]:
    """New ids of transformers' generate for each source, with their end, and the beams' scores."""
    beams = {"early_stopping": "never"} if "num_beams" in options else {}
    found = decoder.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=MOST, use_cache=False,
        encoder_hidden_states=SOURCES, return_dict_in_generate=True, output_scores=True, renormalize_logits=True,
        **beams, **options,
    )  # fmt: skip
    rows = found.sequences[:, prompt.shape[1] :].tolist()
    made = [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]
    return made, found.sequences_scores.tolist() if beams else []


def step_of(decoder: BertLMHeadModel, prompt: torch.Tensor) -> sampling.Step:
    """The same model without a cache: the ids so far are kept here, in the cache's place for rows."""

    def step(ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        kept = cache.self_attention[0]
        values = ids[:, None, :, None].float()
        held = kept.append(values, values)[0][:, 0, :, 0].long()
        crossed = cache.cross_attention[0]
        if crossed.key is None:
            crossed.append(SOURCES[: len(ids)][:, None], SOURCES[: len(ids)][:, None])
        sources = crossed.key[:, 0].repeat_interleave(len(ids) // len(crossed.key), 0)
        return decoder(held, encoder_hidden_states=sources).logits

    return step


OPTIONS = [
    {},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 6},
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4},
]


def processors_of(options: dict, start: int) -> list[sampling.LogitsProcessor]:
    found = []
    if "repetition_penalty" in options:
        found.append(processors.repetition_penalty(options["repetition_penalty"]))
    if "no_repeat_ngram_size" in options:
        found.append(processors.no_repeat_ngram(options["no_repeat_ngram_size"]))
    if "min_new_tokens" in options:
        found.append(processors.suppress_first([EOS], start, options["min_new_tokens"]))
    return found


@thin(5, pytest.mark.ci)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("start", [[BOS], [BOS, 5, 3]])
def test_greedy_equals_transformers_generate(decoder, options, start):
    prompt = torch.tensor([start] * len(SOURCES))
    expected, _ = reference(decoder, prompt, **options)
    found = sampling.greedy(step_of(decoder, prompt), prompt, Cache(1), eos=EOS, max_new=MOST,
                          processors=processors_of(options, len(start)))  # fmt: skip
    assert [ids + [EOS] * (len(ids) < MOST) for ids in found.ids] == expected


BEAMS = [(2, 1.0), (3, 0.0), (4, 1.5), (3, -0.5)]


# each rule with two pairs of beams and exponent
@thin(5, pytest.mark.ci)
@pytest.mark.parametrize(("options", "beams", "alpha"), [
    (options, *BEAMS[(number + more) % 4]) for number, options in enumerate(OPTIONS) for more in (0, 2)
])  # fmt: skip
def test_beams_equal_transformers_generate(decoder, options, beams, alpha):
    """But where its best was cut at the limit and others have ended: ours is then the best that ended."""
    prompt = torch.full((len(SOURCES), 1), BOS)
    expected, scores = reference(decoder, prompt, num_beams=beams, length_penalty=alpha, **options)
    found = beam_search(step_of(decoder, prompt), prompt, Cache(1), eos=EOS, max_new=MOST, beams=beams,
                        patience=math.inf, length_penalty=per_token(alpha),
                        processors=[processors.log_softmax, *processors_of(options, 1)])  # fmt: skip
    equal = 0
    for ids, total, other, score in zip(found.ids, found.logprobs, expected, scores, strict=True):
        if EOS not in other and len(ids) < MOST:
            continue
        equal += 1
        assert ids + [EOS] * (len(ids) < MOST) == other
        assert total / len(other) ** alpha == pytest.approx(score, abs=1e-4)
    assert equal >= 6
