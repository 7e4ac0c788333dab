"""From runs to the rows of a report: one a run, one an arm, one a difference to a baseline.

An arm's values are over its complete runs. A run that stopped at a NaN has no final value, but
counts as collapsed. Runs that are merely unfinished count nowhere but in the list of runs.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_p3o.study.config import CollapseRule
from megatron_p3o.study.runs import Run
from megatron_p3o.study.statistics import (
    Estimate,
    collapse_step,
    estimate,
    final_mean,
    first_mean,
    window_means,
)

REWARD = "reward/mean"
Curve = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number of a run, from one metric's curve.

    Example:
        Quantity("ess_min", "ess/step", "least normalised ESS", lambda curve, window: min(...))
    """

    name: str
    """Column of the CSV files."""
    metric: str
    meaning: str
    of: Callable[[Curve, int], float | None]
    """From the curve and the window; None without values."""


def _best(curve: Curve, window: int) -> float | None:
    return max(window_means(curve, window).values(), default=None)


def _final_over_best(curve: Curve, window: int) -> float | None:
    best, final = _best(curve, window), final_mean(curve, window)
    return final / best if best is not None and final is not None and best > 0 else None


def _mean(curve: Curve, window: int) -> float | None:
    return statistics.fmean(curve.values()) if curve else None


def _min(curve: Curve, window: int) -> float | None:
    return min(curve.values(), default=None)


def _max(curve: Curve, window: int) -> float | None:
    return max(curve.values(), default=None)


QUANTITIES = (
    Quantity("reward_first", REWARD, "reward, first window", first_mean),
    Quantity("reward_final", REWARD, "reward, last window", final_mean),
    Quantity("reward_best", REWARD, "best mean of a window", _best),
    Quantity("final_over_best", REWARD, "last window / best window", _final_over_best),
    Quantity("ess_final", "ess/step", "normalised ESS, last window", final_mean),
    Quantity("ess_mean", "ess/step", "normalised ESS, all steps", _mean),
    Quantity("ess_min", "ess/step", "least normalised ESS of a step", _min),
    Quantity("mismatch_k3", "mismatch/k3", "k3 of trainer and rollout, all steps (nats)", _mean),
    Quantity(
        "mismatch_abs_logprob",
        "mismatch/abs_logprob_mean",
        "mean |log-prob gap| of trainer and rollout, all steps (nats)",
        _mean,
    ),
    Quantity("ratio_p99", "ratio/p99", "99 % quantile of the ratio, last window", final_mean),
    Quantity("ratio_max", "ratio/max", "largest ratio of any token", _max),
    Quantity("grad_norm_max", "grad_norm", "largest gradient norm before clipping", _max),
    Quantity("entropy_final", "entropy/mean", "entropy, last window (nats)", final_mean),
    Quantity(
        "length_final", "response/length_mean", "response length, last window (tokens)", final_mean
    ),
)
_BY_NAME: Mapping[str, Quantity] = {quantity.name: quantity for quantity in QUANTITIES}
# What a table of differences is about.
COMPARED = ("mismatch_k3", "mismatch_abs_logprob", "ess_mean", "reward_final")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run's row."""

    run: Run
    values: Mapping[str, float | None]
    """Name of a quantity -> its value."""
    collapsed_at: int | None
    """Step at which it collapsed, by the rule or by a NaN."""

    @property
    def state(self) -> str:
        """`complete`, `non-finite`, `failed` or `incomplete`."""
        if self.run.is_complete:
            return "complete"
        if self.run.is_nonfinite:
            return "non-finite"
        failed = self.run.attempt is not None and self.run.attempt.has_failed
        return "failed" if failed else "incomplete"

    @property
    def is_over(self) -> bool:
        """Whether more steps cannot change its verdict."""
        return self.state in ("complete", "non-finite")


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """An arm's row, over its seeds."""

    name: str
    labels: Mapping[str, str]
    runs: tuple[RunSummary, ...]
    """All its runs, complete or not."""
    values: Mapping[str, Estimate | None]
    """Name of a quantity -> its mean over complete runs."""
    num_missing: int = 0
    """Runs of the study that have no run dir."""

    @property
    def num_complete(self) -> int:
        return sum(summary.run.is_complete for summary in self.runs)

    @property
    def num_over(self) -> int:
        """Runs of which it is known whether they collapsed."""
        return sum(summary.is_over for summary in self.runs)

    @property
    def collapse_steps(self) -> tuple[int, ...]:
        """Steps at which runs that are over collapsed, least first."""
        return tuple(
            sorted(
                summary.collapsed_at
                for summary in self.runs
                if summary.is_over and summary.collapsed_at is not None
            )
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """A quantity of an arm minus that of the same arm with one axis at its baseline, over the
    seeds that both have complete."""

    axis: str
    arm: str
    baseline_arm: str
    quantity: str
    difference: Estimate


def summarize_run(run: Run, rule: CollapseRule) -> RunSummary:
    """A run's row.

    Args:
        run: complete or not.
        rule: the window of first and final values, and when a run has collapsed.
    """
    values = {
        quantity.name: quantity.of(run.series(quantity.metric), rule.window)
        for quantity in QUANTITIES
    }
    collapsed = collapse_step(run.series(REWARD), window=rule.window, drop=rule.drop)
    if run.is_nonfinite:
        stopped = max(run.records, default=-1) + 1  # the step that was not finished
        collapsed = stopped if collapsed is None else min(collapsed, stopped)
    return RunSummary(run, values, collapsed)


def summarize_arms(
    summaries: Sequence[RunSummary], missing: Sequence[str] = ()
) -> list[ArmSummary]:
    """The arms' rows, in the order in which they first appear.

    Args:
        summaries: of the runs.
        missing: `<arm>/seed<k>` of the study's runs that have no run dir.
    """
    absent = Counter(name.rpartition("/")[0] for name in missing)
    groups: dict[str, list[RunSummary]] = {}
    for summary in summaries:
        groups.setdefault(summary.run.arm, []).append(summary)
    return [
        ArmSummary(
            name=name,
            labels=members[0].run.labels,
            runs=tuple(members),
            values={quantity.name: _over_seeds(quantity, members) for quantity in QUANTITIES},
            num_missing=absent[name],
        )
        for name, members in groups.items()
    ]


def compare(arms: Sequence[ArmSummary], baseline: Mapping[str, str]) -> list[Difference]:
    """What each setting costs or gives beside its baseline.

    With serving as the axis and the exactly served arm as its baseline, this is FP8's own share:
    drift within the batch and staleness are in both arms.

    Args:
        arms: rows.
        baseline: axis -> setting to compare with.
    """
    by_labels = {frozenset(arm.labels.items()): arm for arm in arms}
    found = []
    for axis, setting in baseline.items():
        for arm in arms:
            if arm.labels.get(axis, setting) == setting:
                continue
            other = by_labels.get(frozenset({**arm.labels, axis: setting}.items()))
            for name in COMPARED if other is not None else ():
                assert other is not None
                difference = estimate(_paired(arm, other, name))
                if difference is not None:
                    found.append(Difference(axis, arm.name, other.name, name, difference))
    return found


def missing_metrics(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Metric that the report uses -> names of the runs with steps that do not have it at all."""
    found: dict[str, list[str]] = {}
    for metric in dict.fromkeys(quantity.metric for quantity in QUANTITIES):
        for run in runs:
            if run.records and not any(metric in record for record in run.records.values()):
                found.setdefault(metric, []).append(run.name)
    return found


def meaning(quantity: str) -> str:
    """What a column says."""
    return _BY_NAME[quantity].meaning


def _over_seeds(quantity: Quantity, members: Sequence[RunSummary]) -> Estimate | None:
    values = [summary.values[quantity.name] for summary in members if summary.run.is_complete]
    return estimate([value for value in values if value is not None])


def _paired(arm: ArmSummary, other: ArmSummary, quantity: str) -> list[float]:
    """Differences of the seeds that both arms have complete."""
    left, right = (_by_seed(each, quantity) for each in (arm, other))
    return [left[seed] - right[seed] for seed in left if seed in right]


def _by_seed(arm: ArmSummary, quantity: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for summary in arm.runs:
        value, seed = summary.values[quantity], summary.run.seed
        if summary.run.is_complete and value is not None and seed is not None:
            found.setdefault(seed, value)
    return found
