"""The examples for clusters: layouts fit their models, scripts say the right words."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import load_config
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.splitting import check_layout

ROOT = Path(__file__).parents[2]
QWEN3: dict[str, Any] = {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 151643,
}
MODELS: dict[str, dict[str, Any]] = {
    "h100_qwen3_8b_fp8": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **QWEN3},
    "h100_qwen3_30b_a3b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **QWEN3,
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
NODES = {"h100_qwen3_8b_fp8": (4, 4), "h100_qwen3_30b_a3b": (8, 4)}


@pytest.mark.parametrize("example", MODELS)
def test_the_layout_fits_the_model_and_the_nodes(example: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[example]))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    config = load_config(ROOT / "examples" / example / "run.yaml")
    architecture = read_architecture(tmp_path)
    check_layout(architecture, config.layout)
    trainers, _ = NODES[example]
    layout = ParallelLayout.for_world(config.layout, trainers * 8)
    assert layout.data * config.layout.model_parallel_size == trainers * 8
    launch = config.rollout.launch
    assert launch.replicas * launch.tensor_parallel_size == 8
    assert architecture.num_key_value_heads % launch.tensor_parallel_size == 0
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    assert longest <= architecture.max_position_embeddings


# Notes its words; training ends when serving has noted its own, as the script then ends serving.
SRUN = """
kind=serve; case "$*" in *torchrun*) kind=train; esac
printf '%s\\n' "$P3O_API_KEY" "$@" > "$STUB_OUT/.$kind"
mv "$STUB_OUT/.$kind" "$STUB_OUT/$kind"
until [ -e "$STUB_OUT/serve" ]; do sleep 0.05; done
"""


@pytest.mark.parametrize("example", MODELS)
@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_slurm_script_starts_servers_and_trainers(
    example: str, is_resumed: bool, tmp_path: Path
) -> None:
    """With stand-ins for Slurm's commands, which note the words that they are given."""
    trainers, servers = NODES[example]
    nodes = [f"gpu{number:02}" for number in range(trainers + servers)]
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    stubs = {
        "scontrol": f"printf '%s\\n' {' '.join(nodes)}",
        "srun": SRUN,
        "openssl": "echo made-up-key",
    }
    for name, body in stubs.items():
        (bin_dir / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (bin_dir / name).chmod(0o755)
    out, run_dir = tmp_path / "out", tmp_path / "run"
    out.mkdir()
    if is_resumed:
        (run_dir / "checkpoints").mkdir(parents=True)
        (run_dir / "checkpoints" / "latest").write_text("step_20")
    environment = {
        **os.environ,
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "STUB_OUT": str(out),
        "RUN_DIR": str(run_dir),
        "SLURM_JOB_NODELIST": "gpu[00-11]",
        "SLURM_JOB_ID": "77",
    }
    subprocess.run(
        ["bash", str(ROOT / "examples" / example / "slurm.sh"), "--run.seed", "5"],
        env=environment,
        check=True,
        timeout=30,
    )
    serve, train = ((out / kind).read_text().splitlines() for kind in ("serve", "train"))
    assert serve[0] == train[0] == "made-up-key"
    assert serve[1:4] == [
        f"--nodes={servers}",
        f"--ntasks={servers}",
        f"--nodelist={','.join(nodes[trainers:])}",
    ]
    assert train[1:4] == [
        f"--nodes={trainers}",
        f"--ntasks={trainers}",
        f"--nodelist={','.join(nodes[:trainers])}",
    ]
    for call in (serve, train):
        assert call[-2:] == ["--run.seed", "5"]
        assert f"examples/{example}/run.yaml" in call
        assert call[call.index("--run.dir") + 1] == str(run_dir)
    assert ("--resume" in train) == is_resumed
    assert train[train.index("--rdzv-endpoint") + 1] == "gpu00:29500"
    urls = train[train.index("--rollout.servers") + 1].strip("[]").split(",")
    replicas = load_config(ROOT / "examples" / example / "run.yaml").rollout.launch.replicas
    assert urls == [
        f"http://{node}:{30000 + number}" for node in nodes[trainers:] for number in range(replicas)
    ]
    # What they say is a configuration that loads.
    words = train[train.index("--run.dir") :]
    config = load_config(ROOT / "examples" / example / "run.yaml", words)
    assert list(config.rollout.servers) == urls
