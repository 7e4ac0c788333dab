"""Resharded checkpoints against Megatron itself: what it loads is what the tool writes."""

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from torch import Tensor

from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.setup import ParallelContext, shut_down
from megatron_p3o.parallel.shards import StageOnly
from megatron_p3o.trainer.policy import Policy
from megatron_p3o.weights import ReshardOptions, TargetLayout, reshard
from megatron_p3o.weights.resharding.torch_files import FileRank, directory_name
from tests.dist.harness import next_rendezvous, spawn
from tests.dist.models import make_model
from tests.dist.test_policy import config_for, make_policy


class Case(NamedTuple):
    family: str
    tied: bool
    layout: dict[str, int]
    target: TargetLayout
    """The same layout, as the tool is told."""
    stored: TargetLayout
    """Another one, with which the torch_dist checkpoint is written."""


CASES = [
    Case(
        "qwen3",
        True,
        {"tensor": 2, "pipeline": 2},
        TargetLayout(tensor=2, pipeline=2),
        TargetLayout(tensor=4, vocab_divisible_by=8),
    ),
    Case(
        "qwen2",
        False,
        {"pipeline": 2, "virtual_pipeline": 2, "data": 2},
        TargetLayout(pipeline=2, virtual_pipeline=2),
        TargetLayout(tensor=2, pipeline=4),
    ),
    Case(
        "qwen3_moe",
        False,
        {
            "tensor": 2,
            "pipeline": 2,
            "expert": 2,
            "expert_tensor": 1,
            "sequence_parallel": True,
            "first_stage_layers": 1,
        },
        TargetLayout(tensor=2, pipeline=2, expert=2, expert_tensor=1, chunk_layers=(1, 3)),
        TargetLayout(tensor=1, pipeline=2),
    ),
    Case(
        "glm4",
        False,
        {"tensor": 2, "pipeline": 2},
        TargetLayout(tensor=2, pipeline=2),
        TargetLayout(tensor=4),
    ),
    Case(
        "glm4_moe",
        False,
        {
            "tensor": 2,
            "pipeline": 2,
            "expert": 2,
            "expert_tensor": 1,
            "sequence_parallel": True,
        },
        TargetLayout(tensor=2, pipeline=2, expert=2, expert_tensor=1),
        TargetLayout(tensor=1, pipeline=4),
    ),
    Case(
        "mixtral",
        False,
        {"pipeline": 2, "data": 2, "expert": 2},
        TargetLayout(pipeline=2, expert=2),
        TargetLayout(tensor=2),
    ),
    Case(
        "deepseek_v3",
        False,
        {"pipeline": 2, "data": 2, "expert": 2},
        TargetLayout(pipeline=2, expert=2),
        TargetLayout(tensor=2, pipeline=2),
    ),
    Case(
        "deepseek_v2",
        True,
        {"pipeline": 2, "data": 2, "expert": 2},
        TargetLayout(pipeline=2, expert=2),
        TargetLayout(tensor=2, pipeline=4),
    ),
]


def parameters(policy: Policy) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": tensor
        for index, module in enumerate(policy.model.modules)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        # Other buffers are derived, or count the tokens of a step.
        if isinstance(tensor, torch.nn.Parameter) or name.endswith("expert_bias")
    }


def rank_directory(context: ParallelContext, target: TargetLayout) -> str:
    here = context.coordinates
    rank = FileRank(here.pipeline, context.expert_coordinates.expert, here.tensor)
    return directory_name(rank, target)


def check_rank(configs: list[RunConfig], root: Path) -> int:
    """Compare with what the trainer loads from Hugging Face, then save with Megatron's means."""
    num_compared = 0
    for number, (case, config) in enumerate(zip(CASES, configs, strict=True)):
        policy, context = make_policy(config)
        expected = {name: p.detach().clone() for name, p in parameters(policy).items()}
        sharded = {
            f"model{index}": module.sharded_state_dict()
            for index, module in enumerate(policy.model.modules)
        }

        # torch_dist: Megatron loads what the tool has written.
        with torch.no_grad():
            for parameter in parameters(policy).values():
                parameter.fill_(float("nan"))
        loaded = dist_checkpointing.load(sharded, str(root / f"dist-{number}"))
        for index, module in enumerate(policy.model.modules):
            module.load_state_dict(loaded[f"model{index}"])
        for name, parameter in parameters(policy).items():
            assert torch.equal(drop_padding(parameter), drop_padding(expected[name])), name

        # torch: the file of this rank is its state dict.
        directory = rank_directory(context, case.target)
        with torch.serialization.safe_globals([argparse.Namespace]):
            file = root / f"torch-{number}" / "release" / directory / "model_optim_rng.pt"
            content = torch.load(file, weights_only=True)
        num_modules = len(policy.model.modules)
        for index, module in enumerate(policy.model.modules):
            state = {n: t for n, t in module.state_dict().items() if isinstance(t, Tensor)}
            stored = content["model" if num_modules == 1 else f"model{index}"]
            assert stored.keys() == state.keys()
            for name, tensor in state.items():
                assert torch.equal(drop_padding(stored[name]), drop_padding(tensor)), name
                num_compared += 1

        # The other way: Megatron saves, the tool reads.
        saved = root / f"megatron-dist-{number}"
        if context.rank == 0:
            saved.mkdir()
        context.barrier()
        sharded = {
            f"model{index}": module.sharded_state_dict()
            for index, module in enumerate(policy.model.modules)
        }
        strategy = StageOnly(context)
        dist_checkpointing.save(sharded, str(saved), strategy)
        assert strategy.staged is not None
        written = context.gather_objects(strategy.staged.write())
        if context.rank == 0:
            strategy.staged.finish(written)
        path = root / f"megatron-torch-{number}" / "iter_0000007" / directory
        if context.coordinates.data == 0 or case.layout.get("expert"):
            path.mkdir(parents=True, exist_ok=True)
            states = {
                f"model{index}": module.state_dict()
                for index, module in enumerate(policy.model.modules)
            }
            models = states if num_modules > 1 else {"model": states["model0"]}
            torch.save({"iteration": 7, **models}, path / "model_optim_rng.pt")
        context.barrier()
        shut_down()
        if number + 1 < len(CASES):
            next_rendezvous()
    return num_compared


def drop_padding(tensor: Tensor) -> Tensor:
    """Rows of a vocabulary beyond its end are zeros or whatever Megatron left there."""
    return tensor[:50] if tensor.dim() and len(tensor) in (64, 128) else tensor


def test_megatron_loads_and_saves_what_the_tool_writes_and_reads(tmp_path: Path) -> None:
    models, configs = [], []
    for number, case in enumerate(CASES):
        model = make_model(tmp_path / f"hf-{number}", case.family, tied=case.tied)
        for kind, layout in (("torch_dist", case.stored), ("torch", case.target)):
            name = "dist" if kind == "torch_dist" else kind
            reshard(
                model,
                tmp_path / f"{name}-{number}",
                ReshardOptions(to=kind, layout=layout, names="local"),
            )
        models.append(model)
        configs.append(config_for(model, case.layout))

    counts = spawn(check_rank, 4, configs, tmp_path, num_rendezvous=len(CASES))
    assert min(counts) > 30

    for number, model in enumerate(models):
        for kind in ("dist", "torch"):
            source = tmp_path / f"megatron-{kind}-{number}"
            tracker = source / "latest_checkpointed_iteration.txt"
            if kind == "torch":
                tracker.write_text("7")
            back = tmp_path / f"back-{kind}-{number}"
            reshard(source, back, ReshardOptions(to="hf", config_dir=model))
            one, other = (load_file(path / "model.safetensors") for path in (model, back))
            assert one.keys() == other.keys()
            for name, tensor in one.items():
                assert torch.equal(tensor, other[name]), (kind, number, name)
