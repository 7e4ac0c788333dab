"""Draw docs/figures/objectives.png: the weight that each objective gives to a token's score.

python tools/plot_objectives.py [docs/figures/objectives.png]

The weight w(rho) is read from the losses themselves: for a token with advantage A, the gradient of
the loss by its log-prob is -w * A. KL terms are left out; sequences are one token long, so that
GSPO's ratio is the token's.
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from megatron_p3o.algorithms import LOSSES, TrustStats
from megatron_p3o.config import (
    CISPOObjective,
    DAPOObjective,
    GRPOObjective,
    GSPOObjective,
    ObjectiveBase,
    P3OObjective,
    ReinforceObjective,
    SAPOObjective,
)
from megatron_p3o.types import SequenceStats, TokenStats

_ESS = (1.0, 0.7, 0.4, 0.1)
_OTHERS: Mapping[str, ObjectiveBase] = {
    "reinforce, rloo": ReinforceObjective(),
    "grpo, dr_grpo": GRPOObjective(),
    "dapo": DAPOObjective(),
    "cispo": CISPOObjective(),
    "sapo": SAPOObjective(),
    "gspo (of the sequence's ratio)": GSPOObjective(),
}

_STYLES = ("-", "-", "--", "-.", "-", ":")  # the curves lie on each other below rho = 1


def score_weights(config: ObjectiveBase, ratios: Tensor, *, ess: float, advantage: float) -> Tensor:
    """`[T]` weights of the score function at the given ratios pi / b, without drift within a batch.

    Args:
        config: the objective.
        ratios: `[T]` float64, positive.
        ess: what the batch's ESS is, whatever the ratios.
        advantage: of every token; not 0.
    """
    logprobs = torch.zeros_like(ratios).requires_grad_()
    log_ratios = ratios.log()
    stats = TokenStats(
        logprobs=logprobs,
        rollout_logprobs=-log_ratios,
        advantages=torch.full_like(ratios, advantage),
        token_weights=torch.ones_like(ratios),
        proximal_logprobs=torch.zeros_like(ratios),
        sequences=SequenceStats(
            log_ratios=log_ratios, mismatch=log_ratios, lengths=torch.ones_like(ratios)
        ),
    )
    trust = TrustStats(
        ess=ess, mean_ratio=1.0, ratio_std=0.0, ess_drift=1.0, ess_mismatch=ess, num_tokens=1
    )
    output = LOSSES[config.name](stats, trust, config)
    (gradient,) = torch.autograd.grad(output.loss_sum, logprobs)
    return -gradient / advantage


def draw(path: Path) -> None:
    """Write the figure."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    ratios = torch.logspace(math.log10(0.05), 1, 600, dtype=torch.float64)
    left.set_title("p3o, for either sign of the advantage", loc="left")
    off = P3OObjective(regularizer="off")
    for ess in _ESS:
        _curve(left, ratios, score_weights(off, ratios, ess=ess, advantage=1.0), f"ESS {ess}")
    left.set_ylim(-0.02, 1.3)
    for axes, advantage in ((middle, 1.0), (right, -1.0)):
        axes.set_title(f"others, advantage {'> 0' if advantage > 0 else '< 0'}", loc="left")
        for (label, config), style in zip(_OTHERS.items(), _STYLES, strict=True):
            weights = score_weights(config, ratios, ess=1.0, advantage=advantage)
            _curve(axes, ratios, weights, label, style)
        axes.set_ylim(-0.1, 5.5)
    left.set_ylabel("weight of the score function")
    figure.savefig(path, dpi=120)


def _curve(axes: Axes, ratios: Tensor, weights: Tensor, label: str, style: str = "-") -> None:
    axes.plot(ratios.numpy(), weights.numpy(), style, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("rho = pi / b")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", nargs="?", type=Path, default=Path("docs/figures/objectives.png"))
    path: Path = parser.parse_args().path
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(path)
    print(path)


if __name__ == "__main__":
    main()
