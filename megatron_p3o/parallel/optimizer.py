"""Megatron's optimizer and learning-rate schedule, with a step that fails closed.

A non-finite gradient norm raises on every rank before anything is stepped: the norm is already an
all-reduce, so all ranks see the same number.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_p3o.config import OptimizerSection
from megatron_p3o.errors import NonFiniteError
from megatron_p3o.parallel.model import PolicyModel


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What one optimizer step did."""

    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate that was applied."""


class PolicyOptimizer:
    """AdamW over this rank's parameters, its schedule counted in optimizer steps."""

    def __init__(self, model: PolicyModel, section: OptimizerSection, total_steps: int) -> None:
        """
        Args:
            model: gradients must be finished (`StepRunner.train`) before `step`.
            section: the optimizer's configuration.
            total_steps: optimizer steps of the whole run, where linear and cosine decay end.
        """
        self.megatron = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=section.lr,
                min_lr=section.min_lr,
                weight_decay=section.weight_decay,
                adam_beta1=section.betas[0],
                adam_beta2=section.betas[1],
                adam_eps=section.eps,
                clip_grad=section.clip_grad,
                bf16=model.config.bf16,
                params_dtype=model.config.params_dtype,
                use_distributed_optimizer=section.distributed,
                fp8_recipe=model.config.fp8_recipe if model.config.fp8 else None,
            ),
            model.chunks,
        )
        self._inner = [
            o for o in _leaves(self.megatron) if isinstance(o.optimizer, torch.optim.Adam)
        ]
        for optimizer in self._inner:
            _allocate_adam_state(optimizer.optimizer)
            if isinstance(optimizer, DistributedOptimizer):
                _let_load_skip_step(optimizer)
                _count_padding(optimizer)
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=section.lr,
            min_lr=section.min_lr,
            lr_warmup_steps=section.warmup_steps,
            # Megatron wants decay to end after warm-up, even for runs shorter than that.
            lr_decay_steps=max(total_steps, section.warmup_steps + 1),
            lr_decay_style=section.schedule,
            start_wd=section.weight_decay,
            end_wd=section.weight_decay,
            wd_incr_steps=total_steps,
            wd_incr_style="constant",
        )

    def step(self) -> StepOutcome:
        """Clip, step, advance the schedule.

        Raises:
            NonFiniteError: the gradient norm is NaN or infinite; nothing was stepped.
        """
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise NonFiniteError(
                f"gradient norm is {grad_norm} although every log-prob was finite; nothing was "
                "stepped. Resume from the last checkpoint with a lower optimizer.lr or "
                "precision.trainer=fp32"
            )
        # The schedule counts finished steps; the first step of a warm-up must not have lr = 0.
        self.scheduler.step(1)
        lr = float(self.megatron.param_groups[0]["lr"])
        self.megatron.step()
        # Without a distributed optimizer `grad` is the gradient buffer itself: left in place, the
        # next backward pass would add the buffer to itself.
        self.megatron.zero_grad()
        return StepOutcome(grad_norm=grad_norm, lr=lr)

    def sharded_state(self, model_state: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
        """Optimizer state for Megatron's distributed checkpoints, loadable in any layout."""
        return self.megatron.sharded_state_dict(
            model_state,
            is_loading=is_loading,
            metadata={"distrib_optim_sharding_type": "fully_reshardable"},
        )

    def load_state(self, state: dict[str, Any]) -> None:
        """Take what Megatron's checkpoint loading filled in for `sharded_state`."""
        self.megatron.load_state_dict(state)
        for optimizer in self._inner:
            # Loading hands one step tensor to all parameters; torch's Adam counts in place, so
            # each needs its own, or one step would count as many.
            for parameter_state in optimizer.optimizer.state.values():
                parameter_state["step"] = parameter_state["step"].clone()


def _leaves(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _allocate_adam_state(adam: torch.optim.Adam) -> None:
    """torch's Adam makes its state in the first step, but checkpoints describe it before that."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter].update(
                step=torch.tensor(0.0),
                exp_avg=torch.zeros_like(parameter),
                exp_avg_sq=torch.zeros_like(parameter),
            )


def _let_load_skip_step(optimizer: DistributedOptimizer) -> None:
    """Megatron stores torch Adam's step once per group, then looks for it per parameter."""
    set_states = optimizer._set_main_param_and_optimizer_states

    def set_states_with_step(model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        step = next(iter(optimizer.optimizer.state.values()))["step"]
        set_states(model_param, {"step": step, **tensors})

    optimizer._set_main_param_and_optimizer_states = set_states_with_step


def _count_padding(optimizer: DistributedOptimizer) -> None:
    """Let gathered state have the offsets by which Megatron looks parameters up.

    `get_parameter_state_dp_zero` joins the buckets of a buffer without the padding behind each,
    but `param_index_map` counts it: with several buckets, the states of all parameters behind the
    first padding would be saved shifted, and the last ones cut off.
    """
    for buffer in optimizer.buffers:
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = buffer.numel
