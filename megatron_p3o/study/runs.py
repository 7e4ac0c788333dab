"""Reads run dirs: of a study, or whatever was copied into a directory from a cluster.

A reader forgives what interrupted runs and other versions leave behind, and says so in `notes`:
a half-written last line, steps that a resumed run wrote again, a config.yaml with other fields. A
broken line in the middle is an error, since nothing that we write leaves one.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_p3o.config import load_config, read_mapping
from megatron_p3o.errors import ConfigurationError, InputError
from megatron_p3o.run_dir import RunDir, parse_record
from megatron_p3o.study.arms import arm_name, list_arms
from megatron_p3o.study.config import StudyConfig, flatten, load_study
from megatron_p3o.study.status import Attempt, read_status

STUDY_FILE = "study.yaml"
_ABSENT = "-"
# Fields that say where a run ran, not what it computed.
_ELSEWHERE = (
    "run.",
    "logging.",
    "checkpoint.",
    "rollout.servers",
    "rollout.router",
    "rollout.launch.",
    "rollout.api_key",
    "rollout.publish.directory",
)
# Paths of which only the last part can tell runs apart.
_PATHS = ("model.path", "data.path")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run dir holds."""

    name: str
    """The run dir below the directory that was read."""
    labels: Mapping[str, str]
    """Axis -> setting."""
    seed: int | None
    tree: Mapping[str, Any]
    """config.yaml."""
    records: Mapping[int, Mapping[str, Any]]
    """Step -> its line of metrics.jsonl, in step order."""
    attempt: Attempt | None = None
    """Its last attempt, where the study's status has one."""
    notes: tuple[str, ...] = ()

    @property
    def arm(self) -> str:
        return arm_name(self.labels) or "all"

    @property
    def planned_steps(self) -> int | None:
        """train.steps; None where config.yaml has no such number."""
        train = self.tree.get("train")
        steps = train.get("steps") if isinstance(train, Mapping) else None
        return steps if isinstance(steps, int) else None

    @property
    def num_steps(self) -> int:
        return len(self.records)

    @property
    def is_complete(self) -> bool:
        return self.planned_steps is not None and has_all_steps(self.records, self.planned_steps)

    @property
    def is_nonfinite(self) -> bool:
        """Whether the run stopped before its end at a NaN or infinity."""
        return not self.is_complete and self.attempt is not None and self.attempt.is_nonfinite

    def series(self, metric: str) -> dict[int, float]:
        return curve(self.records, metric)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSet:
    """The runs below a directory."""

    runs: tuple[Run, ...]
    study: StudyConfig | None = None
    """study.yaml, where the directory has one that can be read."""
    missing: tuple[str, ...] = ()
    """Runs of the study that have no run dir yet."""
    notes: tuple[str, ...] = ()
    settings: Mapping[str, list[str]] = field(default_factory=dict)
    """Axis -> its settings, in the order to show them in."""


def read_runs(directory: Path) -> RunSet:
    """The runs of a study dir, or of any directory of run dirs.

    Raises:
        InputError: there are no runs, or a file cannot be read; the message names it.
    """
    if not directory.is_dir():
        raise InputError(f"{str(directory)!r} is no directory; give a study dir or one of run dirs")
    if (directory / STUDY_FILE).is_file():
        try:
            study = load_study(directory / STUDY_FILE)
        except ConfigurationError as error:
            note = f"{STUDY_FILE} cannot be read, so arms follow from the runs' fields: {error}"
            return _any_runs(directory, (note,))
        return _study_runs(directory, study)
    return _any_runs(directory, ())


def read_run(
    root: Path,
    *,
    name: str,
    labels: Mapping[str, str] | None = None,
    attempt: Attempt | None = None,
) -> Run:
    """Read one run dir.

    Raises:
        InputError: a file cannot be read, or metrics.jsonl is broken before its last line.
    """
    paths = RunDir(root)
    tree, config_notes = _read_config(paths.config)
    records, notes = read_records(paths.metrics)
    run = tree.get("run")
    seed = run.get("seed", 0) if isinstance(run, Mapping) else None
    return Run(
        name=name,
        labels=labels or {},
        seed=seed if isinstance(seed, int) else None,
        tree=tree,
        records=records,
        attempt=attempt,
        notes=(*config_notes, *notes),
    )


def read_records(path: Path) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """The lines of a metrics.jsonl by step, with notes on what was left out.

    Raises:
        InputError: the file cannot be read, or a line before the last is no JSON object with a
            step.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error}") from error
    while lines and not lines[-1].strip():
        lines.pop()
    records: dict[int, dict[str, Any]] = {}
    notes, again = [], 0
    for number, line in enumerate(lines, start=1):
        record = parse_record(line)
        if record is None:
            if number == len(lines):
                notes.append(f"{path.name}: the last line is half-written and was left out")
                break
            raise InputError(
                f"{str(path)!r}, line {number}: not a JSON object with a step; the file was "
                "damaged, so copy it again or remove the line"
            )
        again += record["step"] in records
        records[record["step"]] = record
    if again:
        notes.append(f"{path.name}: {again} steps are there twice; the later lines count")
    ordered = dict(sorted(records.items()))
    if ordered and len(ordered) != max(ordered) + 1:
        notes.append(f"{path.name}: {max(ordered) + 1 - len(ordered)} steps are missing")
    return ordered, notes


def curve(records: Mapping[int, Mapping[str, Any]], metric: str) -> dict[int, float]:
    """Step -> value, for the steps whose value is there and finite."""
    return {
        step: float(record[metric])
        for step, record in records.items()
        if _is_finite(record.get(metric))
    }


def has_all_steps(records: Mapping[int, Mapping[str, Any]], steps: int) -> bool:
    """Whether a run of so many steps has reached its end."""
    return bool(records) and max(records) + 1 >= steps


def is_emulated(run: Run) -> bool:
    """Whether a run's FP8 was emulated: rounded numbers, multiplied in higher precision.

    The run says so in its metrics; a configuration can only tell of the embedded engine.
    """
    if any(record.get("precision/emulated") for record in run.records.values()):
        return True
    values = dict(flatten(run.tree))
    types = (values.get("precision.rollout"), values.get("precision.rollout_kv_cache"))
    return values.get("rollout.engine", "embedded") == "embedded" and any(
        str(each).startswith("fp8") for each in types
    )


def _study_runs(directory: Path, study: StudyConfig) -> RunSet:
    status = read_status(directory)
    runs, missing, expected = [], [], set()
    for arm in list_arms(study):
        for seed in study.study.seeds:
            name = f"{arm.name}/seed{seed}"
            root = directory / name
            expected.add(root)
            if RunDir(root).config.is_file() and RunDir(root).metrics.is_file():
                attempt = status.get((arm.name, seed))
                runs.append(read_run(root, name=name, labels=arm.labels, attempt=attempt))
            else:
                missing.append(name)
    others = [
        str(root.relative_to(directory)) for root in _run_dirs(directory) if root not in expected
    ]
    notes = [f"{STUDY_FILE} does not name {name}; it was left out" for name in others]
    if not runs:
        raise InputError(
            f"{str(directory)!r} holds no run with config.yaml and metrics.jsonl; start the study "
            "with p3o study run"
        )
    return RunSet(
        runs=tuple(runs),
        study=study,
        missing=tuple(missing),
        notes=tuple(notes),
        settings=study.settings(),
    )


def _any_runs(directory: Path, notes: tuple[str, ...]) -> RunSet:
    roots = list(_run_dirs(directory))
    if not roots:
        raise InputError(
            f"{str(directory)!r} holds no run dir, that is, no directory with config.yaml and "
            "metrics.jsonl; give one that does"
        )
    names = [str(root.relative_to(directory)) for root in roots]
    runs = [read_run(root, name=name) for root, name in zip(roots, names, strict=True)]
    labels = labels_from_fields([run.tree for run in runs])
    labelled = tuple(replace(run, labels=own) for run, own in zip(runs, labels, strict=True))
    settings = {
        axis: sorted({run.labels[axis] for run in labelled}, key=_natural) for axis in labels[0]
    }
    return RunSet(runs=labelled, notes=notes, settings=settings)


def labels_from_fields(trees: list[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Labels of runs from the fields in which they differ, seeds and places apart.

    A field of the objective that only follows from its name is no label.
    """
    flat = [{name: _label(name, value) for name, value in flatten(tree)} for tree in trees]
    fields = dict.fromkeys(
        name for values in flat for name in values if not name.startswith(_ELSEWHERE)
    )
    axes = []
    for name in fields:
        seen: dict[str, set[str]] = {}
        for values in flat:
            owner = name.startswith("objective.") and name != "objective.name"
            group = str(values.get("objective.name")) if owner else ""
            seen.setdefault(group, set()).add(values.get(name, _ABSENT))
        if any(len(values) > 1 for values in seen.values()):
            axes.append(name)
    return [{name: values.get(name, _ABSENT) for name in axes} for values in flat]


def _run_dirs(directory: Path) -> Iterator[Path]:
    """Directories with config.yaml and metrics.jsonl, in the order of their names."""
    for root, children, files in os.walk(directory):
        children.sort()
        if {"config.yaml", "metrics.jsonl"} <= set(files):
            children.clear()
            yield Path(root)


def _read_config(path: Path) -> tuple[Mapping[str, Any], list[str]]:
    try:
        return load_config(path).model_dump(mode="json"), []
    except ConfigurationError as error:
        problem = error
    try:
        tree = read_mapping(path, sections="run, model, data, train")
    except ConfigurationError as error:
        raise InputError(str(error)) from error
    why = str(problem).splitlines()[0]
    return tree, [f"{path.name} is of another version and was read without checks ({why})"]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _label(field: str, value: Any) -> str:
    if value is None:
        return _ABSENT
    return Path(str(value)).name if field in _PATHS else str(value)


def _natural(text: str) -> tuple[float, str]:
    """Numbers by size, before words."""
    try:
        return float(text), text
    except ValueError:
        return math.inf, text
