"""Regular expressions of a `tokenizer.json`: exponential ones raise a typed error."""

import base64
import json
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from multimodal.errors import CheckpointError, TextError
from multimodal.tokens.text.hub import pipeline as hub
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.hub.patterns import check_growth, check_pattern, no_panic
from multimodal.tokens.text.hub.pipeline import HubTokenizer, naming_pipeline

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
IN_USE = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", GPT4,  # GPT-2; GPT-4, Llama 3, Qwen
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r" ?[^(\s|[.,!?…。，、।۔،])]+", r"[一-龥぀-ゟ゠-ヿ]+", r" {2,}", r"\d{1,3}(?=(?:\d{3})*\b)", r"(?=(\d{3})+(?!\d))",
    r"<\|startoftext\|>|<\|endoftext\|>|'s|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+", r"\n", r"[^\n]+|\n+", "▁", " +",
    r"(?<!a)b",
]  # fmt: skip
EXPLODE = [
    "(a+)+$", "(a|aa)+$", "(a*)*b", "(?:(?:a+)+)+b", "((a{1,1000}){1,1000}){1,1000}", "a{100000}", "(a{9}){9,}{9}",
    "a*a*a*a*b", "(?:a|b)*c", "(a)\\1", "(?<n>a\\g<n>?b)", "(?R)", "((a*)b*)*", "x" * 2001, "(" * 40 + ")" * 40,
]  # fmt: skip


def pipeline(**parts: object) -> dict:
    """A `tokenizer.json` of letters."""
    vocab = {token: i for i, token in enumerate(["<unk>", *"abcdefghijklmnopqrstuvwxyz! "])}
    model = {"type": "BPE", "unk_token": "<unk>", "vocab": vocab, "merges": []}
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return {"version": "1.0", "added_tokens": [], **dict.fromkeys(names), "model": model, **parts}


def split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("pattern", IN_USE)
def test_patterns_in_use_are_taken(pattern):
    check_pattern(pattern)


@pytest.mark.parametrize("pattern", EXPLODE)
@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer", "decoder"])
def test_patterns_that_explode_are_refused_by_name(tmp_path, capfd, pattern, place):
    replace = {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}
    part = split(pattern) if place == "pre_tokenizer" else replace
    several = {"pre_tokenizer": "pretokenizers", "normalizer": "normalizers", "decoder": "decoders"}[place]
    (tmp_path / "tokenizer.json").write_text(json.dumps(pipeline(**{place: {"type": "Sequence", several: [part]}})))
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="regular expression") as error:
        hub_tokenizer(tmp_path, {"vocab_size": 29})
    assert time.monotonic() - start < 5
    assert str(error.value).startswith(f"{tmp_path / 'tokenizer.json'}: ")
    assert len(str(error.value).splitlines()) == 1
    assert capfd.readouterr().err == ""


@pytest.mark.ci
@pytest.mark.parametrize("pattern", ["[a-z]*[a-y]*[a-x]*(?=!)", "[a-z]*[a-z]*[a-z]*!"])
def test_patterns_of_cubic_time_are_refused(pattern):
    with pytest.raises(CheckpointError, match="regular expressions take"):
        HubTokenizer(pipeline(pre_tokenizer=split(pattern)), {}, 29, 0)


def replace(pattern: dict, content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


NFKC = base64.b64encode(bytes(4) + b"a\0" + b"b" * 33 + b"\0").decode()  # the longest of SentencePiece's nmt_nfkc


@pytest.mark.parametrize("several", ["normalizers", "decoders"])
@pytest.mark.parametrize(
    ("steps", "growth"),
    [
        ([replace({"String": "a"}, "a" * 1000)] * 4, "1000000000000"),
        ([replace({"Regex": ""}, "aa")] * 20, "3486784401"), ([replace({"String": "a"}, "b" * 5000)], "5000"),
        ([{"type": "Prepend", "prepend": "aaa"}] * 7, "16384"),
        ([{"type": "Precompiled", "precompiled_charsmap": NFKC}] * 3, "35937"),
        ([replace({"String": "a"}, "b" * 5000) | {"normalizers": [], "decoders": []}], "5000"),  # fields of other types
        ([{"type": "Prepend", "prepend": "a" * 5000, "content": "", "pattern": {"String": "a"}}], "5001"),
    ],
)  # fmt: skip
def test_replacements_without_bound_are_refused(several, steps, growth):
    part = {"type": "Sequence", several: steps}
    with pytest.raises(CheckpointError, match=rf"may make a text {growth} times as long, more than 4096"):
        HubTokenizer(pipeline(**{several[:-1]: {"type": "Sequence", several: [part]}}), {}, 29, 0)


def test_replacements_in_use_are_taken():
    steps = [{"type": "Precompiled", "precompiled_charsmap": NFKC}, {"type": "Prepend", "prepend": "▁"},
             replace({"String": "``"}, '"'), replace({"Regex": " {2,}"}, " ")]  # fmt: skip
    check_growth({"type": "Sequence", "normalizers": steps + [replace({"String": "\n"}, " ")] * 50})


def test_a_panic_while_a_text_is_read_is_an_error_of_the_text(capfd, monkeypatch):
    monkeypatch.setattr(hub, "check_pattern", lambda pattern: None)  # as for one that it misjudges
    tokenizer = HubTokenizer(pipeline(pre_tokenizer=split("z(a+)+$")), {}, 29, 0)
    assert tokenizer.encode("abc") == [1, 2, 3]
    with pytest.raises(TextError, match=r"the tokenizers library failed \(Onig"):
        tokenizer.encode("z" + "a" * 40 + "!")
    assert tokenizer.encode("abc") == [1, 2, 3]
    assert capfd.readouterr().err == ""


def test_a_panic_while_a_file_is_read_is_an_error_of_the_file(tmp_path, capfd):
    charsmap = {"type": "Precompiled", "precompiled_charsmap": 1e308}
    message = r"^here: .*tokenizers library failed"
    with pytest.raises(CheckpointError, match=message), naming_pipeline(Path("here")):
        HubTokenizer(pipeline(normalizer=charsmap), control={}, vocab_size=29, pad_id=0)
    assert capfd.readouterr().err == ""


def test_other_errors_pass_and_stderr_is_as_before(capfd):
    import os

    with pytest.raises(ZeroDivisionError), no_panic("here", TextError), no_panic("there", TextError):
        raise ZeroDivisionError
    os.write(2, b"told")
    assert capfd.readouterr().err == "told"


def test_the_library_panics_still(capfd):
    """Else the guard could go."""
    backend = Backend.from_str(json.dumps(pipeline(pre_tokenizer=split("(a+)+$"))))
    with pytest.raises(BaseException, match="retry-limit") as error:
        backend.encode("a" * 40 + "!")
    assert not isinstance(error.value, Exception)
    capfd.readouterr()
