import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_p3o.algorithms import KL_ESTIMATORS

GUARD = 10.0
E10 = math.exp(GUARD)

ORACLES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda x: x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: x + np.exp(-x) - 1,
    "k3_importance": lambda x: np.exp(x) * x - np.exp(x) + 1,
}
GRADIENTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": np.ones_like,
    "k2": lambda x: x,
    "k3": lambda x: 1 - np.exp(-x),
    "k3_importance": lambda x: np.exp(x) * x,
}
names = pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))


def value_and_gradient(name: str, log_ratios: Tensor) -> tuple[Tensor, Tensor]:
    log_ratios = log_ratios.clone().requires_grad_()
    values = KL_ESTIMATORS[name](log_ratios)
    (gradient,) = torch.autograd.grad(values.sum(), log_ratios)
    return values.detach(), gradient


def test_registry_is_complete_and_immutable() -> None:
    assert set(KL_ESTIMATORS) == set(ORACLES)
    with pytest.raises(TypeError):
        KL_ESTIMATORS["k4"] = torch.exp  # type: ignore[index]


@names
def test_equals_the_formula_inside_the_guard(name: str) -> None:
    grid = np.linspace(-9.99, 9.99, 401)
    values, gradient = value_and_gradient(name, torch.from_numpy(grid))
    np.testing.assert_allclose(values.numpy(), ORACLES[name](grid), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(gradient.numpy(), GRADIENTS[name](grid), rtol=1e-11, atol=1e-13)


@names
def test_gradcheck_on_both_sides_of_the_guard(name: str) -> None:
    points = torch.tensor([-60, -12, -9, -1, -1e-3, 0.5, 3, 9, 12, 60], dtype=torch.float64)
    assert torch.autograd.gradcheck(KL_ESTIMATORS[name], points.requires_grad_())


@settings(deadline=None)
@given(st.floats(-60, 60))
def test_gradient_has_the_sign_of_the_log_ratio_and_is_bounded(log_ratio: float) -> None:
    # Descent then moves log pi towards log b, however far off it is.
    point = torch.tensor([log_ratio], dtype=torch.float64)
    bounds = {"k2": 60.0, "k3": E10, "k3_importance": GUARD * E10}
    for name, bound in bounds.items():
        value, gradient = value_and_gradient(name, point)
        assert gradient.sign() == point.sign() or abs(log_ratio) < 1e-15
        assert abs(gradient) <= bound
        assert value >= -1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@names
def test_extremes_stay_finite_with_the_right_sign(name: str, dtype: torch.dtype) -> None:
    for log_ratio in (-1e4, -800.0, -104.0, 89.0, 800.0, 1e4):
        value, gradient = value_and_gradient(name, torch.tensor([log_ratio], dtype=dtype))
        assert value.isfinite() and gradient.isfinite()
        # k1 pushes down always; rho * l underflows to 0 for l << 0 and must not turn positive.
        if name == "k1":
            assert gradient == 1
        else:
            assert gradient * math.copysign(1, log_ratio) >= 0


def test_guards_are_tangents() -> None:
    # k3 at l = -12: value k3(-10) + 2 (e^10 - 1), slope 1 - e^10; a clamp would give slope +1.
    value, gradient = value_and_gradient("k3", torch.tensor([-12.0], dtype=torch.float64))
    assert value.item() == pytest.approx(-10 + E10 - 1 + 2 * (E10 - 1), rel=1e-13)
    assert gradient.item() == pytest.approx(1 - E10, rel=1e-13)
    # rho l - rho + 1 at l = 13: value f(10) + 3 * 10 e^10, slope 10 e^10.
    value, gradient = value_and_gradient("k3_importance", torch.tensor([13.0], dtype=torch.float64))
    assert value.item() == pytest.approx(9 * E10 + 1 + 30 * E10, rel=1e-13)
    assert gradient.item() == pytest.approx(10 * E10, rel=1e-13)


@names
def test_value_and_gradient_are_continuous_at_the_guard(name: str) -> None:
    for at in (-GUARD, GUARD):
        around = torch.tensor([at - 1e-9, at, at + 1e-9], dtype=torch.float64)
        values, gradient = value_and_gradient(name, around)
        assert values.tolist() == pytest.approx([values[1].item()] * 3, rel=1e-7)
        assert gradient.tolist() == pytest.approx([gradient[1].item()] * 3, rel=1e-7)


@pytest.mark.parametrize("name", ["k3", "k3_importance"])
def test_small_log_ratios_keep_their_digits_in_float32(name: str) -> None:
    # l^2 / 2 = 5e-9 is far below float32's 1.2e-7 around 1: exp(x) - 1 would lose it.
    values, gradient = value_and_gradient(name, torch.tensor([1e-4, -1e-4]))
    assert values.tolist() == pytest.approx([5e-9, 5e-9], rel=5e-3)
    assert gradient.tolist() == pytest.approx([1e-4, -1e-4], abs=2e-7)


# --- expectations, exact over a small vocabulary


def policies() -> tuple[Tensor, Tensor, Tensor]:
    """(logits of pi, log pi, log b)."""
    logits = torch.tensor([0.3, -1.1, 2.0, 0.0, -0.4], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([-0.5, 0.2, 1.0, 0.7, -1.5], dtype=torch.float64).log_softmax(0)
    return logits, logits.log_softmax(0), behaviour


def gradient_of(value: Tensor, logits: Tensor) -> list[float]:
    return torch.autograd.grad(value, logits, retain_graph=True)[0].tolist()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_values_are_unbiased_under_the_policy(name: str) -> None:
    _, logp, logb = policies()
    kl = (logp.exp() * (logp - logb)).sum()
    assert (logp.exp() * KL_ESTIMATORS[name](logp - logb)).sum().item() == pytest.approx(kl.item())


def test_importance_weighted_value_and_gradient_are_unbiased_off_policy() -> None:
    logits, logp, logb = policies()
    kl = (logp.exp() * (logp - logb)).sum()
    # Sampled from b: the expectation's weights carry no gradient.
    estimate = (logb.exp() * KL_ESTIMATORS["k3_importance"](logp - logb)).sum()
    assert estimate.item() == pytest.approx(kl.item(), rel=1e-12)
    assert gradient_of(estimate, logits) == pytest.approx(gradient_of(kl, logits), rel=1e-10)


def test_expected_gradients_off_policy_are_those_documented() -> None:
    logits, logp, logb = policies()
    forward_kl = (logb.exp() * (logb - logp)).sum()
    chi2 = (logb.exp().square() / logp.exp()).sum() - 1
    mean_square = (logb.exp() * (logp - logb).square()).sum() / 2
    expected = {"k1": -forward_kl, "k2": mean_square, "k3": chi2 - forward_kl}
    for name, objective in expected.items():
        estimate = (logb.exp() * KL_ESTIMATORS[name](logp - logb)).sum()
        assert gradient_of(estimate, logits) == pytest.approx(
            gradient_of(objective, logits), rel=1e-9, abs=1e-12
        )
