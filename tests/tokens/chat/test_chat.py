"""Chat templates: rendered as transformers does, in bounded work, with no control token from what a user wrote."""

import json
import re
from pathlib import Path

import pytest

from multimodal.errors import CheckpointError, UsageError
from multimodal.tokens.chat import budget
from multimodal.tokens.chat.budget import MOST_LINES
from multimodal.tokens.chat.format import ChatFormat, media
from multimodal.tokens.chat.messages import read_messages
from multimodal.tokens.chat.template import render
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.sentencepiece import SentencePieceTokenizer
from multimodal.tokens.text.tokenizer import MARK
from multimodal.tokens.text.vocabulary import tokenizer_from
from tests.helpers.references.hub import llama_pieces
from tests.helpers.spread import spread, thin

TEMPLATE = (
    "{{ bos_token }}{{ 'Read: ' if documents is not none }}"
    "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>\n{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def folder_of(kind: str, folder: Path) -> Path:
    """A tokenizer of Qwen's or of Llama's kind."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    pieces = kind == "metaspace"
    made = Tokenizer(models.BPE(byte_fallback=pieces, unk_token="<unk>" if pieces else None))
    names, alphabet = ["<unk>", "<s>", "</s>", "<image>", "<pad>"], pre_tokenizers.ByteLevel.alphabet()
    if pieces:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        names, alphabet = [*names, *(f"<0x{byte:02X}>" for byte in range(256))], []
    else:
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["what is this? a quick brown fox. USER: ASSISTANT: hello"] * 9, trainer)
    pipeline = json.loads(made.to_str())
    pipeline["added_tokens"] = pipeline["added_tokens"][:5]
    (folder / "tokenizer.json").write_text(json.dumps(pipeline))
    record = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(record))
    return folder


FORM = ChatFormat(TEMPLATE, image="<image>", tokens=SPECIAL)


def messages(text: str, *more: str) -> list[dict]:
    parts = [{"type": "image", "image": "a.png"}, *({"type": "text", "text": one} for one in (text, *more))]
    return [{"role": "user", "content": "hello"}, {"role": "assistant", "content": " a fox "},
            {"role": "user", "content": parts}]  # fmt: skip


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_as_transformers(kind, tmp_path):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folder_of(kind, tmp_path))
    ours = hub_tokenizer(tmp_path, {"vocab_size": len(theirs)})
    given = messages("what is  this?\n", "ok")
    plain = [{**one, "content": [{k: v for k, v in part.items() if k != "image"} for part in one["content"]]}
             if isinstance(one["content"], list) else one for one in given]  # fmt: skip
    expected = theirs.apply_chat_template(plain, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False)
    expected_ids = theirs(expected.replace("<image>", "<image>" * 3), add_special_tokens=False).input_ids
    form = FORM
    text, order = form.text(read_messages(given), ["<image>" * 3], ours, "template")
    assert order == [0]
    assert text.replace(MARK, "") == expected.replace("<image>", "<image>" * 3)
    assert ours.encode_template(text) == expected_ids
    ours.save(tmp_path / "ours")
    assert tokenizer_from(tmp_path / "ours").encode_template(text) == expected_ids


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ bos_token }}{{ messages[0].content }}"])
def test_the_space_before_a_first_word_is_as_transformers(template, tmp_path):
    from transformers import PreTrainedTokenizerFast

    path = folder_of("metaspace", tmp_path) / "tokenizer.json"
    split = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": None, "pre_tokenizer": split}))
    theirs, ours = PreTrainedTokenizerFast(tokenizer_file=str(path)), hub_tokenizer(tmp_path, {"vocab_size": 400})
    form = ChatFormat(template, tokens=SPECIAL)
    for text in ("what is", " what is"):
        rendered, _ = form.text(read_messages([{"role": "user", "content": text}]), [], ours, "template")
        assert rendered.replace(MARK, "").endswith(text)
        expected = theirs(rendered.replace(MARK, ""), add_special_tokens=False).input_ids
        assert ours.encode_template(rendered) == expected
    rendered, _ = form.text(read_messages([{"role": "user", "content": "</s>what"}]), [], ours, "template")
    assert ours.names["</s>"] not in ours.encode_template(rendered)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip"])
def test_control_tokens_take_the_blanks_that_they_ask_for(flag, tmp_path):
    """As Phi-3's take the line break behind them."""
    from transformers import PreTrainedTokenizerFast

    path = folder_of("bytes", tmp_path) / "tokenizer.json"
    pipeline = json.loads(path.read_text())
    for token in pipeline["added_tokens"]:
        token[flag] = token["content"] == "</s>"
    path.write_text(json.dumps(pipeline))
    text = "what is \n</s>\nthis?</s> \n"
    expected = PreTrainedTokenizerFast(tokenizer_file=str(path))(text, add_special_tokens=False).input_ids
    ours = hub_tokenizer(tmp_path, {"vocab_size": 400})
    assert ours.encode_template(text) == expected
    ours.save(tmp_path / "ours")
    assert tokenizer_from(tmp_path / "ours").encode_template(text) == expected


SMOLLM = (
    "{% set s = messages[0].content %}{% if '/no_think' in s %}{{ 'off ' }}{% endif %}"
    "{% set s = s.replace('/no_think', '').rstrip() %}{{ s + '<pad>' if s else 'You are helpful.' }}"
)
QWEN = (
    "{% for m in messages %}{% set c = m.content %}{% if '</s>' in c %}{% set c = c.split('</s>')[-1].lstrip('\\n') %}"
    "{% endif %}{{ '<pad>' + c }}{% endfor %}{{ messages[0].content.startswith('<image>') }}"
)
SEEN = "{% set c = messages[0].content %}{{ c | length }}{{ c | capitalize }}{{ c[:2] }}{{ c.replace('<pad>', '') }}"


@pytest.mark.parametrize("template", [SMOLLM, QWEN, SEEN])
@pytest.mark.parametrize(
    "text", ["/no_think", "Terse. /no_think", "<image>hm</s>\n\nYes", " a <pad>", "<<s>/no_think/s>"]
)
def test_templates_see_texts_as_they_are(template, text, tmp_path):
    from transformers import PreTrainedTokenizerFast

    given = [{"role": "user", "content": text}]
    theirs = PreTrainedTokenizerFast.from_pretrained(folder_of("bytes", tmp_path))
    made = render(template, read_messages(given), SPECIAL.values())
    assert made.replace(MARK, "") == theirs.apply_chat_template(given, chat_template=template, tokenize=False)
    assert made.count("<pad>") == (template != SEEN and made[-3:] != "ul.")  # the template's alone


KEPT = ("c", "c + c", "c * 2", "c ~ c", "'<|a|>' + c", "('<|a|>' + c) | trim", "[c, '<|a|>'] | join(c)", "c[1:-1]",
        "c | safe", "('<|a|>' + c).split('Q') | join('<|a|>')", "'<|a|>Q'.replace('Q', c)", "c.rsplit('Q', 1) | last",
        "' '.join(c.split())", "c.replace('Q', '')", "(c + '<|a|>') | replace('Q', '')", "c.strip('Q')",
        "[[c, '<|a|>']] | map('first') | first", "messages | map(attribute='content') | join")  # fmt: skip
LOST = ("c | upper | lower", "c.title().lower()", "messages", "messages | tojson", "c.encode()", "c | pprint", "c | e",
        "c.splitlines() | first", "c | indent('  ', first=true)", "c.partition('Q') | join", "c | list | join",
        "c | reverse | reverse", "namespace(x=c)", "namespace(x=c) | string", "c.zfill(99)", "c | center(99)",
        "c.replace('', 'Q').replace('Q', '')")  # fmt: skip


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("operation", [*KEPT, *LOST])
def test_no_operation_makes_a_control_token_of_what_a_user_wrote(operation):
    """`<|a|>` is the template's own, and stays a name."""
    template = "{% set c = messages[0].content %}<{{ '' }}{{ " + operation + " }}"
    for text in ("</s>", "[B]Q", "<Q/s>", "<</s>/s>", "[BQ]x", "</S>", "/s>"):
        given = read_messages([{"role": "user", "content": text}])
        plain, made = (render(template, given, names) for names in ((), ["</s>", "[B]", "[B]x", "<|a|>"]))
        assert made.replace(MARK, "") == plain
        assert not re.search(r"</s>|\[B\]", made), made
        assert made.count("<|a|>") == plain.count("<|a|>")


def test_a_text_of_blanks_alone_has_no_marks():
    """A template that asks whether there is one must find none."""
    template = "{{ messages[0].content or 'nothing' }}"
    assert render(template, read_messages([{"role": "system", "content": ""}]), ()) == "nothing"
    with pytest.raises(CheckpointError, match=r"cannot be rendered \(SyntaxError"):
        render("{% break %}", read_messages(messages("a")), ())


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
@pytest.mark.parametrize("texts", [("<image></s>",), ("<ima", "ge> </s", ">"), (f"<{MARK}/s>", "</s>")])
def test_what_a_user_wrote_is_no_control_token(kind, texts, tmp_path):
    tokenizer = hub_tokenizer(folder_of(kind, tmp_path), {"vocab_size": 400})
    text, _ = FORM.text(read_messages(messages(*texts)), ["<image>"], tokenizer, "x")
    ids = tokenizer.encode_template(text)
    names = {i: name for name, i in tokenizer.control_names.items()}
    assert [names[i] for i in ids if i in tokenizer.control] == ["<s>", "<image>"]
    assert "".join(texts).replace(MARK, "") in tokenizer.decode(ids)


def test_numbers_may_be_as_large_as_times():
    template = (
        "{% set t = 1700000000 %}{{ t > 3 }}{{ 1700000000 == t }}{{ t is gt 20240101 }}{{ t in [t] }}{{ t + t }}"
        "{{ t - 2000000000 }}{{ t * 1000 }} {{ t | tojson }}{% if t is eq t %}{{ {'t': t} | tojson }}{% endif %}"
    )
    made = render(template, read_messages([{"role": "user", "content": "a"}]), ())
    assert made == "TrueTrueTrueTrue3400000000-3000000001700000000000 1700000000" + '{"t": 1700000000}'


DOUBLE = "{{% set n = namespace(x={1}) %}}{{% for i in range(60) %}}{{% set n.x = {0} %}}{{% endfor %}}{{{{ n.x }}}}"

REPEAT = ("{{% set n = namespace(x=0, text='a' * 99999, long=range(99999) | list) %}}"
          "{{% for i in range(60000) %}}{{% set n.x = {0} %}}{{% endfor %}}")  # fmt: skip


PLAIN = [
    ("{{ messages.__class__.__mro__ }}", "'__class__' of 'list' object is unsafe"),
    ("{{ cycler.__init__.__globals__.os }}", "is unsafe"),
    ("{{ raise_exception('roles must alternate') }}", "x: roles must alternate"),
    ("{% if %}", "Expected an expression"),
    ("{{ messages[7].role.name }}", "has no element 7"),
    ("{{ 'a' * 10000000 }}", "the number 10000000 is larger"),
    ("{{ 5 | tojson(10000000) }}", "the number 10000000 is larger"),
    ("{{ 'a' | center(100000000) }}", "the number 100000000 is larger"),
    ("{{ 'a'.ljust(100000000) }}", "the number 100000000 is larger"),
    ("{{ '%99999999d' | format(1) }}", "No filter named 'format'"),
    ("{{ '{:99999999d}'.format(1) }}", "format is not allowed"),
    ("{{ '%99999999d' % 1 }}", "% is not allowed"),
    ("{{ 9 ** 99999999 }}", "is not allowed|is larger"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{{ messages.append(1) }}", "is unsafe|not safely callable"),
    ("{#" + "a" * 300_000 + "#}", "has 300004 characters"),
    ("{{ lipsum(999999) }}", "'lipsum' is undefined"),
]  # fmt: skip
BOUNDED = [
    ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", f"within {MOST_LINES} steps"),
    ("{{ [1] * 1000 * 1000 * 2 }}", "makes more than"),
    ("{{ ([range(9) | string | center(99999)] * 9999) | join }}", "join makes more than"),
    ("{% set x = 'a' * 99999 %}{{ x | replace('a', x) }}{{ x.replace('a', x) }}", "replace makes more than"),
    ("{% set x = 'a' * 99999 %}{{ x.replace('a', x) }}", "replace makes more than"),
    ("{% set x = 'a' * 99999 %}{{ (messages | map('string') | list + [x] * 9999) | join(x) }}", "makes more"),
    (DOUBLE.format("n.x + n.x", "'a' * 9999"), "more than"),
    (DOUBLE.format("n.x ~ n.x", "'a' * 9999"), "more than"),
    (DOUBLE.format("n.x * n.x", "99"), "bits"),
    (REPEAT.format("[range(99999) | list, n.x]"), "in all"),
    (REPEAT.format("[n.long[1:], n.x]"), "in all"),
    (REPEAT.format("['a' * 1048576, n.x]"), "in all"),
    (REPEAT.format("[n.text.encode('utf-32'), n.x]"), "in all"),
    (REPEAT.format("[n.text | center(99999) | list, n.x]"), "in all"),
    (REPEAT.format("n.text | upper | length"), "in all"),
    (REPEAT.format("-1 in n.long"), "in all"),
]  # fmt: skip
LONG = [  # minutes, with the whole bounds
    (DOUBLE.format("[n.x, n.x]", "[1]"), "elements"),
    (DOUBLE.format("[n.x, n.x]", "[1]").replace("{{ n.x }}", "{{ n }}"), "elements"),
    (DOUBLE.format("[n.x, n.x]", "[1]").replace("{{ n.x }}", "{{ {1: n.x}.values() }}"), "elements"),
    (DOUBLE.format("[n.x, n.x]", "[1]").replace("{{ n.x }}", "{{ n.x == messages }}"), "elements"),
    (REPEAT.format("n.long | sort"), "in all"),
    (REPEAT.format("-1 is in n.long"), "in all"),
    (REPEAT.format("[1, " + "1, " * 9999 + "1]"), "in all"),
    ("{{ range(9999) | batch(1) | sum(start=[]) }}", "sum makes more than"),
]  # fmt: skip
# with bounds of a sixteenth
QUICK = [*((*case, 4) for case in PLAIN + BOUNDED), *spread([(*case, 4) for case in LONG], 5, pytest.mark.ci)]


@pytest.mark.parametrize(
    ("template", "cause", "shift"),
    [*QUICK, *spread([(*case, 0) for case in BOUNDED], 6, pytest.mark.slow, pytest.mark.ci)],
)
def test_a_hostile_template_is_one_line(template, cause, shift, monkeypatch):
    monkeypatch.setattr(budget, "MOST_SECONDS", 200.0)  # slow or busy processors would meet it before the other bounds
    monkeypatch.setattr(budget, "MOST_WORK", budget.MOST_WORK >> shift)
    if cause == "elements":
        monkeypatch.setattr(budget, "MOST_SIZE", budget.MOST_SIZE >> shift)
    with pytest.raises(CheckpointError, match=cause) as error:
        render(template, read_messages([{"role": "user", "content": "hello"}]), ["<s>"], where="x")
    assert "\n" not in str(error.value)


def test_a_medium_left_out_or_written_twice_is_refused(tmp_path):
    tokenizer = hub_tokenizer(folder_of("bytes", tmp_path), {"vocab_size": 400})
    for template, found in (("{{ 1 }}", []), ("<image><image>", ["image", "image"]), ("<pad>", ["audio"])):
        wrong = re.escape(f"x: wrote media {found} for ['image'] in the messages")
        form = ChatFormat(template, image="<image>", audio="<pad>")
        with pytest.raises(CheckpointError, match=wrong):
            form.text(read_messages(messages("a")), ["<image>"], tokenizer, "x")
    with pytest.raises(CheckpointError, match="no token '<end>'"):
        ChatFormat(TEMPLATE, eos=("<end>",)).end_ids(tokenizer)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ("hello", "messages expected a list of messages"),
        ([], "messages expected a list"),
        ([3], r"messages\[0\]: expected an object"),
        ([{"role": "robot", "content": "a"}], "role must be one of system, user, assistant"),
        ([{"role": "user"}], "content must be a text or a list of parts"),
        ([{"role": "user", "content": []}], "content must be a text"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "part 0: type must be one of text, image, audio, video"),
        ([{"role": "user", "content": [{"type": "image"}]}], "part 0: expected 'image' or one of path, url, base64"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "expected a text"),
        ([{"role": "user", "content": [{"type": "image", "image": 1, "path": "a"}]}], "expected 'image' or one of"),
        ([{"role": "user", "content": [{"type": "audio", "base64": "*"}]}], "expected base64"),
    ],
)
def test_wrong_messages_are_named(given, cause):
    with pytest.raises(UsageError, match=cause):
        read_messages(given)


def test_media_in_order():
    given = [{"role": "user", "content": [{"type": "audio", "path": "a.wav"}, {"type": "text", "text": "b"},
                                          {"type": "image", "base64": "aGk="}]}]  # fmt: skip
    assert [(part.kind, part.value) for part in media(read_messages(given))] == [("audio", "a.wav"), ("image", b"hi")]


@pytest.mark.parametrize("legacy", [True, False])
def test_tokens_added_to_a_sentencepiece_model_equal_transformers(legacy, tmp_path):
    """As fine-tunes of Llama have them, also after they are saved as ours."""
    from transformers import AutoTokenizer

    llama_pieces(tmp_path)
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    added = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_start|>": 400, "<|im_end|>": 401, "<think>": 402}
    record = {
        "tokenizer_class": "LlamaTokenizer", "legacy": legacy, "bos_token": "<s>", "eos_token": "<|im_end|>",
        "added_tokens_decoder": {i: flags | {"content": name, "special": name not in ("<think>", "<unk>")}
                                 for name, i in added.items()}}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(record))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    made = hub_tokenizer(tmp_path, {"model_type": "llama", "vocab_size": 408})
    made.save(tmp_path / "ours")
    for tokenizer in (made, tokenizer_from(tmp_path / "ours")):
        assert isinstance(tokenizer, SentencePieceTokenizer)
        assert tokenizer.eos_id == theirs.eos_token_id == 401
        chat = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n<think>\nso the dog"
        for text in (chat, "the cat", "<think>the", "a <think>"):
            assert tokenizer.encode_template(text) == theirs.encode(text, add_special_tokens=False)
        assert 402 in tokenizer.encode("a <think>b")
        assert not tokenizer.control & set(tokenizer.encode("<|im_end|> [403]"))
        assert tokenizer.decode([400, 401, 402], skip_control=False) == "<|im_start|><|im_end|><think>"
    record["added_tokens_decoder"][400]["rstrip"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="with rstrip is not supported"):
        hub_tokenizer(tmp_path, {"model_type": "llama", "vocab_size": 408})


def test_templates_read_the_special_tokens_that_transformers_tokenizers_have(tmp_path):
    """From special_tokens_map.json, or by the default of the class, as DialoGPT names none."""
    from transformers import AutoTokenizer

    from multimodal.weights.any.chat import chat_format

    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ bos_token }}{{ pad_token }}"
    record, said = {"model_max_length": 64, "chat_template": template}, [{"role": "user", "content": "hello"}]
    pipeline = json.loads((folder_of("bytes", tmp_path) / "tokenizer.json").read_text())
    vocab = {{"</s>": "<|endoftext|>"}.get(name, name): i for name, i in pipeline["model"]["vocab"].items()}
    pairs = "\n".join(" ".join(pair) for pair in pipeline["model"]["merges"])
    for folder, kind in (("map", "llama"), ("class", "gpt2")):
        (root := tmp_path / folder).mkdir()
        (root / "config.json").write_text(json.dumps({"model_type": kind}))
        (root / "tokenizer_config.json").write_text(json.dumps(record))
        if kind == "gpt2":
            (root / "vocab.json").write_text(json.dumps(vocab))
            (root / "merges.txt").write_text(f"#version: 0.2\n{pairs}\n")
        else:
            (root / "tokenizer.json").write_text(json.dumps(pipeline))
            named = SPECIAL | {"eos_token": {"content": "</s>", "lstrip": False}}
            (root / "special_tokens_map.json").write_text(json.dumps(named))
        made = hub_tokenizer(root, {"model_type": kind, "vocab_size": 400})
        text = chat_format(root, made).text(read_messages(said), [], made, "")[0]
        theirs = AutoTokenizer.from_pretrained(root)
        assert text == theirs.apply_chat_template(said, tokenize=False) != "hello"
