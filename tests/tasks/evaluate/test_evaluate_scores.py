"""Figures of image evaluation against slow twins, scikit-learn and cases made by hand: ties, absent classes, C,
labels of a list."""

import math
import random
import warnings

import numpy as np
import pytest
import sacrebleu
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, confusion_matrix

from multimodal.data.datasets.class_names import Concept, evenly
from multimodal.data.datasets.image_sets import listed_classes, open_images
from multimodal.errors import DataError, UsageError
from multimodal.tasks.evaluate import retrieval as evaluate_retrieval
from multimodal.tasks.evaluate.class_scores import class_scores
from multimodal.tasks.evaluate.few_shot import FewShotVectors, cache_scores, drawn, few_shot
from multimodal.tasks.evaluate.linear_probe import (
    LabelledVectors,
    ProbeFit,
    best_strength,
    fitted,
    held_out,
    linear_probe,
    searched,
)
from multimodal.tasks.evaluate.reports.confusion import plot_confusion
from multimodal.tasks.evaluate.retrieval import first_ranks, retrieval
from multimodal.tasks.evaluate.scores import bleu, bleu_tokenizer, ranks, top_shares, word_errors
from tests.helpers.data.sets import lines

NAMES = [f"name {i}" for i in range(7)]


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def blobs(classes: int, each: int, seed: int = 0, width: int = 6, spread: float = 0.8) -> LabelledVectors:
    source = torch.Generator().manual_seed(99)
    middles, labels = torch.randn(classes, width, generator=source) * 2, torch.arange(classes * each) % classes
    noise = torch.randn(len(labels), width, generator=torch.Generator().manual_seed(seed))
    return LabelledVectors(middles[labels] + spread * noise, labels)


def test_class_figures_are_those_of_scikit_learn():
    labels = torch.randint(6, (200,), generator=torch.Generator().manual_seed(0))  # the seventh class has no image
    scores = torch.randn(200, 7, generator=torch.Generator().manual_seed(1))
    scores[torch.arange(200), labels] += 1
    made = class_scores(NAMES, labels, scores)
    found, figures = scores.argmax(1), made.figures()
    assert figures["acc1"] == pytest.approx((found == labels).double().mean().item())
    top = scores.topk(5).indices == labels[:, None]
    assert figures["acc5"] == pytest.approx(top.any(1).double().mean().item())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the class without images that was found
        assert figures["mean_per_class_recall"] == pytest.approx(balanced_accuracy_score(labels, found))
    assert (figures["images"], figures["classes"], figures["classes_with_images"]) == (200, 7, 6)
    table = confusion_matrix(labels, found, labels=range(7))
    assert np.array_equal(made.confusion().numpy(), table)
    rows = made.classes()
    assert rows[6] == {"class": "name 6", "images": 0, "recall": None, "found": int(table[:, 6].sum())}
    assert [row["images"] for row in rows] == table.sum(1).tolist()
    np.fill_diagonal(table, 0)
    first = made.confused()[0]
    assert first["images"] == table.max() == table[NAMES.index(first["class"]), NAMES.index(first["taken_for"])]


def test_a_tie_or_a_score_that_is_no_number_is_no_hit():
    nan = math.nan
    scores = torch.tensor([[1.0, 1, 0, 0], [2, 1, 1, 0], [nan, 0, 0, 0], [nan, nan, nan, nan], [0, 0, 0, 0]])
    labels = torch.tensor([0, 0, 1, 2, 3])
    assert ranks(scores, labels).tolist() == [1, 0, 3, 3, 3]
    assert top_shares(scores, labels) == {"top1": 0.2}  # of four classes all would be among five
    made = class_scores(NAMES[:4], labels, scores)
    assert made.figures()["acc1"] == 0.2
    assert made.figures()["acc5"] is None  # of four classes every image would be right
    assert made.found.tolist()[:2] == [1, 0]
    assert made.confusion().trace() == 1  # the same hits as acc1


def test_one_class_alone_is_refused():
    with pytest.raises(DataError, match="the class 'name 0' alone"):
        class_scores(NAMES[:1], torch.zeros(3).long(), torch.ones(3, 1))


def slow_ranks(scores: list[list[float]], groups: list[int], own: list[int]) -> list[int]:
    """A query at a time: right items go behind all wrong ones of the same score."""
    found = []
    for row, group in zip(scores, groups, strict=True):
        order = sorted(range(len(row)), key=lambda i: (-row[i], own[i] == group))
        found.append(1 + next(place for place, i in enumerate(order) if own[i] == group))
    return found


def twin(images: torch.Tensor, texts: torch.Tensor, owners: list[int]) -> tuple[list[int], list[int]]:
    scores = (images.double() @ texts.double().T).round(decimals=5)
    own = list(range(len(images)))
    back = slow_ranks(scores.T.tolist(), owners, own)
    firsts = []
    for image, row in enumerate(scores.tolist()):
        best = max(s for s, owner in zip(row, owners, strict=True) if owner == image)
        firsts.append(1 + sum(s >= best for s, owner in zip(row, owners, strict=True) if owner != image))
    return firsts, back


@pytest.mark.parametrize("cells", [1 << 24, 7])
def test_retrieval_is_its_slow_twin_in_blocks_of_any_size(monkeypatch, cells):
    monkeypatch.setattr(evaluate_retrieval, "CELLS", cells)
    chooser = random.Random(0)
    owners = [i for i in range(30) for _ in range(chooser.randint(1, 6))]
    chooser.shuffle(owners)
    images, texts = unit(30, 4), unit(len(owners), 4, seed=1)
    texts[5], texts[9], images[3] = texts[20], texts[20], images[8]  # captions and images that are the same
    made = retrieval(images, texts, owners)
    firsts, back = twin(images, texts, owners)
    assert made.image_to_text.tolist() == firsts
    assert made.text_to_image.tolist() == back
    figures = made.figures()
    assert (figures["images"], figures["texts"]) == (30, len(owners))
    for name, own in (("image_to_text", firsts), ("text_to_image", back)):
        assert figures[name]["median_rank"] == np.median(own)
        assert figures[name]["mean_reciprocal_rank"] == pytest.approx(np.mean(1 / np.array(own)))
        for k in (1, 5, 10):
            assert figures[name][f"recall@{k}"] == pytest.approx(np.mean(np.array(own) <= k))


def test_recall_is_that_of_clip_benchmark_where_nothing_ties():
    """At least one right text among the k of the highest score, both ways."""
    owners = [i // 5 for i in range(100)]
    images, texts = unit(20, 8), unit(100, 8, seed=1)
    scores, own = images @ texts.T, torch.arange(20)[:, None] == torch.tensor(owners)
    figures = retrieval(images, texts, owners).figures()
    for k in (1, 5, 10):
        for name, s, right in (("image_to_text", scores, own), ("text_to_image", scores.T, own.T)):
            hits = right.gather(1, s.topk(k).indices).any(1)
            assert figures[name][f"recall@{k}"] == pytest.approx(hits.double().mean().item())


def test_ties_in_retrieval_are_no_hits():
    same, apart = torch.tensor([1.0, 0]), torch.tensor([0.0, 1])
    made = retrieval(same.expand(3, 2), same.expand(6, 2), [0, 0, 1, 1, 2, 2])
    assert made.image_to_text.tolist() == [5, 5, 5]  # the four texts of the others come first
    assert made.text_to_image.tolist() == [3] * 6
    assert made.figures()["image_to_text"]["recall@1"] == 0
    # a second own caption that is worse does no harm, one that is better is what counts
    made = retrieval(torch.stack([same, apart]), torch.stack([apart, same, apart]), [0, 0, 1])
    assert made.image_to_text.tolist() == [1, 2]
    assert made.text_to_image.tolist() == [2, 1, 1]
    assert made.figures()["text_to_image"]["recall@5"] is None  # of two images
    nothing = first_ranks(torch.full((2, 2), math.nan), torch.eye(2), torch.arange(2), torch.arange(2))
    assert nothing.tolist() == [2, 2]


@pytest.mark.ci
def test_a_probe_tells_apart_what_is_linear():
    train, test = blobs(5, 30), blobs(5, 12, seed=1)
    probe = linear_probe(train, test, NAMES[:5])
    assert probe.scores.figures()["acc1"] > 0.9
    assert probe.converged
    best = max(fit.accuracy for fit in probe.sweep)
    equal = [fit.c for fit in probe.sweep if fit.accuracy == best]
    assert probe.c == equal[len(equal) // 2]
    assert linear_probe(train, test, NAMES[:5], c=0.5).sweep == []
    shuffled = LabelledVectors(
        train.vectors, train.labels[torch.randperm(150, generator=torch.Generator().manual_seed(0))]
    )
    assert linear_probe(shuffled, test, NAMES[:5], c=1.0).scores.figures()["acc1"] < 0.6


def test_the_search_halves_its_steps_around_the_best():
    tried = []

    def fit(exponent: float) -> ProbeFit:
        tried.append(exponent)
        return ProbeFit(10**exponent, -abs(exponent - 1.3), 1, True)

    best = max(searched(fit), key=lambda fit: fit.accuracy)
    assert math.log10(best.c) == pytest.approx(1.3, abs=1 / 16)
    assert tried[:7] == [-6, -4, -2, 0, 2, 4, 6]
    assert tried[7:] == [1, 3, 0.5, 1.5, 1.25, 1.75, 1.125, 1.375]
    assert [round(math.log10(fit.c)) for fit in searched(lambda e: ProbeFit(10**e, e, 1, True))][-1] == 6  # not beyond


def test_fits_of_two_classes_of_absent_classes_and_without_end():
    train, test = blobs(2, 20), blobs(2, 10, seed=1)
    scores, _, _ = fitted(train, test.vectors, 4, 1.0)
    assert scores.shape == (20, 4)
    assert scores[:, 2:].eq(-math.inf).all()
    assert (scores.argmax(1) == test.labels).double().mean() > 0.9
    model = LogisticRegression(max_iter=1000).fit(train.vectors.numpy(), train.labels.numpy())
    np.testing.assert_allclose(scores[:, :2].softmax(1), model.predict_proba(test.vectors.numpy()), atol=1e-6)
    scores, _, _ = fitted(LabelledVectors(train.vectors, 2 * train.labels), test.vectors, 4, 1.0)
    assert scores[:, [1, 3]].eq(-math.inf).all()
    assert (scores.argmax(1) == 2 * test.labels).double().mean() > 0.9
    with pytest.warns(UserWarning, match="has not converged at C 1e"):
        probe = linear_probe(train, test, NAMES[:2], c=1e6, max_iterations=2)
    assert (probe.converged, probe.iterations) == (False, 2)
    with pytest.raises(DataError, match="of one class"):
        fitted(LabelledVectors(train.vectors, torch.zeros(40).long()), test.vectors, 2, 1.0)
    with pytest.raises(UsageError, match="C"):
        best_strength(train, LabelledVectors(train.vectors[:0], train.labels[:0]), 2)
    _, sweep = best_strength(train, test, 2, max_iterations=3)
    assert not all(fit.converged for fit in sweep)


def test_what_is_held_out_is_a_share_of_each_class():
    labels = torch.tensor([0] * 10 + [1] * 3 + [2] + [3] * 2)
    held = held_out(labels, 0.2, 0)
    assert torch.bincount(labels[held], minlength=4).tolist() == [2, 1, 0, 1]
    assert not torch.equal(held, held_out(labels, 0.2, 1))


@pytest.mark.ci
def test_few_shots_have_means_and_deviations_of_their_draws():
    train, test = blobs(4, 25, spread=2.0), blobs(4, 25, seed=1, spread=2.0)
    rows = few_shot(train, test, NAMES[:4], [1, 16], seeds=3)
    one, many = (row["linear_probe"] for row in rows)
    assert [row["shots"] for row in rows] == [1, 16]
    assert len(one["acc1"]) == len(one["c"]) == 3
    assert one["acc1_mean"] == pytest.approx(np.mean(one["acc1"]))
    assert one["acc1_sd"] == pytest.approx(np.std(one["acc1"], ddof=1))
    assert many["acc1_mean"] > one["acc1_mean"]
    assert many["acc5"] == []
    assert "tip_adapter" not in rows[0]
    assert few_shot(train, test, NAMES[:4], [2], seeds=1, c=1.0)[0]["linear_probe"]["acc1_sd"] is None
    with pytest.warns(UserWarning, match="30 shots: 4 classes have fewer"):
        few_shot(train, test, NAMES[:4], [30], seeds=1, c=1.0)
    with pytest.raises(UsageError, match="C is needed"), pytest.warns(UserWarning, match="30 shots: left out"):
        few_shot(train, test, NAMES[:4], [30], seeds=1)
    with pytest.warns(UserWarning, match="25 shots: left out"):
        assert [row["shots"] for row in few_shot(train, test, NAMES[:4], [1, 25], seeds=1)] == [1]


def test_draws_share_no_image():
    labels = torch.arange(60) % 3
    few, further = drawn(labels, 8, 0)
    assert torch.bincount(labels[few]).tolist() == [8, 8, 8]
    assert torch.bincount(labels[further]).tolist() == [4, 4, 4]
    assert not set(few.tolist()) & set(further.tolist())
    assert drawn(labels, 8, 1)[0].tolist() != few.tolist()


def test_tip_adapter_is_its_formula_and_helps_a_blind_classifier():
    alike, values = unit(5, 4) @ unit(6, 4, seed=1).T, torch.nn.functional.one_hot(torch.arange(6) % 2).float()
    by_hand = [
        [sum(math.exp(-3 * (1 - alike[n, k])) for k in range(6) if k % 2 == c) for c in range(2)] for n in range(5)
    ]
    torch.testing.assert_close(cache_scores(alike, values, 3.0), torch.tensor(by_hand), rtol=1e-5, atol=1e-6)
    train, test = blobs(4, 25), blobs(4, 25, seed=1)
    vectors = [torch.nn.functional.normalize(p.vectors, dim=-1) for p in (train, test)]
    blind = FewShotVectors(*vectors, torch.zeros(100, 4), torch.zeros(100, 4))
    row = few_shot(train, test, NAMES[:4], [4], seeds=2, c=1.0, embedded=blind)[0]["tip_adapter"]
    assert row["acc1_mean"] > 0.8
    assert len(row["alpha"]) == len(row["beta"]) == 2
    with pytest.warns(UserWarning, match="25 shots: no Tip-Adapter"):
        assert "tip_adapter" not in few_shot(train, test, NAMES[:4], [25], seeds=1, c=1.0, embedded=blind)[0]


@pytest.mark.ci
@pytest.mark.parametrize("classes", [3, 40])
def test_a_confusion_matrix_is_drawn_with_any_names(classes, tmp_path):
    names = [f"$x_{i} \\bad{{ 猫 {'long ' * 9}" for i in range(classes)]
    labels = torch.arange(classes - 1)  # the last class has no image
    made = class_scores(names, labels, torch.eye(classes)[:-1])
    (tmp_path / "c.png").write_bytes(plot_confusion(made, "model $ on a_b"))
    with Image.open(tmp_path / "c.png") as image:
        width, height = image.size
        assert min(width, height) > (400 if classes == 3 else 700)
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50


@pytest.mark.parametrize(
    ("ids", "labels", "numbers"),
    [
        (["b", "a", "C"], ["first", "second", "third"], {"C": 0, "a": 1, "b": 2}),  # the order of sorted ids
        (["2", "10", "0"], [f"name {i}" for i in range(12)], {"2": 2, "10": 10, "0": 0}),  # numbers are places
        (["big_dog", "cat"], ["Cat", "puma", "big dog"], {"big_dog": 2, "cat": 0}),
        (["n1", "n2"], ["cat", "hound"], {"n1": 1, "n2": 0}),  # by any of its names
        (["10", "3"], ["a", "b", "c"], "the class '10'"),
        (["a", "b"], ["a", "c"], "the class 'b'"),
        (["a", "b"], ["x", "y", "z"], "the class 'a'"),
    ],
)
def test_labels_of_a_list_are_found_by_name_then_by_place(ids, labels, numbers, tmp_path):
    source = open_images(lines(tmp_path / "a.jsonl", [{"path": f"{i}.png", "label": i} for i in ids]))
    known = {"n1": Concept(("dog", "hound")), "n2": Concept(("cat",))}
    if isinstance(numbers, dict):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = listed_classes(source, known, labels, "names.txt")
        assert (made.names, made.numbers) == (labels, numbers)
        pairs = {"b": "C = 'first', a = 'second', b = 'third'", "2": "2 = 'name 2', 10 = 'name 10', 0 = 'name 0'"}
        by_order = [f"names.txt: labels are matched to classes by order: {pairs[ids[0]]}"] if ids[0] in pairs else []
        assert [str(one.message) for one in caught] == by_order
    else:
        with pytest.raises(UsageError, match=numbers):
            listed_classes(source, known, labels, "names.txt")


def test_word_errors_are_those_of_the_normalized_corpus():
    # "It's" and "it is" normalize to the same words; one of 3 + 1 words is wrong
    assert word_errors(["It's here!", "one"], ["it is here", "two"], "en")["wer"] == 0.25
    assert word_errors(["", "a"], ["", "a"], "en") == {"wer": 0.0, "cer": 0.0}
    assert word_errors(["fünf Mädchen"], ["funf Madchen"], "de")["wer"] == 1.0  # the English one drops the dots
    assert word_errors(["fünf Mädchen"], ["funf Madchen"], None, "english")["wer"] == 0.0
    assert word_errors(["काला"], ["कील"], "en", keep_marks=True)["wer"] == 1.0


def test_top_shares_and_evenly_spread_items():
    scores = torch.eye(7)[:4] + torch.arange(7) * 0.01
    assert top_shares(scores, torch.tensor([0, 1, 5, 0])) == {"top1": 0.5, "top5": 0.75}
    assert evenly(range(10), 3) == [0, 3, 6]
    assert list(evenly(range(2), 5)) == [0, 1]


@pytest.mark.parametrize(("language", "tokenizer"), [
    ("zh", "zh"), ("Chinese", "zh"), ("zho_Hant", "zh"), ("zh-CN", "zh"), ("cmn_Hans", "zh"), ("yue", "zh"),
    ("th", "char"), ("khm_Khmr", "char"), ("my_MM", "char"),
    ("en", "13a"), ("German", "13a"), ("fra_Latn", "13a"), ("xx", "13a"), (None, "13a"),
])  # fmt: skip
def test_bleu_has_the_tokenizer_of_the_language(language, tokenizer):
    wanted, found = ["他们在公园里遛狗。", "A dog, it runs."], ["他们在公园遛狗。", "A dog, he runs."]
    assert bleu_tokenizer(language) == tokenizer
    score = sacrebleu.corpus_bleu(found, [wanted], tokenize=tokenizer).score
    assert bleu(wanted, found, language) == pytest.approx(score, abs=0.005)


@pytest.mark.parametrize("language", ["ja", "ko"])
def test_bleu_counts_letters_without_mecab(monkeypatch, language):
    monkeypatch.setattr(f"sacrebleu.tokenizers.tokenizer_{language}_mecab.MeCab", None)
    assert bleu_tokenizer(language) == "char"
    assert bleu(["彼らは公園で犬を散歩させている。"], ["彼らは公園で犬を散歩させた。"], language) > 60
