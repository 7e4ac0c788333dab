"""Real SGLang servers on the CPU, for tests."""

import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import RunConfig, parse_config
from megatron_p3o.rollout.sglang import ServerFlags, managed_servers
from megatron_p3o.trainer.served_model import server_flags
from tests.conftest import ROOT

START_TIMEOUT_S = 120.0


def server_python() -> Path:
    """Of the servers' own environment, which `make test` builds."""
    python = Path(os.environ.get("P3O_SGLANG_VENV", ROOT / ".venv-sglang")) / "bin" / "python"
    assert python.exists(), f"no {python}; make sglang builds it"
    return python


def run_config(model_dir: Path, **sections: dict[str, Any]) -> RunConfig:
    """Of a run on servers that are started for it; `sections` change fields."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": "runs/unused"},
        "model": {"path": str(model_dir)},
        "data": {
            "source": "generator",
            "generator": "arithmetic",
            "chat": False,
            "max_prompt_tokens": 64,
        },
        "train": {"steps": 4, "prompts_per_step": 4, "samples_per_prompt": 4},
        "sampling": {"max_new_tokens": 1900},
        "rollout": {"engine": "sglang", "concurrency": 16},
    }
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    launch = {"replicas": 1, "python": str(server_python()), **tree["rollout"].get("launch", {})}
    tree["rollout"] = {**tree["rollout"], "launch": launch}
    return parse_config(tree)


def flags_of(config: RunConfig, directory: Path, **fields: Any) -> ServerFlags:
    architecture = read_architecture(config.model.path)
    return server_flags(config, architecture, device_type="cpu", directory=directory, **fields)


class Server:
    """One real server, started as the product starts it."""

    def __init__(
        self, model_dir: Path, directory: Path, *, ranks: int = 1, precision: str = "fp32"
    ) -> None:
        config = run_config(
            model_dir,
            rollout={"engine": "sglang", "launch": {"tensor_parallel_size": ranks}},
            precision={"rollout": precision},
        )
        (server,) = managed_servers(flags_of(config, directory)).servers
        assert server.process is not None
        self.url = server.url
        self.process = server.process
        self.process.start()

    def wait(self) -> "Server":
        """Until it answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.exit_status() is None, self.process.log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.3)
        raise AssertionError(f"no server: {self.process.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """End it and its children, as a lost machine would."""
        self.process.kill()

    def generate(self, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        body = {
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 1.0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": True,
            },
            "return_logprob": True,
        }
        request = urllib.request.Request(
            f"{self.url}/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
        return answer


def logprob_gap(server: Server, model_dir: Path, prompt: list[int]) -> float:
    """Greatest difference between a server's log-probs and those of transformers (nats)."""
    answer = server.generate(prompt, 12)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokens = prompt + answer["output_ids"]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    expected = [logprobs[i - 1, tokens[i]].item() for i in range(len(prompt), len(tokens))]
    found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return max(abs(e - f) for e, f in zip(expected, found, strict=True))


def save_llama(directory: Path, seed: int) -> Path:
    """A random fp32 Llama model; the seed tells its weights apart."""
    config = LlamaConfig(
        vocab_size=509,  # padded by the server
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).float().save_pretrained(directory)
    return directory


def save_qwen3(directory: Path, seed: int) -> Path:
    """A random fp32 Qwen3 model that blocks of 128 divide."""
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    Qwen3(config).float().save_pretrained(directory)
    return directory
