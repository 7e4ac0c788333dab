"""The command lines of SGLang servers and of their router, from the run's configuration.

Servers start with weights that nobody will train against: those of the model directory, or none at
all for FP8 blocks. Their weight version says so until the first publication.
"""

import json
import os
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.config import RunConfig
from megatron_p3o.parent import SECRET_VARIABLE
from megatron_p3o.rollout.sglang.client import UNPUBLISHED

# Of the plugin and the backends that serve without CUDA.
_CPU_WORDS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-cuda-graph", "--skip-server-warmup"),
    "--sleep-on-idle",  # leave the cores to others that share them
)
_CPU_KV_TOKENS_PER_REQUEST_LIMIT = 65536
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp8-block": "bfloat16"}
# A sequence may not fill the context to its last token.
_CONTEXT_SLACK = 8
_RANK_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "GROUP_", "ROLE_", "P3O_")
_RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMP_NUM_THREADS", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"),
)
# Servers and router take their key on the command line alone, where every user of the machine can
# read it, so it is added inside the process. `-c` leaves the module the main one, as `-m` does.
_WITH_KEY = (
    "import os, runpy, sys; module, *words = sys.argv[1:]; "
    f"sys.argv[1:] = [*words, '--api-key', os.environ.pop({SECRET_VARIABLE!r})]; "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A program to run."""

    words: tuple[str, ...]
    environment: dict[str, str]
    """All of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFlags:
    """Command lines for one run's servers on one node."""

    config: RunConfig
    architecture: ModelArchitecture
    device_type: str
    """cuda or cpu"""
    directory: Path
    """For files that servers read at their start."""
    model_config: Mapping[str, Any] | None = None
    """config.json of the model in the numbers that it is served in, where these are not those of
    the model directory; the weights then come with the first publication."""
    first_gpu: int = 0
    """Of this node, for servers."""
    first_step: int = 0
    """With the run's seed it makes a resumed run's samples other ones."""
    api_key: str | None = None

    def server(self, replica: int, port: int, num_starts: int) -> Command:
        """
        Args:
            replica: 0-based number of the server on this node.
            port: that it listens on.
            num_starts: of this server before this one.
        """
        config, launch = self.config, self.config.rollout.launch
        size = launch.tensor_parallel_size
        model_dir, load_words = self._model()
        words = [
            *self._module("sglang.launch_server"),
            *("--model-path", model_dir, *load_words),
            *("--host", launch.host, "--port", str(port)),
            *("--tensor-parallel-size", str(size), "--dtype", self._dtype()),
            *("--context-length", str(self._context_length())),
            *("--random-seed", str(self._seed(replica, num_starts))),
            *("--weight-version", UNPUBLISHED, "--skip-tokenizer-init"),
        ]
        if config.precision.rollout_kv_cache != "auto":
            words += ["--kv-cache-dtype", config.precision.rollout_kv_cache]
        if config.rollout.interrupt == "in_place" and config.rollout.max_staleness:
            # Entries of old weights would be reused for later requests with the same prompt.
            words.append("--disable-radix-cache")
        if config.model.router_replay:
            words.append("--enable-return-routed-experts")
        environment = self._environment()
        if self.device_type == "cpu":
            cores = range(replica * size, (replica + 1) * size)
            bound = "|".join(str(core % (os.cpu_count() or 1)) for core in cores)
            environment |= {
                "SGLANG_USE_CPU_ENGINE": "1",
                "OMP_NUM_THREADS": "1",
                "SGLANG_CPU_OMP_THREADS_BIND": bound,
            }
            words += [*_CPU_WORDS, "--max-total-tokens", str(self._kv_tokens())]
        else:
            words += ["--base-gpu-id", str(self.first_gpu + replica * size)]
        return Command(words=(*words, *launch.args), environment=environment)

    def router(self, port: int, metrics_port: int, server_urls: tuple[str, ...]) -> Command:
        """A router in front of this node's servers; it also wants a port for its own metrics."""
        words = [
            *self._module("sglang_router.launch_router"),
            *("--host", self.config.rollout.launch.host, "--port", str(port)),
            *("--worker-urls", *server_urls, "--policy", "cache_aware"),
            *("--log-level", "warn"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            # Retries, and what counts as a failure, are the client's affair.
            "--disable-retries",
            "--disable-circuit-breaker",
        ]
        return Command(words=tuple(words), environment=self._environment())

    def _module(self, name: str) -> tuple[str, ...]:
        python = self.config.rollout.launch.python or sys.executable
        return (python, "-m", name) if self.api_key is None else (python, "-c", _WITH_KEY, name)

    def _environment(self) -> dict[str, str]:
        key = {} if self.api_key is None else {SECRET_VARIABLE: self.api_key}
        return own_environment() | key

    def _dtype(self) -> str:
        # bf16 arithmetic is slow on CPUs, and FP8 is emulated in fp32 there.
        is_fp8_on_cpu = self.device_type == "cpu" and self.config.precision.rollout == "fp8-block"
        return "float32" if is_fp8_on_cpu else _DTYPES[self.config.precision.rollout]

    def _context_length(self) -> int:
        """What the longest sample needs, not what the model could do."""
        config = self.config
        needed = config.data.max_prompt_tokens + config.sampling.max_new_tokens + _CONTEXT_SLACK
        if self.architecture.rope_scaling is not None:  # servers stretch positions by their rules
            return needed
        return min(needed, self.architecture.max_position_embeddings)

    def _kv_tokens(self) -> int:
        """A CPU server would otherwise claim a share of the machine's memory."""
        wanted = self.config.rollout.concurrency * self._context_length()
        return max(self._context_length(), min(wanted, _CPU_KV_TOKENS_PER_REQUEST_LIMIT))

    def _seed(self, replica: int, num_starts: int) -> int:
        """Servers of one seed would give the samples of a group twice."""
        text = f"{self.config.run.seed}/{self.first_step}/{replica}/{num_starts}"
        return zlib.crc32(text.encode()) % 2**31

    def _model(self) -> tuple[str, tuple[str, ...]]:
        if self.model_config is None:
            return self.config.model.path, ()
        directory = self.directory / "model"
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.model_config, indent=2)
        (directory / "config.json").write_text(text, encoding="utf-8")
        return str(directory), ("--load-format", "dummy")


def own_environment() -> dict[str, str]:
    """This process's, without what makes a process one of torchrun's ranks, and without its
    Python packages: a server that found TORCHELASTIC_USE_AGENT_STORE would wait for a store of
    the trainer's for ever."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_RANK_PREFIXES) and name not in _RANK_VARIABLES
    }
