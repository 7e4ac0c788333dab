"""STUDY.yaml: which runs make up a study, and how its report judges them.

study:
  dir: runs/fp8_study
  base: run.yaml
  seeds: [0, 1, 2]
grids:
  - axes:
      objective:
        p3o: {objective.name: p3o}
        grpo: {objective.name: grpo, objective.clip_high: 0.28}
      serving:
        exact: {precision.rollout: fp32}
        half: {precision.rollout: bf16}
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, PositiveInt, ValidationError, model_validator

from megatron_p3o.config import Section, explain, read_mapping
from megatron_p3o.errors import ConfigurationError

# A name becomes a part of a directory's name.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_SET_BY_THE_STUDY = ("run.dir", "run.seed")


class StudySection(Section):
    dir: Annotated[str, Field(min_length=1)]
    """Where the study writes, relative to the working directory as run.dir is."""
    base: Annotated[str, Field(min_length=1)]
    """The RUN.yaml that every arm starts from, relative to the study file. Its run.dir and
    run.seed are replaced."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(min_length=1)]
    """run.seed of each arm's runs."""

    @model_validator(mode="after")
    def _distinct(self) -> "StudySection":
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"study.seeds={list(self.seeds)} names a seed twice; name each once")
        return self


class GridSection(Section):
    """The product of its axes: one arm for each choice of a setting per axis."""

    axes: dict[str, dict[str, dict[str, Any]]]
    """Axis -> setting -> fields of RUN.yaml by their dotted names."""

    @model_validator(mode="after")
    def _named_and_filled(self) -> "GridSection":
        if not self.axes:
            raise ValueError("grids.axes={} has no axis; name one with at least one setting")
        for axis, settings in self.axes.items():
            _check_name("axis", axis)
            if not settings:
                raise ValueError(f"axis {axis!r} has no setting; add one or remove the axis")
            for setting, overrides in settings.items():
                _check_name(f"setting of axis {axis!r}", setting)
                for field in overrides:
                    _check_field(f"axis {axis!r}, setting {setting!r}", field)
        return self

    @model_validator(mode="after")
    def _axes_are_independent(self) -> "GridSection":
        """No field is set by two axes: the result would depend on their order."""
        owners: dict[str, str] = {}
        for axis, settings in self.axes.items():
            for field in sorted({field for overrides in settings.values() for field in overrides}):
                for other, owner in owners.items():
                    if owner != axis and _overlap(field, other):
                        raise ValueError(
                            f"axes {owner!r} and {axis!r} both set {field}; let one axis set it"
                        )
                owners[field] = axis
        return self


class CollapseRule(Section):
    """When a run's reward has collapsed; the rule is stated in `statistics.collapse_step`."""

    window: PositiveInt = 10
    """Steps that are averaged; also those that the report's first and final values speak of."""
    drop: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of its best value that the averaged reward must lose for good."""


class ReportSection(Section):
    baseline: dict[str, str] | None = None
    """Axis -> setting that the axis's other settings are compared with, seed by seed."""


class StudyConfig(Section):
    """Everything in STUDY.yaml."""

    study: StudySection
    grids: Annotated[tuple[GridSection, ...], Field(min_length=1)]
    """The study is their union; an arm that two of them contain is run once."""
    collapse: CollapseRule = CollapseRule()
    report: ReportSection = ReportSection()

    @model_validator(mode="after")
    def _baseline_exists(self) -> "StudyConfig":
        known = self.settings()
        for axis, setting in (self.report.baseline or {}).items():
            if setting not in known.get(axis, ()):
                raise ValueError(
                    f"report.baseline.{axis}={setting!r} must be a setting of an axis of the "
                    f"grids: {_listed(known)}"
                )
        return self

    def settings(self) -> dict[str, list[str]]:
        """Axis -> its settings over all grids, in the order of the file."""
        found: dict[str, list[str]] = {}
        for grid in self.grids:
            for axis, settings in grid.axes.items():
                names = found.setdefault(axis, [])
                names.extend(name for name in settings if name not in names)
        return found


def load_study(path: str | Path) -> StudyConfig:
    """Read and validate a STUDY.yaml.

    Raises:
        ConfigurationError: the file cannot be read, or names every field that breaks a rule.
    """
    tree = read_mapping(path, sections="study, grids")
    try:
        return StudyConfig.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {explain(error)}") from error


def study_yaml(study: StudyConfig) -> str:
    """The resolved study; `load_study` of it gives an equal one."""
    return yaml.safe_dump(study.model_dump(mode="json"), sort_keys=False)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested mapping with their dotted names."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{what} {name!r} must be made of A-Z a-z 0-9 . _ - and not begin with . or -, since "
            "it becomes part of a directory's name; rename it"
        )


def _check_field(where: str, field: str) -> None:
    if "." not in field.strip("."):
        raise ValueError(f"{where}: {field!r} must be section.field, such as objective.name")
    for owned in _SET_BY_THE_STUDY:
        if _overlap(field, owned):
            raise ValueError(
                f"{where}: {field} is set by the study (study.dir, study.seeds); remove it"
            )


def _overlap(field: str, other: str) -> bool:
    """Whether two dotted names are the same field or one holds the other."""
    return f"{field}.".startswith(f"{other}.") or f"{other}.".startswith(f"{field}.")


def _listed(settings: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{axis}: {', '.join(names)}" for axis, names in settings.items())
