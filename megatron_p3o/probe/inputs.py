"""From words to what is measured: weights, prompts as token ids, sampling.

model directory    its weights; prompts from --prompts or --run
checkpoint         the same, of any format that `p3o reshard` reads
run dir            the weights of checkpoints/latest; data and sampling of its config.yaml
RUN.yaml           the weights of model.path; its data and sampling
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_p3o.architecture import ModelArchitecture, read_architecture
from megatron_p3o.config import (
    DataSection,
    RewardSection,
    RolloutSection,
    RunConfig,
    SamplingSection,
    load_config,
)
from megatron_p3o.data import (
    PromptCursor,
    PromptEncoder,
    PromptItem,
    load_prompts,
    resolve_reward,
)
from megatron_p3o.errors import ConfigurationError, InputError
from megatron_p3o.model_files import check_tokenizer
from megatron_p3o.probe.options import ProbeOptions
from megatron_p3o.run_dir import RunDir
from megatron_p3o.weights import ParamRow, param_rows
from megatron_p3o.weights.resharding.detect import open_source
from megatron_p3o.weights.resharding.endpoints import Source


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
    config = _run_config(options)
    data = _data(options, config)
    target = options.target
    if config is not None and target.is_file():
        target = Path(config.model.path)
    if (target / "config.yaml").is_file():
        target = _latest_checkpoint(target)
    if not target.is_dir():
        raise InputError(
            f"MODEL_OR_RUN={str(target)!r} does not exist; give a model directory, a checkpoint, a "
            "run dir or a RUN.yaml"
        )
    source = open_source(target)
    if source.files is None:
        raise InputError(
            f"MODEL_OR_RUN={str(target)!r} comes without config.json and tokenizer; convert it "
            "with `p3o reshard --to hf` and copy the tokenizer into the result"
        )
    architecture = read_architecture(source.files)
    sampling = _sampling(options, config)
    seed = options.seed
    if seed is None:
        seed = config.run.seed if config is not None else 0
    tokenizer = _tokenizer(source.files)
    prompts = _prompts(options, data, tokenizer, seed)
    _check_lengths(prompts, sampling, architecture)
    if config is not None:
        resolve_reward(config.data.reward.name)
    rollout = config.rollout if config is not None else RolloutSection()
    return ProbeInputs(
        source=str(target),
        model_dir=source.files,
        architecture=architecture,
        rows=param_rows(architecture),
        weights=_weights(source, architecture),
        tokenizer=tokenizer,
        prompts=prompts,
        sampling=sampling,
        seed=seed,
        batch_size=options.batch_size or rollout.batch_size,
        reward=None if config is None else config.data.reward,
    )


def _weights(source: Source, architecture: ModelArchitecture) -> dict[str, Tensor]:
    """All weights of the model, fp32, by checkpoint name."""
    # A checkpoint may hold layers that predict further tokens, which the model does not have.
    wanted = {row.megatron for row in param_rows(architecture)}
    weights: dict[str, Tensor] = {}
    for row in source.rows:
        if row.megatron in wanted:
            for name, part in zip(
                row.hf, source.read(row).converted(torch.float32).parts(), strict=True
            ):
                assert isinstance(part, Tensor), name
                weights[name] = part
    return weights


def _run_config(options: ProbeOptions) -> RunConfig | None:
    """The run whose data and sampling are used."""
    target = options.target
    if target.is_file() and options.run is not None:
        raise ConfigurationError(
            f"MODEL_OR_RUN={str(target)!r} with --run={str(options.run)!r} names two runs; leave "
            "--run out, or give a model directory or checkpoint"
        )
    if options.run is not None:
        return load_config(options.run)
    if target.is_file():
        return load_config(target)
    if (target / "config.yaml").is_file():
        return load_config(target / "config.yaml")
    return None


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


def _latest_checkpoint(directory: Path) -> Path:
    """Of a run dir; raises InputError unless it is complete."""
    run_dir = RunDir(directory)
    if not (run_dir.checkpoints / "latest").is_file():
        raise InputError(
            f"MODEL_OR_RUN={str(directory)!r} is a run dir without a complete checkpoint "
            "(checkpoints/latest); train it with checkpoint.every above 0, or give its config.yaml "
            "to probe the model that it starts from"
        )
    return run_dir.latest_checkpoint()


def _tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    check_tokenizer(model_dir)
    try:
        return AutoTokenizer.from_pretrained(model_dir)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{str(model_dir)!r} has no tokenizer that can be read ({error}); copy the model's "
            "tokenizer files into it"
        ) from error


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


def _check_lengths(
    prompts: tuple[ProbePrompt, ...], sampling: SamplingSection, architecture: ModelArchitecture
) -> None:
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    num_tokens, room = len(longest.token_ids), architecture.max_position_embeddings
    if num_tokens + sampling.max_new_tokens > room:
        raise InputError(
            f"prompt {longest.item.prompt_id} has {num_tokens} tokens and --max-new-tokens="
            f"{sampling.max_new_tokens} follow, but the model has {room} positions "
            "(max_position_embeddings); shorten the prompt or lower --max-new-tokens"
        )
