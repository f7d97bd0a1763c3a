"""Each test runs on a GPU, and in CI on a CPU, where it proves itself."""

import pytest


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.ci), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions of ten bits
    return request.param
