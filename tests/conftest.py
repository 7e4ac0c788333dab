"""What all tests share: determinism, markers by directory, models made once per session."""

import os

# Before torch and transformers are imported, here and in the processes that tests start.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tools.make_tiny_model import make_tiny_model

ROOT = Path(__file__).parents[1]
_MARKERS = ("dist", "integration", "gpu")

torch.set_num_threads(1)
# No deadlines: the machine may be busy. The same examples every time: a red suite stays red.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        directory = item.path.relative_to(ROOT / "tests").parts[0]
        if directory in _MARKERS:
            item.add_marker(directory)
        if directory == "gpu" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random Qwen3-style model of examples/tiny."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct, prepared when it is not there."""
    directory = ROOT / "models" / "SmolLM2-135M-Instruct"
    if not directory.exists():
        tool = ROOT / "tools" / "prepare_smollm2.py"
        subprocess.run([sys.executable, str(tool), str(directory)], check=True)
    return directory
