"""The policy under training: score a batch, decide how far to trust it, step, hand out weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_p3o.algorithms import LOSSES, TrustStats
from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.batching import Microbatch, make_microbatches
from megatron_p3o.parallel.gather import ShardGatherer
from megatron_p3o.parallel.model import build_model
from megatron_p3o.parallel.optimizer import PolicyOptimizer
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.parallel.step import (
    HeadOptions,
    MicrobatchLoss,
    MicrobatchResult,
    MicrobatchScore,
    StepRunner,
)
from megatron_p3o.trainer.metrics import Metric, Over
from megatron_p3o.trainer.trust import StepTrust, measure_trust
from megatron_p3o.types import LossOutput, ScoredSample, TokenStats
from megatron_p3o.weights import (
    HfReader,
    TensorShard,
    hf_tensors,
    load_hf_weights,
    rows_by_megatron_name,
)


class Policy:
    """Megatron model, optimizer and the weight version they hold. Every method is collective."""

    def __init__(
        self, config: RunConfig, architecture: ModelArchitecture, context: ParallelContext
    ) -> None:
        """Build this rank's part and load the model directory's weights into it."""
        self.config = config
        self.context = context
        self.weight_version = 0
        """Optimizer steps that the present weights have seen."""
        self.model = build_model(architecture, context, config)
        self._architecture = architecture
        with HfReader(Path(config.model.path)) as reader:
            load_hf_weights(
                reader,
                architecture,
                dict(self.model.named_parameters()),
                dense=TensorShard(context.coordinates.tensor, context.layout.tensor),
                expert=TensorShard(
                    context.expert_coordinates.expert_tensor, context.layout.expert_tensor
                ),
            )
        # After loading: the optimizer copies the weights into its fp32 main parameters.
        self.optimizer = PolicyOptimizer(
            self.model,
            config.optimizer,
            total_steps=config.train.steps * config.train.optimizer_steps_per_rollout,
        )
        self._runner = StepRunner(
            self.model,
            context,
            HeadOptions(
                temperature=config.sampling.temperature,
                vocab_size=architecture.vocab_size,
                chunk_tokens=config.train.logprob_chunk_tokens,
            ),
        )
        # Keyed by the tables' own spelling, which folds the copy of a tied embedding onto it.
        rows = rows_by_megatron_name(architecture)
        self._gather = ShardGatherer(
            {rows[name].megatron: p for name, p in self.model.named_parameters()},
            {row.megatron for row in rows.values() if row.expert},
            context,
        )

    def microbatches(self, samples: Sequence[ScoredSample]) -> list[Microbatch]:
        """This rank's share of an optimizer step's samples."""
        return make_microbatches(
            samples,
            microbatch_size=self.config.train.microbatch_size,
            data_rank=self.context.coordinates.data,
            data_size=self.context.layout.data,
            device=self.context.device,
            length_multiple=self.config.layout.sequence_multiple,
            count_multiple=self.config.layout.microbatch_multiple,
        )

    def score(self, microbatches: Sequence[Microbatch]) -> list[MicrobatchScore]:
        """One forward pass without gradient; see `StepRunner.score`."""
        return self._runner.score(microbatches)

    def trust(
        self, microbatches: Sequence[Microbatch], scores: Sequence[MicrobatchScore]
    ) -> StepTrust:
        """Exact ESS of the step; see `measure_trust`."""
        return measure_trust(
            microbatches,
            scores,
            self.context,
            self.config.ess,
            weight_version=self.weight_version,
        )

    def update(self, microbatches: Sequence[Microbatch], trust: StepTrust) -> dict[str, Metric]:
        """Forward, backward, optimizer step: the weight version rises by one."""
        results = self._runner.train(
            microbatches,
            self._loss(trust),
            with_entropy=self.config.objective.entropy_coefficient > 0,
        )
        return self._step(results, trust)

    def update_fused(self, microbatches: Sequence[Microbatch]) -> dict[str, Metric]:
        """Score, trust and update with one forward pass; see `train.scoring`."""
        scores = self._runner.forward(microbatches)
        trust = self.trust(microbatches, scores)
        results = self._runner.backward(microbatches, scores, self._loss(trust))
        return self._step(results, trust)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The whole model by Hugging Face name, one tensor at a time, on every rank."""
        return hf_tensors(self._architecture, self._gather)

    def _loss(self, trust: StepTrust) -> MicrobatchLoss:
        objective = self.config.objective
        loss = LOSSES[objective.name]

        def microbatch_loss(index: int, stats: TokenStats) -> LossOutput:
            return loss(stats, trust.per_microbatch[index], objective)

        return microbatch_loss

    def _step(self, results: Sequence[MicrobatchResult], trust: StepTrust) -> dict[str, Metric]:
        outcome = self.optimizer.step()
        self.weight_version += 1
        return {
            **trust.metrics,
            **self._loss_metrics(results, trust.whole),
            "grad_norm": Metric(outcome.grad_norm, Over.MAX),
            "lr": Metric(outcome.lr, Over.LAST),
            **self._router_metrics(),
        }

    def _router_metrics(self) -> dict[str, Metric]:
        """Of the pass that scored this step's samples."""
        stats = self._runner.routers.stats()
        if stats is None:
            return {}
        return {
            "router/load_max_over_mean": Metric(stats.load_max_over_mean),
            "router/load_max_over_mean_worst": Metric(stats.load_max_over_mean_worst, Over.MAX),
            "router/balance_loss": Metric(stats.balance_loss),
            "router/entropy_mean": Metric(stats.entropy),
        }

    def _loss_metrics(
        self, results: Sequence[MicrobatchResult], whole: TrustStats
    ) -> dict[str, Metric]:
        """Means over the step's tokens of the loss and its parts, on every rank."""
        objective = self.config.objective
        # A loss names its metrics even without tokens, so stages without results know them too.
        empty = LOSSES[objective.name](TokenStats.empty(), whole, objective)
        names = ("loss/total", *empty.metrics)
        sums = torch.zeros(len(names), dtype=torch.float64)
        for result in results:
            values = [result.loss_sum, *(result.metrics[name] for name in names[1:])]
            sums += torch.stack([value.double().cpu() for value in values])
        means = self.context.sum_tokens(sums) / whole.num_tokens
        return {name: Metric(mean) for name, mean in zip(names, means.tolist(), strict=True)}
