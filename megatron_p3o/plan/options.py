"""What a plan assumes beside the run's configuration."""

from dataclasses import dataclass

from megatron_p3o.config import RunConfig
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.plan.batch import Lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The cluster, the lengths that are expected, and how much of a peak is reached."""

    nodes: int | None = None
    """Of trainers; None: as many as layout.data takes, or one copy of the model, at least a node's
    GPUs."""
    server_nodes: int = 1
    """Each starts rollout.launch.replicas servers; not used where rollout.servers names them."""
    gpus_per_node: int = 8
    gpu: str = "h100"
    gpu_memory_gb: float | None = None
    """10^9 bytes; None: the data sheet's."""
    mfu: float = 0.35
    """Share of the peak FLOP/s in forward and backward passes."""
    mbu: float = 0.5
    """Share of the peak memory bandwidth while decoding."""
    nbu: float = 0.7
    """Share of a link's bandwidth while weights are sent."""
    prompt_tokens: int | None = None
    """Mean of a prompt; None: data.max_prompt_tokens."""
    response_tokens: int | None = None
    """Mean of a response; None: sampling.max_new_tokens."""

    def __post_init__(self) -> None:
        counts = ("nodes", "server_nodes", "gpus_per_node", "prompt_tokens", "response_tokens")
        for field in counts:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigurationError(f"{_flag(field)}={value} must be >= 1; raise it")
        if self.gpu_memory_gb is not None and not self.gpu_memory_gb > 0:
            raise ConfigurationError(
                f"--gpu-memory-gb={self.gpu_memory_gb} must be > 0; give the GPU's memory in GB"
            )
        for field in ("mfu", "mbu", "nbu"):
            value = getattr(self, field)
            if not 0 < value <= 1:
                raise ConfigurationError(
                    f"{_flag(field)}={value} must be in (0, 1], a share of the peak; 0.35 is usual"
                )

    def expected(self, config: RunConfig) -> Lengths:
        """Mean lengths.

        Raises:
            ConfigurationError: they exceed what can be sampled.
        """
        longest = longest_lengths(config)
        for field, limit, rule in (
            ("prompt_tokens", longest.prompt, "data.max_prompt_tokens"),
            ("response_tokens", longest.response, "sampling.max_new_tokens"),
        ):
            value = getattr(self, field)
            if value is not None and value > limit:
                raise ConfigurationError(
                    f"{_flag(field)}={value} must be <= {rule}={limit}; lower it or raise {rule}"
                )
        return Lengths(
            prompt=self.prompt_tokens or longest.prompt,
            response=self.response_tokens or longest.response,
        )

    def layout(self, config: RunConfig) -> ParallelLayout:
        """The layout that the trainers form.

        Raises:
            ConfigurationError: the ranks do not form it.
        """
        section = config.layout
        if self.nodes is not None:
            world_size = self.nodes * self.gpus_per_node
        elif section.data is not None:
            world_size = section.model_parallel_size * section.data
        else:
            world_size = max(section.model_parallel_size, self.gpus_per_node)
        return ParallelLayout.for_world(section, world_size)


def longest_lengths(config: RunConfig) -> Lengths:
    """Of the longest sequence that can be sampled; a recording is taken to be as long."""
    return Lengths(prompt=config.data.max_prompt_tokens, response=config.sampling.max_new_tokens)


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"
