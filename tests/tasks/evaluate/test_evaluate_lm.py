"""`multimodal evaluate lm`: strided perplexity and GPT-2's zero-shot tasks against versions written out."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from multimodal.blocks.stack import transformer
from multimodal.data.datasets.text import TextCorpus
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.tasks.evaluate.perplexity import evaluate_text, text_losses
from multimodal.tasks.evaluate.text.continuations import Scorer
from multimodal.tasks.text.choices import scored
from multimodal.tasks.text.generate import TextWriter
from multimodal.tasks.text.options import options_for
from multimodal.tokens.text.characters import CharacterTokenizer
from multimodal.tokens.text.sentencepiece import ByteTokenizer
from multimodal.train.lora import with_rates
from multimodal.train.objectives.text.language import LanguageModelSettings, language_config
from multimodal.weights.folder import Checkpoint, save_folder
from tests.helpers.commands import evaluated, one_line, run
from tests.helpers.spread import thin
from tests.helpers.tiny import randomized

CONTEXT = 24
ITEMS = [
    {"text": "the dog sees _ run.", "choices": ["a cat", "two dogs"], "answer": 1},
    {"text": "a cat and a dog: _ runs.", "choices": ["the cat", "the dog", "it"], "answer": "it"},
    {"text": "a dog is here and two cats are there and _ run.", "choices": ["it", "the cats"], "answer": 0},
]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    tokenizer = CharacterTokenizer.train(["abcdefghijklmnopqrstuvwxyz .:,\n"])
    config = language_config(LanguageModelSettings(width=16, layers=2, heads=2, context=CONTEXT), tokenizer.vocab_size)
    return Checkpoint(randomized(TextTransformer(config)).eval(), tokenizer)


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    save_folder(checkpoint, tmp_path / "lm")
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, ITEMS)))
    (tmp_path / "ends.jsonl").write_text(json.dumps({"text": "a dog runs to", "choices": ["me", "it"], "answer": 0}))
    return tmp_path


@torch.no_grad()
def logprob(checkpoint: Checkpoint, ids: list[int], first: int) -> float:
    """Sum over the tokens from `first` on, each by a pass of its own over all before it."""
    model = checkpoint.model
    return sum(
        model(torch.tensor([ids[max(0, at - CONTEXT) : at]]))[0, -1].log_softmax(-1)[ids[at]].item()
        for at in range(first, len(ids))
    )


def of_parts(checkpoint: Checkpoint, before: str, after: str) -> float:
    head, tail = ([*checkpoint.tokenizer.encode(part)] for part in (before, after))
    ids = [checkpoint.tokenizer.bos_id, *head, *tail][-CONTEXT - 1 :]
    return logprob(checkpoint, ids, len(ids) - len(tail))


@pytest.mark.parametrize("stride", [5, 24])
def test_strided_perplexity_is_that_of_windows_written_out(capsys, checkpoint, folder, stride):
    text = "the cat sees two dogs, and the dogs see a cat. all of them run to the house.\n" * 2
    (folder / "text.txt").write_text(text)
    made = evaluated(capsys, "lm", folder / "text.txt", "-m", folder / "lm", "--stride", stride)
    ids = [checkpoint.tokenizer.bos_id, *checkpoint.tokenizer.encode(text), checkpoint.tokenizer.eos_id]
    nats, begin, told = 0.0, 0, 1  # transformers' guide to perplexity, with a token more to each window
    while told < len(ids):
        end = min(begin + CONTEXT + 1, len(ids))
        start = min(begin, max(0, len(ids) - CONTEXT - 1))  # the last window is as long as the others
        with torch.no_grad():
            logs = checkpoint.model(torch.tensor([ids[start : end - 1]]))[0].log_softmax(-1)
        nats -= sum(logs[at - start - 1, ids[at]].item() for at in range(told, end))
        begin, told = begin + stride, end
    (figures,) = made["sets"].values()
    assert figures["perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-4)
    assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text), rel=1e-4)


def test_a_model_in_training_has_the_figures_of_eval_mode_and_trains_on(checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sees two dogs")
    pairs = [("a dog", " runs")]
    right = evaluate_text(checkpoint, tmp_path / "text.txt"), Scorer(checkpoint)(pairs)
    training = replace(checkpoint, model=with_rates(checkpoint.model, {"stem_dropout": 0.5}).train())
    assert (evaluate_text(training, tmp_path / "text.txt"), Scorer(training)(pairs)) == right
    assert all(part.training for part in training.model.modules())


def test_the_last_word_is_right_if_each_of_its_tokens_is_the_most_probable(capsys, checkpoint, folder):
    passages = ["the dog runs", "a cat sees", "two dogs run and two cats run to it"]
    ids = [checkpoint.tokenizer.bos_id, *checkpoint.tokenizer.encode("a dog")]
    with torch.no_grad():
        for _ in range(3):
            ids.append(checkpoint.model(torch.tensor([ids]))[0, -1].argmax().item())
    likely = checkpoint.tokenizer.decode(ids[-3:])
    found = Scorer(checkpoint)([("a dog", likely), ("a dog", likely[:2] + "ab")])
    assert [(one.greedy, one.tokens) for one in found] == [(True, 3), (False, 4)]
    assert found[0].logprob == pytest.approx(logprob(checkpoint, ids, len(ids) - 3), rel=1e-5)
    (folder / "passages.txt").write_text("\n".join(passages))
    lines = [json.dumps({"text": passage}) for passage in passages]
    (folder / "passages.jsonl").write_text("\n".join(lines))
    logs = [of_parts(checkpoint, *(part for part in (p.rpartition(" ")[0], " " + p.rpartition(" ")[2])))
            for p in passages]  # fmt: skip
    for name in ("passages.txt", "passages.jsonl"):
        made = evaluated(capsys, "lm", folder / name, "-m", folder / "lm", "--task", "last-word")
        (figures,) = made["sets"].values()
        assert (figures["passages"], figures["cut"]) == (3, 1)
        assert figures["perplexity"] == pytest.approx(math.exp(-sum(logs) / 3), rel=1e-4)
        assert figures["accuracy"] == 0


@pytest.mark.ci
def test_cloze_and_winograd_take_the_choice_with_the_highest_score(capsys, checkpoint, folder):
    right = {"cloze": [], "per_byte": [], "winograd": []}
    for item in ITEMS:
        before, after = item["text"].split("_")
        answer = item["choices"].index(item["answer"]) if isinstance(item["answer"], str) else item["answer"]
        filled = [" " + choice for choice in item["choices"]]
        whole = [of_parts(checkpoint, before.rstrip(), choice + after) for choice in filled]
        scores = {"cloze": whole, "per_byte": [w / len(c + after) for w, c in zip(whole, filled, strict=True)],
                  "winograd": [of_parts(checkpoint, before.rstrip() + choice, after) for choice in filled]}  # fmt: skip
        for name, row in scores.items():
            right[name].append(max(range(len(row)), key=row.__getitem__) == answer)
    share = {name: sum(row) / 3 for name, row in right.items()}
    (found,) = evaluated(capsys, "lm", folder / "items.jsonl", "-m", folder / "lm", "--task", "cloze")["sets"].values()
    assert (found["accuracy"], found["accuracy_per_byte"]) == (share["cloze"], share["per_byte"])
    assert (found["items"], found["chance"]) == (3, pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 3))
    made = evaluated(capsys, "lm", folder / "items.jsonl", "-m", folder / "lm", "--task", "winograd")
    (found,) = made["sets"].values()
    assert (found["accuracy"], found["accuracy_full"]) == (share["winograd"], share["cloze"])
    (found,) = evaluated(capsys, "lm", folder / "ends.jsonl", "-m", folder / "lm", "--task", "cloze")["sets"].values()
    ends = [of_parts(checkpoint, "a dog runs to", choice) for choice in (" me", " it")]
    assert found["accuracy"] == (ends[0] > ends[1])


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(("task", "line", "message"), [
    ("cloze", '{"text": "a _", "choices": ["b"], "answer": 0}', "expected two or more different texts in 'choices'"),
    ("cloze", '{"text": "a _", "choices": ["b", "c"], "answer": 2}', "expected 0 to 1 or a choice in 'answer' (got 2)"),
    ("cloze", '{"text": "a _ or _", "choices": ["b", "c"], "answer": 0}', "line 1: expected one blank _ (got 2)"),
    ("winograd", '{"text": "a _", "choices": ["b", "c"], "answer": 0}', "item 1: expected text after the blank"),
    ("winograd", "[]", "line 1 is not a JSON object"),
    ("last-word", "one", "line 1 is not JSON"),
    ("last-word", '{"text": "one"}', "line 1: expected two words or more"),
    ("last-word", "", "holds no text"),
])  # fmt: skip
def test_items_that_cannot_be_scored_are_one_line(capsys, folder, task, line, message):
    (folder / "bad.jsonl").write_text(line)
    code, out, err = run(capsys, "evaluate", "lm", folder / "bad.jsonl", "-m", folder / "lm", "--task", task)
    assert (code, out) == (1, "")
    assert message in one_line(err)


def test_a_stride_has_no_part_in_a_task(capsys, folder):
    code, _, err = run(capsys, "evaluate", "lm", folder / "items.jsonl", "--task", "cloze", "--stride", 2)
    assert (code, "--stride: is for --task perplexity" in err) == (2, True)


STRETCHED = [
    PositionConfig("rotary", dynamic=(4.0, 12)),
    PositionConfig("rotary", factors=(1.0,) * 4, long_factors=(1.0, 2.0, 4.0, 8.0), trained=12),
]


@pytest.mark.parametrize("positions", STRETCHED)
def test_rotations_that_depend_on_the_length_of_a_text_do_not_on_its_batch(positions, tmp_path):
    """Dynamic RoPE and Phi-3's LongRoPE: texts on both sides of the switch together and alone."""
    torch.manual_seed(0)
    config = TextConfig(259, 64, transformer(16, 2, 2, 24), True, True, positions=positions)
    made = Checkpoint(randomized(TextTransformer(config)).eval(), ByteTokenizer())
    pairs = [("a dog", " run"), ("a dog", " runs to two cats and more"), ("two cats run to", " me")]
    score = Scorer(made, 64)
    alone = [score([pair])[0].logprob for pair in pairs]
    assert [one.logprob for one in score(pairs)] == pytest.approx(alone, abs=1e-4)
    write = TextWriter(made, options_for({}))
    made.model.requires_grad_(False)
    for one in scored(write, "a dog", [" run", " runs to two cats and more"]):
        row, own = write.ids("a dog"), made.tokenizer.encode(one.text)
        logits = made.model(torch.tensor([[*row, *own[:-1]]]))[0, len(row) - 1 :].log_softmax(-1)
        assert one.logprob == pytest.approx(float(logits.gather(1, torch.tensor(own)[:, None]).sum()), abs=1e-3)
    corpus = TextCorpus.of(["a dog", "two cats run to a dog and me"], made.tokenizer)
    apart = [TextCorpus.of([text], made.tokenizer) for text in ("a dog", "two cats run to a dog and me")]
    total = sum(text_losses(made.model, one, 64, 64)[0] for one in apart)
    assert text_losses(made.model, corpus, 64, 64)[0] == pytest.approx(total, abs=1e-3)
