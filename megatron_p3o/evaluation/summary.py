"""Figures of an evaluation: means over prompts, so that every prompt counts the same."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_p3o.evaluation.items import EvalItem
from megatron_p3o.evaluation.resampling import Interval, bootstrap_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What the items say."""

    num_prompts: int
    samples_per_prompt: int
    reward_mean: Interval | None
    """Over prompts of each one's mean over its rewards that did not fail; None without any."""
    pass_at: Mapping[int, Interval]
    """By k; a failed reward counts as not correct."""
    length_mean: float
    """Tokens, over all samples."""
    length_quantiles: Mapping[str, float]
    truncated_fraction: float
    """Share of samples that the length limit cut."""
    num_failed_rewards: int
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        return {
            "num_prompts": self.num_prompts,
            "samples_per_prompt": self.samples_per_prompt,
            "reward_mean": None if self.reward_mean is None else self.reward_mean.to_json(),
            "pass_at_k": {str(k): interval.to_json() for k, interval in self.pass_at.items()},
            "length": {"mean": self.length_mean, **self.length_quantiles},
            "truncated_fraction": self.truncated_fraction,
            "failed_rewards": self.num_failed_rewards,
            "tokens": self.num_tokens,
        }


def figures(
    items: Sequence[EvalItem], ks: Sequence[int], *, threshold: float, seed: int
) -> Figures:
    """
    Args:
        items: not empty, with equally many samples each.
        ks: of pass@k; none exceeds the samples of a prompt.
        threshold: least reward of a correct sample.
        seed: of the bootstrap.
    """
    lengths = [length for item in items for length in item.lengths]
    rewards = present(item.mean_reward() for item in items)
    reasons = [reason for item in items for reason in item.finish_reasons]
    quantiles = np.quantile(lengths, (0.1, 0.5, 0.9)).tolist()
    return Figures(
        num_prompts=len(items),
        samples_per_prompt=items[0].num_samples,
        reward_mean=bootstrap_mean(rewards, seed=seed) if rewards else None,
        pass_at={
            k: bootstrap_mean([item.pass_at(k, threshold) for item in items], seed=seed) for k in ks
        },
        length_mean=statistics.fmean(lengths),
        length_quantiles=dict(zip(("p10", "p50", "p90"), quantiles, strict=True))
        | {"max": float(max(lengths))},
        truncated_fraction=statistics.fmean(reason == "length" for reason in reasons),
        num_failed_rewards=sum(reward is None for item in items for reward in item.rewards),
        num_tokens=sum(lengths),
    )


def metrics(items: Sequence[EvalItem], ks: Sequence[int], threshold: float) -> dict[str, float]:
    """The same figures without intervals, by the names of docs/metrics.md."""
    lengths = [length for item in items for length in item.lengths]
    rewards = present(item.mean_reward() for item in items)
    reward_mean = {"eval/reward_mean": statistics.fmean(rewards)} if rewards else {}
    return {
        **reward_mean,
        **{
            f"eval/pass_at_{k}": statistics.fmean(item.pass_at(k, threshold) for item in items)
            for k in ks
        },
        "eval/length_mean": statistics.fmean(lengths),
        "eval/truncated_fraction": statistics.fmean(
            reason == "length" for item in items for reason in item.finish_reasons
        ),
        "eval/failed_fraction": statistics.fmean(
            reward is None for item in items for reward in item.rewards
        ),
    }


def present(values: Any) -> list[float]:
    """Those that are not None."""
    return [value for value in values if value is not None]
