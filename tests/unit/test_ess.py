import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_p3o.algorithms import EssSums, TrustStats, first_nonfinite
from megatron_p3o.errors import NonFiniteError, RunError

log_ratio_lists = st.lists(st.floats(-30, 30), min_size=1, max_size=40)


def sums_of(*log_ratios: float) -> EssSums:
    return EssSums.from_log_ratios(torch.tensor(log_ratios, dtype=torch.float64))


def oracle_ess(log_ratios: list[float]) -> float:
    w = np.exp(np.array(log_ratios, dtype=np.float64))
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def test_hand_computed() -> None:
    # w = 1, 3: (1 + 3)^2 / (2 * (1 + 9)) = 0.8; mean 2; population std 1.
    sums = sums_of(0.0, math.log(3.0))
    assert (sums.num_tokens, sums.num_nonfinite) == (2.0, 0.0)
    assert sums.ess == pytest.approx(0.8, rel=1e-14)
    assert sums.mean_ratio == pytest.approx(2.0, rel=1e-14)
    assert sums.ratio_std == pytest.approx(1.0, rel=1e-14)


@settings(deadline=None)
@given(log_ratio_lists)
def test_matches_oracle_and_stays_in_range(log_ratios: list[float]) -> None:
    sums = sums_of(*log_ratios)
    w = np.exp(np.array(log_ratios))
    assert 1 / len(log_ratios) <= sums.ess <= 1
    assert sums.ess == pytest.approx(oracle_ess(log_ratios), rel=1e-12)
    assert sums.mean_ratio == pytest.approx(w.mean(), rel=1e-12)
    # Absolute part: a standard deviation from sums loses half of the digits where all w agree.
    assert sums.ratio_std == pytest.approx(w.std(), rel=1e-6, abs=1e-6 * w.mean())


@settings(deadline=None)
@given(log_ratio_lists, st.floats(-100, 100))
def test_a_common_factor_changes_the_mean_ratio_only(log_ratios: list[float], c: float) -> None:
    plain, scaled = sums_of(*log_ratios), sums_of(*(x + c for x in log_ratios))
    assert scaled.ess == pytest.approx(plain.ess, rel=1e-9)
    assert scaled.mean_ratio == pytest.approx(plain.mean_ratio * math.exp(c), rel=1e-9)


@settings(deadline=None)
@given(st.floats(-300, 300), st.integers(1, 50))
def test_equal_ratios_give_one(log_ratio: float, n: int) -> None:
    assert sums_of(*[log_ratio] * n).ess == pytest.approx(1.0, rel=1e-14)
    assert sums_of(*[0.0] * n).ess == 1.0


@settings(deadline=None)
@given(st.integers(1, 50))
def test_one_huge_weight_gives_one_over_n(n: int) -> None:
    assert sums_of(300.0, *[0.0] * (n - 1)).ess == pytest.approx(1 / n, rel=1e-14)


@settings(deadline=None)
@given(log_ratio_lists, st.data())
def test_sums_add_over_any_split(log_ratios: list[float], data: st.DataObject) -> None:
    part_of = data.draw(
        st.lists(st.integers(0, 4), min_size=len(log_ratios), max_size=len(log_ratios))
    )
    merged = EssSums.zero()
    for part in range(5):
        merged += sums_of(*[x for x, p in zip(log_ratios, part_of, strict=True) if p == part])
    whole = sums_of(*log_ratios)
    assert merged.num_tokens == whole.num_tokens
    assert merged.ess == pytest.approx(whole.ess, rel=1e-12)
    assert merged.mean_ratio == pytest.approx(whole.mean_ratio, rel=1e-12)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-30, 30) | st.just(math.nan)), max_size=30))
def test_sums_by_group_are_those_of_each_group(tokens: list[tuple[int, float]]) -> None:
    log_ratios = torch.tensor([x for _, x in tokens], dtype=torch.float64)
    group = torch.tensor([g for g, _ in tokens], dtype=torch.int64)
    rows = EssSums.by_group(log_ratios, group, 4)
    for index, row in enumerate(rows):
        want = EssSums.from_log_ratios(log_ratios[group == index]).to_tensor()
        assert row.tolist() == pytest.approx(want.tolist(), rel=1e-12)


def test_split_depends_on_merging_sums_and_not_ess() -> None:
    first, second = sums_of(0.0, 0.0), sums_of(2.0, 2.0)
    assert [first.ess, second.ess] == pytest.approx([1.0, 1.0])
    assert (first + second).ess == pytest.approx(oracle_ess([0, 0, 2, 2]), rel=1e-12)


def test_sums_are_float64_for_low_precision_input() -> None:
    # In float32 the square of exp(60) overflows; in bfloat16 a sum of 1000 ones stops at 256.
    for dtype in (torch.float32, torch.bfloat16):
        log_ratios = torch.tensor([60.0] + [0.0] * 1000, dtype=dtype)
        sums = EssSums.from_log_ratios(log_ratios)
        assert sums.sum_w2 == pytest.approx(math.exp(120) + 1000, rel=1e-12)
        assert EssSums.from_log_ratios(log_ratios[1:]).sum_w == 1000.0


def test_gradient_is_not_followed() -> None:
    log_ratios = torch.zeros(3, requires_grad=True)
    assert EssSums.from_log_ratios(log_ratios).ess == 1.0


def test_masked_tokens_do_not_count_even_if_nan() -> None:
    log_ratios = torch.tensor([[0.0, math.nan], [math.inf, 1.0]])
    mask = torch.tensor([[True, False], [False, True]])
    sums = EssSums.from_log_ratios(log_ratios, mask)
    assert sums == EssSums.from_log_ratios(torch.tensor([0.0, 1.0]))
    assert sums.num_tokens == 2


def test_tensor_round_trip_and_reduction() -> None:
    first, second = sums_of(0.3, math.nan), sums_of(-1.0)
    assert first.to_tensor().dtype == torch.float64
    assert first.to_tensor().tolist() == [math.exp(0.3), math.exp(0.3) ** 2, 2.0, 1.0]
    assert EssSums.from_tensor(first.to_tensor()) == first
    assert EssSums.from_tensor(first.to_tensor() + second.to_tensor()) == first + second


# --- fail closed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 355.0, 800.0])
def test_non_finite_ratio_raises_wherever_it_is(bad: float) -> None:
    # exp(355) is finite in float64, its square is not.
    sums = sums_of(0.0, bad, 0.5) + sums_of(*[0.0] * 100)
    assert (sums.num_tokens, sums.num_nonfinite) == (103.0, 1.0)
    assert sums.sum_w == pytest.approx(101 + math.exp(0.5))
    for quantity in ("ess", "mean_ratio", "ratio_std"):
        with pytest.raises(NonFiniteError, match="1 of 103 policy ratios"):
            getattr(sums, quantity)
    assert first_nonfinite(torch.tensor([0.0, bad, 0.5, bad], dtype=torch.float64)) == 1


def test_only_non_finite_ratios_raise_non_finite() -> None:
    with pytest.raises(NonFiniteError, match="2 of 2"):
        _ = sums_of(math.nan, math.nan).ess


def test_overflow_of_the_sum_raises() -> None:
    # Each square is finite, their sum is not.
    sums = sums_of(*[354.5] * 10)
    assert sums.num_nonfinite == 0
    with pytest.raises(NonFiniteError, match="too large"):
        _ = sums.ess


def test_underflow_raises_only_when_nothing_is_left() -> None:
    with pytest.raises(NonFiniteError, match="underflow"):
        _ = sums_of(-800.0, -800.0).ess
    with pytest.raises(NonFiniteError, match="underflow"):
        _ = sums_of(-400.0).ess  # w is finite, w^2 is 0
    assert sums_of(0.0, -800.0).ess == 0.5


def test_no_tokens_raise() -> None:
    for empty in (EssSums.zero(), EssSums.from_log_ratios(torch.zeros(0))):
        assert empty == EssSums(0.0, 0.0, 0.0, 0.0)
        with pytest.raises(RunError, match="no valid response token") as raised:
            _ = empty.ess
        assert not isinstance(raised.value, NonFiniteError)


@pytest.mark.parametrize("corrupt", [EssSums(8.0, 4.0, 4.0), EssSums(1.0, 10.0, 4.0)])
def test_sums_of_no_ratios_at_all_are_not_clamped_into_range(corrupt: EssSums) -> None:
    with pytest.raises(AssertionError):
        _ = corrupt.ess


def test_first_nonfinite_is_none_when_all_are_usable() -> None:
    assert first_nonfinite(torch.tensor([0.0, 354.0, -800.0], dtype=torch.float64)) is None
    assert first_nonfinite(torch.zeros(0)) is None


@settings(deadline=None)
@given(st.lists(st.floats(width=32), max_size=20))
def test_any_floats_give_an_ess_or_raise(log_ratios: list[float]) -> None:
    tensor = torch.tensor(log_ratios, dtype=torch.float32)
    sums = EssSums.from_log_ratios(tensor)
    assert (first_nonfinite(tensor) is None) == (sums.num_nonfinite == 0)
    try:
        ess = sums.ess
    except RunError:
        return
    assert sums.num_nonfinite == 0
    assert 1 / len(log_ratios) <= ess <= 1


# --- trust statistics


def test_trust_stats_from_sums() -> None:
    total, drift, mismatch = sums_of(0.0, math.log(3)), sums_of(0.0, 0.0), sums_of(5.0, -800.0)
    assert TrustStats.from_sums(total, drift, mismatch) == TrustStats(
        ess=total.ess,
        mean_ratio=total.mean_ratio,
        ratio_std=total.ratio_std,
        ess_drift=1.0,
        ess_mismatch=0.5,
        num_tokens=2,
    )


def test_trust_stats_fail_closed_in_every_part() -> None:
    good, bad = sums_of(0.0), sums_of(math.nan)
    for parts in ((bad, good, good), (good, bad, good), (good, good, bad)):
        with pytest.raises(NonFiniteError):
            TrustStats.from_sums(*parts)
