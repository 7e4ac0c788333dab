import math
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_p3o.algorithms import LOSSES, TrustStats, grpo_loss, p3o_loss, reinforce_loss
from megatron_p3o.config import GRPOObjective, ReinforceObjective
from megatron_p3o.config.objectives import OBJECTIVE_NAMES
from megatron_p3o.types import LossOutput, TokenStats

TRUST = TrustStats(
    ess=0.5, mean_ratio=1.0, ratio_std=1.0, ess_drift=1.0, ess_mismatch=0.5, num_tokens=1
)

Rows = Sequence[tuple[float, ...]]  # (log ratio, log-prob, advantage, token weight)
tokens = st.tuples(
    st.floats(-4, 4), st.floats(-20, -0.01), st.floats(-3, 3), st.sampled_from([1.0, 0.5, 2.0])
)


def stats_of(rows: Rows, dtype: torch.dtype = torch.float64) -> TokenStats:
    log_ratios, logprobs, advantages, token_weights = (
        torch.tensor(rows, dtype=dtype).reshape(-1, 4).T
    )
    return TokenStats(
        logprobs=logprobs.clone().requires_grad_(),
        rollout_logprobs=logprobs - log_ratios,
        advantages=advantages,
        token_weights=token_weights,
    )


def gradient_of(output: LossOutput, stats: TokenStats) -> Tensor:
    (gradient,) = torch.autograd.grad(output.loss_sum, stats.logprobs)
    return gradient


def test_reinforce_hand_computed() -> None:
    stats = stats_of([(3.0, -2.0, 1.5, 1.0), (-1.0, -1.0, -0.5, 2.0)])
    output = reinforce_loss(stats, TRUST, ReinforceObjective())
    # 1.5 * 2 and 2 * (-0.5 * 1); the ratio takes no part.
    assert output.loss_sum.item() == pytest.approx(3.0 - 1.0)
    assert output.num_tokens == 2
    assert {k: v.item() for k, v in output.metrics.items()} == {"loss/score": 2.0, "loss/kl": 0.0}
    assert gradient_of(output, stats).tolist() == [-1.5, 1.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "score", "slope", "clipped"),
    [
        (1.1, 1.0, -1.1, -1.1, 0),  # inside the range
        (1.5, 1.0, -1.3, 0.0, 1),  # already raised enough
        (1.5, -1.0, 1.5, 1.5, 0),  # wrong direction: not clipped
        (0.5, -1.0, 0.8, 0.0, 1),  # already lowered enough
        (0.5, 1.0, -0.5, -0.5, 0),  # wrong direction: not clipped
        (1.5, 0.0, 0.0, 0.0, 0),  # nothing to learn, nothing clipped
    ],
)
def test_grpo_clip_cases(
    ratio: float, advantage: float, score: float, slope: float, clipped: int
) -> None:
    stats = stats_of([(math.log(ratio), -1.0, advantage, 1.0)])
    output = grpo_loss(stats, TRUST, GRPOObjective(clip_low=0.2, clip_high=0.3))
    assert output.loss_sum.item() == pytest.approx(score, rel=1e-12)
    assert output.metrics["grpo/clip_fraction"].item() == clipped
    # d rho / d logp = rho, so an unclipped slope is -rho * A.
    assert gradient_of(output, stats).item() == pytest.approx(slope, rel=1e-12)


@settings(deadline=None)
@given(st.lists(tokens, min_size=1, max_size=20), st.floats(0, 0.5))
def test_grpo_matches_the_oracle(rows: Rows, coefficient: float) -> None:
    stats = stats_of(rows)
    config = GRPOObjective(clip_low=0.2, clip_high=0.28, kl_coefficient=coefficient)
    output = grpo_loss(stats, TRUST, config)
    lr, logp, adv, w = np.array(rows).T
    lr = logp - (logp - lr)  # rounded as the loss sees it
    rho = np.exp(lr)
    score = (w * -np.minimum(rho * adv, np.clip(rho, 0.8, 1.28) * adv)).sum()
    kl = (w * coefficient * (lr + np.exp(-lr) - 1)).sum()
    clipped = np.where(adv > 0, rho > 1.28, rho < 0.8) & (adv != 0)
    gradient = w * (np.where(clipped, 0, -rho * adv) + coefficient * (1 - np.exp(-lr)))
    assert output.loss_sum.item() == pytest.approx(score + kl, rel=1e-10, abs=1e-10)
    assert output.metrics["loss/score"].item() == pytest.approx(score, rel=1e-10, abs=1e-10)
    assert output.metrics["loss/kl"].item() == pytest.approx(kl, rel=1e-10, abs=1e-10)
    assert output.metrics["grpo/clip_fraction"].item() == clipped.sum()
    assert gradient_of(output, stats).tolist() == pytest.approx(gradient, rel=1e-9, abs=1e-9)


def test_grpo_gradcheck() -> None:
    rows = [(x, -2.0, a, 0.7) for x in (-1.0, -0.1, 0.15, 1.0, 11.0) for a in (1.3, -0.6)]
    stats = stats_of(rows)

    def loss(logprobs: Tensor) -> Tensor:
        moved = TokenStats(
            logprobs=logprobs,
            rollout_logprobs=stats.rollout_logprobs,
            advantages=stats.advantages,
            token_weights=stats.token_weights,
        )
        return grpo_loss(moved, TRUST, GRPOObjective(kl_coefficient=0.3)).loss_sum

    assert torch.autograd.gradcheck(loss, stats.logprobs)


def test_grpo_stays_finite_where_float32_overflows() -> None:
    stats = stats_of([(100.0, -1.0, a, 1.0) for a in (0.0, 1.0, -1.0)], torch.float32)
    output = grpo_loss(stats, TRUST, GRPOObjective(kl_coefficient=0.1))
    gradient = gradient_of(output, stats)
    assert output.loss_sum.isfinite()
    assert gradient.tolist() == pytest.approx([0.1, 0.1, math.exp(10) + 0.1], rel=1e-6)


def test_first_step_of_grpo_has_the_gradient_of_reinforce() -> None:
    rows = [(0.0, -1.0, 1.5, 1.0), (0.0, -3.0, -0.5, 2.0)]
    ours, plain = stats_of(rows), stats_of(rows)
    gradient = gradient_of(grpo_loss(ours, TRUST, GRPOObjective()), ours)
    expected = gradient_of(reinforce_loss(plain, TRUST, ReinforceObjective()), plain)
    assert torch.equal(gradient, expected)


def test_registry_is_complete_and_immutable() -> None:
    assert tuple(LOSSES) == OBJECTIVE_NAMES
    with pytest.raises(TypeError):
        LOSSES["other"] = p3o_loss  # type: ignore[index]


def test_algorithms_import_neither_megatron_nor_transformers() -> None:
    program = (
        "import sys, megatron_p3o.algorithms\n"
        "print([m for m in ('megatron', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.strip() == "[]"
