"""Text of generated ids, whole and as it grows."""

import json

import pytest
import tokenizers
import torch
from tokenizers import decoders, models

from multimodal.tasks.text.detokenize import IncrementalDetokenizer, continuation, stop_rule
from multimodal.tokens.text.hub.pipeline import HubTokenizer
from multimodal.tokens.text.sentencepiece import ByteTokenizer
from multimodal.tokens.text.tiktokens import GPT2Tokenizer
from multimodal.weights.load import load

WRITTEN = ["naïve 🙂🙂 café, 日本語のテキスト", "Once upon a time, Lily  was\n\tsad. It isn't 3.5!", " x", "aé"]


@pytest.mark.parametrize("kind", ["gpt2", "bytes", "stories"])
def test_a_text_grows_by_whole_letters_only(kind, shared_data):
    if kind == "stories":
        tokenizer = load(shared_data / "weights" / "stories260K").tokenizer
    else:
        tokenizer = {"gpt2": GPT2Tokenizer, "bytes": ByteTokenizer}[kind]()
    for text in WRITTEN:
        ids = tokenizer.encode("Well," + text)
        for cut in (0, 1, len(tokenizer.encode("Well,"))):
            growing = IncrementalDetokenizer(tokenizer, ids[:cut])
            parts = [growing.add(token) for token in ids[cut:]]
            whole = continuation(tokenizer, ids[:cut], ids[cut:])
            assert "".join(parts) + growing.end(True) == whole
            assert ("Well," + text).endswith(whole.removeprefix("\ufffd"))
            assert not any("\ufffd" in part for part in parts[1:])


def test_tokens_of_bytes_are_whole_characters_whatever_stands_beside_them():
    """The `tokenizers` library makes each byte of a run U+FFFD if one of them belongs to no whole character."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "o", "▁"]
    backend = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = HubTokenizer(json.loads(backend.to_str()), {}, len(names), 0, unknown_id=0)

    def texts(before: list[int], ids: list[int], ended: bool) -> list[str]:
        growing = IncrementalDetokenizer(tokenizer, before)
        grown = "".join([growing.add(token) for token in ids]) + growing.end(ended)
        return [grown, continuation(tokenizer, before, ids)]

    text = "日本語のテキスト終"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == backend.decode(ids) == text
    for cut in range(len(text)):
        assert texts(ids[: 3 * cut], ids[3 * cut :], True) == [text[cut:]] * 2
    assert texts(ids[:9], ids[9:-1], False) == ["のテキスト", "のテキスト\ufffd\ufffd"]  # the last one is incomplete
    stray = [*tokenizer.encode("日"), 1 + 0xFF, *tokenizer.encode("本o")]
    assert texts(tokenizer.encode("o"), stray, True) == ["日\ufffd本o"] * 2
    for stop in ("終", "ト終"):
        found = stop_rule([stop], tokenizer, 3)(torch.tensor([ids, [*ids[:-3], *ids[:3]]]))
        assert found.tolist() == [True, False]


def test_a_control_token_within_a_text_takes_no_blank():
    names = ["<unk>", "</s>", "▁jacket", "flU"]
    backend = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = HubTokenizer(json.loads(backend.to_str()), {"</s>": 1}, len(names), 1, unknown_id=0)
    for before, ids in (([], [2, 1, 2, 0, 0, 2, 3, 1]), ([2, 1], [1, 2, 3]), ([1], [2, 1, 2])):
        growing = IncrementalDetokenizer(tokenizer, before)
        parts = [growing.add(token) for token in ids]
        assert "".join(parts) + growing.end(True) == continuation(tokenizer, before, ids)
        assert parts.count(" jacket") + parts.count("jacket") == ids.count(2)


def test_a_stop_ends_the_text_wherever_tokens_split_it():
    tokenizer = ByteTokenizer()

    def parts(text: str, *stops: str) -> list[str]:
        growing = IncrementalDetokenizer(tokenizer, [], stops)
        return [growing.add(token) for token in tokenizer.encode(text)] + [growing.end(True)]

    assert parts("abcd", "cd") == ["a", "b", "", "", ""]
    assert parts("abcx", "cd") == ["a", "b", "", "cx", ""]
    assert parts("abc", "cd") == ["a", "b", "", "c"]
    assert "".join(parts("a\n\nb", "\n\n", "b")) == "a"
    assert "".join(parts("aab", "ab")) == "a"


def test_a_half_letter_at_the_limit_is_left_out():
    growing, ids = IncrementalDetokenizer(ByteTokenizer(), []), ByteTokenizer().encode("aé")
    assert [growing.add(token) for token in ids[:2]] == ["a", ""]
    assert growing.end(False) == ""
    growing.add(ids[2])
    assert growing.end(False) == ""
