"""Training, inference and decoding on a pretended GPU: no mixed devices, no waits of the host but those listed, and
nothing in a captured step that a CUDA graph forbids. `-m ci` takes one of most kinds, `-m slow` all."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from multimodal.data.batching import PaddedText
from multimodal.train.objectives.text.masked import MaskedBatch
from multimodal.train.objectives.text.translation import PairBatch
from tests.helpers.paths import ROOT

SOME = [
    "train CLIP softmax Muon", "train captioner aug", "train language model alibi", "train Conformer joint",
    "train Whisper", "train any", "infer CLIP images",
    "infer language model rotary", "infer m2m100", "infer Conformer's joint search",
]  # fmt: skip
# a scaler's scale and its overflows are read on the host; a text without an end is an error outside of training; rows
# that have ended are looked for every eight steps, and read at the end
KNOWN = {
    "train CLIP float16": {"train/loop.py _work": 1, "train/loop.py _update": 2},
    "infer CLIP texts": {"models/clip.py encode_text": 1},
}
SEARCHED = {"decoding/captured_sampling.py captured_steps": 6}  # of greedy decoding and of sampling
LAUNCHES = {"greedy": 0, "beam": 0, "sampled": 2}  # a token, around the graph of a step: draws of two prompts


def results(*names: str) -> list[dict]:
    command = [sys.executable, "-m", "tests.helpers.processes.fake_cuda", *names]
    one = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=one, timeout=1200)
    assert not done.returncode, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def waits(result: dict) -> dict[str, int]:
    """Number of waits by the innermost function."""
    found: dict[str, int] = {}
    for told, count in result["waits"].items():
        if told.endswith("launches a token"):
            continue
        place = told.split(" < ")[0].rsplit(": ", 1)[1]
        found[place] = found.get(place, 0) + count
    return found


@pytest.mark.parametrize(
    "names", [pytest.param(SOME, marks=pytest.mark.ci), pytest.param([], marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_the_host_does_not_wait(names):
    found = results(*names)
    assert len(found) >= (len(names) or 45)
    for result in found:
        name = result["name"]
        launches = {told.split(":")[0]: count for told, count in result["waits"].items() if told.endswith("a token")}
        assert launches in ({}, LAUNCHES), f"{name}: {result['waits']}"
        assert not result["raised"], f"{name}: {result['raised']}"
        assert waits(result) == KNOWN.get(name, SEARCHED if launches else {}), f"{name}: {result['waits']}"


@pytest.mark.slow
def test_a_fault_is_found(tmp_path):
    """The check itself sees mixed devices, reads by the host and tensors made there."""
    code = (
        "import json\n"
        "from tests.helpers.processes.fake_cuda.device import no_inference_mode, pretended_gpu\n"
        "no_inference_mode()\n"
        "import torch\n"
        "with pretended_gpu() as found:\n"
        "    x = torch.ones(4, device='cuda')\n"
        "    x[x > 0], x.sum().item(), x.tolist(), x + torch.ones(4).to('cuda'), x.cpu()\n"
        "    try:\n"
        "        x + torch.ones(4)\n"
        "    except RuntimeError as error:\n"
        "        print(json.dumps([sum(found.found.values()), 'device' in str(error)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.stdout.strip() == "[5, true]", done.stdout + done.stderr[-2000:]


def test_batches_of_dataclasses_are_pinned(monkeypatch):
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x + 100 if x.dtype == torch.long else x)
    text = PaddedText(torch.zeros(2, 3, dtype=torch.long), torch.tensor([3, 2]))
    assert text.pin_memory().ids.min() == 100
    assert PairBatch(text, text).pin_memory().answer.lengths.tolist() == [103, 102]
    lines = torch.zeros(1, 2, dtype=torch.long)
    batch = MaskedBatch(lines, lines[:, 0], lines > 0, lines[0], lines[0].float(), lines, lines[:, 0])
    assert batch.pin_memory().targets.tolist() == [100, 100]
