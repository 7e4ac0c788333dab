"""Statistics of a mismatch against numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from megatron_p3o.errors import NonFiniteError
from megatron_p3o.probe.statistics import by_position, mean_by_prompt, mismatch_metrics

LOG_2 = math.log(2)


def tensors(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def test_metrics_of_three_tokens() -> None:
    """Ratios 1, 2 and 1/2; the last belongs to another prompt."""
    metrics = mismatch_metrics(tensors([0.0, LOG_2], [-LOG_2]), [4, 7])
    value = {name: measured.value for name, measured in metrics.items()}
    assert value["tokens/response"] == 3
    # k3 = 0, ln 2 - 1/2, 1 - ln 2
    assert value["mismatch/k3"] == pytest.approx(1 / 6)
    assert value["mismatch/abs_logprob_mean"] == pytest.approx(2 * LOG_2 / 3)
    assert value["mismatch/abs_logprob_p50"] == value["mismatch/abs_logprob_max"] == LOG_2
    assert value["ess/mismatch"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert value["ratio/mean"] == pytest.approx(3.5 / 3)
    assert value["ratio/max"] == pytest.approx(2)
    # Within the histogram's bins.
    assert value["ratio/p01"] == pytest.approx(0.5, rel=0.005)
    assert value["ratio/p99"] == pytest.approx(2, rel=0.005)
    # Deviations of the two prompts are 3 - 2 m = 2/3 and 1/2 - m = -2/3, with m = 7/6.
    assert metrics["ratio/mean"].standard_error == pytest.approx(4 / 9)
    # ESS without the one prompt is 1, without the other 9 / (2 * 5) = 0.9.
    assert metrics["ess/mismatch"].standard_error == pytest.approx(0.05)


def test_quantiles_are_values_that_occur() -> None:
    metrics = mismatch_metrics(tensors([-index / 1000 for index in range(1, 101)]), [0])
    for percent in (50, 90, 99):
        assert metrics[f"mismatch/abs_logprob_p{percent}"].value == percent / 1000
    assert metrics["mismatch/abs_logprob_max"].value == 0.1


def test_one_prompt_has_no_standard_error() -> None:
    metrics = mismatch_metrics(tensors([0.1, 0.2], [0.3]), [5, 5])
    assert {measured.standard_error for measured in metrics.values()} == {None}


def test_equal_prompts_leave_no_doubt() -> None:
    metrics = mismatch_metrics(tensors([0.1, -0.3], [0.1, -0.3], [0.1, -0.3]), [0, 1, 2])
    for name in ("mismatch/k3", "mismatch/abs_logprob_mean", "ess/mismatch", "ratio/mean"):
        assert metrics[name].standard_error == pytest.approx(0, abs=1e-12)


def test_prompts_of_unequal_length_are_weighted_by_tokens() -> None:
    values = torch.tensor([1.0, 1.0, 1.0, 5.0], dtype=torch.float64)
    measured = mean_by_prompt(values, torch.tensor([0, 0, 0, 1]))
    # Deviations: 3 - 3 * 2 = -3 and 5 - 2 = 3; sqrt(2 * 18) / 4.
    assert (measured.value, measured.standard_error) == (2.0, 1.5)


def test_positions() -> None:
    gaps = tensors([0.1, 0.2, -0.2, 0.2, 0.7], [-0.3, 0.4])
    buckets = by_position(gaps, [0, 1])
    assert [(b.first, b.last, b.num_tokens) for b in buckets] == [(0, 0, 2), (1, 3, 4), (4, 15, 1)]
    assert [b.abs_mean.value for b in buckets] == pytest.approx([0.2, 0.25, 0.7])
    assert buckets[2].k3.value == pytest.approx(0.7 + math.exp(-0.7) - 1)
    # Only the first response is that long.
    assert buckets[2].abs_mean.standard_error is None
    assert buckets[1].abs_mean.standard_error is not None
    longest = by_position(tensors([0.0] * 65), [0])
    assert [(b.first, b.last) for b in longest] == [(0, 0), (1, 3), (4, 15), (16, 63), (64, 255)]


def test_a_ratio_that_is_not_finite_is_refused() -> None:
    with pytest.raises(NonFiniteError, match="1 of 2 policy ratios"):
        mismatch_metrics(tensors([0.0, math.nan]), [0])
