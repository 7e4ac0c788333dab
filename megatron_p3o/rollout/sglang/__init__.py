"""SGLang servers as a rollout engine: control calls and weight updates."""

from megatron_p3o.rollout.sglang.control import (
    CallRefused,
    ControlError,
    ServerControl,
    ServerInfo,
    ServerTimeout,
    ServerUnreachable,
)
from megatron_p3o.rollout.sglang.transports import (
    BucketTransport,
    DistributedTransport,
    Target,
    TensorTransport,
)
from megatron_p3o.rollout.sglang.update import (
    FailedServer,
    InterruptMode,
    PublishReport,
    WeightUpdate,
)

__all__ = [
    "BucketTransport",
    "CallRefused",
    "ControlError",
    "DistributedTransport",
    "FailedServer",
    "InterruptMode",
    "PublishReport",
    "ServerControl",
    "ServerInfo",
    "ServerTimeout",
    "ServerUnreachable",
    "Target",
    "TensorTransport",
    "WeightUpdate",
]
