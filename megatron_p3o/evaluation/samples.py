"""From prompts to judged items, whoever generates.

Sampling noise is keyed by the prompt's place in the data and by nothing of training: every
evaluation of a run draws with the same noise, so that what changes between them is the model, and
`p3o eval` of a checkpoint gives what the run's own evaluation gave.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from megatron_p3o.data import PromptEncoder, PromptItem, RewardRequest, RewardRunner
from megatron_p3o.evaluation.items import EvalItem
from megatron_p3o.rollout import Generation, GenerationRequest

Generate = Callable[[Sequence[GenerationRequest]], list[Generation]]
"""See `RolloutEngine.generate`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPrompt:
    """A prompt as the engine is given it."""

    item: PromptItem
    token_ids: tuple[int, ...]

    def request(self, num_samples: int) -> GenerationRequest:
        return GenerationRequest(
            prompt_id=f"eval-{self.item.prompt_id}",
            prompt_ids=self.token_ids,
            num_samples=num_samples,
            step=0,
        )


def encode_prompts(items: Sequence[PromptItem], encoder: PromptEncoder) -> list[EvalPrompt]:
    """Raises InputError for a prompt that cannot be encoded."""
    return [EvalPrompt(item=item, token_ids=encoder.encode(item)) for item in items]


def sample_items(
    prompts: Sequence[EvalPrompt],
    num_samples: int,
    generate: Generate,
    tokenizer: PreTrainedTokenizerBase,
    rewards: RewardRunner,
) -> list[EvalItem]:
    """One judged item per prompt, in order."""
    requests = [prompt.request(num_samples) for prompt in prompts]
    generations = generate(requests) if requests else []
    return [
        _judged(
            prompt,
            generations[index * num_samples : (index + 1) * num_samples],
            tokenizer,
            rewards,
        )
        for index, prompt in enumerate(prompts)
    ]


def _judged(
    prompt: EvalPrompt,
    generations: Sequence[Generation],
    tokenizer: PreTrainedTokenizerBase,
    rewards: RewardRunner,
) -> EvalItem:
    item = prompt.item
    texts = tokenizer.batch_decode(
        [list(generation.response_ids) for generation in generations], skip_special_tokens=True
    )
    results = rewards.score([RewardRequest(item.prompt, text, item.answer) for text in texts])
    return EvalItem(
        prompt_id=item.prompt_id,
        prompt=item.prompt,
        answer=item.answer,
        responses=tuple(texts),
        rewards=tuple(result.value for result in results),
        reward_errors=tuple(result.error for result in results),
        lengths=tuple(len(generation.response_ids) for generation in generations),
        finish_reasons=tuple(generation.finish_reason for generation in generations),
    )
