"""Real SGLang servers on the CPU, for tests."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

from tests.conftest import ROOT

START_TIMEOUT_S = 120.0


def server_python() -> Path:
    """Of the servers' own environment, which tools/setup_sglang_cpu.sh builds."""
    venv = Path(os.environ.get("P3O_SGLANG_VENV", ROOT / ".venv-sglang"))
    if not (venv / "bin" / "python").exists():
        pytest.skip(f"no SGLang in {venv}; tools/setup_sglang_cpu.sh builds it")
    return venv / "bin" / "python"


class Server:
    """One server process tree."""

    def __init__(self, model_dir: Path, log: Path, *arguments: str, ranks: int = 1) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        words = [
            *(str(server_python()), "-m", "sglang.launch_server", "--model-path", str(model_dir)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--grammar-backend", "none", "--disable-cuda-graph", "--skip-server-warmup"),
            *("--skip-tokenizer-init", "--max-total-tokens", "8192", "--dtype", "float32"),
            *arguments,
        ]
        environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
        environment.pop("PYTHONPATH", None)
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                words,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        self._log = log

    def wait(self) -> "Server":
        """Until it answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.3)
        raise AssertionError(f"the server did not start: {self._log.read_text()[-3000:]}")

    def kill(self) -> None:
        """End it and its children, as a lost machine would."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)

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
