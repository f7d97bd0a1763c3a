"""Arguments of the public functions that are no texts, numbers or paths: a typed error with name and value.

In a process of their own, since the shape checker of the tests would refuse them first."""

import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

PROGRAM = """
import json, sys, warnings
from PIL import Image
import multimodal
from multimodal.errors import MultimodalError
from multimodal.tasks.text.embed import embed
from multimodal.tasks.retrieve.index import open_index
from multimodal.tasks.encode.results import Results
from multimodal.weights.load import load
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.decoding.ngram import read_arpa
from multimodal.data.sources import open_source
image, clip = Image.new("RGB", (40, 40)), load("clip-vit-16")
classify = lambda labels=("a", "b"), given=image, **options: multimodal.classify(given, labels, clip, **options)
for case in sys.argv[1:]:
    try:
        eval(case)
        print("nothing")
    except MultimodalError as error:
        print(type(error).__name__, json.dumps(str(error)))
    except Exception as error:
        print("untyped", type(error).__name__, error)
"""
CASES = [
    ("classify(['a', 3])", "TextError", "labels: number 2 of 2: expected a text (3)"),
    ("classify(['a', None])", "TextError", "labels: number 2 of 2: expected a text (None)"),
    ("classify(['a', b'b'])", "TextError", "labels: number 2 of 2: expected a text (b'b')"),
    ("classify([])", "TextError", "labels: expected at least one"),
    ("classify('a')", "TextError", "labels: expected a list of texts ('a')"),
    ("classify(7)", "TextError", "labels: expected a list of texts (7)"),
    ("classify({'a': 1})", "TextError", "labels: expected a list of texts ({'a': 1})"),
    ("classify(['a', chr(0xd800)])", "TextError", "has a lone surrogate"),
    ("classify(templates=[3])", "UsageError", "templates: number 1 of 1: expected a text (3)"),
    ("classify(templates=3)", "UsageError", "templates: expected a list of texts (3)"),
    (
        "classify(templates={'a': ['x', None], 'b': ['y']})",
        "TextError",
        "prompts of label 'a': number 2 of 2: expected",
    ),
    ("classify(templates={3: ['x']})", "TextError", "templates: number 1 of 1: expected a text (3)"),
    ("classify(top='x')", "UsageError", "top must be an integer of at least 1 (got 'x')"),
    ("classify(top=0)", "UsageError", "top must be an integer of at least 1 (got 0)"),
    ("classify(threshold='x')", "UsageError", "threshold must be a number (got 'x')"),
    ("classify(scores=7)", "UsageError", "scores must be one of softmax, sigmoid, cosine (got 7)"),
    ("classify(batch_size='x')", "UsageError", "batch_size must be an integer of at least 1 (got 'x')"),
    ("classify(None, classifier=7)", "UsageError", "classifier must be a path (got 7)"),
    ("classify(None, classifier='a\\0b')", "CheckpointError", "classifier: a path cannot hold a NUL ('a\\x00b')"),
    ("classify(given='a\\0b.png')", "ImageError", "a path cannot hold a NUL ('a\\x00b.png')"),
    ("classify(given=3)", "ImageError", "<int>: expected a path, bytes, a file object"),
    ("classify(given=chr(0xd800))", "ImageError", "a path cannot hold a lone surrogate"),
    ("load(3)", "UsageError", "model: expected a name or a path (3)"),
    ("load('a\\0b')", "UsageError", "neither a path nor a known model"),
    ("load('clip-vit-16', preprocessing='a\\0b')", "UsageError", "preprocessing: a path cannot hold a NUL"),
    ("tokenizer_from('a\\0b')", "UsageError", "tokenizer: a path cannot hold a NUL"),
    ("open_index('a\\0b')", "UsageError", "index: a path cannot hold a NUL"),
    ("Results('a\\0b.csv', 'csv', ['file'], {})", "UsageError", "results: a path cannot hold a NUL"),
    ("read_arpa('a\\0b')", "CheckpointError", "lm: a path cannot hold a NUL"),
    ("open_source('a\\0b.jsonl')", "DataError", "no such file"),
    ("embed(['a', 3], clip)", "TextError", "texts: number 2 of 2: expected a text (3)"),
    ("embed('a', clip)", "TextError", "texts: expected a list of texts ('a')"),
    ("embed([], clip)", "TextError", "texts: expected at least one"),
    ("embed(None, clip)", "TextError", "texts: expected a list of texts (None)"),
    ("embed(['a'], clip, normalize='none')", "UsageError", "normalize must be True, False or None (got 'none')"),
    ("embed(['a'], clip, normalize=False)", "UsageError", "normalize must be True or None: vectors of a CLIP have"),
    ("clip.tokenizer.encode(3)", "TextError", "expected a text (3)"),
]


@pytest.mark.ci
@pytest.mark.timeout(120)
def test_arguments_of_another_type_are_named_with_their_value():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", PROGRAM, *(case for case, *_ in CASES)]
    run = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == len(CASES)
    for line, (case, kind, cause) in zip(lines, CASES, strict=True):
        shown = cause.replace("\\", "\\\\")
        assert line.startswith(f"{kind} "), (case, line)
        assert shown in line, (case, line)
