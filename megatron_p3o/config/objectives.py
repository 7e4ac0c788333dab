"""What `objective.name` chooses among; the formulas stand in `megatron_p3o.algorithms`."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from megatron_p3o.config.section import Section


class _Objective(Section):
    advantage: Literal["group_zscore", "group_mean", "none"] = "group_zscore"
    """(r - mean) / (std + 1e-6) with the n-1 std; r - mean; or the reward itself."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus: the loss gains -coefficient * H per token."""
    normalization: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over the step's tokens, or the mean over sequences of each one's token mean."""


class P3OObjective(_Objective):
    """`megatron_p3o.algorithms.p3o`; the defaults are the paper's algorithm."""

    name: Literal["p3o"] = "p3o"
    cap: Literal["ess", "none", "constant"] = "ess"
    """What bounds the ratio: the batch's ESS, nothing, or `cap_constant`."""
    cap_constant: PositiveFloat | None = None
    regularizer: Literal["adaptive", "constant", "off"] = "adaptive"
    """Weight of the KL term: 1 - ESS, `regularizer_constant`, or 0."""
    regularizer_constant: PositiveFloat | None = None
    kl_estimator: Literal["k1", "k2", "k3", "k3_importance"] = "k3"

    @model_validator(mode="after")
    def _constants(self) -> "P3OObjective":
        for switch in ("cap", "regularizer"):
            mode, constant = getattr(self, switch), getattr(self, f"{switch}_constant")
            if (mode == "constant") != (constant is not None):
                raise ValueError(
                    f"objective.{switch}_constant={constant} goes with objective.{switch}=constant "
                    f"and only with it (got {mode}); set both or neither"
                )
        return self


class ReinforceObjective(_Objective):
    """Plain score-function gradient: no ratio, no clip."""

    name: Literal["reinforce"] = "reinforce"


class GRPOObjective(_Objective):
    """Clipped surrogate against the rollout engine's log-probs."""

    name: Literal["grpo"] = "grpo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: PositiveFloat = 0.2
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of k3 between trainer and rollout policy."""


Objective = Annotated[
    P3OObjective | ReinforceObjective | GRPOObjective, Field(discriminator="name")
]

OBJECTIVE_NAMES = ("p3o", "reinforce", "grpo")
