"""Masking, next sentences and replaced tokens against their definitions; batches and gradients that depend on nothing
else."""

from collections import Counter

import pytest
import torch
from torch.testing import assert_close

from multimodal.data.datasets.documents import SentenceWindow, encoded, read_documents, read_texts, windows
from multimodal.data.datasets.labelled_texts import LabelledText, classes_of, read_labelled
from multimodal.data.loader import Loader, generator
from multimodal.errors import DataError, TextError, UsageError
from multimodal.models.text import TextTransformer
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.sentencepiece import ByteTokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.train.objectives.text.collocations import collocations
from multimodal.train.objectives.text.electra import ReplacedTokens, detection_figures, drawn, electra, run
from multimodal.train.objectives.text.masked import (
    NEXT,
    OTHER,
    CollateMasked,
    EncoderSettings,
    MaskedLanguage,
    MaskedTexts,
    bert,
    masked_figures,
)
from multimodal.train.objectives.text.masking import (
    Masker,
    MaskSettings,
    chosen_tokens,
    grouped,
    random_spans,
    words_of,
)
from multimodal.train.objectives.text.span_boundary import SpanBoundary, SpanEncoder, boundaries
from tests.helpers.data.contrast import EXACT, gradient
from tests.helpers.tiny import randomized

WORDS = [f"word{i}" for i in range(20)]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##a", "##b", "##c"]
TOKENIZER = WordPieceTokenizer(PIECES, len(PIECES), 2, 3, 32)
SMALL = EncoderSettings(16, 1, 2, 32, 0.0)


def source(settings: MaskSettings | None = None, pairs: str | None = None) -> MaskedTexts:
    """Four documents of five sentences, each word of which says what document it is of."""
    made = [
        SentenceWindow(document, tuple([5 + 4 * document + i % 4] * (2 + i) for i in range(5))) for document in range(4)
    ]
    return MaskedTexts(made, Masker(TOKENIZER, settings or MaskSettings()), 32, pairs)


@pytest.mark.parametrize(("able", "wanted"), [(1, 1), (3, 1), (20, 3), (30, 4), (0, 0)])
def test_a_fixed_share_of_the_tokens_is_guessed_and_at_least_one(able, wanted):
    mask = torch.arange(40) < able
    for seed in range(20):
        chosen = chosen_tokens(mask, 0.15, generator(seed))
        assert int(chosen.sum()) == wanted
        assert not (chosen & ~mask).any()


def test_whole_words_are_guessed_or_not_and_are_not_too_many():
    starts = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    able, word, sizes = torch.ones(20, dtype=torch.bool), starts.cumsum(0), Counter()
    for seed in range(200):
        chosen = chosen_tokens(able, 0.15, generator(seed), [[word] for word in words_of(able, starts)])
        assert 1 <= int(chosen.sum()) <= 3
        for number in word.unique():
            assert chosen[word == number].all() or not chosen[word == number].any()
        sizes[int(chosen.sum())] += 1
    assert sizes[3] > 150  # a short one where only longer words are left
    assert chosen_tokens(able[:5], 0.15, generator(0), [[[0, 1, 2]], [[3, 4]]]).tolist() == [False] * 3 + [True] * 2


def test_what_stands_for_a_token_is_the_mask_another_token_or_itself():
    masker, found, others = Masker(TOKENIZER, MaskSettings(share=0.5)), Counter(), Counter()
    ids = torch.tensor([2, *([5, 6, 7, 8, 1] * 20), 3])
    for seed in range(100):
        read, chosen, draws = masker(ids, generator(seed))
        assert int(chosen.sum()) == len(draws) == 40
        assert torch.equal(read[~chosen], ids[~chosen])
        assert not chosen[ids < 5].any()  # control tokens, and words that the vocabulary lacks
        masked, same = read[chosen] == 4, read[chosen] == ids[chosen]
        found += Counter(masked=int(masked.sum()), same=int(same.sum()), all=len(masked))
        others.update(read[chosen][~masked & ~same].tolist())
    assert found["masked"] / found["all"] == pytest.approx(0.8, abs=0.02)
    assert found["same"] / found["all"] == pytest.approx(0.1 + 0.1 / 23, abs=0.02)
    assert set(others) == set(range(5, len(PIECES)))
    assert max(others.values()) < 5 * min(others.values())


def test_static_masks_come_back_and_dynamic_ones_do_not():
    for ways, same in ((0, False), (3, True)):
        made = source(MaskSettings(ways=ways))
        plan = made.plan(64)
        epochs = [sorted(key for batch in plan(epoch) for key in batch) for epoch in range(6)]
        assert all(len(keys) == len(made) for keys in epochs)
        seen = [[made.prepare(key, generator(0, epoch, key)).ids.tolist() for key in keys]
                for epoch, keys in enumerate(epochs)]  # fmt: skip
        assert (seen[0] == seen[3]) == same
        assert (seen[2] == seen[5]) == same
        assert seen[0] != seen[1] != seen[2]


@pytest.mark.ci
def test_batches_are_the_same_for_any_number_of_workers():
    made, found = source(MaskSettings(), pairs="next"), []
    for workers in (0, 2):
        loader = Loader(made, made.plan(80), made.prepare, CollateMasked(0, 64), seed=3, workers=workers)
        steps = loader.start(0)
        found.append([next(steps).batches[0] for _ in range(7)])
        steps.close()
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))


def test_half_of_the_pairs_follow_and_the_others_are_of_another_document():
    made, told = source(MaskSettings(share=0.01), pairs="next"), Counter()
    for number in range(len(made)):
        for seed in range(100):
            example = made.prepare((0, number), generator(seed))
            ids = example.ids.clone()
            ids[example.chosen] = example.targets
            first, second, rest = ids[1:].tensor_split((ids[1:] == 3).nonzero()[:, 0] + 1)
            assert ids[0] == 2
            assert not len(rest)
            assert len(ids) <= 32
            assert example.segments.tolist() == [0] * (1 + len(first)) + [1] * len(second)
            first, second = first[:-1].tolist(), second[:-1].tolist()
            own, other = {(i - 5) // 4 for i in first}, {(i - 5) // 4 for i in second}
            assert own == {number}
            told[example.follows] += 1
            if example.follows == NEXT:
                assert first + second == made.windows[number].ids
            else:
                assert len(other) == 1
                assert other != own
    assert told[NEXT] + told[OTHER] == 400
    assert told[NEXT] == pytest.approx(200, abs=40)


def batch(made: MaskedTexts, numbers: list[int]):
    return CollateMasked(0, 64)([made.prepare((0, number), generator(number)) for number in numbers])


@pytest.mark.parametrize("kind", ["masked", "pairs", "electra", "boundary"])
def test_accumulation_is_exact(kind):
    made = source(pairs="next" if kind == "pairs" else None)
    if kind == "electra":
        objective = ReplacedTokens(randomized(electra(len(PIECES), SMALL, 0.5)).double())
    elif kind == "boundary":
        objective = SpanBoundary(randomized(SpanEncoder(bert(len(PIECES), SMALL))).double())
    else:
        objective = MaskedLanguage(randomized(TextTransformer(bert(len(PIECES), SMALL, kind == "pairs"))).double())
    loss, whole = gradient(objective, [batch(made, [0, 1, 2, 3])])
    parts, summed = gradient(objective, [batch(made, [2]), batch(made, [0, 3, 1])])
    assert parts == pytest.approx(loss, abs=1e-5)
    for name, grad in whole.items():
        assert name.endswith(("key.bias", "places.weight")) or grad.abs().max() > 0, name
        assert_close(summed[name], grad, **EXACT)


def test_the_loss_is_that_of_the_masked_tokens_alone():
    made = source(pairs="next")
    model = randomized(TextTransformer(bert(len(PIECES), SMALL, pairs=True)))
    own, objective = batch(made, [0, 1, 2, 3]), MaskedLanguage(model)
    wanted, told = 0.0, 0.0
    model.requires_grad_(False)
    for row, example in enumerate(made.prepare((0, n), generator(n)) for n in range(4)):
        states = model.states(example.ids[None], segments=example.segments[None])
        scores = model.logits(states)[0, example.chosen].log_softmax(-1)
        wanted -= float(scores.gather(1, example.targets[:, None]).sum())
        told -= float(model.classes(model.pooled(states))[0].log_softmax(-1)[example.follows])
        assert own.follows[row] == example.follows
    terms, counts = objective(own), objective.counts(own)
    assert float(terms["masked"]) == pytest.approx(wanted, rel=1e-5)
    assert float(terms["next"]) == pytest.approx(told, rel=1e-5)
    figures = masked_figures(model, [own])
    assert figures["masked"] == pytest.approx(wanted / counts["masked"], rel=1e-5)
    assert counts["next"] == 4
    assert {figures["next_accuracy"] * 4} <= {0.0, 1.0, 2.0, 3.0, 4.0}


def test_replacements_are_drawn_from_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0, -30.0]]).expand(20000, -1)
    ids = drawn(logits, torch.rand(20000, generator=generator(0)))
    shares = torch.bincount(ids, minlength=4) / 20000
    assert_close(shares, logits[0].softmax(-1), atol=0.01, rtol=0)
    assert drawn(logits[:3], torch.tensor([0.0, 0.0900, 0.999999])).tolist() == [0, 0, 2]


def test_the_detector_learns_of_replaced_tokens_and_teaches_its_own_weights_only():
    model, made = randomized(electra(len(PIECES), SMALL, 0.5)), source(MaskSettings(masked=1.0, random=0.0))
    assert model.generator.embed is model.discriminator.embed
    assert model.generator.positions is model.discriminator.positions
    assert model.generator.config.width == 8
    own = batch(made, [0, 1, 2, 3])
    found = run(model, own)
    ids = own.ids.clone()
    assert (ids[own.chosen] == 4).all()
    ids[own.chosen] = drawn(found.generator, own.draws)
    assert torch.equal(found.replaced, (ids != own.ids) & own.chosen & ~_right(own, ids))
    ReplacedTokens(model)(own)["detect"].backward()
    assert model.generator.stack.blocks[0].feed.up.weight.grad is None
    assert model.discriminator.stack.blocks[0].feed.up.weight.grad.abs().max() > 0
    figures = detection_figures(model, [own])
    assert 0 <= figures["f1"] <= 1
    assert 0 <= figures["auc"] <= 1
    assert figures["replaced"] == pytest.approx(int(found.replaced.sum()) / int(own.lengths.sum()))


def _right(own, ids) -> torch.Tensor:
    right = torch.zeros_like(own.chosen)
    right[own.chosen] = ids[own.chosen] == own.targets
    return right


def test_documents_end_at_empty_lines_and_windows_lose_nothing(tmp_path):
    path = tmp_path / "text.txt"
    text = ' = Title = \n\nOne man @-@ eating <unk> . Two men . "No" ?\nThree .\n \nFour\n'
    path.write_text(text, encoding="utf-8")
    assert read_documents(path) == [
        ["= Title ="], ["One man-eating <unk> .", "Two men .", '"No" ?', "Three ."], ["Four"],
    ]  # fmt: skip
    table = tmp_path / "rows.tsv"
    table.write_text("good film\t1\nbad film\t0\n", encoding="utf-8")
    assert read_texts(table) == [["good film"], ["bad film"]]
    long = [["word1 word2", "word3 " * 9, "word4"], ["word5"]]
    made = windows(long, TOKENIZER, 5, shortest=1)
    assert [window.size for window in made] == [2, 5, 5, 1]
    assert [i for window in made for i in window.ids] == [i for d in long for text in d for i in TOKENIZER.encode(text)]
    assert [window.document for window in made] == [0, 0, 0, 1]
    assert encoded("word1 <unk> word2", TOKENIZER) == [6, 1, 7]
    assert windows(long, TOKENIZER, 5, shortest=2)[-1].document == 0


def test_sentences_keep_their_spaces_in_a_byte_level_vocabulary():
    sentences = ["One man waits.", '"No?" Two men.', "He waits."]
    tokenizer = BytePairTokenizer.train([" ".join(sentences)] * 3, 300)
    made = windows([sentences, ["He waits."]], tokenizer, 100, shortest=1)
    assert [tokenizer.decode(window.ids) for window in made] == [" ".join(sentences), "He waits."]
    assert len(made[0].sentences) == 3
    assert tokenizer.decode(made[0].sentences[2]) == " He waits."


@pytest.mark.parametrize(("lines", "refused"), [
    (["review\tsentiment", *["good\t1", "bad\t0"] * 2], True),
    (["review\tsentiment", "fine\tpos", *["good\t1", "bad\t0"] * 100], True),  # one label is misspelt
    (["text\tlabel", *["good\t1", "bad\t0"] * 2], False),
    ([*["good\t1", "bad\t0"] * 2], False),
    (["one\ta", "two\tb", "three\tc"], False),
    (["one\ta", *["two\tb"] * 3], False),
    (["one\ta", "two\tb", *["three\tc", "four\td"] * 2], False),
])  # fmt: skip
def test_a_first_line_that_looks_like_a_header_is_refused(tmp_path, lines, refused):
    table = tmp_path / "rows.tsv"
    table.write_text("\n".join(lines), encoding="utf-8")
    if not refused:
        assert len(read_labelled(table)) == len(lines) - (lines[0] == "text\tlabel")
        return
    line = r"rows\.tsv: line 1 looks like a header, since no other line has the label 'sentiment'; name the columns"
    with pytest.raises(DataError, match=line):
        read_labelled(table)
    assert len(read_labelled(table, ("review", "sentiment"))) == len(lines) - 1


def test_the_first_and_the_last_cell_of_a_row_may_be_empty_but_no_label(tmp_path):
    """As pandas writes missing values."""
    table = tmp_path / "rows.tsv"
    table.write_text("id\ttext\tlabel\tnote\n1\tgood\tyes\t\n\tbad\tno\t\n\t\t\t\n", encoding="utf-8")
    assert read_labelled(table, ("text", "label")) == [("good", "yes"), ("bad", "no")]
    assert read_texts(table) == [["id"], ["1"]]
    table.write_text("text\tlabel\n\tno\ngood\t\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"rows\.tsv: line 3 has no label"):
        read_labelled(table)


@pytest.mark.parametrize("room", [3, 0, -6])
def test_windows_without_room_for_a_text_are_refused(room):
    with pytest.raises(UsageError, match=f"^context must be larger by {4 - room} or more, for texts of 4 tokens$"):
        windows([["word1 word2"]], TOKENIZER, room)


def test_labels_stand_in_the_column_that_the_header_says_and_are_classes(tmp_path):
    table = tmp_path / "rows.tsv"
    table.write_text("label\ttext\n1\tgood\n0\tbad\n", encoding="utf-8")
    assert read_labelled(table) == [("good", "1"), ("bad", "0")]
    for text in ("sentence\tlabel\tidx\ngood\t1\t0\nbad\t0\t1\n", "index\tlabel\ttext\n0\t1\tgood\n1\t0\tbad\n"):
        table.write_text(text, encoding="utf-8")  # GLUE's files, with the numbers of their rows
        assert read_labelled(table) == [("good", "1"), ("bad", "0")]
    table.write_text("\tgood\t1\t\t\n\tbad\t0\t\t\n", encoding="utf-8")  # columns without any text
    assert read_labelled(table) == [("good", "1"), ("bad", "0")]
    numbers = [LabelledText("a film", f"{i / 7:.3f}") for i in range(40)]
    with pytest.raises(DataError, match=r"rows\.tsv: 40 of 40 labels occur once, so these are texts or numbers"):
        classes_of(numbers, table)
    assert len(classes_of(numbers[:20], table)) == 20
    assert len(classes_of(numbers + numbers[:20], table)) == 40


def test_a_trained_vocabulary_spells_its_texts_and_keeps_spare_ids_for_control(tmp_path):
    texts = ["the cat sat on the mat", "the dog sat on the cat"] * 3
    made = WordPieceTokenizer.train(texts, 60, spare=7, context=16)
    assert made.vocab == WordPieceTokenizer.train(texts, 60, spare=7, context=16).vocab
    assert made.decode(made.encode(texts[0])) == texts[0]
    assert set(range(made.vocab_size - 7, made.vocab_size)) <= made.control
    assert made.mask_id == made.vocab.index("[MASK]")
    assert made.mask_id not in made.encode("[MASK] the [MASK]")
    made.save(tmp_path)
    again = tokenizer_from(tmp_path)
    assert (again.vocab, again.vocab_size, again.mask_id) == (made.vocab, made.vocab_size, made.mask_id)
    with pytest.raises(TextError, match="no text to train a vocabulary on"):
        WordPieceTokenizer.train(["", "  "], 60)
    with pytest.raises(UsageError, match="vocab_size 9: no letters beside 9 control tokens"):
        WordPieceTokenizer.train(texts, 9, spare=4)


def test_what_cannot_be_masked_is_said():
    with pytest.raises(UsageError, match="tokenizer has no mask_id"):
        Masker(ByteTokenizer(), MaskSettings())
    with pytest.raises(UsageError, match=r"masked must be 1 at most with random 0\.1"):
        MaskSettings(masked=0.95)
    with pytest.raises(DataError, match="data holds fewer than two documents with two sentences in 1 windows"):
        MaskedTexts([SentenceWindow(0, ([5], [6]))], Masker(TOKENIZER, MaskSettings()), 32, pairs="next")
    with pytest.raises(DataError, match="data holds too little text for a window"):
        MaskedTexts([], Masker(TOKENIZER, MaskSettings()), 32)


def test_spans_are_whole_words_side_by_side_of_geometric_length():
    words = [[at] for at in range(1, 400)]
    lengths: Counter[int] = Counter()
    for seed in range(40):
        spans = random_spans(words, MaskSettings(unit="spans"), generator(seed))
        assert [word for span in spans for word in span] == words
        lengths.update(map(len, spans))
    assert max(lengths) == 10
    mean = sum(size * count for size, count in lengths.items()) / lengths.total()
    assert mean == pytest.approx(sum(0.8**k for k in range(10)), rel=0.05)  # of the clipped distribution
    broken = random_spans([[1], [2, 3], [7]], MaskSettings(unit="spans", geometric=1e-6), generator(0))
    assert broken == [[[1], [2, 3]], [[7]]]  # a span ends where a token may not be masked


def test_a_span_longer_than_what_is_left_ends_after_a_word():
    masker, ids = Masker(TOKENIZER, MaskSettings(unit="spans", geometric=1e-6)), torch.arange(5, 25)
    found = [masker(ids, generator(seed))[1] for seed in range(400)]  # of two spans of ten words
    assert {int(chosen.sum()) for chosen in found} == {3}
    assert max(sum(found)) < 2 * 60  # no word is usual: each is in 60 of 400 on average
    ids[torch.tensor([1, 3])] = 25  # ##a
    sizes = {int(masker(ids[:4], generator(seed))[1].sum()) for seed in range(20)}
    assert sizes == {2}  # a whole word where one token may be masked


def test_figures_of_texts_without_a_token_to_predict_are_refused():
    made = MaskedTexts([SentenceWindow(0, ([1, 1],))], Masker(TOKENIZER, MaskSettings()), 32)
    with pytest.raises(DataError, match="expected a known token to predict, got none in 1 texts"):
        masked_figures(TextTransformer(bert(len(PIECES), SMALL)).eval(), [batch(made, [0])])


def test_collocations_have_a_high_pmi_and_are_masked_whole():
    dice = torch.Generator().manual_seed(0)
    texts = []
    for _ in range(400):
        text = [(int(i),) for i in torch.randint(5, 25, (12,), generator=dice)]
        texts.append([*text[:4], (30,), (31, 32), *text[4:8], (33,), (34,), (35,), *text[8:]])
    found = collocations(texts, 4, 10)
    assert ((30,), (31, 32)) in found
    assert not any(len(run) > 3 for run in found)
    words = [[1], [2, 3], [4], [5]]
    assert grouped(words, [0, 30, 31, 32, 33, 7], {((30,), (31, 32))}) == [[1, 2, 3], [4], [5]]
    assert grouped([[1], [3, 4]], [0, 30, 1, 31, 32], {((30,), (31, 32))}) == [[1], [3, 4]]  # not side by side


def test_a_token_s_boundary_is_that_of_its_span():
    chosen = torch.tensor([[0, 1, 1, 0, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0]], dtype=torch.bool)
    rows, before, after, place = boundaries(chosen, chosen.flatten().nonzero()[:, 0])
    assert rows.tolist() == [0, 0, 0, 1, 1, 1]
    assert before.tolist() == [0, 0, 3, 2, 2, 2]
    assert after.tolist() == [3, 3, 5, 6, 6, 6]
    assert place.tolist() == [0, 1, 0, 0, 1, 2]


def test_half_of_the_pairs_keep_their_order_and_the_others_are_swapped():
    made, told = source(MaskSettings(share=0.01), pairs="order"), Counter()
    for number in range(4):
        for seed in range(50):
            example = made.prepare((0, number), generator(seed))
            ids = example.ids.clone()
            ids[example.chosen] = example.targets
            first, second = (ids[example.segments == part].tolist() for part in (0, 1))
            first, second = first[1:-1], second[:-1]
            assert (first + second if example.follows == NEXT else second + first) == made.windows[number].ids
            told[example.follows] += 1
    assert told[NEXT] == pytest.approx(100, abs=30)
