"""The policy under training: score a batch, decide how far to trust it, step, hand out weights."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_p3o.algorithms import TrustStats, required_inputs, total_loss
from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.batching import Microbatch, PackingPlan, make_microbatches
from megatron_p3o.parallel.context import SequenceShard
from megatron_p3o.parallel.gather import ShardGatherer
from megatron_p3o.parallel.model import build_model
from megatron_p3o.parallel.optimizer import PolicyOptimizer
from megatron_p3o.parallel.packing import SequenceCost
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.parallel.step import (
    HeadOptions,
    MicrobatchLoss,
    MicrobatchResult,
    MicrobatchScore,
    StepRunner,
)
from megatron_p3o.trainer.loading import load_model_dir
from megatron_p3o.trainer.metrics import Metric, Over
from megatron_p3o.trainer.reference import ReferenceModel
from megatron_p3o.trainer.trust import StepTrust, measure_trust
from megatron_p3o.types import LossOutput, ScoredSample, TokenStats
from megatron_p3o.weights import hf_tensors, rows_by_megatron_name


class Policy:
    """Megatron model, optimizer and the weight version they hold. Every method is collective."""

    def __init__(
        self,
        config: RunConfig,
        architecture: ModelArchitecture,
        context: ParallelContext,
        reference_architecture: ModelArchitecture | None = None,
    ) -> None:
        """Build this rank's part and load the model directory's weights into it.

        Args:
            config: of the run.
            architecture: of the model directory.
            context: where this rank stands.
            reference_architecture: of the reference model; None: the policy's own.
        """
        self.config = config
        self.context = context
        self.weight_version = 0
        """Optimizer steps that the present weights have seen."""
        self.model = build_model(architecture, context, config)
        self._architecture = architecture
        load_model_dir(self.model, config.model.path, architecture, context)
        # After loading: the optimizer copies the weights into its fp32 main parameters.
        self.optimizer = PolicyOptimizer(
            self.model,
            config.optimizer,
            total_steps=config.train.steps * config.train.optimizer_steps_per_rollout,
        )
        head = HeadOptions(
            temperature=config.sampling.temperature,
            vocab_size=architecture.vocab_size,
            chunk_tokens=config.train.logprob_chunk_tokens,
        )
        self._runner = StepRunner(
            self.model, context, head, router_replay=config.model.router_replay
        )
        self._inputs = required_inputs(config.objective, config.reference)
        self._reference: ReferenceModel | None = None
        if "reference" in self._inputs:
            self._reference = ReferenceModel(
                config, reference_architecture or architecture, context, head
            )
        # Keyed by the tables' own spelling, which folds the copy of a tied embedding onto it.
        rows = rows_by_megatron_name(architecture)
        self._gather = ShardGatherer(
            {rows[name].megatron: tensor for name, tensor in self.model.named_weights()},
            {row.megatron for row in rows.values() if row.expert},
            context,
        )

    def microbatches(self, samples: Sequence[ScoredSample]) -> list[Microbatch]:
        """This rank's share of an optimizer step's samples, before the rollout batch is used."""
        max_tokens = self.config.train.max_tokens_per_microbatch
        placed = [
            replace(s, sequence=place, lag=self.weight_version - s.sample.weight_version_min)
            for place, s in enumerate(samples)
        ]
        return make_microbatches(
            placed,
            microbatch_size=self.config.train.microbatch_size,
            data_rank=self.context.coordinates.data,
            data_size=self.context.layout.data,
            device=self.context.device,
            shard=SequenceShard(
                rank=self.context.coordinates.context,
                size=self.context.layout.context,
                multiple=self.config.sequence_multiple,
            ),
            packing=None
            if max_tokens is None
            else PackingPlan(max_tokens=max_tokens, cost=SequenceCost.of(self._architecture)),
            count_multiple=self.config.layout.microbatch_multiple,
            experts_shape=self._experts_shape(),
        )

    def _experts_shape(self) -> tuple[int, int] | None:
        """(layers, experts per token) of what the rollout reports, when it is replayed."""
        moe = self._architecture.moe
        if not self.config.model.router_replay or moe is None:
            return None
        return len(moe.layers), moe.experts_per_token

    def with_reference(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """The microbatches with the reference model's log-probs, where the loss takes them."""
        return microbatches if self._reference is None else self._reference.attach(microbatches)

    def score(self, microbatches: Sequence[Microbatch]) -> list[MicrobatchScore]:
        """One forward pass without gradient; see `StepRunner.score`."""
        return self._runner.score(microbatches)

    def trust(
        self, microbatches: Sequence[Microbatch], scores: Sequence[MicrobatchScore]
    ) -> StepTrust:
        """Exact ESS of the step; see `measure_trust`."""
        if self.config.objective.name == "sft":
            # Answers come from no policy: the ratios are those to the trainer itself, 1.
            microbatches = [
                replace(m, rollout_logprobs=m.proximal(s.logprobs))
                for m, s in zip(microbatches, scores, strict=False)
            ] or microbatches
        return measure_trust(
            microbatches,
            scores,
            self.context,
            self.config.ess,
            weight_version=self.weight_version,
            with_sequences="sequences" in self._inputs,
        )

    def update(self, microbatches: Sequence[Microbatch], trust: StepTrust) -> dict[str, Metric]:
        """Forward, backward, optimizer step: the weight version rises by one."""
        results = self._runner.train(
            microbatches,
            self._loss(trust),
            with_entropy="entropy" in self._inputs,
        )
        return self._step(results, trust)

    def update_fused(self, microbatches: Sequence[Microbatch]) -> dict[str, Metric]:
        """Score, trust and update with one forward pass; see `train.scoring`."""
        scores = self._runner.forward(microbatches)
        trust = self.trust(microbatches, scores)
        results = self._runner.backward(microbatches, scores, self._loss(trust))
        return self._step(results, trust)

    def precision_metrics(self) -> dict[str, float]:
        """Marks runs in which FP8 is emulated, by the trainer or by the rollout engine."""
        is_emulated = self.model.fp8_emulation is not None or self.config.emulates_rollout
        return {"precision/emulated": 1.0} if is_emulated else {}

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The whole model by Hugging Face name, one tensor at a time, on every rank."""
        return hf_tensors(self._architecture, self._gather)

    def _loss(self, trust: StepTrust) -> MicrobatchLoss:
        def microbatch_loss(index: int, stats: TokenStats) -> LossOutput:
            stats = replace(stats, sequences=trust.sequences[index])
            return self._total_loss(stats, trust.per_microbatch[index])

        return microbatch_loss

    def _total_loss(self, stats: TokenStats, trust: TrustStats) -> LossOutput:
        return total_loss(stats, trust, self.config.objective, self.config.reference)

    def _step(self, results: Sequence[MicrobatchResult], trust: StepTrust) -> dict[str, Metric]:
        outcome = self.optimizer.step()
        if self.model.fp8_emulation is not None:
            self.model.fp8_emulation.advance((self.context.tensor_group, self.context.data_group))
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
        replay = {}
        if self.config.model.router_replay:
            replay["router/replay_disagreement"] = Metric(stats.replay_disagreement)
        return {
            **replay,
            "router/load_max_over_mean": Metric(stats.load_max_over_mean),
            "router/load_max_over_mean_worst": Metric(stats.load_max_over_mean_worst, Over.MAX),
            "router/balance_loss": Metric(stats.balance_loss),
            "router/entropy_mean": Metric(stats.entropy),
        }

    def _loss_metrics(
        self, results: Sequence[MicrobatchResult], whole: TrustStats
    ) -> dict[str, Metric]:
        """Means over the step's tokens of the loss and its parts, on every rank."""
        # A loss names its metrics even without tokens, so stages without results know them too.
        empty = self._total_loss(TokenStats.empty(), whole)
        names = ("loss/total", *empty.metrics)
        sums = torch.zeros(len(names), dtype=torch.float64)
        for result in results:
            values = [result.loss_sum, *(result.metrics[name] for name in names[1:])]
            sums += torch.stack([value.double().cpu() for value in values])
        means = self.context.sum_tokens(sums) / whole.num_tokens
        return {name: Metric(mean) for name, mean in zip(names, means.tolist(), strict=True)}
