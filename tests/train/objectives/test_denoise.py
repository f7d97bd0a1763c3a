"""Each way to damage a text against its definition: what is lost, how much, and that the target gives it back."""

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from multimodal.data.batching import tensors_in
from multimodal.data.datasets.documents import SentenceWindow
from multimodal.data.loader import Loader, generator
from multimodal.errors import DataError, UsageError
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.train.objectives.text.denoise import (
    OBJECTIVES,
    Denoised,
    Vocabulary,
    bert_style,
    deshuffling,
    document_rotation,
    drop_tokens,
    prefix_language,
    random_spans,
    random_tokens,
    replace_spans,
    sentence_permutation,
    span_corruption,
    text_infilling,
    token_deletion,
)
from multimodal.train.objectives.text.denoising import (
    DenoisedTexts,
    Denoising,
    NoiseSettings,
    SizeSettings,
    denoising_figures,
    encoder_decoder,
    sentinels,
)
from multimodal.train.objectives.text.translation import CollatePairs
from tests.helpers.data.contrast import EXACT, gradient
from tests.helpers.tiny import randomized

MARKS = list(range(999, 899, -1))
MASK = 500


def runs(mask: Tensor) -> list[int]:
    return [len(list(group)) for noise, group in itertools.groupby(mask.tolist()) if noise]


def restored(found: Denoised, marks: list[int]) -> list[int]:
    """The text that source and target tell together: each mark of the source is what follows it in the target."""
    spans, text = {}, []
    for token in found.target.tolist():
        if token in marks:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    assert list(spans) == marks[: len(spans)]  # in order, none twice, the last without tokens
    assert spans.popitem()[1] == []
    for token in found.source.tolist():
        text += spans.pop(token) if token in marks else [token]
    assert not spans
    return text


@pytest.mark.parametrize(("count", "noise", "spans"), [(100, 15, 5), (20, 3, 1), (33, 5, 2), (512, 77, 26), (2, 1, 1)])
def test_random_spans_are_t5s(count, noise, spans):
    for seed in range(20):
        mask = random_spans(count, 0.15, 3.0, generator(seed))
        assert int(mask.sum()) == noise
        assert len(runs(mask)) == spans
        assert not mask[0]
        assert mask[-1]
    assert not random_spans(1, 0.15, 3.0, generator(0)).any()


@pytest.mark.ci
def test_every_division_into_spans_is_equally_likely():
    found = Counter(tuple(random_spans(6, 0.5, 1.5, generator(seed)).tolist()) for seed in range(3600))
    assert len(found) == 4  # 3 kept in two parts times 3 of noise in two parts
    assert min(found.values()) == pytest.approx(900, abs=120)


def test_source_and_target_give_back_the_text_for_every_mask():
    ids = torch.arange(10, 18)
    for bits in itertools.product([False, True], repeat=8):
        assert restored(replace_spans(ids, torch.tensor(bits), MARKS), MARKS) == ids.tolist()
    assert replace_spans(ids[:5], torch.tensor([0, 1, 1, 0, 1], dtype=torch.bool), MARKS) == (
        pytest.approx([10, 999, 13, 998]), pytest.approx([999, 11, 12, 998, 14, 997]),
    )  # fmt: skip


def test_span_corruption_of_a_long_text():
    ids = torch.arange(10, 210)
    found = span_corruption(ids, MARKS, generator(1))
    assert restored(found, MARKS) == ids.tolist()
    assert len(found.source) == 200 - 30 + 10
    assert len(found.target) == 30 + 10 + 1
    with pytest.raises(DataError, match="a text of 200 tokens has 10 spans, too many for 10 sentinels"):
        span_corruption(ids, MARKS[:10], generator(1))


def test_random_tokens_are_a_fixed_share_all_over_the_text():
    found = torch.stack([random_tokens(40, 0.15, generator(seed)) for seed in range(2000)])
    assert (found.sum(1) == 6).all()
    assert_close(found.double().mean(0), torch.full((40,), 0.15, dtype=torch.float64), atol=0.035, rtol=0)


def test_dropped_tokens_are_the_target():
    ids = torch.arange(10, 50)
    found = drop_tokens(ids, generator(0))
    assert sorted([*found.source.tolist(), *found.target.tolist()]) == ids.tolist()
    assert found.source.tolist() == sorted(found.source.tolist())
    assert found.target.tolist() == sorted(found.target.tolist())
    assert len(found.target) == 6
    kept = token_deletion(ids, generator(0))
    assert kept.tolist() == found.source.tolist()


def test_bert_style_masks_nine_of_ten_and_mass_all():
    ids, ordinary, found = torch.arange(10, 110), torch.arange(200, 300), Counter()
    for seed in range(200):
        source, target = bert_style(ids, MASK, ordinary, generator(seed))
        assert torch.equal(target, ids)
        changed = source[source != ids]
        assert len(changed) == 15
        found.update("mask" if token == MASK else "other" for token in changed.tolist())
        mass = bert_style(ids, MASK, ordinary, generator(seed), other=0.0).source
        assert (mass[mass != ids] == MASK).all()
    assert found["other"] / found.total() == pytest.approx(0.1, abs=0.02)


def gaps(ids: list[int], source: list[int]) -> list[int]:
    """Number of tokens behind each mask; no token is in the text twice and no two masks are side by side."""
    lengths, at = [], 0
    for i, token in enumerate(source):
        if token == MASK:
            after = ids.index(source[i + 1]) if i + 1 < len(source) else len(ids)
            lengths.append(after - at)
            at = after
        else:
            assert ids[at] == token
            at += 1
    assert at == len(ids)
    return lengths


def test_text_infilling_takes_a_fixed_share_in_poisson_spans_and_empty_ones():
    ids, lengths = torch.arange(10, 210), Counter()
    for seed in range(300):
        source = text_infilling(ids, MASK, generator(seed))
        assert int((source != MASK).sum()) == 140
        assert source[source != MASK].tolist() == sorted(source[source != MASK].tolist())
        if (MASK, MASK) not in set(itertools.pairwise(source.tolist())):
            lengths.update(gaps(ids.tolist(), source.tolist()))
    total = lengths.total()
    assert sum(size * count for size, count in lengths.items()) / total == pytest.approx(3, abs=0.2)
    assert lengths[0] / total == pytest.approx(0.05, abs=0.03)  # e^-3
    assert text_infilling(torch.tensor([7]), MASK, generator(0), share=0.9).tolist() == [MASK]
    assert text_infilling(ids[:3], MASK, generator(0), share=0.1).tolist() == ids[:3].tolist()
    many = [text_infilling(ids[:56], MASK, generator(seed), share=0.3, mean=0.5) for seed in range(20)]
    assert max(map(len, many)) <= 56


def test_orders_are_lost_and_nothing_else():
    sentences, ids = [[1, 2, 3], [4], [5, 6]], torch.arange(10, 30)
    orders = Counter(str(sentence_permutation(sentences, generator(seed))) for seed in range(600))
    assert len(orders) == 6
    assert min(orders.values()) == pytest.approx(100, abs=40)
    firsts = Counter()
    for seed in range(400):
        turned = document_rotation(ids, generator(seed)).tolist()
        firsts[turned[0]] += 1
        at = turned.index(10)
        assert turned[at:] + turned[:at] == ids.tolist()
    assert len(firsts) == 20
    shuffled = deshuffling(ids, generator(0))
    assert sorted(shuffled.source.tolist()) == shuffled.target.tolist() == ids.tolist()
    assert shuffled.source.tolist() != ids.tolist()
    cuts = {len(prefix_language(ids, generator(seed)).source) for seed in range(300)}
    assert cuts == set(range(1, 20))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_a_function_of_its_generator(name):
    sentences, vocabulary = (
        [list(range(10, 30)), [31, 32], list(range(40, 58))],
        Vocabulary(MASK, MARKS, torch.arange(9)),
    )
    once, again, other = (OBJECTIVES[name](sentences, vocabulary, generator(seed), 0.3, 3.0) for seed in (1, 1, 2))
    assert torch.equal(once.source, again.source)
    assert torch.equal(once.target, again.target)
    assert once.source.tolist() != other.source.tolist()
    text = [i for sentence in sentences for i in sentence]
    if name in ("spans", "replace"):
        assert restored(once, MARKS) == text
    elif name in ("drop", "prefix"):
        assert sorted([*once.source.tolist(), *once.target.tolist()]) == text
    else:
        assert once.target.tolist() == text


TOKENIZER = WordPieceTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(20))], 31, 2, 3)


def source(style: str, objective: str = "spans") -> DenoisedTexts:
    made = [SentenceWindow(n, (list(range(5, 5 + size)),)) for n, size in enumerate((14, 9, 20, 6))]
    begin = TOKENIZER.pad_id if style == "t5" else TOKENIZER.eos_id
    return DenoisedTexts(made, TOKENIZER, sentinels(TOKENIZER, 6), begin, objective, NoiseSettings())


@pytest.mark.parametrize("style", ["t5", "bart"])
def test_accumulation_is_exact_and_the_loss_is_that_of_the_target(style):
    torch.manual_seed(0)
    made, collate = source(style), CollatePairs(TOKENIZER.pad_id)
    model = randomized(encoder_decoder(31, style, made.start_id, SizeSettings(16, 1, 1, 2, 32))).double()
    pairs = [made.prepare(made.read(key), generator(key)) for key in range(4)]
    loss, whole = gradient(Denoising(model), [collate(pairs)])
    parts, summed = gradient(Denoising(model), [collate(pairs[1:2]), collate([pairs[3], pairs[0], pairs[2]])])
    assert parts == pytest.approx(loss, abs=1e-5)
    for name, grad in whole.items():
        assert_close(summed[name], grad, **EXACT)
    alone = []
    for pair in pairs:
        assert pair.answer[0] == made.start_id
        logits = model(torch.tensor([pair.source]), torch.tensor([pair.answer[:-1]]))[0]
        alone.append(-logits.log_softmax(-1).gather(1, torch.tensor(pair.answer[1:])[:, None]))
    assert loss == pytest.approx(float(torch.cat(alone).detach().mean()), abs=1e-5)
    figures = denoising_figures(model, [collate(pairs)], made.vocabulary.ordinary)
    assert figures["loss"] == pytest.approx(loss, abs=1e-5)
    assert figures["text"] != pytest.approx(loss, abs=1e-5)


@pytest.mark.ci
def test_batches_are_the_same_for_any_number_of_workers():
    made, found = source("t5"), []
    for workers in (0, 2):
        loader = Loader(made, made.plan(40, 0), made.prepare, CollatePairs(0), seed=1, workers=workers)
        steps = loader.start(0)
        found.append([next(steps).batches[0] for _ in range(6)])
        steps.close()
    for one, other in zip(*found, strict=True):
        tensors = zip(tensors_in(one), tensors_in(other), strict=True)
        assert all(torch.equal(a, b) for a, b in tensors)


def test_sentinels_are_control_tokens():
    assert sentinels(TOKENIZER, 3) == [30, 29, 28]
    with pytest.raises(UsageError, match="tokenizer must end in 9 control tokens"):
        sentinels(TOKENIZER, 9)
    plain = BytePairTokenizer.train(["some text"], 300)
    with pytest.raises(UsageError, match="must end in 1 control tokens"):
        sentinels(plain, 1)
