"""Which rank's end is reported when several ranks ended."""

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_p3o.trainer.launch import cause_of


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        # rank: (exit code, second), in the order in which torchrun saw them
        ({0: (1, 10), 1: (-signal.SIGKILL, 10)}, 1),
        ({0: (1, 10), 2: (-signal.SIGTERM, 10), 1: (-signal.SIGSEGV, 11)}, 1),
        ({1: (2, 10), 0: (-signal.SIGTERM, 10), 2: (-signal.SIGTERM, 11)}, 1),
        # One that ignored SIGTERM is killed half a minute later.
        ({2: (1, 10), 1: (-signal.SIGTERM, 11), 0: (-signal.SIGKILL, 40)}, 2),
        ({0: (-signal.SIGTERM, 10), 1: (1, 12)}, 0),
    ],
)
def test_the_rank_that_failed_first(
    ends: dict[int, tuple[int, int]], cause: int, tmp_path: Path
) -> None:
    failures = {}
    for rank, (exitcode, second) in ends.items():
        failures[rank] = ProcessFailure(rank, 1000 + rank, exitcode, str(tmp_path / "none"))
        failures[rank].timestamp = second
    rank, failure = cause_of(ChildFailedError("p3o", failures))
    assert (rank, failure.exitcode) == (cause, ends[cause][0])
