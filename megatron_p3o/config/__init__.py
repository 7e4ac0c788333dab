"""The configuration of a run: one frozen tree, `RunConfig`, from YAML plus dotted overrides.

Imports no torch, so that a study tool, a login node or an editor can validate a file. Every rule
that needs only the configuration is checked here; rules that need the model's or the data's files
are checked by `megatron_p3o.preflight`, before anything heavy starts.
"""

from megatron_p3o.config.load import (
    json_schema,
    load_config,
    parse_config,
    parse_overrides,
    to_yaml,
)
from megatron_p3o.config.objectives import (
    CISPOObjective,
    ClippedObjective,
    CorrectionSection,
    DAPOObjective,
    DrGRPOObjective,
    GRPOObjective,
    GSPOObjective,
    Objective,
    ObjectiveBase,
    P3OObjective,
    P4OObjective,
    PPODecoupledObjective,
    ReinforceObjective,
    RLOOObjective,
    SAPOObjective,
)
from megatron_p3o.config.sections import (
    CheckpointSection,
    DataSection,
    EssSection,
    LayoutSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RewardSection,
    RolloutSection,
    RunConfig,
    RunSection,
    SamplingSection,
    TrainSection,
)

__all__ = [
    "CISPOObjective",
    "CheckpointSection",
    "ClippedObjective",
    "CorrectionSection",
    "DAPOObjective",
    "DataSection",
    "DrGRPOObjective",
    "EssSection",
    "GRPOObjective",
    "GSPOObjective",
    "LayoutSection",
    "ModelSection",
    "Objective",
    "ObjectiveBase",
    "OptimizerSection",
    "P3OObjective",
    "P4OObjective",
    "PPODecoupledObjective",
    "PrecisionSection",
    "RLOOObjective",
    "ReinforceObjective",
    "RewardSection",
    "RolloutSection",
    "RunConfig",
    "RunSection",
    "SAPOObjective",
    "SamplingSection",
    "TrainSection",
    "json_schema",
    "load_config",
    "parse_config",
    "parse_overrides",
    "to_yaml",
]
