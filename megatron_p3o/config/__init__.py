"""The configuration of a run: one frozen tree, `RunConfig`, from YAML plus dotted overrides.

Imports no torch, so that a study tool, a login node or an editor can validate a file. Every rule
that needs only the configuration is checked here; rules that need the model's or the data's files
are checked by `megatron_p3o.preflight`, before anything heavy starts.
"""

from megatron_p3o.config.data import DataSection, EvalSection, RewardSection
from megatron_p3o.config.layout import LayoutSection
from megatron_p3o.config.load import (
    explain,
    json_schema,
    load_config,
    parse_config,
    parse_overrides,
    read_mapping,
    set_dotted,
    to_yaml,
)
from megatron_p3o.config.loggers import LoggingSection, MlflowSection, WandbSection
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
    ReferenceSection,
    ReinforceObjective,
    RLOOObjective,
    SAPOObjective,
    SFTObjective,
)
from megatron_p3o.config.precision import Fp8Section, PrecisionSection
from megatron_p3o.config.rollout import (
    Interrupt,
    LaunchSection,
    ParityCheckSection,
    PublishSection,
    RolloutSection,
    SamplingSection,
    TemperatureShiftSection,
    Transport,
)
from megatron_p3o.config.section import Section
from megatron_p3o.config.sections import (
    CheckpointSection,
    DynamicSamplingSection,
    EssSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    RunSection,
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
    "DynamicSamplingSection",
    "EssSection",
    "EvalSection",
    "Fp8Section",
    "GRPOObjective",
    "GSPOObjective",
    "Interrupt",
    "LaunchSection",
    "LayoutSection",
    "LoggingSection",
    "MlflowSection",
    "ModelSection",
    "Objective",
    "ObjectiveBase",
    "OptimizerSection",
    "P3OObjective",
    "P4OObjective",
    "PPODecoupledObjective",
    "ParityCheckSection",
    "PrecisionSection",
    "PublishSection",
    "RLOOObjective",
    "ReferenceSection",
    "ReinforceObjective",
    "RewardSection",
    "RolloutSection",
    "RunConfig",
    "RunSection",
    "SAPOObjective",
    "SFTObjective",
    "SamplingSection",
    "Section",
    "TemperatureShiftSection",
    "TrainSection",
    "Transport",
    "WandbSection",
    "explain",
    "json_schema",
    "load_config",
    "parse_config",
    "parse_overrides",
    "read_mapping",
    "set_dotted",
    "to_yaml",
]
