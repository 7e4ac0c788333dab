"""From a study to its runs: one validated RunConfig for every arm and seed."""

import itertools
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_p3o.config import RunConfig, parse_config, read_mapping, set_dotted
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.run_dir import RunDir
from megatron_p3o.study.config import GridSection, StudyConfig, flatten, load_study

_DEFAULT_OBJECTIVE = "p3o"


@dataclass(frozen=True, slots=True)
class Arm:
    """One setting per axis.

    Example:
        Arm({"objective": "grpo", "serving": "exact"}, {"objective.name": "grpo"})
    """

    labels: Mapping[str, str]
    """Axis -> setting."""
    overrides: Mapping[str, Any]
    """Dotted fields of RUN.yaml."""

    @property
    def name(self) -> str:
        return arm_name(self.labels)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """An arm with one seed, and where its files are."""

    arm: Arm
    seed: int
    config: RunConfig

    @property
    def name(self) -> str:
        return f"{self.arm.name}/seed{self.seed}"

    @property
    def run_dir(self) -> RunDir:
        return RunDir(Path(self.config.run.dir))

    @property
    def yaml(self) -> Path:
        """The run's RUN.yaml."""
        return self.run_dir.root.with_name(f"seed{self.seed}.yaml")

    @property
    def log(self) -> Path:
        """What the run printed."""
        return self.run_dir.root.with_name(f"seed{self.seed}.log")


@dataclass(frozen=True, slots=True)
class Plan:
    """A study with its runs, every one of them validated."""

    study: StudyConfig
    base: Mapping[str, Any]
    """The tree of the base RUN.yaml."""
    runs: tuple[PlannedRun, ...]
    """Every arm's first seed, then every arm's second, and so on: an early report has all arms."""


def arm_name(labels: Mapping[str, str]) -> str:
    """`{"objective": "grpo", "serving": "exact"}` -> `grpo__exact`."""
    return "__".join(labels.values())


def load_plan(path: str | Path) -> Plan:
    """Read STUDY.yaml and its base, and build every run's configuration.

    Raises:
        ConfigurationError: a file is wrong, or an arm's configuration is; the message names it.
    """
    study = load_study(path)
    base = read_mapping(Path(path).parent / study.study.base, sections="run, model, data, train")
    return Plan(study, base, plan_runs(study, base))


def list_arms(study: StudyConfig) -> list[Arm]:
    """The arms of all grids, in the order of the file.

    Raises:
        ConfigurationError: two grids give the same labels other fields, or two arms with other
            labels the same name.
    """
    found: dict[str, Arm] = {}
    for grid in study.grids:
        for arm in _product(grid):
            known = found.setdefault(arm.name, arm)
            if known.labels != arm.labels:
                raise ConfigurationError(
                    f"arms {_shown(known.labels)} and {_shown(arm.labels)} would both be named "
                    f"{arm.name!r}; rename a setting"
                )
            if known.overrides != arm.overrides:
                raise ConfigurationError(
                    f"arm {arm.name!r} sets {dict(known.overrides)} in one grid and "
                    f"{dict(arm.overrides)} in another; give the settings different names"
                )
    return list(found.values())


def plan_runs(study: StudyConfig, base: Mapping[str, Any]) -> tuple[PlannedRun, ...]:
    """Every run of the study.

    Args:
        study: the study.
        base: the tree of the base RUN.yaml.

    Raises:
        ConfigurationError: names the arm whose configuration is wrong, or two arms that differ
            by nothing but their names.
    """
    arms = list_arms(study)
    runs = tuple(
        PlannedRun(arm, seed, _configure(study, base, arm, seed))
        for seed in study.study.seeds
        for arm in arms
    )
    seen: dict[str, str] = {}
    for run in runs[: len(arms)]:
        other = seen.setdefault(_without_dir(run.config), run.arm.name)
        if other != run.arm.name:
            raise ConfigurationError(
                f"arms {other!r} and {run.arm.name!r} have equal configurations, so they are one "
                "run twice; remove one or mend its fields"
            )
    return runs


def differences(config: RunConfig, other: RunConfig) -> list[str]:
    """How a run's configuration differs from another's, apart from where and with how many
    threads it runs: `field: value, other value`."""
    left, right = (dict(flatten(each.model_dump(mode="json"))) for each in (config, other))
    ignored = {"run.dir", "run.num_threads_per_rank"}
    return [
        f"{field}: {left.get(field)!r}, {right.get(field)!r}"
        for field in dict.fromkeys([*left, *right])
        if field not in ignored and left.get(field) != right.get(field)
    ]


def _product(grid: GridSection) -> list[Arm]:
    axes = list(grid.axes)
    arms = []
    for choice in itertools.product(*grid.axes.values()):
        labels = dict(zip(axes, choice, strict=True))
        overrides: dict[str, Any] = {}
        for axis, setting in labels.items():
            overrides |= grid.axes[axis][setting]
        arms.append(Arm(labels, overrides))
    return arms


def _configure(study: StudyConfig, base: Mapping[str, Any], arm: Arm, seed: int) -> RunConfig:
    tree = deepcopy(dict(base))
    try:
        objective = tree.get("objective") or {}
        name = arm.overrides.get("objective.name")
        if name is not None and name != _name_of(objective):
            # The other objective may lack these fields, or give them another meaning.
            tree["objective"] = {}
        run_dir = str(Path(study.study.dir) / arm.name / f"seed{seed}")
        fixed = {"run.dir": run_dir, "run.seed": seed}
        for field, value in {**arm.overrides, **fixed}.items():
            set_dotted(tree, field, value)
        return parse_config(tree)
    except ConfigurationError as error:
        raise ConfigurationError(f"arm {arm.name!r}: {error}") from error


def _name_of(objective: Any) -> Any:
    # Anything but a mapping is left for validation to refuse.
    return objective.get("name", _DEFAULT_OBJECTIVE) if isinstance(objective, Mapping) else None


def _without_dir(config: RunConfig) -> str:
    tree = config.model_dump(mode="json")
    del tree["run"]["dir"]
    return json.dumps(tree, sort_keys=True)


def _shown(labels: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{axis}: {setting}" for axis, setting in labels.items()) + "}"
