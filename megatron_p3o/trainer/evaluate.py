"""Evaluation between training steps, on data of its own, that leaves training as it is.

It draws no torch random number and moves no data cursor; sampling noise is keyed, so a run with
evaluations trains exactly as one without. Every rank generates and judges its share of the prompts.
"""

import torch
from transformers import AutoTokenizer

from megatron_p3o.config import RunConfig
from megatron_p3o.data import PromptEncoder, RewardRunner, check_failures
from megatron_p3o.errors import InputError
from megatron_p3o.evaluation.items import EvalItem
from megatron_p3o.evaluation.samples import EvalPrompt, encode_prompts, sample_items
from megatron_p3o.evaluation.summary import metrics
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.preflight import RunInputs
from megatron_p3o.rollout import EmbeddedEngine
from megatron_p3o.trainer.experience import Weights
from megatron_p3o.trainer.served_model import embedded_engine


class Evaluator:
    """Measures the weights that were published last."""

    def __init__(
        self,
        config: RunConfig,
        inputs: RunInputs,
        context: ParallelContext,
        shared: EmbeddedEngine | None,
    ) -> None:
        """
        Args:
            config: of the run, with evaluations.
            inputs: what the checks read.
            context: where this rank stands.
            shared: the rollout engine, which is given all weights; None: build another.

        Raises:
            InputError: on the rank that met it: a prompt cannot be encoded.
        """
        assert inputs.eval_prompts is not None
        self._config = config
        self._context = context
        self._own: EmbeddedEngine | None = None
        if shared is None:
            # transformers draws initial weights, which are then overwritten.
            with torch.random.fork_rng(devices=[]):
                self._own = embedded_engine(config, inputs.architecture, context.device)
        self._engine = shared or self._own
        self._tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        self._rewards = RewardRunner(config.eval_data.reward)
        encoder = PromptEncoder(self._tokenizer, config.eval_data)
        mine = inputs.eval_prompts[context.rank :: context.layout.world_size]
        self._prompts = encode_prompts(mine, encoder)
        _check_lengths(self._prompts, config, inputs)

    def metrics(self, weights: Weights, version: int) -> dict[str, float]:
        """`eval/...`, the same on every rank. Collective.

        Args:
            weights: published last.
            version: of these weights.

        Raises:
            RewardError: on every rank, when more rewards fail than are tolerated.
        """
        if self._own is not None:
            self._own.update_weights(weights(), version)
        assert self._engine is not None
        section = self._config.eval
        engine = self._engine.with_sampling(self._config.eval_sampling, seed=self._config.run.seed)
        mine = sample_items(
            self._prompts, section.n, engine.generate, self._tokenizer, self._rewards
        )
        items = [item for share in self._context.gather_objects(mine) for item in share]
        self._check_rewards(items)
        return metrics(items, sorted(set(section.k)), section.threshold)

    def close(self) -> None:
        self._rewards.close()

    def _check_rewards(self, items: list[EvalItem]) -> None:
        errors = [error for item in items for error in item.reward_errors if error is not None]
        total = sum(item.num_samples for item in items)
        reward = self._config.eval_data.reward
        check_failures(len(errors), total, reward, errors[0] if errors else None)


def make_evaluator(
    config: RunConfig,
    inputs: RunInputs,
    context: ParallelContext,
    shared: EmbeddedEngine | None,
) -> Evaluator | None:
    """None for a run without evaluations; see `Evaluator`."""
    return Evaluator(config, inputs, context, shared) if config.eval.every else None


def _check_lengths(prompts: list[EvalPrompt], config: RunConfig, inputs: RunInputs) -> None:
    room, length = inputs.architecture.max_position_embeddings, config.eval_sampling.max_new_tokens
    for prompt in prompts:
        if len(prompt.token_ids) + length > room:
            raise InputError(
                f"eval.data: prompt {prompt.item.prompt_id} has {len(prompt.token_ids)} tokens and "
                f"eval.max_new_tokens={length} follow, but the model has {room} positions "
                "(max_position_embeddings); shorten the prompt or lower eval.max_new_tokens"
            )
