"""The best checkpoint of a run: whose it is, and what a full disk leaves."""

import re

import pytest
import torch

from multimodal.errors import TrainingError
from multimodal.train.checkpoint.best import KeepBest, save_checkpoint
from multimodal.weights.folder import Checkpoint, load_folder
from tests.helpers import tiny_run
from tests.helpers.folders import files_of_at_most
from tests.helpers.spread import thin


def judged(run, scores, **changes) -> KeepBest:
    found = iter(scores)
    start = Checkpoint(tiny_run.model())
    return KeepBest(tiny_run.settings(run, **changes), lambda _: {"score": next(found)}, lambda f: f["score"], start)


def test_a_run_that_resumes_no_state_starts_its_best_anew(tmp_path):
    judged(tmp_path, [5.0])(tiny_run.model(), 1)
    again = judged(tmp_path, [3.0], resume=True)  # an old best, and no state
    again(tiny_run.model(), 2)
    assert again.load().card["validation"] == {"score": 3.0, "step": 2}


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(("again", "newer", "kept"), [
    (5.0, 3.0, {"score": 5.0, "step": 1}),
    (2.0, 3.0, {"score": 3.0, "step": 2}),  # on other data both are worse
    (2.0, 1.0, {"score": 2.0, "step": 1}),
    (2.0, None, {"score": 2.0, "step": 1}),  # the run was complete
])  # fmt: skip
def test_a_resumed_run_measures_its_best_once_more(tmp_path, again, newer, kept):
    judge = judged(tmp_path, [5.0])
    tiny_run.loop(tmp_path, steps=1, evaluate=judge).fit()
    old = {path.name: path.read_bytes() for path in (tmp_path / "best").iterdir()}
    resumed = judged(tmp_path, [again, newer], resume=True)
    if newer is not None:
        resumed(tiny_run.model(), 2)
    assert resumed.load().card["validation"] == kept
    new = {path.name: path.read_bytes() for path in (tmp_path / "best").iterdir()}
    assert (new == old) == (again == 5.0)


def test_a_run_without_a_finite_score_never_gives_an_older_best(tmp_path):
    judged(tmp_path, [5.0])(tiny_run.model(), 1)
    again = judged(tmp_path, [float("nan")])
    again(tiny_run.model(), 1)
    with pytest.raises(TrainingError, match="best: holds no checkpoint of this run"):
        again.load()


def test_training_goes_on_if_the_best_cannot_be_saved_and_loading_tries_again(tmp_path, caplog):
    judge, scores = judged(tmp_path, [5.0, 6.0]), []

    def evaluate(model, step):
        with files_of_at_most(1000):
            scores.append(judge(model, step)["score"])
        return {}

    loop = tiny_run.loop(tmp_path, steps=2, evaluate_every=1, evaluate=evaluate)
    loop.fit()
    assert loop.saved == 2
    assert scores == [5.0, 6.0]
    line = f"{tmp_path / 'best'}: the checkpoint cannot be saved: File too large"
    assert caplog.messages.count(f"{line}; training continues") == 2
    with files_of_at_most(1000), pytest.raises(TrainingError, match=re.escape(line)):
        judge.load()
    assert judge.load().card["validation"] == {"score": 6.0, "step": 2}


@torch.no_grad()
def test_a_best_that_waits_for_the_disk_is_the_model_as_it_was(tmp_path):
    judge, model = judged(tmp_path, [5.0, 4.0]), tiny_run.model()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with files_of_at_most(1000):
        judge(model, 1)
    for parameter in model.parameters():
        parameter.add_(1)
    judge(model, 2)
    assert all(tensor.equal(wanted[name]) for name, tensor in judge.load().model.state_dict().items())


def test_a_checkpoint_that_does_not_fit_the_disk_names_its_folder_and_leaves_the_older(tmp_path):
    save_checkpoint(Checkpoint(tiny_run.model(), card={"step": 1}), tmp_path / "out")
    line = f"{tmp_path / 'out'}: the checkpoint cannot be saved: File too large"
    with files_of_at_most(1000), pytest.raises(TrainingError, match=re.escape(line)):
        save_checkpoint(Checkpoint(tiny_run.model(), card={"step": 2}), tmp_path / "out")
    assert load_folder(tmp_path / "out").card == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
