import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_p3o.algorithms import EssSums, TrustStats, p3o_loss, reinforce_loss
from megatron_p3o.config import P3OObjective, ReinforceObjective
from megatron_p3o.types import LossOutput, TokenStats

Rows = Sequence[tuple[float, ...]]  # (log ratio, log-prob, advantage, token weight)
tokens = st.tuples(
    st.floats(-8, 8), st.floats(-20, -0.01), st.floats(-3, 3), st.sampled_from([1.0, 0.5, 2.0])
)
token_lists = st.lists(tokens, min_size=1, max_size=20)


def stats_of(rows: Rows, dtype: torch.dtype = torch.float64) -> TokenStats:
    columns = torch.tensor(rows, dtype=dtype).reshape(-1, 4).T
    log_ratios, logprobs, advantages, token_weights = columns
    return TokenStats(
        logprobs=logprobs.clone().requires_grad_(),
        rollout_logprobs=logprobs - log_ratios,
        advantages=advantages,
        token_weights=token_weights,
    )


def trust_of(ess: float) -> TrustStats:
    return TrustStats(
        ess=ess, mean_ratio=1.0, ratio_std=0.0, ess_drift=1.0, ess_mismatch=ess, num_tokens=1
    )


def gradient_of(output: LossOutput, stats: TokenStats) -> Tensor:
    (gradient,) = torch.autograd.grad(output.loss_sum, stats.logprobs)
    return gradient


def oracle(rows: Rows, cap: float, regularizer: float) -> tuple[float, float, np.ndarray, int]:
    """(score sum, KL sum, gradient, capped tokens), straight from the formulas."""
    lr, logp, adv, w = np.array(rows, dtype=np.float64).T
    lr = logp - (logp - lr)  # rounded as the loss sees it, since rho is compared with the cap
    rho = np.exp(lr)
    score = -np.minimum(rho, cap) * adv * logp
    kl = regularizer * (lr + np.exp(-lr) - 1)
    gradient = w * (-np.minimum(rho, cap) * adv + regularizer * (1 - np.exp(-lr)))
    return float((w * score).sum()), float((w * kl).sum()), gradient, int((rho > cap).sum())


def check(output: LossOutput, stats: TokenStats, expected: tuple) -> None:
    score, kl, gradient, capped = expected
    assert output.loss_sum.item() == pytest.approx(score + kl, rel=1e-10, abs=1e-10)
    assert output.metrics["loss/score"].item() == pytest.approx(score, rel=1e-10, abs=1e-10)
    assert output.metrics["loss/kl"].item() == pytest.approx(kl, rel=1e-10, abs=1e-10)
    assert output.metrics["p3o/cap_fraction"].item() == capped
    assert not any(metric.requires_grad for metric in output.metrics.values())
    assert gradient_of(output, stats).tolist() == pytest.approx(gradient, rel=1e-10, abs=1e-10)


def test_hand_computed() -> None:
    # rho = 1 and 3: e = 0.8. Both are capped at 0.8; A = 1 and -2; k3(log 3) = log 3 + 1/3 - 1.
    stats = stats_of([(0.0, -1.0, 1.0, 1.0), (math.log(3), -0.5, -2.0, 1.0)])
    log_ratios = (stats.logprobs - stats.rollout_logprobs).detach()
    sums = EssSums.from_log_ratios(log_ratios)
    output = p3o_loss(stats, TrustStats.from_sums(sums, sums, sums), P3OObjective())
    kl = 0.2 * (math.log(3) + 1 / 3 - 1)
    assert output.num_tokens == 2
    assert output.loss_sum.item() == pytest.approx(0.8 * 1 * 1 - 0.8 * 2 * 0.5 + kl, rel=1e-12)
    assert output.metrics["loss/kl"].item() == pytest.approx(kl, rel=1e-12)
    assert output.metrics["p3o/cap_fraction"].item() == 2
    assert gradient_of(output, stats).tolist() == pytest.approx([-0.8, 1.6 + 0.2 * 2 / 3])


@settings(deadline=None)
@given(token_lists, st.floats(0.01, 1))
def test_matches_the_oracle(rows: Rows, ess: float) -> None:
    stats = stats_of(rows)
    output = p3o_loss(stats, trust_of(ess), P3OObjective())
    check(output, stats, oracle(rows, cap=ess, regularizer=1 - ess))


@pytest.mark.parametrize(
    ("switches", "cap", "regularizer"),
    [
        ({"cap": "none"}, math.inf, 0.7),
        ({"cap": "constant", "cap_constant": 2.0}, 2.0, 0.7),
        ({"regularizer": "off"}, 0.3, 0.0),
        ({"regularizer": "constant", "regularizer_constant": 0.05}, 0.3, 0.05),
        ({"cap": "none", "regularizer": "off"}, math.inf, 0.0),
    ],
)
def test_ablation_switches(switches: dict, cap: float, regularizer: float) -> None:
    rows = [(-2.0, -3.0, 1.5, 1.0), (0.1, -1.0, -0.5, 2.0), (1.5, -0.2, 0.7, 1.0)]
    stats = stats_of(rows)
    output = p3o_loss(stats, trust_of(0.3), P3OObjective.model_validate(switches))
    check(output, stats, oracle(rows, cap, regularizer))


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", -0.5, 1.0),
        ("k2", 0.125, -0.5),
        ("k3", -0.5 + math.exp(0.5) - 1, 1 - math.exp(0.5)),
        ("k3_importance", 1 - 1.5 * math.exp(-0.5), -0.5 * math.exp(-0.5)),
    ],
)
def test_estimator_switch(estimator: str, value: float, slope: float) -> None:
    stats = stats_of([(-0.5, -1.0, 0.0, 1.0)])
    config = P3OObjective.model_validate({"kl_estimator": estimator})
    output = p3o_loss(stats, trust_of(0.25), config)
    assert output.loss_sum.item() == pytest.approx(0.75 * value, rel=1e-12)
    assert gradient_of(output, stats).item() == pytest.approx(0.75 * slope, rel=1e-12)


@settings(deadline=None)
@given(token_lists)
def test_on_policy_is_reinforce(rows: Rows) -> None:
    on_policy = [(0.0, *row[1:]) for row in rows]
    stats, same = stats_of(on_policy), stats_of(on_policy)
    sums = EssSums.from_log_ratios(torch.zeros(len(rows)))
    trust = TrustStats.from_sums(sums, sums, sums)
    p3o = p3o_loss(stats, trust, P3OObjective())
    reinforce = reinforce_loss(same, trust, ReinforceObjective())
    assert p3o.loss_sum.item() == reinforce.loss_sum.item()
    assert torch.equal(gradient_of(p3o, stats), gradient_of(reinforce, same))
    assert p3o.metrics["p3o/cap_fraction"].item() == 0


@settings(deadline=None)
@given(token_lists)
def test_weight_never_exceeds_ess_nor_ratio_and_is_never_zero(
    rows: Rows,
) -> None:
    # With A = 1, token weight 1 and no regulariser, the gradient is minus the weight.
    rows = [(row[0] * 10, row[1], 1.0, 1.0) for row in rows]
    stats = stats_of(rows)
    ratios = (stats.logprobs - stats.rollout_logprobs).detach().exp()
    sums = EssSums.from_log_ratios(ratios.log())
    trust = TrustStats.from_sums(sums, sums, sums)
    output = p3o_loss(stats, trust, P3OObjective(regularizer="off"))
    weights = -gradient_of(output, stats)
    assert (weights > 0).all()
    assert (weights <= trust.ess).all()
    assert (weights <= ratios).all()


def test_advantage_sign_makes_no_difference_to_the_weight() -> None:
    for log_ratio in (-3.0, 3.0):
        stats = stats_of([(log_ratio, -1.0, 1.0, 1.0), (log_ratio, -1.0, -1.0, 1.0)])
        up, down = gradient_of(
            p3o_loss(stats, trust_of(0.4), P3OObjective(regularizer="off")), stats
        ).tolist()
        assert up == -down == pytest.approx(-min(math.exp(log_ratio), 0.4))


@settings(deadline=None)
@given(token_lists, st.integers(0, 20), st.floats(0.01, 1))
def test_sums_do_not_depend_on_the_split(rows: Rows, cut: int, ess: float) -> None:
    config, trust = P3OObjective(), trust_of(ess)
    whole_stats = stats_of(rows)
    whole = p3o_loss(whole_stats, trust, config)
    parts_stats = [stats_of(rows[:cut]), stats_of(rows[cut:])]
    parts = [p3o_loss(stats, trust, config) for stats in parts_stats]
    assert sum(p.num_tokens for p in parts) == whole.num_tokens == len(rows)
    assert sum(p.loss_sum.item() for p in parts) == pytest.approx(
        whole.loss_sum.item(), rel=1e-10, abs=1e-10
    )
    for name, value in whole.metrics.items():
        assert sum(p.metrics[name].item() for p in parts) == pytest.approx(
            value.item(), rel=1e-10, abs=1e-10
        )
    gradients = torch.cat([gradient_of(p, s) for p, s in zip(parts, parts_stats, strict=True)])
    assert torch.equal(gradients, gradient_of(whole, whole_stats))


def test_no_tokens_give_a_zero_that_backpropagates() -> None:
    hidden = torch.ones(3, requires_grad=True)
    empty = stats_of([])
    stats = TokenStats(
        logprobs=hidden[:0] * 2,
        rollout_logprobs=empty.rollout_logprobs,
        advantages=empty.advantages,
        token_weights=empty.token_weights,
    )
    output = p3o_loss(stats, trust_of(0.5), P3OObjective())
    assert (output.loss_sum.item(), output.num_tokens) == (0.0, 0)
    output.loss_sum.backward()
    assert hidden.grad is not None and hidden.grad.tolist() == [0.0, 0.0, 0.0]
    full = p3o_loss(stats_of([(0.0, -1.0, 1.0, 1.0)]), trust_of(0.5), P3OObjective())
    assert output.metrics.keys() == full.metrics.keys()
    assert all(value.item() == 0 for value in output.metrics.values())


@pytest.mark.parametrize("cap", ["ess", "none"])
def test_overflowing_ratio_with_zero_advantage_adds_nothing(cap: str) -> None:
    # exp(100) is infinite in float32 and finite in float64, so the ESS does not raise.
    stats = stats_of([(100.0, -1.0, 0.0, 1.0)], torch.float32)
    config = P3OObjective.model_validate({"cap": cap, "regularizer": "off"})
    output = p3o_loss(stats, trust_of(1.0), config)
    assert output.loss_sum.item() == 0
    assert gradient_of(output, stats).tolist() == [0.0]


def test_overflowing_ratio_is_capped_at_the_ess() -> None:
    stats = stats_of([(100.0, -1.0, 2.0, 1.0)], torch.float32)
    output = p3o_loss(stats, trust_of(0.25), P3OObjective(regularizer="off"))
    assert gradient_of(output, stats).tolist() == [-0.5]


def test_vanishing_ratio_is_pulled_back_by_the_regulariser() -> None:
    stats = stats_of([(-60.0, -61.0, 1.0, 1.0)], torch.float32)
    gradient = gradient_of(p3o_loss(stats, trust_of(0.5), P3OObjective()), stats).item()
    assert gradient == pytest.approx(0.5 * (1 - math.exp(10)), rel=1e-6)


def test_nan_is_not_hidden() -> None:
    stats = stats_of([(math.nan, -1.0, 1.0, 1.0)])
    assert p3o_loss(stats, trust_of(0.5), P3OObjective()).loss_sum.isnan()


def test_entropy_bonus() -> None:
    base = stats_of([(0.3, -1.0, 1.0, 1.0), (0.0, -2.0, 1.0, 0.5)])
    entropy = torch.tensor([2.0, 4.0], dtype=torch.float64, requires_grad=True)
    stats = TokenStats(
        logprobs=base.logprobs,
        rollout_logprobs=base.rollout_logprobs,
        advantages=base.advantages,
        token_weights=base.token_weights,
        entropy=entropy,
    )
    plain = p3o_loss(stats, trust_of(0.5), P3OObjective())
    output = p3o_loss(stats, trust_of(0.5), P3OObjective(entropy_coefficient=0.1))
    # The bonus lowers the loss: 0.1 * (1 * 2 + 0.5 * 4).
    assert (plain.loss_sum - output.loss_sum).item() == pytest.approx(0.4, rel=1e-12)
    (gradient,) = torch.autograd.grad(output.loss_sum, entropy)
    assert gradient.tolist() == pytest.approx([-0.1, -0.05])
    assert {k: v.item() for k, v in output.metrics.items()} == {
        k: v.item() for k, v in plain.metrics.items()
    }
