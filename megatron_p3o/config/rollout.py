"""The sections that say who generates, from which servers, and how weights get there."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_p3o.config.section import Section

Transport = Literal["tensor", "distributed", "disk"]
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
Interrupt = Literal["wait", "in_place", "retract", "abort"]


class LaunchSection(Section):
    """SGLang servers that are started and kept alive: by `p3o train` on the node of rank 0, or by
    `p3o serve` on any node."""

    replicas: NonNegativeInt = 0
    """Servers to start; 0 starts none."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs of each server; on a CPU, cores."""
    python: str | None = None
    """Interpreter of SGLang's own environment; None: that of this process."""
    args: tuple[str, ...] = ()
    """More words for `sglang.launch_server`, after those that follow from the configuration."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address that servers and router listen on. Anything but a loopback address lets others on
    the network in; set an API key then."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first server; the others follow, then the router's and that of its metrics. 0:
    free ports."""
    first_gpu: NonNegativeInt | None = None
    """First GPU of the node for servers; None: after those of this node's trainer ranks."""
    router: bool = False
    """Also start sglang-router and generate through it; else the client balances by itself."""
    start_timeout_s: PositiveFloat = 1800.0
    """Until a started server answers: it loads the model and captures CUDA graphs."""
    max_restarts: NonNegativeInt = 10
    """Restarts of one server before it is given up."""

    @property
    def is_open(self) -> bool:
        """Whether others than this host's users can reach the servers."""
        return self.replicas > 0 and self.host not in _LOOPBACK


class PublishSection(Section):
    """The trainer's weights to the servers, after every rollout batch."""

    transport: Transport = "distributed"
    """`tensor`: servers on the trainer's host read its memory (CUDA IPC; bytes on a CPU).
    `distributed`: a broadcast to each server (NCCL; gloo on a CPU). `disk`: safetensors in
    `directory`, which the servers load."""
    directory: str | None = None
    """For `disk`: where versions are written, at the same path on the servers' hosts. None: in
    run.dir."""
    bucket_mb: PositiveInt = 512
    """Megabytes (2^20 bytes) sent at once by `tensor` and `distributed`."""
    verify_every: NonNegativeInt = 10
    """Compare checksums of the servers' parameters at the first publication and at every so many
    after it; 0: never. Against the trainer's weights where their layout in the server is known,
    else among the servers."""
    timeout_s: PositiveFloat = 600.0
    """Deadline of one control call, bucket or load; a server that is slower has failed."""


class ParityCheckSection(Section):
    """Before the first step: the servers' log-probs against the trainer's, on the same tokens and
    weights."""

    samples_per_server: NonNegativeInt = 4
    """0 turns the check off."""
    max_new_tokens: PositiveInt = 32
    max_mean_gap: PositiveFloat | None = None
    """Greatest mean absolute difference (nats) at which training starts; None: 1e-4 when trainer
    and rollout are fp32, else 0.05."""


class TemperatureShiftSection(Section):
    """A fault on purpose, for studies: samples drawn at another temperature than
    `sampling.temperature`, which the trainer assumes."""

    sampled_at: PositiveFloat
    """The temperature that samples are drawn at."""
    logprobs: Literal["sampled", "assumed"] = "sampled"
    """Which log-probs the trainer is given: those of the distribution that was sampled from, whose
    ratios correct the fault; or those at `sampling.temperature`, whose ratios are blind to it."""


class RolloutSection(Section):
    engine: Literal["embedded", "sglang", "replay", "answers"] = "embedded"
    """`embedded` generates in the trainer's processes, `sglang` on servers, `replay` reads a
    recording; `answers` takes the data's own, for objective sft."""
    replay_path: str | None = None
    """A recorded samples.jsonl, for engine replay."""
    batch_size: PositiveInt = 64
    """Sequences that the embedded engine decodes together."""
    max_staleness: NonNegativeInt = 0
    """Rollout batches that generation may be ahead of training: 0 is synchronous, 1 is one step
    off, more is fully asynchronous. A sample's weights are at most this many publications old
    when it is trained on. The embedded engine takes turns with the trainer and is always this far
    ahead, so that studies of staleness can be repeated exactly."""
    interrupt: Interrupt = "retract"
    """What a publication does to running generations: `wait` lets them end, `retract` computes
    their KV cache again and goes on with the new weights, `in_place` goes on with the KV cache of
    the old weights, `abort` ends them and goes on from the tokens they have, on any server."""
    servers: tuple[str, ...] = ()
    """URLs of running SGLang servers; `launch` then says only what `p3o serve` starts."""
    router: str | None = None
    """URL of an sglang-router in front of `servers`, to generate through; weights always go to
    each server."""
    launch: LaunchSection = LaunchSection()
    concurrency: PositiveInt = 128
    """Samples in flight on each server."""
    request_timeout_s: PositiveFloat = 1800.0
    """Deadline of one sample's generation on one server; it is then tried again on another."""
    max_attempts: PositiveInt = 8
    """Failed tries of one sample before the run stops. Waiting for a server is none."""
    probe_every_s: PositiveFloat = 5.0
    """Seconds between two looks at each server's health."""
    probe_timeout_s: PositiveFloat = 30.0
    """A server that gives no sign of life for this long is taken out; if it was started by us, it
    is restarted."""
    outage_timeout_s: PositiveFloat = 600.0
    """How long the run waits while no server can serve, before it stops."""
    api_key_env: str | None = None
    """Environment variable that holds the servers' API key."""
    api_key_file: str | None = None
    """File that holds the servers' API key."""
    allow_untested_version: bool = False
    """Use servers of a version that this client was not tested with."""
    parity_check: ParityCheckSection = ParityCheckSection()
    publish: PublishSection = PublishSection()
    temperature_shift: TemperatureShiftSection | None = None
    """For studies, with engine embedded."""

    @model_validator(mode="after")
    def _replay(self) -> "RolloutSection":
        if (self.engine == "replay") != (self.replay_path is not None):
            raise ValueError(
                f"rollout.replay_path={self.replay_path!r} goes with rollout.engine=replay and "
                f"only with it (got {self.engine}); set both or neither"
            )
        return self

    @model_validator(mode="after")
    def _servers(self) -> "RolloutSection":
        if self.engine in ("replay", "answers") and self.max_staleness:
            raise ValueError(
                f"rollout.max_staleness={self.max_staleness} needs an engine that generates (got "
                f"{self.engine}); set it to 0"
            )
        if self.engine != "embedded" and self.temperature_shift is not None:
            raise ValueError(
                "rollout.temperature_shift is of rollout.engine=embedded (got "
                f"{self.engine}); remove it or change the engine"
            )
        if self.engine == "sglang" and not self.servers and not self.launch.replicas:
            raise ValueError(
                "rollout.engine=sglang has no servers; name running ones in rollout.servers, or "
                "set rollout.launch.replicas to start some"
            )
        return self

    @model_validator(mode="after")
    def _urls(self) -> "RolloutSection":
        named = [("rollout.servers", url) for url in self.servers]
        if self.router is not None:
            named.append(("rollout.router", self.router))
            if not self.servers:
                raise ValueError(
                    f"rollout.router={self.router!r} stands in front of rollout.servers, and there "
                    "are none; name them, or use rollout.launch.router for servers to be started"
                )
        for field, url in named:
            if _problem := _url_problem(url):
                raise ValueError(
                    f"{field}={url!r} {_problem}; write it as http://host:port, with the API key "
                    "in rollout.api_key_env or rollout.api_key_file"
                )
        if len({url.rstrip("/") for url in self.servers}) < len(self.servers):
            raise ValueError(
                f"rollout.servers={list(self.servers)} names a server twice; name each once"
            )
        return self

    @model_validator(mode="after")
    def _api_key(self) -> "RolloutSection":
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError(
                f"rollout.api_key_env={self.api_key_env!r} and rollout.api_key_file="
                f"{self.api_key_file!r} both say where the API key is; keep one"
            )
        return self

    @property
    def has_api_key(self) -> bool:
        return self.api_key_env is not None or self.api_key_file is not None


class SamplingSection(Section):
    temperature: PositiveFloat = 1.0
    """Logits are divided by it, in the rollout and in the trainer's log-probs alike."""
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: PositiveInt = 128

    @model_validator(mode="after")
    def _untruncated(self) -> "SamplingSection":
        if self.top_p != 1.0 or self.top_k != -1:
            raise ValueError(
                f"sampling.top_p={self.top_p}, sampling.top_k={self.top_k}: training needs top_p=1 "
                "and top_k=-1, since a truncated distribution makes every policy ratio wrong; "
                "remove them"
            )
        return self


def _url_problem(url: str) -> str | None:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        return "has no valid port"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "is not an http or https URL"
    if port is None:
        return "names no port"
    if parts.username is not None or parts.password is not None or parts.query:
        return "carries more than a host and a port"
    if parts.path not in ("", "/"):
        return "has a path"
    return None
