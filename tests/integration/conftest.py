"""Real servers, started once for the tests that leave them alive."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.sglang_servers import Server, save_llama


@pytest.fixture(scope="session")
def llama_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two random models of one shape."""
    root = tmp_path_factory.mktemp("llama")
    return [save_llama(root / str(seed), seed) for seed in range(2)]


@pytest.fixture(scope="session")
def servers(
    llama_models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    """Two servers with weights of nobody's: a test publishes first."""
    started = [
        Server(llama_models[0], tmp_path_factory.mktemp(f"server{number}")) for number in range(2)
    ]
    try:
        yield [server.wait() for server in started]
    finally:
        for server in started:
            server.process.stop()
