"""A plan of a run: everything that `p3o plan` says, as numbers."""

from dataclasses import asdict, dataclass
from typing import Any

from megatron_p3o.architecture import ModelArchitecture, read_architecture
from megatron_p3o.config import RunConfig
from megatron_p3o.errors import InputError, UserError
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.plan.advice import Situation, warnings
from megatron_p3o.plan.hardware import Gpu, find_gpu
from megatron_p3o.plan.memory import StageMemory, trainer_memory
from megatron_p3o.plan.options import PlanOptions, longest_lengths
from megatron_p3o.plan.parameters import (
    ModelParameters,
    StageParameters,
    count_model,
    count_stages,
)
from megatron_p3o.plan.serving import Servers, plan_servers
from megatron_p3o.plan.sync import WeightSync, plan_sync
from megatron_p3o.plan.timing import StepCost, plan_step
from megatron_p3o.splitting import check_layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Bytes, FLOPs and seconds are plain numbers in those units."""

    family: str
    layout: ParallelLayout
    options: PlanOptions
    gpu: Gpu
    memory_bytes: float
    """Of a GPU."""
    prompt_tokens: int
    response_tokens: int
    parameters: ModelParameters
    stages: list[StageParameters]
    memory: list[StageMemory]
    servers: Servers | None
    sync: WeightSync
    cost: StepCost
    warnings: list[str]

    @property
    def worst_stage(self) -> StageMemory:
        return max(self.memory, key=lambda stage: stage.total)

    @property
    def largest_stage(self) -> int:
        """With the most parameters on a rank."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)

    def to_json(self) -> dict[str, Any]:
        """The same numbers, with those that follow from others."""
        tree = asdict(self)
        for stage, memory in zip(tree["memory"], self.memory, strict=True):
            stage |= {
                "peak_phase": memory.peak_phase,
                "allowance": memory.allowance,
                "total": memory.total,
            }
        for stage, parameters in zip(tree["stages"], self.stages, strict=True):
            stage["total"] = parameters.total
        tree["worst_stage"] = self.worst_stage.stage
        tree["largest_stage"] = self.largest_stage
        tree["layout"]["world_size"] = self.layout.world_size
        tree["sync"]["seconds"] = self.sync.seconds
        return tree


def make_plan(config: RunConfig, options: PlanOptions) -> Plan:
    """Read the model's config.json and compute everything.

    Raises:
        UserError: the model cannot be read, the layout does not fit it or the cluster, or an option
            is out of range.
    """
    architecture = read_architecture(config.model.path, with_weights=False)
    check_layout(architecture, config.layout)
    reference = _reference(config, architecture)
    layout, gpu = options.layout(config), find_gpu(options.gpu)
    memory_bytes = gpu.memory_bytes
    if options.gpu_memory_gb is not None:
        memory_bytes = options.gpu_memory_gb * 1e9
    lengths = options.expected(config)
    servers = plan_servers(config, architecture, options, memory_bytes)
    sync = plan_sync(config, architecture, layout, servers, gpu, options)
    cost = plan_step(config, architecture, reference, layout, servers, sync, gpu, options)
    memory = trainer_memory(config, architecture, layout, longest_lengths(config), reference)
    situation = Situation(
        config=config,
        architecture=architecture,
        layout=layout,
        options=options,
        gpu=gpu,
        memory_bytes=memory_bytes,
        memory=max(memory, key=lambda stage: stage.total),
        servers=servers,
        cost=cost,
    )
    return Plan(
        family=architecture.family,
        layout=layout,
        options=options,
        gpu=gpu,
        memory_bytes=memory_bytes,
        prompt_tokens=lengths.prompt,
        response_tokens=lengths.response,
        parameters=count_model(architecture),
        stages=count_stages(architecture, config.layout),
        memory=memory,
        servers=servers,
        sync=sync,
        cost=cost,
        warnings=warnings(situation),
    )


def _reference(config: RunConfig, policy: ModelArchitecture) -> ModelArchitecture | None:
    if not config.reference.kl_coefficient:
        return None
    if config.reference.model_path is None:
        return policy
    try:
        reference = read_architecture(config.reference_path, with_weights=False)
        check_layout(reference, config.layout)
    except UserError as error:
        raise InputError(f"reference.model_path={config.reference_path!r}: {error}") from error
    return reference
