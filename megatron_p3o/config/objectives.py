"""What `objective.name` chooses among; the formulas stand in `megatron_p3o.algorithms`.

The defaults of every objective are its paper's algorithm, group advantages aside.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from megatron_p3o.config.section import Section

ClipLow = Annotated[float, Field(gt=0, le=1)]
KLEstimator = Literal["k1", "k2", "k3", "k3_importance"]


class CorrectionSection(Section):
    """`megatron_p3o.algorithms.correction`: a weight on the score term for the engines' gap."""

    mode: Literal["off", "truncate", "mask", "reject"] = "off"
    """Ratio capped at `high`; ratio, but 0 outside [low, high]; 1, but 0 outside [low, high]."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio of the token, the product over its sequence, or the geometric mean over it."""
    high: PositiveFloat | None = None
    """Upper end of the band; every mode but off needs it."""
    low: PositiveFloat | None = None
    """Lower end of the band; None for none."""

    @property
    def carries_ratio(self) -> bool:
        """Whether the weight contains the ratio, which the objective must then leave out."""
        return self.mode in ("truncate", "mask")

    @model_validator(mode="after")
    def _band(self) -> "CorrectionSection":
        if (self.mode == "off") != (self.high is None):
            raise ValueError(
                f"objective.correction.high={self.high} goes with a correction and only with it "
                f"(got objective.correction.mode={self.mode}); set both or neither"
            )
        if self.low is not None:
            if self.mode not in ("mask", "reject"):
                raise ValueError(
                    f"objective.correction.low={self.low} is not used by "
                    f"objective.correction.mode={self.mode}; remove it, or use mask or reject"
                )
            assert self.high is not None
            if self.low >= self.high:
                raise ValueError(
                    f"objective.correction.low={self.low} must be < objective.correction.high="
                    f"{self.high}; lower it or remove it"
                )
        return self


class ReferenceSection(Section):
    """`megatron_p3o.algorithms.reference`: KL to a frozen model, beside any objective."""

    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL term; 0 builds no reference model."""
    kl_estimator: KLEstimator = "k3"
    model_path: Annotated[str, Field(min_length=1)] | None = None
    """A Hugging Face model directory with the same vocabulary; None: model.path, the model that
    training starts from."""

    @model_validator(mode="after")
    def _used(self) -> "ReferenceSection":
        if self.model_path is not None and not self.kl_coefficient:
            raise ValueError(
                f"reference.model_path={self.model_path!r} is not used with "
                "reference.kl_coefficient=0; set a coefficient or remove the path"
            )
        return self


class ObjectiveBase(Section):
    """What all objectives share."""

    # Objectives whose own weight contains p / b, which a correction must not count again.
    _weighs_behavior: ClassVar[bool] = False

    name: str
    advantage: Literal["group_zscore", "group_mean", "leave_one_out", "none"] = "group_zscore"
    """(r - mean) / (std + 1e-6) with the n-1 std; r - mean; r - mean of the others; or r."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: the loss gains -coefficient * H per token."""
    normalization: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    """Mean over the step's tokens; mean over sequences of each one's token mean; or the sum over
    tokens divided by (sequences x `normalization_length`)."""
    normalization_length: PositiveInt | None = None
    """Tokens, for constant_length and only for it; None: sampling.max_new_tokens."""
    correction: CorrectionSection = CorrectionSection()

    @model_validator(mode="after")
    def _normalization_length(self) -> "ObjectiveBase":
        if self.normalization_length is not None and self.normalization != "constant_length":
            raise ValueError(
                f"objective.normalization_length={self.normalization_length} goes with "
                f"objective.normalization=constant_length and only with it (got "
                f"{self.normalization}); remove it"
            )
        return self

    @model_validator(mode="after")
    def _ratio_counts_once(self) -> "ObjectiveBase":
        if self._weighs_behavior and self.correction.carries_ratio:
            raise ValueError(
                f"objective.correction.mode={self.correction.mode} must be off or reject with "
                f"objective.name={self.name}, whose own weight already contains that ratio; use "
                "reject to drop tokens outside a band"
            )
        return self


class P3OObjective(ObjectiveBase):
    """`megatron_p3o.algorithms.p3o`; the defaults are the paper's algorithm."""

    _weighs_behavior = True

    name: Literal["p3o"] = "p3o"
    cap: Literal["ess", "none", "constant"] = "ess"
    """What bounds the ratio: the batch's ESS, nothing, or `cap_constant`."""
    cap_constant: PositiveFloat | None = None
    regularizer: Literal["adaptive", "constant", "off"] = "adaptive"
    """Weight of the KL term: 1 - ESS, `regularizer_constant`, or 0."""
    regularizer_constant: PositiveFloat | None = None
    kl_estimator: KLEstimator = "k3"

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


class P4OObjective(ObjectiveBase):
    """P3O anchored at the behaviour policy and at the trainer that first consumed the batch."""

    _weighs_behavior = True

    name: Literal["p4o"] = "p4o"
    kl_estimator: KLEstimator = "k3"


class ReinforceObjective(ObjectiveBase):
    """Plain score-function gradient: no ratio, no clip."""

    name: Literal["reinforce"] = "reinforce"


class RLOOObjective(ObjectiveBase):
    """REINFORCE whose baseline is the mean reward of the group's other samples."""

    name: Literal["rloo"] = "rloo"
    advantage: Literal["group_zscore", "group_mean", "leave_one_out", "none"] = "leave_one_out"


class ClippedObjective(ObjectiveBase):
    """Clipped surrogate: no gradient where the ratio has left [1 - clip_low, 1 + clip_high]."""

    clip_low: ClipLow = 0.2
    clip_high: PositiveFloat = 0.2


class GRPOObjective(ClippedObjective):
    """Clipped surrogate against the rollout engine's log-probs."""

    name: Literal["grpo"] = "grpo"
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of k3 between trainer and rollout policy."""


class DAPOObjective(ClippedObjective):
    """Clipped surrogate with a wider upper end, and a penalty for overlong responses."""

    name: Literal["dapo"] = "dapo"
    clip_high: PositiveFloat = 0.28
    overlong_buffer_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of sampling.max_new_tokens over which the reward's penalty grows from 0 to 1, ending
    where generation is cut; 0 turns the penalty off."""


class DrGRPOObjective(ClippedObjective):
    """Clipped surrogate without division by the reward's std or by the response's length."""

    name: Literal["dr_grpo"] = "dr_grpo"
    advantage: Literal["group_zscore", "group_mean", "leave_one_out", "none"] = "group_mean"
    normalization: Literal["token_mean", "sequence_mean", "constant_length"] = "constant_length"


class GSPOObjective(ClippedObjective):
    """Clipped surrogate of one length-normalised ratio per sequence."""

    name: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: PositiveFloat = 4e-4
    normalization: Literal["token_mean", "sequence_mean", "constant_length"] = "sequence_mean"


class CISPOObjective(ClippedObjective):
    """REINFORCE weighted by the clipped ratio; no token loses its gradient."""

    name: Literal["cispo"] = "cispo"
    clip_low: ClipLow = 1.0
    """1 means no lower bound."""
    clip_high: PositiveFloat = 4.0
    """The paper gives no value."""


class SAPOObjective(ObjectiveBase):
    """A soft gate around ratio 1 in place of a clip."""

    name: Literal["sapo"] = "sapo"
    tau_positive: PositiveFloat = 1.0
    """Sharpness of the gate for positive advantages."""
    tau_negative: PositiveFloat = 1.05
    """The same for the others."""
    normalization: Literal["token_mean", "sequence_mean", "constant_length"] = "sequence_mean"


class PPODecoupledObjective(ClippedObjective):
    """Clipped surrogate against the proximal policy, weighted by proximal over behaviour."""

    _weighs_behavior = True

    name: Literal["ppo_decoupled"] = "ppo_decoupled"
    behavior_weight_cap: PositiveFloat = 5.0
    """Greatest weight for the gap between proximal and behaviour policy."""


class SFTObjective(ObjectiveBase):
    """Negative log-likelihood of the data's own answers (rollout.engine: answers)."""

    name: Literal["sft"] = "sft"
    advantage: Literal["none"] = "none"
    """Not used: an answer has no advantage."""

    @model_validator(mode="after")
    def _no_correction(self) -> "SFTObjective":
        if self.correction.mode != "off":
            raise ValueError(
                f"objective.correction.mode={self.correction.mode} corrects for a behaviour "
                "policy, and objective.name=sft has none; remove it"
            )
        return self


Objective = Annotated[
    P3OObjective
    | P4OObjective
    | ReinforceObjective
    | RLOOObjective
    | GRPOObjective
    | DAPOObjective
    | DrGRPOObjective
    | GSPOObjective
    | CISPOObjective
    | SAPOObjective
    | PPODecoupledObjective
    | SFTObjective,
    Field(discriminator="name"),
]

OBJECTIVE_NAMES = (
    "p3o",
    "p4o",
    "reinforce",
    "rloo",
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "cispo",
    "sapo",
    "ppo_decoupled",
    "sft",
)
