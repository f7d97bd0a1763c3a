"""Meaning of the outputs, which a state to resume from must share with the run."""

import re
from dataclasses import replace

import pytest

from multimodal.errors import CheckpointError
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.train.checkpoint.meaning import check_meaning, meaning_of
from multimodal.train.loop import Loop
from multimodal.train.lora import LoraSettings, adapt
from multimodal.weights.folder import Checkpoint
from tests.helpers import tiny_run


def loop(run, labels: str | None, **changes) -> Loop:
    made = tiny_run.loop(run, **changes)
    start = Checkpoint(made.objective.model, card={"labels": labels.split()}) if labels else None
    return Loop(made.settings, made.objective, made.loader, start=start)


@pytest.mark.ci
def test_a_state_of_other_classes_is_refused_by_name(tmp_path):
    loop(tmp_path, "cup dolphin elephant fox gun hat", steps=2).fit()
    problem = "does not fit this run: classes from number 2 were dolphin, elephant, fox, …, now elephant, fox"
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path}/states/state-000000002: {problem}")):
        loop(tmp_path, "cup elephant fox", steps=4, resume=True).fit()
    loop(tmp_path, "cup dolphin elephant fox gun hat", steps=4, resume=True).fit()


def test_a_state_without_a_meaning_stays_usable(tmp_path):
    loop(tmp_path, None, steps=2).fit()
    again = loop(tmp_path, "cup dolphin", steps=4, resume=True)
    again.fit()
    assert again.first == 2


@pytest.mark.ci
@pytest.mark.parametrize(("changes", "now"), [
    ({"lora_alpha": 32.0}, "rank 2 and alpha 32 on query value"),
    ({"lora_rank": 4}, "rank 4 and alpha 16 on query value"),
    ({"lora_targets": ("query",)}, "rank 2 and alpha 16 on query"),
    ({"lora_rank": 0}, "none"),
])  # fmt: skip
def test_other_adapters_are_refused(tmp_path, changes, now):
    settings = LoraSettings(lora_rank=2, lora_targets=("query", "value"))

    def adapted(steps: int, lora: LoraSettings) -> Loop:
        net = tiny_run.model()
        adapt(net, lora)
        return tiny_run.loop(tmp_path, net=net, steps=steps, resume=True)

    adapted(1, settings).fit()
    line = f"fit this run: LoRA settings were rank 2 and alpha 16 on query value, now {now}"
    with pytest.raises(CheckpointError, match=re.escape(line) + "$"):
        adapted(2, replace(settings, **changes)).fit()
    adapted(2, settings).fit()


@pytest.mark.parametrize("rank", [0, 2])
def test_other_frozen_parts_are_refused(tmp_path, rank):
    """Their moments would fit by position and shape, in the wrong parameters."""

    def half_frozen(steps: int, block: int) -> Loop:
        net = tiny_run.model()
        adapt(net, LoraSettings((f"stack.blocks.{block}",), lora_rank=rank))
        return tiny_run.loop(tmp_path, net=net, steps=steps, resume=True)

    half_frozen(1, 0).fit()
    with pytest.raises(CheckpointError, match=r"run: trained parameters .*were .*blocks\.1.*, now .*blocks\.0"):
        half_frozen(2, 1).fit()
    half_frozen(2, 0).fit()


def test_a_tokenizer_learned_again_differs(tmp_path):
    start = Checkpoint(tiny_run.model())
    learned = lambda text: meaning_of(Checkpoint(start.model, BytePairTokenizer.train([text], 260)))
    assert learned("a cat sat on the mat") == learned("a cat sat on the mat")
    with pytest.raises(ValueError, match=r"tokenizer files.* were .*, now "):
        check_meaning(learned("a cat sat on the mat"), learned("dogs ran to dogs and dogs"))


def test_other_colours_of_an_image_model_are_refused():
    old, new = (meaning_of(Checkpoint(tiny_run.model(), card={"palette": [[0, 0], [x, 0]]})) for x in (1, 2))
    with pytest.raises(ValueError, match=r"colours from number 2 were \[1, 0\], now \[2, 0\]"):
        check_meaning(old, new)


@pytest.mark.parametrize(("changes", "line"), [
    ({"target": "age"}, "target were price, now age"),
    ({"numbers": ["y", "x"]}, "columns were x, y, kind, now y, x, kind"),
    ({"categories": {"kind": ["a", "c"]}}, "categories of kind from number 2 were b, now c"),
    ({"labels": ["low"]}, "classes from number 2 were high, now none"),
])  # fmt: skip
def test_the_columns_of_a_table_count(changes, line):
    table = {"target": "price", "numbers": ["x", "y"], "categories": {"kind": ["a", "b"]}, "labels": ["low", "high"]}
    old, new = (meaning_of(Checkpoint(tiny_run.model(), card={"table": one})) for one in (table, table | changes))
    check_meaning(old, old)
    with pytest.raises(ValueError, match=re.escape(line)):
        check_meaning(old, new)
