"""The figure of docs/objectives.md: its weights are the formulas', and the tool writes it."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_p3o.config import CISPOObjective, GRPOObjective, ObjectiveBase, P3OObjective
from tools.plot_objectives import score_weights

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("config", "advantage", "weights"),
    [
        (P3OObjective(regularizer="off"), 1.0, [0.2, 0.4, 0.4, 0.4]),
        (P3OObjective(regularizer="off"), -1.0, [0.2, 0.4, 0.4, 0.4]),
        (GRPOObjective(), 1.0, [0.2, 0.9, 0.0, 0.0]),
        (GRPOObjective(), -1.0, [0.0, 0.9, 1.5, 9.0]),
        (CISPOObjective(), 1.0, [0.2, 0.9, 1.5, 5.0]),
    ],
)
def test_weights(config: ObjectiveBase, advantage: float, weights: list[float]) -> None:
    ratios = torch.tensor([0.2, 0.9, 1.5, 9.0], dtype=torch.float64)
    got = score_weights(config, ratios, ess=0.4, advantage=advantage)
    assert got.tolist() == pytest.approx(weights)


def test_the_tool_draws_the_figure(tmp_path: Path) -> None:
    path = tmp_path / "figures" / "objectives.png"
    run = subprocess.run(
        [sys.executable, str(ROOT / "tools/plot_objectives.py"), str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert run.stdout.strip() == str(path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24])[0] == 1440
    assert (ROOT / "docs/figures/objectives.png").exists()
