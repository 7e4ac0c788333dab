"""The data's answers as token ids, for supervised training."""

from transformers import PreTrainedTokenizerBase

from megatron_p3o.config import RunConfig
from megatron_p3o.data import DrawnPrompt, PromptEncoder
from megatron_p3o.preflight import RunInputs
from megatron_p3o.rollout import AnswerEngine


def answer_engine(
    config: RunConfig, inputs: RunInputs, tokenizer: PreTrainedTokenizerBase
) -> AnswerEngine:
    """Answers of the run's prompts, each with the end-of-sequence token that the model samples.

    Raises:
        ConfigurationError: the tokenizer cannot encode the prompts as configured.
    """
    prompts = inputs.prompts
    assert prompts is not None
    encoder = PromptEncoder(tokenizer, config.data)
    # The tokenizer's own where the model ends responses with several.
    ends = inputs.architecture.eos_token_ids
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]

    def answer_ids(key: str) -> tuple[int, ...]:
        return encoder.encode_answer(prompts[DrawnPrompt.from_key(key).index], end)

    return AnswerEngine(answer_ids, config.sampling.max_new_tokens)
