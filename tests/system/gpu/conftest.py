"""Each test runs on a GPU, and in CI on a CPU, where it proves itself."""

from collections.abc import Collection

import pytest


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.ci), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions of ten bits
    return request.param


def on_devices(name: str, cases: Collection[str], some: Collection[str]) -> pytest.MarkDecorator:
    """Each case on a GPU; on a CPU `some` in CI, the others with `-m slow`."""
    on_a_cpu = [pytest.param("cpu", case, marks=pytest.mark.ci if case in some else pytest.mark.slow) for case in cases]
    on_a_gpu = [pytest.param("cuda", case, marks=pytest.mark.gpu) for case in cases]
    return pytest.mark.parametrize(("device", name), [*on_a_cpu, *on_a_gpu], indirect=["device"])
