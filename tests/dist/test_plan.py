"""What `p3o plan` counts against Megatron's real models, rank by rank."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.parallel.model import build_model
from megatron_p3o.parallel.optimizer import PolicyOptimizer
from megatron_p3o.parallel.setup import initialize, shut_down
from megatron_p3o.plan.memory import trainer_memory
from megatron_p3o.plan.options import longest_lengths
from megatron_p3o.plan.parameters import count_stages
from tests.dist import matrix
from tests.dist.harness import next_rendezvous, spawn
from tests.dist.models import replay_config, tiny_config

_EXPERT = re.compile(r"\.local_experts\.")


def make_configs(directory: Path, world_size: int) -> list[RunConfig]:
    """The invariance matrix's cuts of a world size; of two ranks, those of the other families."""
    configs = {}
    for case in matrix.CASES:
        is_other = not case.model.startswith(("dense", "experts"))
        if matrix.world_size(case) != world_size or not (is_other or world_size == 4):
            continue
        key = f"{case.model}-{sorted(case.layout.items())}"
        fields = dict(matrix.MODELS[case.model])
        path = directory / re.sub(r"\W+", "-", case.model)
        tiny_config(
            str(fields.pop("family")), tied=bool(fields.pop("tied")), **fields
        ).save_pretrained(path)
        configs[key] = replay_config(
            path,
            Path("unused"),
            steps=1,
            groups=4,
            group_size=4,
            layout=dict(case.layout),
            optimizer={"distributed": case.sharded},
        )
    return list(configs.values())


def count(configs: Sequence[RunConfig]) -> list[tuple[int, int, int, int]]:
    """(stage, parameters, those in experts, numbers of optimizer state) of this rank."""
    counts = []
    for config in configs:
        layout = ParallelLayout.for_world(config.layout, int(os.environ["WORLD_SIZE"]))
        context = initialize(layout, seed=0)
        architecture = read_architecture(config.model.path, with_weights=False)
        model = build_model(architecture, context, config)
        named = [item for module in model.modules for item in module.named_parameters()]
        optimizer = PolicyOptimizer(model, config.optimizer, total_steps=1)
        state = sum(
            tensor.numel()
            for inner in optimizer._inner
            for of_parameter in inner.optimizer.state.values()
            for name, tensor in of_parameter.items()
            if name != "step"
        )
        counts.append(
            (
                context.coordinates.pipeline,
                sum(parameter.numel() for _, parameter in named),
                sum(parameter.numel() for name, parameter in named if _EXPERT.search(name)),
                state,
            )
        )
        shut_down()
        if config is not configs[-1]:
            next_rendezvous()
    return counts


@pytest.mark.parametrize("world_size", [2, 4])
def test_counts_are_those_of_the_models_that_are_built(world_size: int, tmp_path: Path) -> None:
    configs = make_configs(tmp_path, world_size)
    by_rank = spawn(count, world_size, configs, num_rendezvous=len(configs))
    for config, *counts in zip(configs, *by_rank, strict=True):
        architecture = read_architecture(config.model.path, with_weights=False)
        layout = ParallelLayout.for_world(config.layout, world_size)
        stages = count_stages(architecture, config.layout)
        for rank, (stage, total, expert, _) in enumerate(counts):
            planned = stages[stage]
            assert (planned.total, planned.expert) == (total, expert), (config.layout, rank)
        # Ranks share optimizer state unevenly, by whole buckets; their sum is what is planned.
        memory = trainer_memory(config, architecture, layout, longest_lengths(config), None)
        state = sum(memory[stage].resident["optimizer"] for stage, *_ in counts)
        assert state == pytest.approx(4 * sum(numbers for *_, numbers in counts)), config.layout
