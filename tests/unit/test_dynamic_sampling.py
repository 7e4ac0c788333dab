"""Groups of equal rewards give their place to fresh prompts: which, how often, and what is told."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_p3o.config import RunConfig, parse_config
from megatron_p3o.data import PromptItem, PromptSet
from megatron_p3o.errors import ConfigurationError, RewardError
from megatron_p3o.rollout import Generation, GenerationRequest
from megatron_p3o.trainer.experience import Collected, GeneratedRollouts, batch_metrics, is_flat
from megatron_p3o.types import Sample, SampleGroup, VersionSpan

NUM_PROMPTS = 12
GROUP_SIZE = 3


class Tokenizer:
    """Token ids are code points."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def batch_decode(self, rows: Sequence[list[int]], skip_special_tokens: bool) -> list[str]:
        return ["".join(map(chr, row)) for row in rows]


class Engine:
    """Answers a prompt p with p right in every sample, in none, or in the first alone."""

    def __init__(self, right: str, wrong: str) -> None:
        self.right, self.wrong = right, wrong
        self.asked: list[list[str]] = []

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        self.asked.append([request.prompt_id for request in requests])
        return [
            Generation(
                prompt_id=request.prompt_id,
                sample_index=index,
                response_ids=tuple(map(ord, self._answer(chr(request.prompt_ids[0]), index))),
                logprobs=(-0.5,) * 2,
                finish_reason="stop",
                version_spans=(VersionSpan(0, 0, 2),),
            )
            for request in requests
            for index in range(request.num_samples)
        ]

    def _answer(self, prompt: str, index: int) -> str:
        is_right = prompt in self.right or (prompt not in self.wrong and index == 0)
        return f"{ord(prompt) - ord('a'):02d}" if is_right else "99"

    def update_weights(self, named_tensors: Iterable[Any], version: int) -> None: ...

    def close(self) -> None: ...


def config_with(rounds: int, prompts: int = 4, **sections: dict) -> RunConfig:
    tree: dict[str, Any] = {
        "run": {"dir": "runs/x"},
        "model": {"path": "models/m"},
        "data": {"source": "jsonl", "path": "x", "chat": False, "shuffle": False},
        "train": {
            "steps": 2,
            "prompts_per_step": prompts,
            "samples_per_prompt": GROUP_SIZE,
            "dynamic_sampling": {"max_rounds": rounds},
        },
    }
    return parse_config({**tree, **sections})


def rollouts(config: RunConfig, engine: Engine) -> GeneratedRollouts:
    context = SimpleNamespace(
        rank=0, layout=SimpleNamespace(world_size=1), gather_objects=lambda value: [value]
    )
    prompts = PromptSet(
        PromptItem(prompt_id=str(i), prompt=chr(ord("a") + i), answer=str(i))
        for i in range(NUM_PROMPTS)
    )
    return GeneratedRollouts(
        config,
        context,  # type: ignore[arg-type]
        engine=engine,
        prompts=prompts,
        tokenizer=Tokenizer(),  # type: ignore[arg-type]
    )


def prompt_ids(collected: Collected) -> list[str]:
    return [group.prompt_id for group in collected.groups]


def test_without_it_nothing_is_replaced_or_told() -> None:
    engine = Engine(right="a", wrong="bc")
    collected = rollouts(config_with(0), engine).collect(0)
    assert prompt_ids(collected) == ["0-0", "0-1", "0-2", "0-3"]
    assert collected.metrics == {}


def test_equal_groups_are_replaced_in_place_until_none_is_left() -> None:
    engine = Engine(right="be", wrong="d")  # b and d of the first four, then e of the next two
    collected = rollouts(config_with(5), engine).collect(0)
    assert prompt_ids(collected) == ["0-0", "0-6", "0-2", "0-5"]
    assert engine.asked == [["0-0", "0-1", "0-2", "0-3"], ["0-4", "0-5"], ["0-6"]]
    assert not any(map(is_flat, collected.groups))
    assert collected.metrics == {
        "dynamic_sampling/rounds": 2.0,
        "dynamic_sampling/dropped_groups": 3.0,
        "dynamic_sampling/dropped_fraction": pytest.approx(3 / 7),
        "dynamic_sampling/dropped_tokens": 3 * GROUP_SIZE * 2,
        "dynamic_sampling/dropped_reward_mean": pytest.approx(2 / 3),  # b and e right, d wrong
    }


def test_the_bound_leaves_equal_groups_in_the_batch() -> None:
    engine = Engine(right="abcdefghijkl", wrong="")
    collected = rollouts(config_with(2), engine).collect(0)
    assert prompt_ids(collected) == ["0-8", "0-9", "0-10", "0-11"]
    assert all(map(is_flat, collected.groups))
    assert collected.metrics["dynamic_sampling/rounds"] == 2
    assert collected.metrics["dynamic_sampling/dropped_groups"] == 8
    assert collected.metrics["dynamic_sampling/dropped_reward_mean"] == 1


def test_the_last_round_is_not_dropped_by_a_small_prompt_set() -> None:
    # Twelve prompts, drawn again in the next epoch under another id.
    engine = Engine(right="abcdefghijkl", wrong="")
    collected = rollouts(config_with(3), engine).collect(0)
    assert prompt_ids(collected) == ["1-0", "1-1", "1-2", "1-3"]


def test_a_resumed_run_draws_on_after_the_replacements() -> None:
    whole = rollouts(config_with(5), Engine(right="be", wrong="dh"))
    whole.collect(0)
    state = whole.state()
    resumed = rollouts(config_with(5), Engine(right="be", wrong="dh"))
    resumed.load_state(state)
    first, second = whole.collect(1), resumed.collect(1)
    assert first == second
    assert prompt_ids(first) == ["0-11", "0-8", "0-9", "0-10"]


def test_failing_rewards_stop_before_more_is_drawn() -> None:
    engine = Engine(right="", wrong="")
    source = rollouts(config_with(5), engine)
    source._prompts = PromptSet(  # answers that are no integers make the verifier fail
        PromptItem(prompt_id=item.prompt_id, prompt=item.prompt, answer="none")
        for item in source._prompts
    )
    with pytest.raises(RewardError, match="max_failure_fraction"):
        source.collect(0)
    assert len(engine.asked) == 1


def test_a_group_is_flat_by_the_rewards_that_are_there() -> None:
    def group(*rewards: float | None) -> SampleGroup:
        return SampleGroup(
            prompt_id="p",
            samples=tuple(
                Sample(
                    prompt_id="p",
                    sample_index=index,
                    prompt_ids=(1,),
                    response_ids=(2,),
                    rollout_logprobs=(-1.0,),
                    finish_reason="stop",
                    weight_version_min=0,
                    weight_version_max=0,
                    reward=reward,
                )
                for index, reward in enumerate(rewards)
            ),
        )

    flat = [group(1.0, 1.0), group(None, 0.5), group(None, None)]
    mixed = [group(0.0, 1.0), group(0.0, None, 1.0)]
    assert all(map(is_flat, flat)) and not any(map(is_flat, mixed))
    metrics = batch_metrics([*flat, *mixed], [0.0], 0, config_with(0))
    assert metrics["advantage/zero_variance_fraction"] == pytest.approx(3 / 5)


def test_where_it_makes_no_sense_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"max_rounds=2 drops groups of equal rewards"):
        config_with(2, objective={"name": "reinforce", "advantage": "none"})
    with pytest.raises(ConfigurationError, match=r"max_rounds=2 must be 0 with rollout\.engine="):
        config_with(2, rollout={"engine": "replay", "replay_path": "x"})
