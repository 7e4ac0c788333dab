"""Batches ahead of training: which prompts, how far ahead, what a checkpoint keeps."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from megatron_p3o.config import RunConfig, parse_config
from megatron_p3o.data import load_prompts
from megatron_p3o.errors import RunError
from megatron_p3o.rollout.sglang import Reply, Response
from megatron_p3o.trainer.producer import BatchProducer
from megatron_p3o.types import VersionSpan
from tests.unit.test_dynamic_sampling import Tokenizer


class Servers:
    """Answers every prompt with its own first token, by the present version."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[str] = []
        self.gate: asyncio.Event | None = None
        self.failing: str | None = None
        self.old: set[str] = set()
        """Samples that come, once, by weights that are far too old."""

    async def sample(self, name: str, prompt_ids: Sequence[int], max_new_tokens: int) -> Response:
        self.asked.append(name)
        version = self.version
        if name in self.old:
            self.old.discard(name)
            version -= 9
        if self.gate is not None:
            await self.gate.wait()
        if name == self.failing:
            raise RunError(f"sample {name} failed")
        index = int(name.rpartition("/")[2])
        answer = prompt_ids[0] if index == 0 else ord("?")
        response = Response()
        response.extend(
            Reply(
                token_ids=(answer,),
                logprobs=(-0.5,),
                version_spans=(VersionSpan(version, 0, 1),),
                finish_reason="stop",
            )
        )
        return response


def run_config(tmp_path: Path, **sections: dict[str, Any]) -> RunConfig:
    lines = "".join(f'{{"prompt": "{p}", "answer": "1"}}\n' for p in "abcdefghij")
    (tmp_path / "prompts.jsonl").write_text(lines)
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": "runs/unused"},
        "model": {"path": "models/unused"},
        "data": {
            "source": "jsonl",
            "path": str(tmp_path / "prompts.jsonl"),
            "chat": False,
            "shuffle": False,
        },
        "train": {"steps": 4, "prompts_per_step": 2, "samples_per_prompt": 2},
        "rollout": {"engine": "sglang", "servers": ["http://h:1"], "max_staleness": 1},
    }
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    return parse_config(tree)


def producer(config: RunConfig, servers: Servers) -> BatchProducer:
    prompts = load_prompts(config.data)
    return BatchProducer(config, servers, prompts=prompts, tokenizer=cast(Any, Tokenizer()))


def test_batches_are_made_as_far_ahead_as_allowed_and_taken_in_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        servers = Servers()
        made = producer(run_config(tmp_path), servers)
        for step in range(4):
            made.start_up_to(step)
            collected = await made.take(step, weight_version=step)
            keys = [group.prompt_id for group in collected.groups]
            assert keys == [f"0-{2 * step}", f"0-{2 * step + 1}"]
            lags = {step - s.weight_version_min for g in collected.groups for s in g.samples}
            assert lags == {0 if step == 0 else 1}
            # Never a step more than one ahead, and none beyond the last.
            await asyncio.sleep(0.02)
            assert len(servers.asked) == 4 * min(step + 2, 4)
            servers.version = step + 1
        assert len(set(servers.asked)) == 16
        made.close()

    asyncio.run(scenario())


def test_a_checkpoint_keeps_the_prompts_of_batches_in_the_making(tmp_path: Path) -> None:
    async def scenario() -> None:
        servers = Servers()
        config = run_config(tmp_path)
        first = producer(config, servers)
        first.start_up_to(0)
        await first.take(0, 0)
        state = first.state()
        assert state["in_flight"] == {"1": [[2, 0], [3, 0]]}
        first.close()

        resumed = producer(config, servers)
        resumed.load_state(state)
        seen = []
        for step in (1, 2, 3):
            resumed.start_up_to(step)
            groups = (await resumed.take(step, step)).groups
            seen += [group.prompt_id for group in groups]
            servers.version = step + 1
        assert seen == [f"0-{index}" for index in range(2, 8)]
        assert "in_flight" not in resumed.state()
        resumed.close()

    asyncio.run(scenario())


def test_a_run_resumed_with_less_staleness_forgets_no_prompt(tmp_path: Path) -> None:
    async def scenario() -> None:
        rollout = {"engine": "sglang", "servers": ["http://h:1"]}
        ahead = producer(run_config(tmp_path, rollout={**rollout, "max_staleness": 3}), Servers())
        ahead.start_up_to(0)
        await ahead.take(0, 0)
        state = ahead.state()
        assert sorted(state["in_flight"]) == ["1", "2", "3"]
        ahead.close()

        near = producer(run_config(tmp_path, rollout={**rollout, "max_staleness": 0}), Servers())
        near.load_state(state)
        near.start_up_to(1)
        await near.take(1, 0)
        assert near.state()["in_flight"] == {step: state["in_flight"][step] for step in "23"}
        near.close()

    asyncio.run(scenario())


def test_stale_groups_are_sampled_again_and_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        servers = Servers()
        servers.version = 9
        servers.old = {"0-1/0"}
        made = producer(run_config(tmp_path), servers)
        made.start_up_to(0)
        collected = await made.take(0, weight_version=9)
        assert [g.prompt_id for g in collected.groups] == ["0-0", "0-1"]
        assert all(s.weight_version_min == 9 for g in collected.groups for s in g.samples)
        assert collected.metrics["rollout/stale_refused"] == 2.0
        made.close()

    asyncio.run(scenario())


def test_a_failed_sample_ends_its_batch_with_its_own_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        servers = Servers()
        servers.failing = "0-1/1"
        made = producer(run_config(tmp_path), servers)
        made.start_up_to(0)
        with pytest.raises(RunError, match="sample 0-1/1 failed"):
            await made.take(0, 0)
        made.close()

    asyncio.run(scenario())


def test_flat_groups_are_replaced_by_further_prompts(tmp_path: Path) -> None:
    """No answer is right here, so every group is flat in every round."""

    async def scenario() -> None:
        servers = Servers()
        config = run_config(
            tmp_path,
            train={
                "steps": 2,
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
                "dynamic_sampling": {"max_rounds": 2},
            },
            rollout={"engine": "sglang", "servers": ["http://h:1"], "max_staleness": 0},
        )
        made = producer(config, servers)
        made.start_up_to(0)
        collected = await made.take(0, 0)
        assert [g.prompt_id for g in collected.groups] == ["0-4", "0-5"]
        assert collected.metrics["dynamic_sampling/rounds"] == 2.0
        assert collected.metrics["dynamic_sampling/dropped_groups"] == 4.0
        made.close()

    asyncio.run(scenario())
