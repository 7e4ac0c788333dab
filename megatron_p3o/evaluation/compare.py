"""Two evaluations of the same prompts, compared prompt by prompt.

Differences are B - A. Pairing takes what a prompt's difficulty adds to both out of the comparison,
so that a small difference can be told from none with far fewer prompts. The intervals are paired
bootstraps, the p-values those of a sign-flip test, and that of wins against losses a sign test;
see `resampling`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_p3o.errors import InputError
from megatron_p3o.evaluation.items import EvalItem, read_results
from megatron_p3o.evaluation.resampling import (
    Interval,
    bootstrap_mean,
    sign_flip_p_value,
    sign_test_p_value,
)

_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One figure of both."""

    name: str
    a: float
    b: float
    interval: Interval
    """Of B - A."""
    p_value: float

    def to_json(self) -> dict[str, Any]:
        difference = self.interval.to_json()
        return {"a": self.a, "b": self.b, "difference": difference, "p_value": self.p_value}


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedPrompt:
    """A prompt's mean rewards."""

    item: EvalItem
    a: float
    b: float

    @property
    def change(self) -> float:
        return self.b - self.a


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What `p3o eval compare` found."""

    differences: Sequence[Difference]
    """The mean reward first, then pass@k."""
    num_pairs: int
    num_unpaired: tuple[int, int]
    """Prompts that only A and only B has."""
    num_without_reward: int
    """Pairs in which every reward of one failed; they are in pass@k alone."""
    num_wins: int
    """Pairs in which B's mean reward is higher."""
    num_losses: int
    num_ties: int
    sign_test_p_value: float
    changed: Sequence[PairedPrompt]
    """All that changed, the largest change first."""
    notes: Sequence[str]
    """Settings that differ."""

    def to_json(self, num_changed: int) -> dict[str, Any]:
        return {
            "differences": {one.name: one.to_json() for one in self.differences},
            "pairs": self.num_pairs,
            "only_in_a": self.num_unpaired[0],
            "only_in_b": self.num_unpaired[1],
            "pairs_without_reward": self.num_without_reward,
            "wins": self.num_wins,
            "losses": self.num_losses,
            "ties": self.num_ties,
            "sign_test_p_value": self.sign_test_p_value,
            "changed": [
                {"prompt_id": one.item.prompt_id, "a": one.a, "b": one.b}
                for one in self.changed[:num_changed]
            ],
            "notes": list(self.notes),
        }


def compare(a: Path, b: Path, *, seed: int) -> Comparison:
    """Compare two output directories of `p3o eval`.

    Raises:
        InputError: one is not such a directory, or they are of different prompts, verifiers or
            thresholds.
    """
    (items_a, summary_a), (items_b, summary_b) = read_results(a), read_results(b)
    _check_settings(a, summary_a, b, summary_b)
    pairs = _pairs(a, items_a, b, items_b)
    threshold = float(summary_a["settings"]["threshold"])
    ks = sorted(set(map(int, summary_a["pass_at_k"])) & set(map(int, summary_b["pass_at_k"])))
    rewarded = [
        PairedPrompt(item=one, a=mean_a, b=mean_b)
        for one, other in pairs
        if (mean_a := one.mean_reward()) is not None and (mean_b := other.mean_reward()) is not None
    ]
    differences = []
    if rewarded:
        differences.append(
            _difference("reward mean", [p.a for p in rewarded], [p.b for p in rewarded], seed)
        )
    for k in ks:
        passed_a = [one.pass_at(k, threshold) for one, _ in pairs]
        passed_b = [other.pass_at(k, threshold) for _, other in pairs]
        differences.append(_difference(f"pass@{k}", passed_a, passed_b, seed))
    wins = sum(pair.change > 0 for pair in rewarded)
    losses = sum(pair.change < 0 for pair in rewarded)
    changed = [pair for pair in rewarded if pair.change]
    return Comparison(
        differences=differences,
        num_pairs=len(pairs),
        num_unpaired=(len(items_a) - len(pairs), len(items_b) - len(pairs)),
        num_without_reward=len(pairs) - len(rewarded),
        num_wins=wins,
        num_losses=losses,
        num_ties=len(rewarded) - wins - losses,
        sign_test_p_value=sign_test_p_value(wins, losses),
        changed=sorted(changed, key=lambda pair: -abs(pair.change)),
        notes=_notes(summary_a["settings"], summary_b["settings"]),
    )


def _difference(name: str, a: Sequence[float], b: Sequence[float], seed: int) -> Difference:
    changes = [after - before for before, after in zip(a, b, strict=True)]
    return Difference(
        name=name,
        a=sum(a) / len(a),
        b=sum(b) / len(b),
        interval=bootstrap_mean(changes, seed=seed),
        p_value=sign_flip_p_value(changes, seed=seed),
    )


def _pairs(
    a: Path, items_a: Sequence[EvalItem], b: Path, items_b: Sequence[EvalItem]
) -> list[tuple[EvalItem, EvalItem]]:
    others = {item.prompt_id: item for item in items_b}
    pairs = [(item, others[item.prompt_id]) for item in items_a if item.prompt_id in others]
    for one, other in pairs:
        for part in ("prompt", "answer"):
            text, other_text = getattr(one, part), getattr(other, part)
            if text != other_text:
                raise InputError(
                    f"prompt_id {one.prompt_id}: its {part} is {text[:_SHOWN]!r} in {str(a)!r} "
                    f"and {other_text[:_SHOWN]!r} in {str(b)!r}; only evaluations of the same "
                    "data can be compared: evaluate both with one --data"
                )
    if not pairs:
        raise InputError(
            f"{str(a)!r} and {str(b)!r} have no prompt_id in common; evaluate both with one --data"
        )
    return pairs


def _check_settings(
    a: Path, summary_a: Mapping[str, Any], b: Path, summary_b: Mapping[str, Any]
) -> None:
    try:
        for name in ("threshold", "reward"):
            value, other = summary_a["settings"][name], summary_b["settings"][name]
            if value != other:
                raise InputError(
                    f"--{name} is {value!r} in {str(a)!r} and {other!r} in {str(b)!r}, so that "
                    f"their figures mean different things; evaluate both with one --{name}"
                )
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{str(a)!r} or {str(b)!r}: summary.json lacks {error}; evaluate again"
        ) from error


def _notes(settings_a: Mapping[str, Any], settings_b: Mapping[str, Any]) -> list[str]:
    names = ("temperature", "max_new_tokens", "samples_per_prompt", "chat", "system_prompt")
    return [
        f"{name}: {settings_a.get(name)!r} in A, {settings_b.get(name)!r} in B"
        for name in names
        if settings_a.get(name) != settings_b.get(name)
    ]
