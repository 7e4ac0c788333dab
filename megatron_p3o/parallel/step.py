"""One pass over a step's microbatches, through Megatron's pipeline schedule.

`score` runs forward without gradient and keeps the log-probs; `train` runs forward and backward
with the trust statistics that scoring gave. Both select the response tokens' hidden states and
apply `parallel.logprobs`, by the same code on the same numbers, so their log-probs are bitwise
equal for the same weights. `forward` and `backward` are the same step without a scoring pass: all
microbatches' forwards, then all backwards, for models without pipeline stages.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_p3o.parallel.batching import Microbatch
from megatron_p3o.parallel.logprobs import token_logprobs
from megatron_p3o.parallel.model import PolicyModel
from megatron_p3o.parallel.router import RouterMonitor
from megatron_p3o.parallel.router_replay import RouterReplay
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
    """What one forward pass says of a microbatch's T tokens; gradient only from `forward`."""

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

    def __init__(
        self,
        model: PolicyModel,
        context: ParallelContext,
        head: HeadOptions,
        *,
        router_replay: bool = False,
    ) -> None:
        """
        Args:
            model: what is run.
            context: where this rank stands.
            head: how log-probs are taken.
            router_replay: send tokens to the microbatches' `routed_experts`.
        """
        self._model = model
        self._context = context
        self._head = head
        self._replay = RouterReplay(model, context) if router_replay else None
        self.routers = RouterMonitor(model, context, self._replay)
        """Records the passes of `score` and `forward`."""
        self._schedule = get_forward_backward_func()

    def score(
        self, microbatches: Sequence[Microbatch], *, with_entropy: bool = True
    ) -> list[MicrobatchScore]:
        """Log-probs and entropy of every response token under the present weights.

        Without `with_entropy` the entropy is zeros.

        Returns:
            One entry per microbatch on the last pipeline stage; an empty list elsewhere.
        """

        def read(index: int, hidden: Tensor, non_loss_data: bool) -> MicrobatchScore:
            logprobs, entropy = self._logprobs(
                hidden, microbatches[index], with_entropy=with_entropy
            )
            return MicrobatchScore(logprobs=logprobs, entropy=entropy)

        with torch.no_grad(), self.routers.recording():
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

        def compute_loss(index: int, hidden: Tensor) -> tuple[Tensor, Tensor, MicrobatchResult]:
            microbatch = microbatches[index]
            logprobs, entropy = self._logprobs(hidden, microbatch, with_entropy=with_entropy)
            score = MicrobatchScore(logprobs=logprobs, entropy=entropy)
            output = loss(index, _token_stats(microbatch, score))
            num_tokens = torch.tensor(output.num_tokens, dtype=torch.int, device=hidden.device)
            return output.loss_sum, num_tokens, _result(score, output)

        self._model.zero_grad_buffers()
        return self._run(microbatches, compute_loss, forward_only=False)

    def forward(self, microbatches: Sequence[Microbatch]) -> list[MicrobatchScore]:
        """All forward passes, keeping their graphs for `backward`. Needs a single stage."""
        assert self._context.layout.pipeline == 1
        scores = []
        with self.routers.recording():
            for microbatch in microbatches:
                self._expect(microbatch)
                hidden = _forward(self._model.wrapped, microbatch)
                logprobs, entropy = self._logprobs(hidden, microbatch, with_entropy=True)
                scores.append(MicrobatchScore(logprobs=logprobs, entropy=entropy))
        return scores

    def backward(
        self,
        microbatches: Sequence[Microbatch],
        scores: Sequence[MicrobatchScore],
        loss: MicrobatchLoss,
    ) -> list[MicrobatchResult]:
        """All backward passes through what `forward` returned; otherwise as `train`."""
        wrapped = self._model.wrapped
        wrapped.zero_grad_buffer()
        results, num_tokens = [], 0
        for index, (microbatch, score) in enumerate(zip(microbatches, scores, strict=True)):
            output = loss(index, _token_stats(microbatch, score))
            is_last = index + 1 == len(microbatches)
            # Gradients are reduced over ranks in the last backward pass, as in the schedules.
            with contextlib.nullcontext() if is_last else wrapped.no_sync():
                output.loss_sum.backward()
            num_tokens += output.num_tokens
            results.append(_result(score, output))
        total = torch.tensor(num_tokens, dtype=torch.int, device=self._context.device)
        self._model.config.finalize_model_grads_func([wrapped], total)
        return results

    def _expect(self, microbatch: Microbatch) -> None:
        """Tell the routers whose forward pass comes next."""
        self.routers.expect(microbatch)
        if self._replay is not None:
            self._replay.expect(microbatch)

    def _run(
        self, microbatches: Sequence[Microbatch], on_hidden: Callable[..., Any], **options: bool
    ) -> list[Any]:
        def forward_step(
            iterator: Any, model: torch.nn.Module
        ) -> tuple[Tensor, Callable[..., Any]]:
            index, microbatch = next(iterator)
            self._expect(microbatch)
            return _forward(model, microbatch), partial(on_hidden, index)

        # Every model chunk of a virtual pipeline goes over all microbatches.
        iterators = [iter(enumerate(microbatches)) for _ in self._model.chunks]
        is_interleaved = len(iterators) > 1
        return self._schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if is_interleaved else iterators[0],
            model=self._model.chunks if is_interleaved else self._model.wrapped,
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


def _forward(model: torch.nn.Module, microbatch: Microbatch) -> Tensor:
    """[B, S, H] on the last stage, what the next stage takes elsewhere."""
    packed = None
    if microbatch.cu_seqlens is not None:
        # Padding belongs to its sequence, where the causal mask hides it. Transformer Engine's
        # ring attention asks for the padded boundaries by name; they are the same here.
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=microbatch.cu_seqlens,
            cu_seqlens_kv=microbatch.cu_seqlens,
            cu_seqlens_q_padded=microbatch.cu_seqlens,
            cu_seqlens_kv_padded=microbatch.cu_seqlens,
            max_seqlen_q=microbatch.max_seqlen,
            max_seqlen_kv=microbatch.max_seqlen,
        )
    return model(  # type: ignore[no-any-return]
        microbatch.input_ids, microbatch.position_ids, None, packed_seq_params=packed
    )


def _token_stats(microbatch: Microbatch, score: MicrobatchScore) -> TokenStats:
    return TokenStats(
        logprobs=score.logprobs,
        rollout_logprobs=microbatch.rollout_logprobs,
        advantages=microbatch.advantages,
        token_weights=microbatch.token_weights,
        proximal_logprobs=microbatch.proximal(score.logprobs),
        entropy=score.entropy,
        reference_logprobs=microbatch.reference_logprobs,
    )


def _result(score: MicrobatchScore, output: LossOutput) -> MicrobatchResult:
    return MicrobatchResult(
        logprobs=score.logprobs.detach(),
        loss_sum=output.loss_sum.detach(),
        metrics=output.metrics,
    )
