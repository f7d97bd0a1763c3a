"""`multimodal inspect`: every view drawn and printed, and one-line errors."""

import json

import numpy as np
import pytest
from PIL import Image

from multimodal.tasks.inspect.alignment import AlignmentRequest
from multimodal.tasks.inspect.maps import attention
from multimodal.tasks.inspect.views import ViewOptions, view
from multimodal.weights.load import load
from tests.helpers.commands import run
from tests.helpers.spread import spread, thin
from tests.helpers.tiny_checkpoints import checkpoint, source_of

CASES = [
    ("rotary", "attention", ()), ("rotary", "attention", ("--layer", "all")),
    ("rotary", "distance", ()), ("rotary", "induction", ("--length", 6)), ("learned", "positions", ()),
    ("text-to-text", "alignment", ("--answer", "dc")), ("captioner", "alignment", ("--answer", "dc")),
    ("clip", "attention", ()), ("clip", "attention", ("--layer", "all")), ("clip", "filters", ()),
    ("clip", "positions", ()), ("vit", "distance", ()), ("joint", "attention", ()), ("joint", "alignment", ()),
]  # fmt: skip
DRAWN = {(what, more[:1]): (kind, what, more) for kind, what, more in CASES}.values()  # each view once


@pytest.mark.parametrize(("kind", "what", "more"), spread(CASES, 2, pytest.mark.slow, pytest.mark.ci), ids=str)
def test_every_view_has_its_numbers_and_is_drawn_once(capsys, files, tmp_path, kind, what, more):
    drawn = (kind, what, more) in DRAWN
    sources = [] if what in ("filters", "positions", "induction") else [source_of(files, kind)]
    plot = tmp_path / "new" / "a.png"
    command = ["inspect", files[kind], *sources, "--what", what, *more, "--quiet"]
    code, out, err = run(capsys, *command, *(("--plot", plot) if drawn else ()), "--format", "json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert record["what"] == what
    if drawn:
        with Image.open(plot) as image:
            assert min(image.size) > 200
            assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 20
    numbers = next(record[key] for key in ("weights", "maps", "distances", "similarity", "components", "heads")
                   if isinstance(record.get(key), list) and not (key == "heads" and "weights" in record))  # fmt: skip
    assert numbers
    asked = AlignmentRequest(*map(str, [*sources, *more[1:]][:2])) if sources and "--layer" not in more else None
    if asked is not None:
        assert len(view(load(files[kind]), what, asked, ViewOptions()).lines) > 1


def test_the_numbers_of_a_head_are_listed(capsys, files):
    code, out, err = run(capsys, "inspect", files["rotary"], "abc", "--layer", 1, "--head", 0)
    assert (code, err) == (0, "")
    header, heads, *tokens = out.splitlines()
    assert header.split()[:3] == ["layer", "head", "entropy"]
    assert heads.split()[:2] == ["1", "0"]
    weights = attention(checkpoint("rotary"), "abc").weights[1, 0]
    assert [line.split()[0] for line in tokens] == ["<bos>", "a", "b", "c"]
    assert f"{weights[3].max():.3f}" in tokens[3].split(",")[0]


def test_json_has_the_weights_that_were_captured(capsys, files):
    code, out, _ = run(capsys, "inspect", files["rotary"], "abc", "--layer", 0, "--head", 1, "--format", "json")
    assert code == 0
    record = json.loads(out)
    seen = attention(checkpoint("rotary"), "abc")
    assert (record["layers"], record["heads"]) == ([0], [1])
    assert np.allclose(record["weights"][0][0], seen.weights[0, 1].numpy(), rtol=1e-4, atol=1e-9)
    assert record["keys"]["tokens"] == list(seen.keys.names)


def test_induction_lists_the_best_head_first(files):
    heads = view(checkpoint("rotary"), "induction", None, ViewOptions(length=8)).record["heads"]
    scores = [head["prefix_matching"] for head in heads]
    assert len(heads) == 4
    assert scores == sorted(scores, reverse=True)


BAD = [
    (("rotary", "abc", "--layer", "2"), "--layer must be in [0, 1] (got 2)"),
    (("rotary", "abc", "--head", "2"), "--head must be in [0, 1] (got 2)"),
    (("rotary", "--what", "filters"), "--what filters"),
    (("rotary", "--what", "positions"), "positions: rotary"),
    (("rotary", "a" * 40), "the model's context is 32"),
    (("rotary", "abc", "--what", "alignment"), "expected an encoder-decoder, got text"),
    (("text-to-text", "abc", "--what", "alignment", "--answer", "a" * 40), "answer: has 42 tokens"),
    (("clip", "--what", "induction"), "expected a causal language model, got clip"),
    (("clip", "--what", "positions", "--size", "8"), "--size: is for --what attention and distance of an image model"),
    (("rotary", "abc", "--interpolation", "dino"), "--interpolation: is for --what"),
    (("clip", "absent.png"), "absent.png: no such file"),
    (("joint", "absent.wav"), "absent.wav"),
    (("learned", "--what", "induction", "--length", "100"), "(got 100: 201 tokens)"),
    (("rotary", "abc", "--plot", "a.jpg"), "--plot a.jpg: must end in .png"),
    (("rotary", "abc", "--plot", "/proc/none/a.png"), "--plot /proc/none/a.png"),
]


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(("arguments", "cause"), BAD, ids=[cause for _, cause in BAD])
def test_what_cannot_be_shown_is_one_line(capsys, files, arguments, cause):
    code, out, err = run(capsys, "inspect", files[arguments[0]], *arguments[1:])
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert cause in err


@pytest.mark.parametrize("arguments", [
    ("rotary",), ("rotary", "abc", "--what", "induction"), ("rotary", "abc", "--answer", "x"),
    ("clip", "--what", "filters", "--layer", "1"), ("rotary", "abc", "--layer", "x"),
    ("rotary", "abc", "--length", "4"),
])  # fmt: skip
def test_flags_that_do_not_go_together_end_with_2(capsys, files, arguments):
    code, _, err = run(capsys, "inspect", files[arguments[0]], *arguments[1:])
    assert code == 2
    assert len(err.splitlines()) == 1


def test_the_shipped_models_and_the_stories(capsys, shared_data, tmp_path):
    story = shared_data / "weights" / "stories260K"
    if not story.is_dir():
        pytest.skip("no stories260K in ../shared/data/weights")
    code, out, err = run(capsys, "inspect", story, "Once upon a time", "--format", "json")
    assert (code, err) == (0, "")
    assert np.asarray(json.loads(out)["weights"]).shape == (1, 8, 5, 5)
