"""One pass over a step's microbatches, through Megatron's pipeline schedule.

`score` runs forward without gradient and keeps the log-probs; `train` runs forward and backward
with the trust statistics that scoring gave. Both select the response tokens' hidden states and
apply `parallel.logprobs`, by the same code on the same numbers, so their log-probs are bitwise
equal for the same weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_p3o.parallel.batching import Microbatch
from megatron_p3o.parallel.logprobs import token_logprobs
from megatron_p3o.parallel.model import PolicyModel
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.types import LossOutput, TokenStats

MicrobatchLoss = Callable[[int, TokenStats], LossOutput]
"""(index of the microbatch in the step, its token statistics) -> loss sums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """How hidden states become log-probs; see `parallel.logprobs.token_logprobs`."""

    temperature: float
    vocab_size: int
    chunk_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchScore:
    """What one forward pass says of a microbatch's T tokens; no gradient."""

    logprobs: Tensor  # [T] float32
    entropy: Tensor  # [T] float32, nats


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchResult:
    """What one forward and backward pass gave; sums over the microbatch's tokens."""

    logprobs: Tensor  # [T] float32
    loss_sum: Tensor  # []
    metrics: Mapping[str, Tensor]  # name -> []


class StepRunner:
    """Runs the model over the microbatches of one optimizer step."""

    def __init__(self, model: PolicyModel, context: ParallelContext, head: HeadOptions) -> None:
        self._model = model
        self._context = context
        self._head = head
        self._schedule = get_forward_backward_func()

    def score(self, microbatches: Sequence[Microbatch]) -> list[MicrobatchScore]:
        """Log-probs and entropy of every response token under the present weights.

        Returns:
            One entry per microbatch on the last pipeline stage; an empty list elsewhere.
        """

        def read(index: int, hidden: Tensor, non_loss_data: bool) -> MicrobatchScore:
            logprobs, entropy = self._logprobs(hidden, microbatches[index], with_entropy=True)
            return MicrobatchScore(logprobs=logprobs, entropy=entropy)

        with torch.no_grad():
            return self._run(microbatches, read, forward_only=True, collect_non_loss_data=True)

    def train(
        self, microbatches: Sequence[Microbatch], loss: MicrobatchLoss, *, with_entropy: bool
    ) -> list[MicrobatchResult]:
        """Accumulate and finish the gradient of `sum of losses / tokens of the step`.

        Gradients are reduced over data-parallel ranks, summed over the copies of tied embeddings
        and divided by the step's token count, by Megatron's finalize_model_grads.

        Returns:
            One entry per microbatch on the last pipeline stage; an empty list elsewhere.
        """

        def backpropagate(index: int, hidden: Tensor) -> tuple[Tensor, Tensor, MicrobatchResult]:
            microbatch = microbatches[index]
            logprobs, entropy = self._logprobs(hidden, microbatch, with_entropy=with_entropy)
            output = loss(
                index,
                TokenStats(
                    logprobs=logprobs,
                    rollout_logprobs=microbatch.rollout_logprobs,
                    advantages=microbatch.advantages,
                    token_weights=microbatch.token_weights,
                    proximal_logprobs=microbatch.proximal_logprobs,
                    entropy=entropy if with_entropy else None,
                ),
            )
            num_tokens = torch.tensor(output.num_tokens, dtype=torch.int, device=hidden.device)
            result = MicrobatchResult(
                logprobs=logprobs.detach(),
                loss_sum=output.loss_sum.detach(),
                metrics=output.metrics,
            )
            return output.loss_sum, num_tokens, result

        self._model.wrapped.zero_grad_buffer()
        return self._run(microbatches, backpropagate, forward_only=False)

    def _run(
        self, microbatches: Sequence[Microbatch], on_hidden: Callable[..., Any], **options: bool
    ) -> list[Any]:
        def forward_step(
            iterator: Any, model: torch.nn.Module
        ) -> tuple[Tensor, Callable[..., Any]]:
            index, microbatch = next(iterator)
            # [B, S, H] on the last stage, what the next stage takes elsewhere.
            output = model(microbatch.input_ids, microbatch.position_ids, None)
            return output, partial(on_hidden, index)

        return self._schedule(
            forward_step_func=forward_step,
            data_iterator=iter(enumerate(microbatches)),
            model=self._model.wrapped,
            num_microbatches=len(microbatches),
            # The shapes below are only hints: stages exchange each microbatch's own shape.
            seq_length=max(m.input_ids.shape[1] for m in microbatches),
            micro_batch_size=max(m.input_ids.shape[0] for m in microbatches),
            **options,
        )

    def _logprobs(
        self, hidden_BSH: Tensor, microbatch: Microbatch, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        hidden_TH = hidden_BSH[microbatch.token_rows, microbatch.token_cols]
        return token_logprobs(
            hidden_TH,
            self._model.output_weight(),
            microbatch.labels,
            temperature=self._head.temperature,
            vocab_size=self._head.vocab_size,
            chunk_tokens=self._head.chunk_tokens,
            tensor_group=self._context.tensor_group,
            with_entropy=with_entropy,
        )
