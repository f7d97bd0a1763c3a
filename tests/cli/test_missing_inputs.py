"""Every command finds a missing input before torch is imported, which takes seconds."""

import json
import subprocess
import sys

import pytest
from PIL import Image

CASES = """
classify none.png --labels a b
classify red.png --labels_file none.txt
classify red.png --classifier none.safetensors
classify --labels a b --calibrate none/
index none.png -o new.index
search dog --index none
caption none.png
transcribe none.wav
transcribe here.wav --lm none.arpa
generate --file none.txt
generate hello --examples none.jsonl
translate --file none.txt --to de
tag --file none.txt --model any
answer who --file none.txt --model any
embed --file none.txt
embed --images none.png
evaluate classification none/ --model any
evaluate lm none.txt
evaluate translation none.txt --references here.txt
evaluate translation here.txt --references none.txt
evaluate tagging none.conll --model any
evaluate qa none.json --model any
evaluate choice none.jsonl --model any
evaluate asr none.jsonl
evaluate zeroshot none/
evaluate zeroshot . --labels_file none.txt
evaluate zeroshot . --classes none.jsonl
evaluate zeroshot . --classifier none.safetensors
evaluate retrieval none.jsonl
evaluate linear-probe none/ --train .
evaluate linear-probe . --train none/
evaluate few-shot . --train none/
evaluate answers none.jsonl
evaluate captions none.jsonl
evaluate captions list.jsonl --predictions none.csv
validate none/
validate . --classes none.jsonl
clean none.txt -o new.txt
clean here.txt -o new.txt --bad_words none.txt
convert folder/ new/ --config none.json
""".strip().splitlines()
PROGRAM = """
import contextlib, io, json, sys
from multimodal.cli.main import main
for case in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main(case.split())
        except SystemExit as end:
            code = end.code
    print(json.dumps([case, code, out.getvalue(), err.getvalue(), "torch" in sys.modules]))
"""


@pytest.mark.ci
def test_a_missing_input_is_found_at_once(tmp_path):
    Image.new("RGB", (9, 9)).save(tmp_path / "red.png")
    for name in ("here.txt", "here.wav", "list.jsonl"):
        (tmp_path / name).write_text("hello\n")
    before = sorted(tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    rows = list(map(json.loads, done.stdout.splitlines()))
    assert len(rows) == len(CASES), done.stderr
    for case, code, out, err, torch in rows:
        *_, line = err.splitlines()
        assert (code, out) == (1, ""), (case, err)
        assert line.startswith("multimodal: error: "), case
        assert "none" in line, case
        assert not torch, case
    assert sorted(tmp_path.iterdir()) == before
