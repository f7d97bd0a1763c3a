"""Compute budgets against the tables of the papers, and power laws that are fitted to their own points."""

import pytest

from multimodal.errors import UsageError
from multimodal.models.presets import preset
from multimodal.tasks.inspect.cost import counts
from multimodal.tasks.inspect.scaling import PowerLaw, compute_budget, compute_optimal, fit_power_law
from tests.helpers.commands import one_line, run


@pytest.mark.parametrize(("name", "flops", "days"), [
    pytest.param("gpt3_175b", 3.14e23, 3640, marks=pytest.mark.slow),
    pytest.param("gpt3_125m", 2.25e20, 2.60, marks=pytest.mark.ci),
])  # fmt: skip
def test_budgets_are_those_of_gpt_3(name, flops, days):
    """Brown et al. 2020, table D.1: total training compute on 300 B tokens."""
    found = counts(preset(name), 8, training_tokens=300e9)["compute"]
    assert (found["flops"], found["petaflop_days"]) == (pytest.approx(flops, rel=0.01), pytest.approx(days, rel=0.01))


@pytest.mark.parametrize(("parameters", "flops", "tokens"), [
    (400e6, 1.92e19, 8.0e9), (1e9, 1.21e20, 20.2e9), (10e9, 1.23e22, 205.1e9), (67e9, 5.76e23, 1.5e12),
    (175e9, 3.85e24, 3.7e12), (1e12, 1.27e26, 21.2e12),
])  # fmt: skip
def test_optimal_sizes_are_those_of_chinchilla(parameters, flops, tokens):
    """Hoffmann et al. 2022, table 3, whose tokens per parameter rise from 20 to 22."""
    found = compute_optimal(flops)
    assert (found.parameters, found.tokens) == (pytest.approx(parameters, rel=0.07), pytest.approx(tokens, rel=0.12))
    assert compute_budget(int(parameters))["flops"] == pytest.approx(flops, rel=0.1)


def test_a_power_law_is_found_again():
    law = PowerLaw(8.8e13, 0.076, 1.0)  # Kaplan et al. 2020, equation 1.1
    sizes = [1e5, 1e6, 3e7, 1e9]
    found = fit_power_law(sizes, [law(size) for size in sizes])
    assert found == (pytest.approx(8.8e13, rel=1e-6), pytest.approx(0.076), pytest.approx(1))
    noisy = fit_power_law([1, 2, 3, 4], [4, 2.2, 1.2, 1.1])
    assert 0.9 < noisy.r2 < 1
    for x, y in (([1, 1], [2, 3]), ([1, 2], [0, 1]), ([1, 2], [1])):
        with pytest.raises(UsageError, match="expected two or more"):
            fit_power_law(x, y)


@pytest.mark.ci
def test_tokens_are_for_models_of_text(capsys):
    code, _, err = run(capsys, "info", "clip-vit-16", "--training_tokens", 5)
    assert (code, "--training_tokens needs a model that predicts tokens" in one_line(err)) == (1, True)
    code, out, _ = run(capsys, "info", "gpt3_125m", "--training_tokens", "300e9", "--length", 8)
    assert (code, "2.25e+20 FLOPs (2.61 petaflop/s-days); optimal for as many: " in out) == (0, True)
