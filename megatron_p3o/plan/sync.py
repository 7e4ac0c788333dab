"""Bytes that carry new weights to the rollout engine, and their time.

Each server gets the whole model. In bf16 a weight has 2 bytes a number. In FP8 blocks the matrices
of linear layers have 1, and 4 bytes for the scale of each 128 x 128 block of each Hugging Face
tensor (`megatron_p3o.weights.quantize`); the others stay as the trainer holds them, the biases
that choose experts in fp32.

    gather   the model in the trainer's type passes every rank once, over NVLink within one node,
             over its network adapter beyond; 0 where a rank holds the whole model
    send     rank 0 sends one copy to each server (`rollout.sglang.transports`): servers x bytes
             over one network adapter, or over NVLink with transport=tensor. transport=disk, whose
             servers read one copy from files, is taken to be as fast as the network
"""

from dataclasses import dataclass, replace

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.plan.hardware import Gpu
from megatron_p3o.plan.options import PlanOptions
from megatron_p3o.plan.parameters import model_weights
from megatron_p3o.plan.precision import Precision
from megatron_p3o.plan.serving import Servers

COMPARED = ("bf16", "fp8-block")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSync:
    """One publication."""

    num_servers: int
    bytes_per_server: int
    """In precision.rollout."""
    total_bytes: int
    by_precision: dict[str, int]
    """Bytes a server, for comparison."""
    gather_s: float
    send_s: float

    @property
    def seconds(self) -> float:
        return self.gather_s + self.send_s


def served_model_bytes(architecture: ModelArchitecture, precision: Precision) -> int:
    return sum(map(precision.served_bytes, model_weights(architecture)))


def plan_sync(
    config: RunConfig,
    architecture: ModelArchitecture,
    layout: ParallelLayout,
    servers: Servers | None,
    gpu: Gpu,
    options: PlanOptions,
) -> WeightSync:
    """Without servers nothing is sent; the embedded engine copies what is gathered."""
    precision = Precision.of(config.precision)
    by_precision = {
        name: served_model_bytes(architecture, replace(precision, rollout=name))
        for name in COMPARED
    }
    num_servers = 0 if servers is None else servers.count
    per_server = served_model_bytes(architecture, precision) if num_servers else 0
    link = gpu.network_bytes_s if layout.world_size > options.gpus_per_node else gpu.nvlink_bytes_s
    is_local = config.rollout.publish.transport == "tensor"
    send_link = gpu.nvlink_bytes_s if is_local else gpu.network_bytes_s
    held = precision.trainer_bytes * sum(w.num_elements for w in model_weights(architecture))
    is_cut = layout.tensor * layout.pipeline * layout.expert * layout.expert_tensor > 1
    is_read = config.rollout.engine != "replay"
    return WeightSync(
        num_servers=num_servers,
        bytes_per_server=per_server,
        total_bytes=num_servers * per_server,
        by_precision=by_precision,
        gather_s=held / (link * options.nbu) if is_cut and is_read else 0.0,
        send_s=num_servers * per_server / (send_link * options.nbu),
    )
