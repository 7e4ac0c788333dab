"""Per-token estimators of KL(pi || b), each a function of `l = log pi - log b`; gradient flows.

    name           value                 gradient    expectation of the gradient (tokens from b)
    k1             l                     1           -grad KL(b || pi)
    k2             l^2 / 2               l           grad of E_b[l^2] / 2
    k3             l + exp(-l) - 1       1-exp(-l)   grad of chi^2(b || pi) - KL(b || pi)
    k3_importance  rho*l - rho + 1       rho * l     grad KL(pi || b), unbiased

with rho = exp(l); gradients are with respect to log pi. k1, k2 and k3 are Schulman's estimators
(joschu.net/blog/kl-approx.html); as values, k1 and k3 are unbiased for tokens from pi. P3O's
regulariser is k3 (arXiv:2605.12380). k3_importance is k3 weighted by rho, so it is unbiased, in
value and gradient, for tokens from b. Beware k1 there: descending it moves pi away from b.

Overflow guard. exp(-l) in k3 (for very negative l) and rho in k3_importance (for large l) would
overflow. Clamping the exponent removes that part of the gradient: k3 is then left with gradient
+1 for l < -guard, which pushes pi further down where it is already too low. Here the function
continues linearly beyond the guard instead: value and gradient are continuous, the gradient keeps
its sign and is bounded. k1 and k2 need no guard.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

_MAX_EXPONENT = 10.0  # e^10 = 22026; torchtitan's DAPO loss clamps log-ratios at the same value


def guarded_expm1(x: Tensor) -> Tensor:
    """`exp(x) - 1`, continued by its tangent for x > 10; the gradient is in (0, e^10]."""
    tangent = math.exp(_MAX_EXPONENT) * torch.relu(x - _MAX_EXPONENT)
    return torch.expm1(x.clamp(max=_MAX_EXPONENT)) + tangent


def k1(log_ratios: Tensor) -> Tensor:
    """`l`; may be negative."""
    return log_ratios


def k2(log_ratios: Tensor) -> Tensor:
    """`l^2 / 2`."""
    return log_ratios.square() / 2


def k3(log_ratios: Tensor) -> Tensor:
    """`l + exp(-l) - 1`; linear for l < -10, gradient in [1 - e^10, 1)."""
    return log_ratios + guarded_expm1(-log_ratios)


def k3_importance(log_ratios: Tensor) -> Tensor:
    """`rho * l - rho + 1`; linear for l > 10, gradient in [-1/e, 10 e^10]."""
    inside = log_ratios.clamp(max=_MAX_EXPONENT)
    slope = _MAX_EXPONENT * math.exp(_MAX_EXPONENT)
    tangent = slope * torch.relu(log_ratios - _MAX_EXPONENT)
    return inside.exp() * inside - torch.expm1(inside) + tangent


KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"k1": k1, "k2": k2, "k3": k3, "k3_importance": k3_importance}
)
"""By the name in `objective.kl_estimator`: log-ratios -> estimates, elementwise."""
