"""Start a run's ranks on this node through torchrun's engine, or be one of them."""

import errno
import logging
import os
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from types import TracebackType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_p3o.config import RunConfig
from megatron_p3o.errors import RunError, UserError
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.parent import end_with_parent
from megatron_p3o.preflight import check_run
from megatron_p3o.run_dir import RunDir
from megatron_p3o.trainer.report import is_finished, report

# Names the file by which the first failing rank claims the right to print its message.
_FAILURE_FILE = "P3O_FAILURE_FILE"
# While running, only a run dir is written to.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def launch_ranks(config: RunConfig, *, resume: bool) -> None:
    """Check the inputs, start one process per rank of the layout, wait for them.

    Every rank runs this process's own command line again, with torchrun's environment.

    Raises:
        UserError: bad input; nothing was started or written.
        SystemExit: a rank failed; the code is the rank's (2 for bad input, else 1).
    """
    inputs = check_run(config, resume=resume)
    layout = ParallelLayout.for_world(config.layout, _local_world_size(config))
    if is_finished(config, inputs):
        print(f"run.dir={config.run.dir!r} has finished all {config.train.steps} steps")
        report(config)
        return
    with tempfile.TemporaryDirectory(prefix="p3o-") as directory:
        threads = config.run.num_threads_per_rank or max(
            1, (os.cpu_count() or 1) // layout.world_size
        )
        os.environ |= {
            "OMP_NUM_THREADS": str(threads),
            _FAILURE_FILE: str(Path(directory) / "failure"),
        }
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=layout.world_size,
            run_id=Path(config.run.dir).name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.2,
        )
        # What failed is said below, once.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        try:
            elastic_launch(launch, sys.executable)("-m", "megatron_p3o.cli", *sys.argv[1:])
        except ChildFailedError as error:
            rank, failure = cause_of(error)
            if failure.exitcode < 0:
                name = signal.Signals(-failure.exitcode).name
                print(
                    f"p3o: rank {rank} was ended by {name}; {_what_is_left(config)}",
                    file=sys.stderr,
                )
            sys.exit(2 if failure.exitcode == 2 else 1)
        except SignalException as error:
            sys.exit(128 + error.sigval)


def cause_of(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that failed first, with how it ended.

    Of ranks that were found dead together (torchrun counts whole seconds), one that a signal
    ended is the cause: the others lost their peer. SIGTERM is what torchrun ends the rest with.
    """
    first = error.get_first_failure()
    for rank, failure in sorted(error.failures.items()):
        together = failure.timestamp <= first[1].timestamp + 1
        if together and failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return rank, failure
    return first


def _what_is_left(config: RunConfig) -> str:
    if (RunDir(Path(config.run.dir)).checkpoints / "latest").exists():
        return "the last checkpoint is valid, continue with --resume"
    return f"no checkpoint was complete yet, remove run.dir={config.run.dir!r} and start again"


def run_as_rank(config: RunConfig, *, resume: bool) -> None:
    """Train as one of torchrun's ranks.

    Raises:
        SystemExit: 2 for bad input, 1 for a failure while running. Only the rank that failed
            first prints: the others fail because it left.
    """
    # Megatron and torch warn, on every rank, of optional packages and of each other's renamings.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    from megatron_p3o.trainer.worker import run_rank

    if _FAILURE_FILE in os.environ:
        # Killed outright, the launcher could not end its ranks.
        end_with_parent(os.getppid())
    with _LeaveOnFailure(config):
        run_rank(config, resume=resume)


class _LeaveOnFailure:
    """Ends the process when its block fails, whatever the failure.

    Without Python's clean-up: destructors of process groups would wait for ranks that are gone.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        if _is_first_failure():
            print(_describe(error, self._config), file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(2 if isinstance(error, UserError) else 1)


def _describe(error: BaseException, config: RunConfig) -> str:
    if isinstance(error, UserError | RunError):
        return f"p3o: {error}"
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return (
            f"p3o: run.dir={config.run.dir!r} cannot be written ({error.strerror}); make room, "
            f"then: {_what_is_left(config)}"
        )
    return "".join(traceback.format_exception(error))


def _is_first_failure() -> bool:
    path = os.environ.get(_FAILURE_FILE)
    if path is None:
        return True
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _local_world_size(config: RunConfig) -> int:
    """Ranks to start here: what the layout asks for, or one copy per free GPU."""
    import torch

    layout = config.layout
    if layout.data is not None:
        return layout.model_parallel_size * layout.data
    return max(layout.model_parallel_size, torch.cuda.device_count())
