"""Rewards to advantages and token weights of one optimizer step."""

from typing import Any

import pytest

from megatron_p3o.config import RunConfig, parse_config
from megatron_p3o.trainer.experience import batch_metrics, score_groups
from megatron_p3o.types import Sample, SampleGroup


def config_with(objective: dict[str, Any]) -> RunConfig:
    return parse_config(
        {
            "run": {"dir": "runs/x"},
            "model": {"path": "models/m"},
            "data": {"source": "generator", "generator": "arithmetic"},
            "train": {"steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2},
            "sampling": {"max_new_tokens": 10},
            "objective": objective,
        }
    )


def group(*samples: tuple[int, float | None]) -> SampleGroup:
    """From (response tokens, reward)."""
    return SampleGroup(
        prompt_id="p",
        samples=tuple(
            Sample(
                prompt_id="p",
                sample_index=index,
                prompt_ids=(1,),
                response_ids=(2,) * length,
                rollout_logprobs=(-1.0,) * length,
                finish_reason="stop",
                weight_version_min=0,
                weight_version_max=0,
                reward=reward,
            )
            for index, (length, reward) in enumerate(samples)
        ),
    )


def test_dapo_takes_the_overlong_penalty_off_rewards_before_advantages() -> None:
    groups = [group((10, 1.0), (8, 1.0), (9, 0.0), (4, None))]
    fields = {"name": "dapo", "advantage": "group_mean", "overlong_buffer_fraction": 0.2}
    config = config_with(fields)
    # 10 tokens: -1; 8: 0; 9: -0.5. Rewards 0, 1, -0.5 with mean 1/6.
    scored = score_groups(groups, config)
    assert [s.advantage for s in scored] == pytest.approx([-1 / 6, 5 / 6, -2 / 3])
    metrics = batch_metrics(groups, [s.advantage for s in scored], 0, config)
    # What is recorded and logged as reward stays the verifier's.
    assert metrics["reward/mean"] == pytest.approx(2 / 3)
    assert metrics["reward/overlong_penalty_mean"] == pytest.approx(-1.5 / 4)


def test_other_objectives_know_no_overlong_penalty() -> None:
    groups = [group((10, 1.0), (8, 0.0))]
    config = config_with({"name": "grpo", "advantage": "group_mean"})
    scored = score_groups(groups, config)
    assert [s.advantage for s in scored] == [0.5, -0.5]
    metrics = batch_metrics(groups, [0.5, -0.5], 0, config)
    assert "reward/overlong_penalty_mean" not in metrics


@pytest.mark.parametrize(("length", "divisor"), [(None, 10), (40, 40)])
def test_constant_length_is_the_generation_limit_unless_named(
    length: int | None, divisor: int
) -> None:
    config = config_with({"name": "dr_grpo", "normalization_length": length})
    scored = score_groups([group((2, 1.0), (6, 0.0))], config)
    # n / (m * L), so that the division by n = 8 leaves 1 / (m * L) per token.
    assert [s.token_weight for s in scored] == pytest.approx([8 / (2 * divisor)] * 2)
    assert [s.advantage for s in scored] == [0.5, -0.5]
