"""`multimodal generate`: against transformers' `generate` on the same random weights, streams, choices, examples,
bad input."""

import io
import json
import sys
import warnings

import pytest
import torch

from multimodal.errors import CheckpointError, MultimodalError, TextError, UsageError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.tasks.text.choices import scored
from multimodal.tasks.text.examples import Demonstration, read_examples, with_examples
from multimodal.tasks.text.generate import Generator, TextWriter, generate, generate_many
from multimodal.tasks.text.options import options_for
from multimodal.tasks.text.translate import asked_of
from multimodal.tokens.text.characters import CharacterTokenizer
from multimodal.tokens.text.sentencepiece import ByteTokenizer
from multimodal.weights.card import searched
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.load import load
from tests.helpers.byte_models import byte_model
from tests.helpers.commands import one_line, run
from tests.helpers.references import decoders as decoder_references
from tests.helpers.references import seq2seq as seq2seq_references
from tests.helpers.spread import thin
from tests.helpers.tiny import TEXTS

MOST = 9
TEXT = ["bcd", "", "defghijk", "zz"]
SEARCHES = [
    ({}, {}),
    ({"beam_size": 3, "num_return": 2, "length_penalty": 0.5},
     {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}),
    ({"repetition_penalty": 1.5, "no_repeat_ngram": 2, "min_tokens": 4},
     {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 4}),
]  # fmt: skip


def letters(size: int) -> CharacterTokenizer:
    """One id a letter, 0 for begin and end."""
    return CharacterTokenizer("".join(chr(ord("a") + i) for i in range(size - 1)))


def test_what_a_checkpoint_asks_for_and_we_cannot_do_is_named():
    told = {"num_beams": 4, "repetition_penalty": 1.0, "bad_words_ids": [[5, 6]], "top_k": 9}
    told |= {"forced_bos_token_id": None}
    told |= {"guidance_scale": 1.5, "num_beam_groups": 1, "num_return_sequences": 3, "stop_strings": "b", "user": "x"}
    told |= {"cache_implementation": "static", "pad_token_id": 3, "transformers_version": "5", "dola_layers": None}
    checkpoint = byte_model()
    checkpoint.card["generation"] = searched(told)
    left = r"bad_words_ids \[\[5, 6\]\], num_return_sequences 3, guidance_scale 1.5, user 'x', which is not followed"
    with pytest.warns(UserWarning, match=f"asks for {left}"):
        writer = Generator(checkpoint, max_new_tokens=1, top_p=1.0).writer  # its value for off
    assert (writer.options.beam_size, writer.options.stop) == (4, ("b",))
    with pytest.warns(UserWarning, match="bad_words_ids"):
        writer = Generator(checkpoint, max_new_tokens=1, temperature=1.0, seed=1).writer  # no beams
    assert writer.options.beam_size == 1


ASKED = [
    {"num_beams": 3, "early_stopping": True, "no_repeat_ngram_size": 2, "length_penalty": 2.0},
    {"num_beams": 2, "min_length": 5, "max_length": 7, "forced_bos_token_id": 5, "forced_eos_token_id": 0},
    {"num_beams": 2, "max_length": 6, "forced_eos_token_id": [9, 4]},
    {"num_beams": 3, "encoder_no_repeat_ngram_size": 2, "suppress_tokens": [0, 5],
     "begin_suppress_tokens": [9, 8, 7, 3], "bad_words_ids": [[11], [0]], "forced_bos_token_id": 6, "max_length": 12},
    {"encoder_no_repeat_ngram_size": 1, "begin_suppress_tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9], "max_length": 6},
    {"repetition_penalty": 1.8, "decoder_start_token_id": 7, "max_new_tokens": 6, "min_new_tokens": 6},
]  # fmt: skip


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("name", "file"), [("Hugging Face T5", "generation_config.json"),
                                            ("Hugging Face BART", "config.json")])  # fmt: skip
def test_what_the_files_of_a_checkpoint_ask_for_is_the_default(name, file, asked, tmp_path):
    """As of `generate()` without arguments. Old folders have it in config.json."""
    made = seq2seq_references.case(name)
    forced = {"forced_bos_token_id": None, "forced_eos_token_id": None}
    asked = {"max_length": MOST, "decoder_start_token_id": 4, **forced, **asked}
    theirs = {"eos_token_id": 0, "pad_token_id": 0, **asked}
    if file == "generation_config.json":
        (tmp_path / file).write_text(json.dumps(asked))
    config = made.config | (asked if file == "config.json" else {})
    checkpoint = made.family.load(made.tensors, config, "file", tmp_path)
    tokenizer = letters(made.config["vocab_size"])
    found = list(generate_many(TEXT, Checkpoint(checkpoint.model, tokenizer, card=checkpoint.card)))
    for text, (own, *_) in zip(TEXT, found, strict=True):
        ids = torch.tensor([[0, *tokenizer.encode(text), 0]])
        row = made.reference.generate(ids, attention_mask=torch.ones_like(ids), **theirs)[0, 1:].tolist()
        assert own.text == tokenizer.decode(row[: row.index(0)] if 0 in row else row)
        assert own.tokens == len(row)


@pytest.mark.parametrize(("file", "beams", "most"), [("generation_config.json", 1, 19), ("config.json", 5, 100)])
def test_transformers_defaults_count_where_they_are_asked_for(file, beams, most, tmp_path):
    """An old config.json lists them all."""
    made, asked = seq2seq_references.case("Hugging Face BART"), {"num_beams": 1, "max_length": 20, "min_length": 0}
    (tmp_path / file).write_text(json.dumps(asked))
    config = made.config | (asked if file == "config.json" else {})
    checkpoint = made.family.load(made.tensors, config, "file", tmp_path)
    assert asked_of(checkpoint, {}).beam_size == beams
    checkpoint = Checkpoint(checkpoint.model, letters(made.config["vocab_size"]), card=checkpoint.card)
    assert Generator(checkpoint).writer.options.max_new_tokens == most
    checkpoint.card["generation"] = {"min_length": 57, "max_length": 143}
    assert Generator(checkpoint, max_new_tokens=8).writer.options.min_tokens == 8  # no end before the cut
    checkpoint.card["generation"] = {"min_length": 57, "max_length": 21}
    assert Generator(checkpoint).writer.options.min_tokens == 20


def test_a_value_that_cannot_be_is_refused():
    checkpoint = byte_model()
    checkpoint.card["generation"] = {"num_beams": "four"}
    with pytest.raises(CheckpointError, match=r"generation_config\.json: num_beams: beam_size must be an integer"):
        generate("a", checkpoint)


@thin(2, pytest.mark.ci)
@thin(2, pytest.mark.slow)
@pytest.mark.parametrize(("name", "ours", "theirs"), [
    ("Llama", *SEARCHES[0]),
    *((name, *both) for name in ("GPT-2", "Mistral", "Hugging Face T5", "Hugging Face BART") for both in SEARCHES),
])  # fmt: skip
def test_texts_equal_transformers_generate(name, ours, theirs):
    """Prompts of different length together, against each alone."""
    answers = name.startswith("Hugging")
    made = (seq2seq_references if answers else decoder_references).case(name)
    tokenizer = letters(made.config["vocab_size"])
    checkpoint = made.family.load(made.tensors, made.config, "file")
    checkpoint = Checkpoint(checkpoint.model, tokenizer)
    found = list(generate_many(TEXT, checkpoint, max_new_tokens=MOST, batch_size=3, **ours))
    start = {"decoder_start_token_id": checkpoint.model.config.start_id} if answers else {}
    assert len({one.text for own in found for one in own}) > 1
    for text, own in zip(TEXT, found, strict=True):
        ids = torch.tensor([[0, *tokenizer.encode(text), *[0] * answers]])
        expected = made.reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MOST, eos_token_id=0,
            forced_eos_token_id=None, forced_bos_token_id=None, pad_token_id=0, return_dict_in_generate=True,
            output_scores=True, **theirs, **start,
        )  # fmt: skip
        rows = expected.sequences[:, 1 if answers else ids.shape[1] :].tolist()
        assert [one.text for one in own] == [tokenizer.decode(row[: row.index(0)] if 0 in row else row) for row in rows]
        if "num_beams" in theirs:
            assert [one.score for one in own] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate") / "tiny"
    save_folder(byte_model(), folder)
    return folder


DRAWN = {"temperature": 1.3, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "num_return": 2, "max_new_tokens": 12}


@pytest.mark.ci
def test_draws_follow_the_seed_and_not_the_batch():
    prompts = ["abc", "x", "hello you", ""]
    together = list(generate_many(prompts, byte_model(), seed=3, **DRAWN))
    assert together == list(generate_many(prompts, byte_model(), seed=3, batch_size=4, **DRAWN))
    other = list(generate_many(prompts, byte_model(), seed=4, **DRAWN))
    assert [one.text for own in together for one in own] != [one.text for own in other for one in own]
    for prompt, own in zip(prompts, together, strict=True):
        ((*alone,),) = generate_many([prompt], byte_model(), seed=3, batch_size=1, **DRAWN)
        assert [one.text for one in alone] == [one.text for one in own]
        assert [one.logprob for one in alone] == pytest.approx([one.logprob for one in own], abs=1e-4)


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("options", [{"repetition_penalty": 1.4}, {"temperature": 1.2, "seed": 5},
                                     {"temperature": 2.0, "stop": ["e", "qq"]}])  # fmt: skip
@pytest.mark.parametrize("kind", ["learned", "window"])
def test_what_is_streamed_is_the_whole_text(options, kind):
    model = byte_model(200) if kind == "learned" else byte_model(40, "rotary", window=5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "text: exceeds the 40 tokens")
        parts = list(Generator(model, max_new_tokens=40, **options).stream("hello"))
        assert "".join(parts) == generate("hello", model, max_new_tokens=40, **options)
    assert all(parts)
    with pytest.raises(UsageError, match="stream: expected beam_size 1"):
        Generator(model, beam_size=2).stream("hello")


def test_examples_stand_before_the_prompt_as_far_as_they_fit(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input": "1", "output": "one"}\n\n{"input": "2", "output": "two"}\n')
    (tmp_path / "a.tsv").write_text('Input\tOutput\n1\tone\r\n2\t"two"\n')
    expected = [Demonstration("1", "one"), Demonstration("2", "two")]
    assert read_examples(str(tmp_path / "a.jsonl"), "--examples") == expected
    assert read_examples(str(tmp_path / "a.tsv"), "--examples") == expected
    text = "Input: 1\nOutput: one\n\nInput: 2\nOutput: two\n\nInput: 3\nOutput:"
    assert with_examples("3", expected, lambda text: True) == (text, 0)
    less = text.replace("Input: 2\nOutput: two\n\n", "")
    assert with_examples("3", expected, lambda made: len(made) < len(text)) == (less, 1)
    assert with_examples("3", expected, lambda made: False) == ("Input: 3\nOutput:", 2)
    for name, content, told in (
        ("b.jsonl", '{"input": 1, "output": "x"}', 'line 1 is not an object with texts "input" and "output"'),
        ("b.jsonl", "{", "line 1 is not an object"), ("b.tsv", "a\tb\n\nc\n", "line 3 is not two columns with text"),
        ("b.tsv", "input\toutput\n", "has no example"), ("b.txt", "", "must end in .jsonl or .tsv"),
    ):  # fmt: skip
        (tmp_path / name).write_text(content)
        with pytest.raises(UsageError, match=told):
            read_examples(str(tmp_path / name), "--examples")


def test_long_prompts_are_refused_or_cut_with_their_number():
    checkpoint, long = byte_model(), "".join(chr(97 + i % 26) for i in range(50))
    with pytest.raises(TextError, match="prompt: has 50 tokens, the model's context is 40"):
        generate(long, checkpoint)
    with pytest.warns(UserWarning, match="prompt: 14 of 50 tokens are cut from the left"):
        cut = generate(long, checkpoint, max_new_tokens=5, on_long="cut")
    assert cut == generate(long[14:], checkpoint, max_new_tokens=5)
    with pytest.warns(UserWarning, match="text: ends after 3 tokens at the model's context of 40"):
        ((one,),) = generate_many([long[:38]], checkpoint, max_new_tokens=5)
    assert (one.stopped, one.tokens) == ("context", 3)
    endless = byte_model(40, "rotary")
    with pytest.warns(UserWarning, match="prompt: has 50 tokens, the model was trained on 40"):
        generate(long, endless, max_new_tokens=2)
    with pytest.warns(UserWarning, match="prompt: 11 of 50 tokens are cut from the left"):
        generate(long, endless, max_new_tokens=2, on_long="cut")
    with pytest.warns(UserWarning, match="text: exceeds the 40 tokens"):
        generate(long[:38], endless, max_new_tokens=5)


def test_an_empty_prompt_begins_with_the_begin_or_the_end_of_a_text():
    checkpoint = byte_model()
    write = TextWriter(checkpoint, options_for({}))
    assert write.ids("") == [ByteTokenizer.eos_id]
    assert write.ids("a") == ByteTokenizer().encode("a")
    assert generate("", checkpoint, max_new_tokens=3) != generate("a", checkpoint, max_new_tokens=3)
    checkpoint.tokenizer.eos_id = None
    with pytest.raises(TextError, match="prompt: is empty, and the vocabulary has no begin-of-text"):
        generate("", checkpoint)
    ((one,),) = generate_many(["a"], checkpoint, max_new_tokens=7)  # and no end either
    assert (one.tokens, one.stopped) == (7, "max_new_tokens")


WRONG = [
    ({"temperature": -1.0}, "temperature must be a number in"), ({"top_p": 0.0}, "top_p must"),
    ({"min_p": 2.0}, "min_p must be a number in"), ({"beam_size": 0}, "beam_size must"),
    ({"top_k": 5, "temperature": 0.0}, "top_k 5 is for sampling"), ({"num_return": 2}, "num_return 2 needs a beam"),
    ({"beam_size": 2, "temperature": 1.0}, "beam_size 2 searches"), ({"stop": [""]}, "stop must be strings"),
    ({"stop": "\ud800"}, r"stop must be strings of UTF-8 .*ud800"),
    ({"min_tokens": 200}, "min_tokens 200 is above max_new_tokens"), ({"on_long": "no"}, "on_long must be one of"),
    ({"beams": 2}, "option 'beams': unknown"), ({"max_new_tokens": 10**20}, "max_new_tokens must be an integer in"),
    ({"temperature": 1e-5}, "temperature 1e-05 is too near 0"),
    ({"device": "nowhere"}, "device 'nowhere'"), ({"compute_type": "float1"}, "compute_type must be one of"),
]  # fmt: skip


@pytest.mark.ci
def test_values_that_cannot_be_used_are_named():
    model = byte_model()
    for options, told in WRONG:
        with pytest.raises(UsageError, match=told):
            generate("a", model, **options)
    encoder = Checkpoint(TextTransformer(TextConfig(23, 12, TEXTS["learned"].stack, False)), ByteTokenizer())
    with pytest.raises(UsageError, match="expected a language model"):
        generate("a", encoder)
    nameless = Checkpoint(byte_model().model, source="x")
    with pytest.raises(CheckpointError, match="model x: checkpoint has no tokenizer"):
        generate("a", nameless)
    broken = byte_model()
    with torch.no_grad():
        broken.model.embed.weight[:] = torch.nan
    for options in ({}, {"temperature": 1.0}, {"beam_size": 2}):
        with pytest.raises(MultimodalError, match="logits are not finite"):
            generate("a", broken, **options)


def test_the_command_prints_texts_and_reports_what_is_broken(capsys, tiny, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(b"abc\n\n\xff\xfe\n" + b"x" * 50 + b"\nhello\r\n")
    code, out, err = run(capsys, "generate", "--file", prompts, "-m", tiny, "--max_new_tokens", 6, "--format", "json")
    records = json.loads(out)
    assert code == 1
    assert err.splitlines() == [
        f"multimodal: error: {prompts}, line 3: is not UTF-8 text (byte 0 of the line is 0xff)",
        f"multimodal: error: {prompts}, line 4: has 50 tokens, the model's context is 40 (on_long cut cuts it)",
    ]
    assert [record["prompt_tokens"] for record in records] == [3, 1, None, None, 5]
    code, out, _ = run(capsys, "generate", "--file", prompts, "-m", tiny, "--max_new_tokens", 6)
    assert code == 1
    assert out.count("\n") == 5
    assert out.split("\n")[2:4] == ["", ""]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\nhello\n")))
    code, out, err = run(capsys, "generate", "-", "-m", tiny, "--max_new_tokens", 6, "--format", "json")
    assert (code, err) == (0, "")
    assert json.loads(out) == [records[0], records[4]]
    code, out, _ = run(capsys, "generate", "abc", "--stream", "-m", tiny, "--max_new_tokens", 6)
    assert out == run(capsys, "generate", "--prompt", "abc", "-m", tiny, "--max_new_tokens", 6)[1]
    code, out, _ = run(capsys, "generate", "one or", "-m", tiny, "--choices", "two", "three")
    best = scored(TextWriter(load(tiny), options_for({})), "one or", ["two", "three"])[0]
    assert out == f"{best.text}\t{best.score:.4f}\n"


def test_the_command_says_in_one_line_that_the_memory_is_too_small(capsys, tiny, monkeypatch):
    def large(*_):
        return torch.empty(2**62, dtype=torch.uint8)

    monkeypatch.setattr("multimodal.tasks.text.generate.TextWriter.__call__", large)
    code, out, err = run(capsys, "generate", "abc", "-m", tiny)
    assert (code, out) == (1, "")
    assert err.startswith(f"multimodal: error: prompt: not enough memory ({2**62} bytes asked for at once)")
    assert err.count("\n") == 1


def test_the_command_takes_a_dash_alone_for_the_standard_input(capsys, tiny):
    code, out, err = run(capsys, "generate", "abc", "-", "-m", tiny)
    assert (code, out) == (2, "")
    assert "-: stands alone" in err


@pytest.mark.filterwarnings("always")
def test_the_command_says_how_many_examples_are_left_out(capsys, tiny, tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb\nc\td\ne\tf\n")
    code, out, err = run(capsys, "generate", "g", "--examples", tmp_path / "a.tsv", "-m", tiny, "--max_new_tokens", 3,
                         "--format", "json")  # fmt: skip
    assert code == 0
    assert err == ("multimodal: warning: prompt: 2 of 3 examples are left out, as the context of 40 tokens has no room "
                   "for them\n")  # fmt: skip
    assert json.loads(out)[0]["prompt_tokens"] == len("Input: a\nOutput: b\n\nInput: g\nOutput:")


def test_a_stop_stands_beside_the_empty_line_that_ends_an_answer(tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.tsv").write_text("a\tb\n")
    seen = []
    monkeypatch.setattr(TextWriter, "__call__", lambda write, rows: [seen.append(write.options.stop) or []])
    few = ["-m", tiny, "--max_new_tokens", 3]  # else there is no room for examples
    run(capsys, "generate", "g", "--examples", tmp_path / "a.tsv", *few, "--stop", "x", "y")
    assert seen == [("x", "y", "\n\n")]


def test_control_tokens_in_a_prompt_are_text_and_half_characters_one_line(capsys, tiny):
    code, out, _ = run(capsys, "generate", "</s>", "-m", tiny, "--max_new_tokens", 3, "--format", "json")
    assert json.loads(out)[0]["prompt_tokens"] == 4
    code, out, err = run(capsys, "generate", "a\udcff", "-m", tiny)
    assert code == 1
    assert out == ""
    assert "prompt: text 'a\\udcff' has a lone surrogate" in one_line(err)


@pytest.mark.parametrize(("flags", "told"), [
    ([], "give one of TEXT, --prompt and --file"), (["a", "--prompt", "b"], "give one of"),
    (["a", "--choices", "x", "y", "--seed", "1"], "--seed: has no part in a choice"),
    (["a", "b", "--stream"], "--stream: is for the text of one prompt"),
])  # fmt: skip
def test_flags_that_contradict_end_with_2(capsys, flags, told):
    code, out, err = run(capsys, "generate", "-m", "x", *flags)
    assert code == 2
    assert out == ""
    assert told in err
    assert err.count("\n") == 1


def test_a_trained_model_tells_a_story(capsys, shared_data):
    model = shared_data / "weights" / "stories260K"
    code, out, err = run(capsys, "generate", "-m", model, "--prompt", "", "--temperature", 0, "--max_tokens", 60)
    assert (code, err) == (0, "")
    assert out.startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    )
