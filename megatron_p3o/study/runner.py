"""Start a study's runs, each an ordinary `p3o train` in a process of its own.

<study.dir>/study.yaml, base.yaml      the study and its base, as they were started
<study.dir>/status.jsonl               starts of runs, and how they ended
<study.dir>/<arm>/seed<k>.yaml         the run's RUN.yaml
<study.dir>/<arm>/seed<k>.log          what it printed; locked while the run is going
<study.dir>/<arm>/seed<k>/             its run dir

Starting a study again goes on with it: finished runs are skipped, and the others resumed from
their checkpoints or started afresh. Nothing of another study is overwritten.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

import yaml

from megatron_p3o.config import load_config, to_yaml
from megatron_p3o.errors import ConfigurationError, InputError, UserError
from megatron_p3o.parent import guard_words
from megatron_p3o.run_dir import replace_text
from megatron_p3o.study.arms import Plan, PlannedRun, differences
from megatron_p3o.study.config import study_yaml
from megatron_p3o.study.runs import STUDY_FILE, curve, has_all_steps, read_records
from megatron_p3o.study.statistics import final_mean
from megatron_p3o.study.status import Attempt, append_status, last_words, read_status

TRAIN = (sys.executable, "-m", "megatron_p3o.cli", "train")
# Between asking a run to end and ending it by force; its guard takes 5 s for the same.
_GRACE_S = 15.0


class Action(Enum):
    """What there is to do for a run."""

    START = "start"
    RESUME = "resume"
    RESTART = "start again"
    """It was interrupted before its first checkpoint; its run dir is removed."""
    SKIP = "finished"
    STOPPED = "stopped at NaN"
    """Starting it again would come to the same end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run."""

    run: PlannedRun
    action: Action | None
    """None: another process is at it."""
    exit_code: int
    """0 when it has all its steps."""
    seconds: float
    message: str
    """Why it failed."""
    final_reward: float | None


def select(plan: Plan, patterns: Sequence[str]) -> list[PlannedRun]:
    """The runs whose arm, or `arm/seed<k>`, matches one of the patterns; all without patterns.

    Raises:
        ConfigurationError: a pattern matches nothing.
    """
    for pattern in patterns:
        if not any(_matches(run, pattern) for run in plan.runs):
            arms = ", ".join(dict.fromkeys(run.arm.name for run in plan.runs))
            raise ConfigurationError(f"--only {pattern!r} matches no arm; the arms are {arms}")
    return [
        run
        for run in plan.runs
        if not patterns or any(_matches(run, pattern) for pattern in patterns)
    ]


def next_action(run: PlannedRun, last: Attempt | None) -> Action:
    """What to do for a run, from its run dir.

    Args:
        run: of the plan.
        last: its last attempt.

    Raises:
        UserError: its run dir holds another run, or something that is no run.
    """
    paths = run.run_dir
    if not paths.exists():
        return Action.START
    known = {path.name for path in (paths.config, paths.metrics, paths.samples, paths.curves)}
    known |= {path.name for path in (paths.tensorboard, paths.servers, paths.weights)}
    known |= {path.name for path in (paths.wandb, paths.wandb_id, paths.mlflow_id)}
    known |= {paths.checkpoints.name}
    strange = [
        entry.name
        for entry in sorted(paths.root.iterdir())
        if entry.name not in known and not entry.name.startswith(".")
    ]
    if paths.config.is_file():
        _refuse_other_run(run)
        if _has_finished(run):
            return Action.SKIP
        if last is not None and last.is_nonfinite:
            return Action.STOPPED
        if (paths.checkpoints / "latest").is_file():
            return Action.RESUME
    if strange:
        raise InputError(
            f"{str(paths.root)!r} would be removed to start its run again, but it also holds "
            f"{strange[0]!r}, which is of no run; move that away or choose another study.dir"
        )
    return Action.RESTART


def check_plan(plan: Plan) -> dict[str, Action]:
    """Name of each run -> what there is to do. Reads only.

    Raises:
        UserError: study.dir is no study's, or a run dir in it holds another run.
    """
    directory = Path(plan.study.study.dir)
    if directory.exists() and not directory.is_dir():
        raise InputError(f"study.dir={str(directory)!r} is a file; choose another directory")
    if (directory / "config.yaml").exists():
        raise InputError(
            f"study.dir={str(directory)!r} is a run dir (it has config.yaml); choose another one"
        )
    status = read_status(directory)
    return {run.name: next_action(run, status.get((run.arm.name, run.seed))) for run in plan.runs}


def write_plan(plan: Plan) -> None:
    """Create study.dir with study.yaml and its base.

    Raises:
        InputError: it cannot be written.
    """
    directory = Path(plan.study.study.dir)
    section = plan.study.study.model_copy(update={"base": "base.yaml"})
    study = plan.study.model_copy(update={"study": section})
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_text(directory / "base.yaml", yaml.safe_dump(dict(plan.base), sort_keys=False))
        replace_text(directory / STUDY_FILE, study_yaml(study))
    except OSError as error:
        raise InputError(
            f"study.dir={str(directory)!r} cannot be written ({error.strerror}); choose another one"
        ) from error


def write_run(run: PlannedRun) -> Path:
    """Write a run's RUN.yaml, for others to start.

    Raises:
        InputError: it cannot be written.
    """
    try:
        run.yaml.parent.mkdir(parents=True, exist_ok=True)
        replace_text(run.yaml, to_yaml(run.config))
    except OSError as error:
        raise InputError(
            f"{str(run.yaml)!r} cannot be written ({error.strerror}); choose another study.dir"
        ) from error
    return run.yaml


def run_all(
    plan: Plan,
    runs: Sequence[PlannedRun],
    *,
    jobs: int = 1,
    command: Sequence[str] = TRAIN,
    on_start: Callable[[PlannedRun, Action], None] = lambda run, action: None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run what is not finished, `jobs` at a time, and wait for it.

    Args:
        plan: the study; `check_plan` and `write_plan` have been called.
        runs: those of its runs to start.
        jobs: runs at once. They share the machine's cores.
        command: words before the RUN.yaml.
        on_start: called when a process is about to start.
        on_end: called with every run's outcome, skipped ones included.

    Raises:
        KeyboardInterrupt: Ctrl-C; no process is left.
        asyncio.CancelledError: SIGTERM or SIGHUP; the same.
    """
    runner = _Runner(plan, jobs, command, on_start, on_end)
    return asyncio.run(runner.run(runs))


class _Runner:
    """Processes of a study, and how they end."""

    def __init__(
        self,
        plan: Plan,
        jobs: int,
        command: Sequence[str],
        on_start: Callable[[PlannedRun, Action], None],
        on_end: Callable[[Outcome], None],
    ) -> None:
        self._directory = Path(plan.study.study.dir)
        self._window = plan.study.collapse.window
        self._gate = asyncio.Semaphore(jobs)
        self._cores = max(1, _num_cores() // jobs)
        self._command, self._on_start, self._on_end = command, on_start, on_end
        self._sole = jobs == 1

    async def run(self, runs: Sequence[PlannedRun]) -> list[Outcome]:
        """Consumes `runs`; waits for a free job; unblocked by a process that ends; produces
        outcomes, in the order of `runs`."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, task.cancel)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._run(run)) for run in runs]
        return [task.result() for task in tasks]

    async def _run(self, run: PlannedRun) -> Outcome:
        async with self._gate:
            started = time.monotonic()
            try:
                outcome = await self._locked(run)
            except (OSError, UserError) as error:
                seconds = time.monotonic() - started
                outcome = self._outcome(run, None, 1, seconds, f"{type(error).__name__}: {error}")
        self._on_end(outcome)
        return outcome

    async def _locked(self, run: PlannedRun) -> Outcome:
        """The run's outcome, from its end or from now.

        The log is locked. Its lock goes to the process as well, and lasts until both have ended.
        """
        run.log.parent.mkdir(parents=True, exist_ok=True)
        with run.log.open("ab") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return self._outcome(run, None, 1, 0.0, "another process is running it")
            last = read_status(self._directory).get((run.arm.name, run.seed))
            action = next_action(run, last)
            if action is Action.SKIP:
                return self._outcome(run, action, 0, 0.0, "")
            if action is Action.STOPPED:
                assert last is not None
                message = f"{last.message} (remove {run.run_dir.root} to run it again)"
                return self._outcome(run, action, 1, 0.0, message)
            return await self._start(run, action, log)

    async def _start(self, run: PlannedRun, action: Action, log: IO[bytes]) -> Outcome:
        if action is Action.RESTART:
            shutil.rmtree(run.run_dir.root)
        replace_text(run.yaml, to_yaml(run.config))
        self._record(run, None, 0.0, "started")
        self._on_start(run, action)
        begin, started = log.tell(), time.monotonic()
        words = [*self._command, str(run.yaml), *self._threads(run)]
        if action is Action.RESUME:
            words.append("--resume")
        code = await self._wait_for(words, log)
        seconds = time.monotonic() - started
        message = ""
        if code == 0 and not _has_finished(run):
            code, message = 1, f"it ended without all {run.config.train.steps} steps; see {run.log}"
        elif code:
            message = _message(run.log, begin, code)
        self._record(run, code, seconds, message)
        return self._outcome(run, action, code, seconds, message)

    async def _wait_for(self, words: Sequence[str], log: IO[bytes]) -> int:
        """Exit code of the command. When this is cancelled, the command is ended first."""
        process = await asyncio.create_subprocess_exec(
            *guard_words(list(words)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self._environment(),
            start_new_session=True,
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                await _end(process)

    def _record(self, run: PlannedRun, code: int | None, seconds: float, message: str) -> None:
        attempt = Attempt(
            arm=run.arm.name,
            seed=run.seed,
            exit_code=code,
            seconds=round(seconds, 3),
            message=message,
        )
        append_status(self._directory, attempt)

    def _environment(self) -> Mapping[str, str]:
        # Unbuffered: an error must be the log's last words.
        return {**os.environ, "OMP_NUM_THREADS": str(self._cores), "PYTHONUNBUFFERED": "1"}

    def _threads(self, run: PlannedRun) -> list[str]:
        """`p3o train` takes all cores for itself unless it is told otherwise."""
        if self._sole or run.config.run.num_threads_per_rank is not None:
            return []
        layout = run.config.layout
        ranks = layout.model_parallel_size * (layout.data or 1)
        return ["--run.num_threads_per_rank", str(max(1, self._cores // ranks))]

    def _outcome(
        self, run: PlannedRun, action: Action | None, code: int, seconds: float, message: str
    ) -> Outcome:
        reward = None
        if code == 0:
            records, _ = read_records(run.run_dir.metrics)
            reward = final_mean(curve(records, "reward/mean"), self._window)
        return Outcome(run, action, code, seconds, message, reward)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a guard, which ends its command and what that started; by force if it takes too long."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _GRACE_S)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _refuse_other_run(run: PlannedRun) -> None:
    path = run.run_dir.config
    remedy = "choose another study.dir, give the setting another name, or remove that run dir"
    try:
        there = load_config(path)
    except ConfigurationError as error:
        raise InputError(
            f"{str(path)!r} is not the configuration of this study's arm {run.arm.name!r} "
            f"({str(error).splitlines()[0]}); {remedy}"
        ) from error
    if changed := differences(there, run.config):
        raise InputError(
            f"{str(path)!r} is not the configuration of this study's arm {run.arm.name!r} (there, "
            f"here: {'; '.join(changed[:5])}); {remedy}"
        )


def _has_finished(run: PlannedRun) -> bool:
    if not run.run_dir.metrics.is_file():
        return False
    records, _ = read_records(run.run_dir.metrics)
    return has_all_steps(records, run.config.train.steps)


def _message(log: Path, begin: int, code: int) -> str:
    """Why a run failed, from what it printed since `begin` (bytes)."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begin, size - 65536))
        said = last_words(file.read().decode("utf-8", errors="replace"))
    if code > 128 and code - 128 in set(signal.Signals):
        return f"ended by {signal.Signals(code - 128).name}" + (f"; {said}" if said else "")
    return said or f"exit code {code}, and no message"


def _matches(run: PlannedRun, pattern: str) -> bool:
    return fnmatchcase(run.arm.name, pattern) or fnmatchcase(run.name, pattern)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
