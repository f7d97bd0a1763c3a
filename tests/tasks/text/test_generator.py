"""`Generator`: streams and prompts of many callers."""

from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import pytest
import torch

from multimodal.errors import UsageError
from multimodal.export.refusals import HELD, check_kind
from multimodal.tasks.text.generate import Generator
from tests.helpers.byte_models import byte_model


@pytest.mark.ci
def test_any_thread_takes_pieces_of_streams_and_calls_come_in_between():
    one = Generator(byte_model(), max_new_tokens=20)
    expected, other, parts = one("hello"), one("world"), []
    stream, abandoned = one.stream("hello"), one.stream("world")
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for pool in cycle((first, second)):
            if (part := pool.submit(next, stream, None).result(10)) is None:
                break
            parts.append(part)
            assert second.submit(one, "world").result(10) == other
        assert next(abandoned)
        first.submit(abandoned.close).result(10)
        assert second.submit(one, "hello").result(10) == expected
    assert "".join(parts) == expected


def test_a_prompt_that_fails_is_its_error_and_the_callers_own_comes_last():
    one = Generator(byte_model(), max_new_tokens=3, batch_size=4)

    def prompts():
        yield from ["a", "\ud800", "b", "c"]
        raise OSError("mine")

    results, found = one.many(prompts()), []
    with pytest.raises(OSError, match="mine"):
        found.extend(results)  # each result is appended as it comes
    assert [type(result).__name__ for result in found] == ["list", "TextError", "list", "list"]
    assert str(found[1]).startswith("prompt 2: text '\\ud800' has a lone surrogate")
    assert [result[0].text for result in found if isinstance(result, list)] == [one(text) for text in "abc"]
    with pytest.raises(UsageError, match="prompts expected several items"):
        one.many("a")
    for stop in (None, 5, [""]):
        with pytest.raises(UsageError, match="stop must be strings"):
            Generator(byte_model(), stop=stop)


def test_a_prefix_model_sees_all_of_its_prompt_and_is_not_exported_as_a_causal_one():
    model, prompts = byte_model(), ["abc", "hello you"]
    model.card["objective"] = "prefix"
    one = Generator(model, max_new_tokens=4, min_tokens=4)
    for prompt, (found, *_) in zip(prompts, one.many(prompts), strict=True):
        ids = one.writer.ids(prompt)
        count = len(ids)
        for token in found.ids:
            mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
            mask[:, :count] = True
            logits = model.model.logits(model.model.states(torch.tensor([ids]), mask=mask))[0, -1].detach()
            torch.testing.assert_close(one.writer.logits(ids[:count], [*ids[count:], token])[-1], logits)
            logits[one.writer.ends] = -torch.inf
            assert int(logits.argmax()) == token
            ids = [*ids, token]
    for to in HELD:
        with pytest.raises(UsageError, match="does not support prefix language models"):
            check_kind(model, to)
