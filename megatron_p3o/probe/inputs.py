"""From words to what is measured: weights, prompts as token ids, sampling; see `targets`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.config import (
    DataSection,
    RewardSection,
    RolloutSection,
    RunConfig,
    SamplingSection,
)
from megatron_p3o.data import (
    PromptCursor,
    PromptEncoder,
    PromptItem,
    load_prompts,
    resolve_reward,
)
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.probe.options import ProbeOptions
from megatron_p3o.targets import check_lengths, load_tokenizer, open_target, run_config
from megatron_p3o.weights import ParamRow, param_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbePrompt:
    """A prompt as the engine is given it."""

    key: str
    """Decides the sampling noise, as in a run."""
    item: PromptItem
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeInputs:
    """Everything but the ways of serving."""

    source: str
    """Where the weights are from."""
    model_dir: Path
    """Configuration and tokenizer."""
    architecture: ModelArchitecture
    rows: tuple[ParamRow, ...]
    weights: Mapping[str, Tensor]
    """By checkpoint name, fp32, on the CPU."""
    tokenizer: PreTrainedTokenizerBase
    prompts: tuple[ProbePrompt, ...]
    sampling: SamplingSection
    seed: int
    batch_size: int
    reward: RewardSection | None
    """None: nothing says how responses are judged."""


def read_inputs(options: ProbeOptions) -> ProbeInputs:
    """Read and check everything; the weights come last.

    Raises:
        UserError: whatever is wrong with a file or a word.
    """
    config = run_config(options.target, options.run)
    data = _data(options, config)
    target = open_target(options.target, config)
    sampling = _sampling(options, config)
    seed = options.seed
    if seed is None:
        seed = config.run.seed if config is not None else 0
    tokenizer = load_tokenizer(target.model_dir)
    prompts = _prompts(options, data, tokenizer, seed)
    check_lengths(
        ((prompt.item, prompt.token_ids) for prompt in prompts),
        sampling.max_new_tokens,
        target.architecture,
    )
    if config is not None:
        resolve_reward(config.data.reward.name)
    rollout = config.rollout if config is not None else RolloutSection()
    return ProbeInputs(
        source=str(target.directory),
        model_dir=target.model_dir,
        architecture=target.architecture,
        rows=param_rows(target.architecture),
        weights=dict(target.weights()),
        tokenizer=tokenizer,
        prompts=prompts,
        sampling=sampling,
        seed=seed,
        batch_size=options.batch_size or rollout.batch_size,
        reward=None if config is None else config.data.reward,
    )


def _data(options: ProbeOptions, config: RunConfig | None) -> DataSection:
    if config is None and options.prompts is None:
        raise ConfigurationError(
            f"MODEL_OR_RUN={str(options.target)!r} says nothing about prompts; add --prompts "
            "FILE.jsonl, or --run RUN.yaml for the data and sampling of a run"
        )
    # Without a run nothing judges the responses, so that no answers are needed.
    section = (
        config.data
        if config is not None
        else DataSection(source="jsonl", path=str(options.prompts), answer_field="prompt")
    )
    changes: dict[str, object] = {}
    if options.prompts is not None:
        changes |= {"source": "jsonl", "path": str(options.prompts), "generator": None}
    if options.chat is not None:
        changes["chat"] = options.chat
        if not options.chat:
            changes["system_prompt"] = None
    return section.model_copy(update=changes)


def _sampling(options: ProbeOptions, config: RunConfig | None) -> SamplingSection:
    given = {"temperature": options.temperature, "max_new_tokens": options.max_new_tokens}
    section = config.sampling if config is not None else SamplingSection()
    return section.model_copy(update={k: v for k, v in given.items() if v is not None})


def _prompts(
    options: ProbeOptions, data: DataSection, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[ProbePrompt, ...]:
    """The first prompts that a run of this seed draws, each once."""
    items = load_prompts(data)
    encoder = PromptEncoder(tokenizer, data)
    cursor = PromptCursor(len(items), seed, data.shuffle)
    return tuple(
        ProbePrompt(
            key=drawn.key, item=items[drawn.index], token_ids=encoder.encode(items[drawn.index])
        )
        for drawn in cursor.take(min(options.num_prompts, len(items)))
    )
