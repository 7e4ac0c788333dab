"""SGLang servers as a rollout engine: processes, requests, weight updates."""

from megatron_p3o.rollout.sglang.client import (
    ExpertLayout,
    GenerateClient,
    GenerateOptions,
    Reply,
)
from megatron_p3o.rollout.sglang.cluster import (
    Cluster,
    ServerSet,
    given_servers,
    managed_servers,
)
from megatron_p3o.rollout.sglang.control import ServerControl, ServerInfo
from megatron_p3o.rollout.sglang.errors import (
    BadReply,
    CallRefused,
    RequestRefused,
    ServerError,
    ServerTimeout,
    ServerUnreachable,
    WrongWeights,
)
from megatron_p3o.rollout.sglang.flags import ServerFlags
from megatron_p3o.rollout.sglang.fleet import Fleet
from megatron_p3o.rollout.sglang.loop_thread import LoopThread
from megatron_p3o.rollout.sglang.process import ManagedProcess
from megatron_p3o.rollout.sglang.sampler import Response, Sampler
from megatron_p3o.rollout.sglang.supervisor import Health, Server, Supervisor
from megatron_p3o.rollout.sglang.transports import (
    BucketTransport,
    DistributedTransport,
    Target,
    TensorTransport,
)
from megatron_p3o.rollout.sglang.update import FailedServer, PublishReport, WeightUpdate

__all__ = [
    "BadReply",
    "BucketTransport",
    "CallRefused",
    "Cluster",
    "DistributedTransport",
    "ExpertLayout",
    "FailedServer",
    "Fleet",
    "GenerateClient",
    "GenerateOptions",
    "Health",
    "LoopThread",
    "ManagedProcess",
    "PublishReport",
    "Reply",
    "RequestRefused",
    "Response",
    "Sampler",
    "Server",
    "ServerControl",
    "ServerError",
    "ServerFlags",
    "ServerInfo",
    "ServerSet",
    "ServerTimeout",
    "ServerUnreachable",
    "Supervisor",
    "Target",
    "TensorTransport",
    "WeightUpdate",
    "WrongWeights",
    "given_servers",
    "managed_servers",
]
