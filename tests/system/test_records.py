"""Schema checks: each record with each value replaced loads or raises one typed error."""

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from multimodal.data.datasets.labelled_texts import read_labelled
from multimodal.data.manifests import read_list
from multimodal.errors import CheckpointError, DataError, MultimodalError, UsageError
from multimodal.system.files import parse_json, path_of, sha256
from multimodal.system.records import from_record, to_record
from multimodal.tasks.classify.classifier_file import _digest, read_classifier
from multimodal.tasks.retrieve.record import FileFacts, IndexRecord, read_entry, read_index_record
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.text.sentencepiece import ByteTokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.train.checkpoint.atomic import MARKER, check
from multimodal.train.checkpoint.state import StateRecord
from multimodal.weights.card import check_card
from multimodal.weights.folder import Checkpoint, load_folder, save_folder
from tests.helpers import tiny
from tests.helpers.paths import ROOT
from tests.helpers.spread import spread, thin

ASSETS = ROOT / "assets"
SHARED = json.loads('{"a": ' + "[" * 60 + "]" * 60 + "}")["a"]  # as deep as JSON may be, nearly
VALUES = [None, True, -1, 0, 1e308, 2**63, "x", "\0", [], {}, [None], SHARED]
RECORD = Preprocessing((32, 32), "shortest", "bicubic", (0.5,) * 3, (0.5,) * 3, 0, 1.0)
INDEX = IndexRecord("m", None, "0" * 64, RECORD, 8, "float32", 1, 3, "ivf", 4, {"image": 0.9},
                    {"vectors": FileFacts(8, 9, "0" * 64)})  # fmt: skip
CLASSIFIER = {
    "labels": ["cat", "dog"], "templates": ["a photo of a {}."], "model": "m", "model_sha256": "0" * 64,
    "preprocessing": to_record(RECORD), "scores": "softmax", "threshold": 0.5,
    "calibration": {"kind": "temperature", "loss": "softmax", "scale": [1.0], "offset": [0.0], "figures": {}},
}  # fmt: skip
STATE = {
    "done": 5, "settings": {"rate": 0.1}, "random": {"torch": 1}, "scaler": {},
    "counters": {"read": 1, "broken": 0, "not_finite": 0, "in_row": 0, "evaluated": -1},
}  # fmt: skip


def places(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """Path of each value, nested ones too."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


def mutations(record: dict[str, Any], values: list[Any] = VALUES) -> Iterator[dict[str, Any]]:
    """With each value replaced by each other one or left out, and with a key too many."""
    for place in places(record):
        for change in [*values, ...]:
            made = inner = copy.deepcopy(record)
            for key in place[:-1]:
                inner = inner[key]
            if change is ...:
                del inner[place[-1]]
            else:
                inner[place[-1]] = change
            yield made
    yield record | {"another": 1}


def classifier_file(path: Path, record: Any, weights: torch.Tensor | None = None) -> Path:
    """A file whose sums are right."""
    weights = torch.nn.functional.normalize(torch.ones(2, 4)) if weights is None else weights
    text = record if isinstance(record, str) else json.dumps(record)
    caught = {"format": "multimodal classifier 1", "classifier": text, "sha256": _digest(weights, text)}
    path.write_bytes(save({"weights": weights}, metadata=caught))
    return path


def as_index(folder: Path, record: Any) -> Any:
    (folder / "index.json").write_text(json.dumps(record))
    return read_index_record(folder)


def as_marker(folder: Path, record: Any) -> Any:
    (folder / MARKER).write_text(json.dumps(record))
    return check(folder)


def as_tokenizer(folder: Path, record: Any) -> Any:
    (folder / "tokenizer_config.json").write_text(json.dumps(record))
    return tokenizer_from(folder).encode("a word")


def as_entry(folder: Path, record: Any) -> Any:
    return read_entry(json.dumps(record).encode(), "images")


KINDS: dict[str, tuple[Callable[[Path, Any], Any], dict[str, Any]]] = {
    "classifier": (lambda folder, one: read_classifier(classifier_file(folder / "c.safetensors", one)), CLASSIFIER),
    "preprocessing": (lambda _, record: from_record(Preprocessing, record, "preprocessing.json"), to_record(RECORD)),
    "index": (as_index, to_record(INDEX)),
    "index entry": (as_entry, {"file": "/a.png", "bytes": 3, "mtime_ns": 4}),
    "card": (
        lambda _, record: check_card(record, "card.json"),
        {"name": "m", "templates": ["{}"], "labels": ["a"], "language": "en", "alignment_heads": [[0, 1]],
         "translation": {"from": "en", "to": None}, "transcribe": {"beam_size": 1}, "normalize": True},
    ),
    "state": (lambda _, record: from_record(StateRecord, record, "state.pt", others=True), STATE),
    "marker": (as_marker, {"format": 1, "step": 3, "files": {"state.pt": {"bytes": 0, "sha256": "0"}}}),
    "characters": (as_tokenizer, {"kind": "characters", "characters": "a word"[:3]}),
    "clip": (as_tokenizer, {"kind": "clip", "context": 77}),
    "byt5": (as_tokenizer, {"kind": "byt5", "sentinels": 4}),
    "whisper": (as_tokenizer, {"kind": "whisper", "multilingual": True, "languages": 99}),
}  # fmt: skip


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_value_of_each_record_is_checked(kind, tmp_path):
    read, record = KINDS[kind]
    faults = [text for changed in mutations(record) for text in fault(lambda one=changed: read(tmp_path, one))]
    assert len(faults) > len(list(places(record))) * 5
    assert max(map(len, faults)) < 500 + len(str(tmp_path))
    assert "several lines" not in faults


@pytest.mark.parametrize(("record", "cause"), [
    ({"labels": 7}, "labels: expected a list (7)"),
    ({"labels": [1, None]}, "labels[0]: expected a text (1)"),
    ({"labels": ["a", "a"]}, "labels: 'a' is repeated"),
    ({"labels": [" a", "b"]}, "labels: one has outer spaces"),
    ({"labels": []}, "labels: expected at least one"),
    ({"labels": ["a"]}, "weights: expected a float32 vector for each of 1 labels"),
    ({"threshold": "x"}, "threshold: expected a number or null ('x')"),
    ({"threshold": True}, "threshold: expected a number or null (True)"),
    ({"threshold": 2}, "threshold: expected a number from 0 to 1 (2.0)"),
    ({"model_sha256": None}, "model_sha256: expected a text (None)"),
    ({"model_sha256": "abc"}, "model_sha256: expected 64 hexadecimal digits ('abc')"),
    ({"preprocessing": []}, "preprocessing: expected an object for Preprocessing ([])"),
    ({"preprocessing": to_record(RECORD) | {"size": [224000, 224000]}}, "invalid size ((224000, 224000))"),
    ({"preprocessing": to_record(RECORD) | {"std": [0, 1, 1]}}, "invalid std"),
    ({"scores": "logits"}, "scores: expected 'softmax' or 'sigmoid' or 'cosine' ('logits')"),
    ({"templates": [3]}, "templates[0]: expected a text (3)"),
    ({"calibration": {}}, "calibration: missing key 'kind'"),
    ({"calibration": CLASSIFIER["calibration"] | {"scale": []}}, "calibration: scale: expected 1 numbers"),
    ({"more": 1}, "unknown key 'more' for ClassifierRecord"),
])  # fmt: skip
def test_a_crafted_classifier_is_refused_by_key_and_value(record, cause, tmp_path):
    file = classifier_file(tmp_path / "c.safetensors", CLASSIFIER | record)
    with pytest.raises(CheckpointError) as error:
        read_classifier(file)
    assert str(error.value).startswith(f"{file}: ")
    assert cause in str(error.value)


@pytest.mark.parametrize(("weights", "cause"), [
    (torch.ones(2, 7), "expected vectors of length 1"), (torch.zeros(2, 4), "expected vectors of length 1"),
    (torch.full((2, 4), torch.nan), "expected vectors of length 1"), (torch.ones(2), "float32 vector for each"),
    (torch.ones(2, 4).half(), "torch.float16"), (torch.ones(2, 4, dtype=torch.long), "torch.int64"),
])  # fmt: skip
def test_crafted_label_vectors_are_refused(weights, cause, tmp_path):
    with pytest.raises(CheckpointError, match=cause):
        read_classifier(classifier_file(tmp_path / "c.safetensors", CLASSIFIER, weights))


@pytest.mark.parametrize(("text", "cause"), [
    (b"[1]", "for ClassifierRecord ([1])"), (b"{", "cannot be read as JSON"),
    (b'{"a": 1, "a": 2}', "repeated key 'a'"),
    (b'{"a": NaN}', "NaN is not valid JSON"), (b'{"a": 1e999}', "1e999 is too large"),
    (b'{"a": -Infinity}', "Infinity is not valid JSON"), (b'{"a": "\\ud800"}', "a lone surrogate in '\\ud800'"),
    (b'{"\\udfff": 1}', "a lone surrogate"), (b"[" * 10**5, "nested deeper than 64"),
    (b'{"a":' * 70 + b"1" + b"}" * 70, "nested deeper than 64"), (b"7" * 5000, "a number of 5000 digits"),
    (b"\xff", "not UTF-8 text (byte 0 is 0xff)"), (b"\xff\xfe{\0}\0", "not UTF-8 text"), (b"", "Expecting value"),
])  # fmt: skip
def test_json_that_no_record_may_have_is_refused(text, cause):
    with pytest.raises(CheckpointError) as error:
        from_record(_classifier_record(), parse_json(text, "f.json"), "f.json")
    assert str(error.value).startswith("f.json: ")
    assert cause in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def _classifier_record() -> type:
    from multimodal.tasks.classify.classifier_file import ClassifierRecord

    return ClassifierRecord


def test_json_of_other_programs_is_read():
    assert parse_json(b'\xef\xbb\xbf{"a": 1000000000000000019884624838656}', "f") == {"a": 10**30 + 19884624838656}
    assert parse_json('"\\udcff"', "f") == "\udcff"  # a byte of a file's name


@dataclass(frozen=True)
class _Sample:
    count: int
    share: float = 0.5
    kind: Literal["a", "b"] | None = None
    pair: tuple[int, str] | None = None
    table: dict[str, list[float]] | str = ""


def test_values_become_the_types_of_the_fields():
    made = from_record(_Sample, {"count": 1, "share": 1, "pair": [2, "x"], "table": {"a": [1, 2.5]}}, "f")
    assert made == _Sample(1, 1.0, None, (2, "x"), {"a": [1.0, 2.5]})
    assert type(made.share) is float
    assert from_record(_Sample, to_record(made), "f") == made


@pytest.mark.parametrize(("record", "cause"), [
    ({"count": True}, "f: count: expected a whole number (True)"), ({"count": 2**64}, "f: count: expected a whole"),
    ({"count": 1, "share": float("inf")}, "f: share: expected a number (inf)"),
    ({"count": 1, "kind": "c"}, "f: kind: expected 'a' or 'b' ('c')"),
    ({"count": 1, "pair": [1]}, "f: pair: expected 2 values ([1])"),
    ({"count": 1, "pair": ["x", 1]}, "f: pair[0]: expected a whole number ('x')"),
    ({"count": 1, "table": {"a": 1}}, "f: table: 'a': expected a list (1)"),
    ({"count": 1, "table": 3}, "f: table: expected an object or a text (3)"),
])  # fmt: skip
def test_another_type_is_named_with_its_key(record, cause):
    with pytest.raises(DataError) as error:
        from_record(_Sample, record, "f", DataError)
    assert str(error.value).startswith(cause)


@pytest.mark.parametrize(("path", "cause"), [
    ("a\0b", r"hold a NUL \('a\\x00b'\)"), ("\ud800", "lone surrogate"), ("", "expected a path"),
    (3, "expected a path"), (None, "expected a path"), (b"a", "expected a path"),
])  # fmt: skip
def test_a_path_that_no_system_takes_is_refused(path, cause):
    with pytest.raises(UsageError, match=cause):
        path_of(path, UsageError, "here")


SOME = ["clip-softmax", "text-to-text", "git", "joint", "speech-to-text"]


@pytest.mark.parametrize("name", spread(SOME, 3, pytest.mark.slow, pytest.mark.ci))
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_each_value_of_a_configuration_loads_or_is_refused(name, tmp_path):
    """The tensors hold the sizes to the file: what is left are settings without a tensor."""
    save_folder(Checkpoint(tiny.made(name)), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    changes = list(mutations(json.loads(path.read_text()), [None, True, -1, 0, 1e308, 2**63, 2**40, "x", []]))
    faults = []
    for changed in random.Random(0).sample(changes, 60):
        path.write_text(json.dumps(changed))
        vouch(tmp_path / "m")
        faults += fault(lambda: load_folder(tmp_path / "m"))
    assert len(faults) > 30
    assert all(str(tmp_path / "m") in text for text in faults)


def fault(call: Callable[[], object]) -> list[str]:
    """The message of the typed error, which is one line; none where there is no error."""
    try:
        call()
    except MultimodalError as error:
        return [str(error)] if len(str(error).splitlines()) == 1 else ["several lines"]
    return []


def vouch(folder: Path) -> None:
    """A manifest that fits the files as they are."""
    sums = {path.name: sha256(path) for path in folder.iterdir() if path.name != "manifest.json"}
    (folder / "manifest.json").write_text(json.dumps({"sha256": sums}))


SWAPS = {
    ".tiktoken": [("IQ== 0\nIg== 1\n", "Ig== 0\nIQ== 1\n")],
    ".json": [('"!": 3,', '"!": 4,'), ('"\\"": 4,', '"\\"": 3,')],
}


@pytest.mark.parametrize("name", ["clip-vit-16", "asr-conformer-en", "whisper-mini"])
def test_another_tokenizer_with_new_sums_is_noticed(name, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(ASSETS / name, folder)
    file = folder / ("ranks.tiktoken" if name == "whisper-mini" else "tokenizer.json")
    text = file.read_text()
    for ours, theirs in SWAPS[file.suffix]:  # a vocabulary of the same size with two tokens in each other's place
        assert ours in text
        text = text.replace(ours, theirs, 1)
    file.write_text(text)
    vouch(folder)
    with pytest.raises(CheckpointError, match="is not the tokenizer that the model was trained with") as error:
        load_folder(folder)
    assert str(error.value).startswith(f"{file}: ")
    for path in (file, folder / "tokenizer_config.json"):
        path.unlink()
    vouch(folder)
    with pytest.raises(CheckpointError, match=r"trained with \(sha256 none"):
        load_folder(folder)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):

    from multimodal.weights.folder import Checkpoint, save_folder

    with pytest.raises(CheckpointError, match="the tokenizer has 259 tokens, the model embeds 23"):
        save_folder(Checkpoint(tiny.made("clip-softmax"), ByteTokenizer()), tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_preprocessing_far_larger_than_the_model_is_refused_before_memory_is_asked_for(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(ASSETS / "clip-vit-16", folder)
    record = json.loads((folder / "preprocessing.json").read_text())
    for size, cause in (([224000, 224000], "invalid size"), ([3200, 3200], "too large for a model of 96 x 96"),
                        ([100, 96], "must be a multiple of the patch")):  # fmt: skip
        (folder / "preprocessing.json").write_text(json.dumps(record | {"size": size}))
        vouch(folder)
        with pytest.raises(CheckpointError, match=cause) as error:
            load_folder(folder)
        assert str(error.value).startswith(f"{folder / 'preprocessing.json'}: ")


def test_rows_of_a_list_are_strict_json(tmp_path):
    (tmp_path / "l.jsonl").write_bytes(b'{"a": 1}\n{"a": 1, "a": 2}\n{"a": NaN}\n' + b"[" * 5000 + b"\n{}\n")
    actual = list(read_list(tmp_path / "l.jsonl"))
    assert [bool(line.fault) for line in actual] == [False, True, True, True, False]
    with pytest.raises(DataError, match="hold a NUL"):
        next(iter(read_list(Path("a\0b"))))


def test_a_row_of_a_tsv_is_a_line_and_loses_only_whole_quotes(tmp_path):
    """pandas writes the first kind of quotes, GLUE has the others."""
    rows = ['"he said ""x"""\t1', '"Yes\t0', '"a" or "b"\t1', 'it is 5"\t0', '"\t1', '""\t0', '0\t"broken', 'cell"']
    (tmp_path / "l.tsv").write_text("\n".join(["text\tlabel", "", *rows]))
    actual = list(read_list(tmp_path / "l.tsv"))
    cells = ['he said "x"', '"Yes', '"a" or "b"', 'it is 5"', '"', "", "0"]
    assert [line.values["text"] for line in actual[:-1]] == cells
    assert [(line.number, line.fault) for line in actual if line.fault] == [
        (10, "columns do not fit the header (1 instead of 2)")
    ]
    (tmp_path / "t.tsv").write_text("\n".join(rows[:5]))
    assert [row.text for row in read_labelled(tmp_path / "t.tsv")] == cells[:5]
    (tmp_path / "one.tsv").write_text("text\na, b\n")
    assert [line.values for line in read_list(tmp_path / "one.tsv")] == [{"text": "a, b"}]


def test_metadata_is_what_the_classifier_is_read_from(tmp_path):
    with safe_open(classifier_file(tmp_path / "c.safetensors", CLASSIFIER), "pt") as file:
        assert set(file.metadata()) == {"format", "classifier", "sha256"}
    assert read_classifier(tmp_path / "c.safetensors").record.threshold == 0.5
