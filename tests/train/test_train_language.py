"""Language models: packed = separate, the prefix's loss, windows of a text, the loss over a vocabulary, data."""

import gzip
import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from multimodal.data.batching import stack_fields
from multimodal.data.datasets.documents import read_documents, read_texts
from multimodal.data.datasets.text import (
    IGNORED,
    Packed,
    PrepareTokens,
    TextCorpus,
    Windows,
    held_out,
    texts_in,
)
from multimodal.data.loader import generator
from multimodal.errors import CheckpointError, DataError, TextError, UsageError
from multimodal.models.text import TextTransformer
from multimodal.system.assets import asset
from multimodal.tasks.evaluate.perplexity import text_losses, text_scores, windows
from multimodal.tokens.text.characters import CharacterTokenizer
from multimodal.tokens.text.sentencepiece import ByteTokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.train.losses import vocabulary_loss
from multimodal.train.objectives.text.language import (
    Language,
    LanguageModelSettings,
    gpt2_weights,
    language_config,
    loss_of_states,
)
from multimodal.weights.folder import Checkpoint, load_folder, save_folder
from tests.helpers import tiny
from tests.helpers.spread import thin

KINDS = ["learned", "sinusoidal", "rotary", "bucket", "alibi", "shaw", "llama", "window"]
DOCUMENTS = [[3, 4, 5, 6, 7], [8, 9, 3], [5, 5, 4, 8, 9, 6, 2], [7, 2]]
OTHERS = {"window": {"window": 2}, "capped": {"logit_cap": 0.5},
          "narrow": {"tied": True, "embed_width": 4, "narrow": True}}  # fmt: skip


def model(kind: str) -> TextTransformer:
    if kind in OTHERS:
        made = TextTransformer(replace(tiny.TEXTS["rotary"], **OTHERS[kind]))
        return tiny.randomized(made).double()
    return tiny.made(f"text-{kind}").double()


def pieces(documents) -> list[torch.Tensor]:
    return [torch.tensor(document) for document in documents]


def gradients(net: TextTransformer, batches) -> tuple[float, dict[str, torch.Tensor]]:
    net.zero_grad()
    total = sum(Language(net, chunk=3)(batch)["loss"] for batch in batches)
    total.backward()
    return total.item(), {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_cost_and_teach_what_they_do_alone(kind, prefix):
    """Positions restart, and nothing is seen across documents or in the padding."""
    net = model(kind)
    row = PrepareTokens(12, prefix, packed=True)(pieces(DOCUMENTS[:3]), generator(0))
    other = PrepareTokens(12, prefix, packed=True)(pieces(DOCUMENTS[3:]), generator(1))
    packed = gradients(net, [stack_fields([row, other])])
    alone, at = [], 0
    for document, size in zip(DOCUMENTS[:3], (4, 2, 6), strict=True):
        own = slice(at, at + size)
        plain = PrepareTokens(size, prefix)(pieces([document]), generator(0))
        given = row.given[own] if prefix else None
        alone.append(stack_fields([plain._replace(targets=row.targets[own], given=given)]))
        at += size
    alone.append(stack_fields([PrepareTokens(1, prefix)(pieces(DOCUMENTS[3:]), generator(1))]))
    separate = gradients(net, alone)
    assert packed[0] == pytest.approx(separate[0], rel=1e-9)
    assert packed[1].keys() == separate[1].keys()
    for name, grad in packed[1].items():
        assert torch.allclose(grad, separate[1][name], atol=1e-9), name


def test_a_prefix_is_seen_by_all_and_the_loss_is_on_the_rest():
    net, ids = model("rotary"), [3, 4, 5, 6, 7, 8]
    row = PrepareTokens(5, prefix=True)(pieces([ids]), generator(3))
    seen = int(row.given.sum())
    assert 1 < seen < 5  # of this seed
    assert row.targets.tolist() == [IGNORED] * (seen - 1) + ids[seen:]
    batch = stack_fields([row])
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[:, :seen] = True
    logits = net.logits(net.states(torch.tensor([ids[:5]]), mask=mask))[0]
    wanted = F.cross_entropy(logits[seen - 1 :], torch.tensor(ids[seen:]), reduction="sum")
    objective = Language(net)
    assert objective(batch)["loss"].item() == pytest.approx(wanted.item(), rel=1e-9)
    assert objective.counts(batch)["loss"] == 6 - seen
    drawn = {int(PrepareTokens(5, prefix=True)(pieces([ids]), generator(n)).given.sum()) for n in range(60)}
    assert drawn == {1, 2, 3, 4, 5}


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("kind", ["learned", "window", "llama", "capped", "narrow"])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_the_loss_over_the_vocabulary_is_that_of_all_logits(kind, chunk):
    net = model(kind)
    config = replace(net.config, transform=kind != "narrow", head_bias=True, logit_scale=1.0 if net.head else 0.5)
    torch.manual_seed(0)
    net = TextTransformer(config).double()
    ids, targets = torch.randint(0, tiny.VOCABULARY, (2, 9)), torch.randint(0, tiny.VOCABULARY, (18,))
    targets[[3, 11]] = IGNORED
    states = net.states(ids).flatten(0, 1)
    wanted = F.cross_entropy(net.logits(states[None])[0], targets, reduction="sum")
    found = loss_of_states(net, states, targets, chunk)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    parts = list(net.parameters())
    for mine, plain in zip(*(torch.autograd.grad(2 * x, parts, retain_graph=True) for x in (found, wanted)),
                           strict=True):  # fmt: skip
        assert torch.allclose(mine, plain, atol=1e-12)


def test_the_loss_over_the_vocabulary_under_autocast_is_near_and_keeps_types():
    torch.manual_seed(0)
    states, weight = torch.randn(50, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    targets = torch.randint(0, 300, (50,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = vocabulary_loss(states, weight, None, targets, 16)
    loss.backward()
    assert loss.dtype == states.grad.dtype == weight.grad.dtype == torch.float32
    own, other = (x.detach().clone().requires_grad_() for x in (states, weight))
    wanted = F.cross_entropy(own @ other.T, targets, reduction="sum")
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=5e-3)
    assert (weight.grad - other.grad).norm() < 0.02 * other.grad.norm()
    with torch.no_grad():
        assert vocabulary_loss(own, other, None, targets, 7).item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize(("length", "context", "stride"), [(30, 8, 8), (30, 8, 3), (5, 8, 8), (9, 8, 1), (2, 4, 2)])
def test_windows_tell_each_token_once_from_enough_before_it(length, context, stride):
    found = windows(length, context, stride)
    told = [target for start, end, first in found for target in range(first + 1, end + 1)]
    assert told == list(range(1, length))
    for start, end, first in found:
        assert end - start <= context
        assert start == 0 or first - start >= context - stride


@pytest.mark.parametrize("prefix", [False, True])
def test_what_a_text_costs_does_not_depend_on_the_batch(prefix):
    net, corpus = model("alibi"), TextCorpus.of(["abcdefghij" * 3, "b", "cdcd"], CharacterTokenizer("abcdefghij"))
    options = {"context": 8, "stride": 4, "prefix": prefix}
    one, many = (text_losses(net, corpus, **options, batch=size) for size in (1, 7))
    assert one[0] == pytest.approx(many[0], rel=1e-6)
    assert one[1] == many[1] == 31 + 2 + 5
    assert text_losses(net, corpus, context=8, stride=2, prefix=prefix)[0] != pytest.approx(one[0], rel=1e-4)


def test_scores_are_of_tokens_characters_and_bytes():
    net = model("learned")
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)  # each of 23 tokens is as probable
    corpus = TextCorpus.of(["äbä", "b"], CharacterTokenizer("bä"))
    scores = text_scores(net, corpus, context=4, stride=4)
    assert scores["loss"] == pytest.approx(math.log(23))
    assert scores["perplexity"] == pytest.approx(23)
    assert scores["nats_per_character"] == pytest.approx(math.log(23) * 6 / 4)  # two ends among them
    assert scores["bits_per_byte"] == pytest.approx(math.log2(23) * 6 / 6)


def test_rows_hold_each_piece_once_and_waste_little():
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (300,), generator=random).tolist()
    corpus = TextCorpus.of(["x" * length for length in lengths], CharacterTokenizer("x"))
    source = Packed(corpus, 16)
    batches = source.plan(1, 0)(0)
    numbers = Counter(number for batch in batches for row in batch for number in row)
    assert numbers == Counter(range(len(source)))
    rows = [PrepareTokens(16, packed=True)(source.read(row), generator(0)) for batch in batches for row in batch]
    assert sum(int((row.targets != IGNORED).sum()) for row in rows) == sum(lengths) + len(lengths)
    assert stack_fields(rows).padding < 0.1
    assert source.plan(1, 0)(1) != batches == source.plan(1, 0)(0)


def test_windows_of_an_epoch_do_not_overlap_and_move_from_epoch_to_epoch():
    source = Windows(TextCorpus.of(["abc" * 40], CharacterTokenizer("abc")), 8)
    first, second = (sorted(key for batch in source.plan(2, 5)(epoch) for key in batch) for epoch in (0, 1))
    assert all((b - a) % 8 == 0 and b > a for a, b in pairwise(first))
    assert first[0] % 8 != second[0] % 8
    row = PrepareTokens(8)(source.read(first[0]), generator(0))
    assert row.targets.tolist() == source.read(first[0] + 1)[0][:8].tolist()
    assert row.documents is row.places is row.given is None
    with pytest.raises(DataError, match="do not fill more than one context of 200"):
        Windows(TextCorpus.of(["abc"], CharacterTokenizer("abc")), 200)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.jsonl.gz", "a.csv.gz", "a.tsv.GZ"])
def test_texts_of_a_manifest_are_read_without_its_keys_and_labels(tmp_path, name):
    rows = {
        "jsonl": '{"text": "Say \\"one\\".\\n\\nTwo.", "label": "x"}\n{"text": "four", "label": "y"}\n',
        "csv": 'text,label\n"Say ""one"".\n\nTwo.",x\nfour,y\n',
        "tsv": 'text\tlabel\n"Say ""one"". Two."\tx\r\nfour\ty\n',
    }[name.split(".")[1]]
    (tmp_path / name).write_bytes(gzip.compress(rows.encode()) if name.lower().endswith("gz") else rows.encode())
    first = 'Say "one". Two.' if "tsv" in name else 'Say "one".\n\nTwo.'
    assert texts_in(tmp_path / name) == [first, "four"]
    assert read_documents(tmp_path / name) == [['Say "one".', "Two."], ["four"]]
    lines = [["text"]] * ("tsv" in name) + [[first], ["four"]]  # of a .tsv the first column, which needs no header
    assert read_texts(tmp_path / name) == lines


def test_texts_are_files_lines_or_paragraphs(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\n\nthree\n")
    (tmp_path / "b.gz").write_bytes(gzip.compress("fünf\r\n".encode()))
    assert texts_in(tmp_path / "a.txt") == ["one\ntwo\n\n\nthree\n"]
    assert texts_in(tmp_path / "a.txt", "lines") == ["one", "two", "three"]
    assert texts_in(tmp_path / "a.txt", "blank") == ["one\ntwo", "three"]
    assert texts_in(tmp_path / "b.gz") == ["fünf\n"]
    (tmp_path / "broken.gz").write_bytes(gzip.compress(b"text" * 99)[:20])
    (tmp_path / "latin").write_bytes("fünf".encode("latin-1"))
    (tmp_path / "empty").write_text(" \n")
    causes = {
        "broken.gz": "cannot be read",
        "latin": "byte 1 is not UTF-8",
        "none": "cannot be read",
        "empty": "no text",
    }
    for name, cause in causes.items():
        with pytest.raises(DataError, match=f"{name}: .*{cause}"):
            texts_in(tmp_path / name)
    assert held_out(["0123456789"], 0.1) == (["012345678"], ["9"])
    assert held_out(["0123456789", "abcdefghij"], 0.1) == (["012345678", "abcdefghi"], ["9", "j"])  # two files
    assert held_out(["a", "b", "c"], 0.4) == (["a"], ["b", "c"])
    with pytest.raises(UsageError, match=r"hold 0\.999: leaves nothing"):
        held_out(["a", "b"], 0.999)


def test_a_shipped_model_gives_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids = tokenizer_from("asr-conformer-en").encode(" the cat")
    assert ids == tokenizer_from(asset("asr-conformer-en")).encode(" the cat")
    (tmp_path / "asr-conformer-en").mkdir()
    with pytest.raises(CheckpointError, match="tokenizer_config"):  # a folder of this name comes first
        tokenizer_from("asr-conformer-en")


def test_characters_are_tokens_and_others_are_refused(tmp_path):
    tokenizer = CharacterTokenizer.train(["so weiß", "<end>"])
    assert tokenizer.characters == "".join(sorted(set("so weiß<end>")))
    ids = tokenizer.encode("<end> weiß")
    assert 0 not in ids
    assert tokenizer.decode([0, *ids, 0]) == "<end> weiß"
    assert tokenizer.decode([0, *ids], skip_control=False) == "<end><end> weiß"
    with pytest.raises(TextError, match="'x' is not in this vocabulary of 11 characters"):
        tokenizer.encode("weix")
    tokenizer.save(tmp_path)
    again = tokenizer_from(tmp_path)
    assert isinstance(again, CharacterTokenizer)
    assert again.encode("so weiß") == tokenizer.encode("so weiß")
    (tmp_path / "tokenizer_config.json").write_text('{"kind": "characters", "characters": "aa"}')
    with pytest.raises(CheckpointError, match="must be unique"):
        tokenizer_from(tmp_path)
    with pytest.raises(TextError, match="no text"):
        CharacterTokenizer.train([])


def test_a_corpus_has_a_token_before_and_after_each_text():
    corpus = TextCorpus.of(["ab", "é"], ByteTokenizer())
    assert [corpus.text(n).tolist() for n in range(2)] == [[1, 100, 101, 1], [1, 198, 172, 1]]
    assert (corpus.characters, corpus.bytes) == (3, 4)


SIZES = {"width": 16, "layers": 2, "heads": 4, "context": 8}


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("changes", [
    *({"positions": kind} for kind in ("learned", "sinusoidal", "rotary", "bucket", "alibi", "shaw", "none")),
    {"norm": "rms", "gated": True, "activation": "silu", "bias": False, "kv_heads": 2, "tied": False},
    {"post_norm": True, "dropout": 0.1, "attention_dropout": 0.1},
])  # fmt: skip
def test_model_settings_make_models_that_are_saved_and_loaded(tmp_path, changes):
    net = TextTransformer(language_config(LanguageModelSettings(**SIZES | changes), 11)).eval()
    gpt2_weights(net)
    save_folder(Checkpoint(net), tmp_path / "made")
    again = load_folder(tmp_path / "made").model
    ids = torch.randint(0, 11, (2, 8))
    assert torch.equal(net(ids), again(ids))
    assert net(ids).std() < 0.2  # nearly nothing is known


def test_new_weights_are_gpt2s():
    net = TextTransformer(language_config(LanguageModelSettings(width=64, layers=8, heads=4, positions="learned"), 500))
    gpt2_weights(net)
    for name, p in net.named_parameters():
        if "norm" in name:
            continue
        if p.ndim < 2:
            assert not p.any(), name
        else:
            last = name.endswith((".attention.out.weight", ".feed.down.weight"))
            std = 0.01 if name == "positions" else 0.005 if last else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.05), name


@pytest.mark.parametrize(("changes", "message"), [
    ({"width": 10, "heads": 4}, "width must be a multiple of heads"),
    ({"heads": 0}, "heads must be an integer of at least 1"),
    ({"kv_heads": 3}, "kv_heads must be 0 or a divisor"),
    ({"width": 12, "heads": 4}, "heads must be so many"),
    ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\)"),
    ({"preset": "vit_b16"}, "preset vit_b16: expected a causal language model"),
    ({"preset": "gpt-7"}, "gpt-7"),
])  # fmt: skip
def test_sizes_that_cannot_be_are_said(changes, message):
    with pytest.raises(UsageError, match=message):
        language_config(LanguageModelSettings(**changes), 10)
