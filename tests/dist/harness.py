"""Run a function on several gloo ranks, with a hard timeout, and get every rank's result."""

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch.distributed import TCPStore

_TIMEOUT_S = 240.0
_STORE_PORTS = "TEST_STORE_PORTS"


def spawn(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    num_rendezvous: int = 1,
    timeout_s: float = _TIMEOUT_S,
) -> list[Any]:
    """`fn(*args)` on `world_size` fresh processes with torchrun's environment.

    The parent hosts the rendezvous stores, as torchrun's agent does, so there is no race for ports.

    Args:
        fn: a module-level function; RANK, WORLD_SIZE, MASTER_ADDR and so on are set around it.
        world_size: processes to start.
        args: picklable arguments.
        num_rendezvous: how often `fn` may join process groups; see `next_rendezvous`.
        timeout_s: after this all ranks are killed and the test fails.

    Returns:
        Every rank's return value, in rank order; it must be picklable.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        stores = [
            TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for _ in range(num_rendezvous)
        ]
        ports = ",".join(str(store.port) for store in stores)
        processes = [
            context.Process(
                target=_rank_main, args=(fn, rank, world_size, ports, directory, args), daemon=False
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, Path(directory), timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [
            pickle.loads((Path(directory) / f"result_{rank}").read_bytes())
            for rank in range(world_size)
        ]


def _wait(processes: list[Any], directory: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes):
        failed = [rank for rank, p in enumerate(processes) if p.exitcode not in (None, 0)]
        assert not failed, _failure(directory, failed)
        assert time.monotonic() < deadline, f"no result after {timeout_s} s"
        time.sleep(0.05)
    failed = [rank for rank, p in enumerate(processes) if p.exitcode != 0]
    assert not failed, _failure(directory, failed)


def _failure(directory: Path, failed: list[int]) -> str:
    time.sleep(0.3)  # let slower ranks write theirs
    texts = sorted(directory.glob("error_*"), key=lambda path: path.stat().st_mtime)
    details = texts[0].read_text() if texts else "no traceback was written"
    return f"ranks {failed} failed; first error:\n{details}"


def _rank_main(
    fn: Callable[..., Any], rank: int, world_size: int, ports: str, directory: str, args: Any
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        _STORE_PORTS: ports,
        "OMP_NUM_THREADS": "1",
    }
    next_rendezvous()
    torch.set_num_threads(1)
    try:
        result = fn(*args)
    except BaseException:
        (Path(directory) / f"error_{rank}").write_text(traceback.format_exc())
        os._exit(1)
    (Path(directory) / f"result_{rank}").write_bytes(pickle.dumps(result))


def next_rendezvous() -> None:
    """Let this rank's next `init_process_group` use a store that no earlier one has used."""
    first, _, rest = os.environ[_STORE_PORTS].partition(",")
    os.environ |= {"MASTER_PORT": first, _STORE_PORTS: rest}
