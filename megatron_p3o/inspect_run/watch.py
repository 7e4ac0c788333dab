"""`p3o watch`: shows a run until it has finished."""

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from megatron_p3o.config import read_mapping
from megatron_p3o.errors import ConfigurationError, InputError
from megatron_p3o.inspect_run.follow import MetricsFollower
from megatron_p3o.inspect_run.frame import NAMES, frame
from megatron_p3o.inspect_run.progress import Progress, State
from megatron_p3o.run_dir import RunDir


class Watcher:
    """A run as seen from outside."""

    def __init__(self, root: Path, *, now: Callable[[], float] = time.time) -> None:
        """
        Args:
            root: the run dir.
            now: seconds since the epoch.

        Raises:
            InputError: there is no such directory.
        """
        if not root.is_dir():
            raise InputError(f"RUN={str(root)!r} is no directory; give the run.dir of a run")
        self._paths, self._now = RunDir(root), now
        self._follower = MetricsFollower(self._paths.metrics)
        self._progress = Progress(total=None, names=NAMES)

    def look(self) -> State:
        """Read what is new.

        Raises:
            InputError: metrics.jsonl is broken before its last line.
        """
        # Each time, since a run that is resumed may have been given another number of steps.
        self._progress.total = _planned_steps(self._paths.config)
        records, replaced = self._follower.read()
        if replaced:
            self._progress.clear()
        for record in records:
            self._progress.add(record)
        return self._progress.state(self._silence_s())

    def frame(self) -> RenderableType:
        """What has been read, as a picture."""
        return frame(str(self._paths.root), self._progress, self._silence_s())

    def _silence_s(self) -> float:
        try:
            written = self._paths.metrics.stat().st_mtime
        except OSError:  # not there yet
            return 0.0
        return max(0.0, self._now() - written)


def watch_run(root: Path, console: Console, *, once: bool, every: float) -> None:
    """Show the run: one frame, or a new one every so many seconds until it has finished.

    Raises:
        InputError: as `Watcher` does.
    """
    watcher = Watcher(root)
    state = watcher.look()
    if once or not console.is_terminal:
        console.print(watcher.frame())
        return
    with Live(watcher.frame(), console=console, auto_refresh=False) as live:
        while state is not State.FINISHED:
            time.sleep(every)
            state = watcher.look()
            live.update(watcher.frame(), refresh=True)


def _planned_steps(config: Path) -> int | None:
    """train.steps of a config.yaml; None where it is not there, or of no version that has it."""
    try:
        train = read_mapping(config, sections="run, train").get("train")
    except ConfigurationError:
        return None
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) else None
