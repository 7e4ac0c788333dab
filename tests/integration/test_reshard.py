"""`p3o reshard` on a real model and on what a real training run leaves."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT
from tests.integration.commands import p3o, write_run


def reshard(source: Path, destination: Path, *words: str) -> Path:
    result = p3o("reshard", str(source), str(destination), *words, cwd=destination.parent)
    assert result.returncode == 0, result.stderr
    return destination


def test_smollm2_comes_back_bitwise(smollm2_dir: Path, tmp_path: Path) -> None:
    """Through every format: 30 tied layers, 9 heads and 3 groups, so 3 tensor ranks."""
    layout = ("--tp", "3", "--pp", "2", "--chunk-layers", "14,16")
    dist = reshard(smollm2_dir, tmp_path / "dist", "--to", "torch_dist", *layout)
    cut = reshard(dist, tmp_path / "torch", "--to", "torch", "--tp", "3")
    end = reshard(cut, tmp_path / "end", "--to", "hf", "--verify", "--max-shard-size", "200MB")
    before = load_file(smollm2_dir / "model.safetensors")
    after: dict[str, torch.Tensor] = {}
    files = sorted(end.glob("*.safetensors"))
    for path in files:
        after |= load_file(path)
    assert len(files) > 2
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert json.loads((end / name).read_text()) == json.loads((smollm2_dir / name).read_text())
    assert AutoTokenizer.from_pretrained(end).chat_template


def test_a_training_run_is_exported_and_generates(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The exported weights give the log-probs that the run recorded with them."""
    run = write_run(
        tmp_path,
        tiny_model_dir,
        train={"steps": 2},
        layout={"data": 1, "tensor": 2},
        # Decay moves the weights even where no reward tells the samples apart.
        optimizer={"lr": 0.1, "weight_decay": 3.0, "schedule": "constant", "warmup_steps": 0},
    )
    result = p3o("train", str(run), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    # The second step's samples come from the weights after the first.
    exported = reshard(
        tmp_path / "run" / "checkpoints" / "step_1", tmp_path / "hf", "--to", "hf", "--verify"
    )
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    start = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    samples = [sample for sample in map(json.loads, lines) if sample["step"] == 1]
    assert samples
    differences = []
    for sample in samples:
        prompt, response = sample["prompt_ids"], sample["response_ids"]
        recorded = torch.tensor(sample["rollout_logprobs"])
        for one in (model, start):
            with torch.no_grad():
                logits = one(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])
            differences.append((logprobs[:, 0] - recorded).abs().max())
    assert max(differences[0::2]) < 1e-5
    # The weights before the step would not do.
    assert max(differences[1::2]) > 1e-3
    prompt = torch.tensor([samples[0]["prompt_ids"]])
    assert model.generate(prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt.shape[1]


def test_the_command_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    cut = reshard(tiny_model_dir, tmp_path / "torch", "--to", "torch", "--tp", "2")
    seen = p3o("reshard", str(cut), "--inspect", cwd=tmp_path)
    assert seen.returncode == 0, seen.stderr
    assert "format: torch (tp 2, pp 1, vpp 1, ep 1, etp 2, layers 4)" in seen.stdout
    assert re.search(r"^vocabulary: \d+ \+ \d+ rows of padding$", seen.stdout, re.M)
    assert "mlp.linear_fc1.layer_norm_weight" in seen.stdout
    script = [sys.executable, str(ROOT / "tools" / "reshard.py"), str(cut), str(tmp_path / "hf")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*script, "--to", "hf", "--verify"], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "read back and compared" in done.stdout
    for words in ((str(cut), "y"), ("x", "y", "--to", "hf"), (str(cut), "y", "--no"), ()):
        bad = p3o("reshard", *words, cwd=tmp_path)
        assert bad.returncode == 2
        assert "Traceback" not in bad.stderr
