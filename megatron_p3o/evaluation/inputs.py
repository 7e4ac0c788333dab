"""From the words of `p3o eval` to what is generated and judged."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_p3o.config import (
    DataSection,
    EvalSection,
    PrecisionSection,
    RolloutSection,
    RunConfig,
    SamplingSection,
)
from megatron_p3o.data import PromptEncoder, PromptSet, load_prompts, resolve_reward
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.evaluation.items import check_out
from megatron_p3o.evaluation.options import EvalOptions
from megatron_p3o.evaluation.samples import EvalPrompt, encode_prompts
from megatron_p3o.run_dir import RunDir
from megatron_p3o.targets import (
    OpenedTarget,
    check_lengths,
    is_run_dir,
    load_tokenizer,
    open_target,
    run_config,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalInputs:
    """Everything but the engine."""

    target: OpenedTarget
    tokenizer: PreTrainedTokenizerBase
    data: DataSection
    data_digest: str
    """Of all prompts and answers of the source."""
    prompts: tuple[EvalPrompt, ...]
    num_samples: int
    ks: tuple[int, ...]
    threshold: float
    sampling: SamplingSection
    seed: int
    precision: PrecisionSection
    rollout: RolloutSection
    batch_size: int
    out: Path

    def settings(self) -> dict[str, Any]:
        """What the figures depend on, JSON-ready."""
        return {
            "source": str(self.target.directory),
            "data": self.data.path or self.data.generator,
            "data_digest": self.data_digest,
            "chat": self.data.chat,
            "system_prompt": self.data.system_prompt,
            "reward": self.data.reward.name,
            "threshold": self.threshold,
            "samples_per_prompt": self.num_samples,
            "temperature": self.sampling.temperature,
            "max_new_tokens": self.sampling.max_new_tokens,
            "seed": self.seed,
        }


def read_inputs(options: EvalOptions) -> EvalInputs:
    """Read and check everything; weights are not read yet.

    Raises:
        UserError: whatever is wrong with a file or a word.
    """
    config = run_config(options.target, options.run)
    data, sampling = options.data_section(config), options.sampling(config)
    target = open_target(options.target, config)
    out = _out(options, target)
    check_out(out)
    resolve_reward(data.reward.name)
    items = load_prompts(data)
    tokenizer = load_tokenizer(target.model_dir)
    limit = options.limit
    if limit is None and config is not None and options.data is None:
        limit = config.eval.limit
    prompts = encode_prompts(items[:limit], PromptEncoder(tokenizer, data))
    check_lengths(
        ((prompt.item, prompt.token_ids) for prompt in prompts),
        sampling.max_new_tokens,
        target.architecture,
    )
    rollout = RolloutSection() if config is None else config.rollout
    return EvalInputs(
        target=target,
        tokenizer=tokenizer,
        data=data,
        data_digest=PromptSet(items).fingerprint(),
        prompts=tuple(prompts),
        num_samples=options.num_samples,
        ks=options.pass_at(),
        threshold=_threshold(options, config),
        sampling=sampling,
        seed=_seed(options, config),
        precision=PrecisionSection() if config is None else config.precision,
        rollout=rollout,
        batch_size=options.batch_size or rollout.batch_size,
        out=out,
    )


def _out(options: EvalOptions, target: OpenedTarget) -> Path:
    if options.out is not None:
        return options.out
    if not is_run_dir(options.target):
        raise ConfigurationError(
            f"MODEL_OR_RUN={str(options.target)!r} is no run dir, which could take the results; "
            "add --out DIR"
        )
    name = target.directory.name
    if options.data is not None:
        name += f"-{options.data.stem}"
    return RunDir(options.target).evaluations / name


def _threshold(options: EvalOptions, config: RunConfig | None) -> float:
    if options.threshold is not None:
        return options.threshold
    return (EvalSection() if config is None else config.eval).threshold


def _seed(options: EvalOptions, config: RunConfig | None) -> int:
    if options.seed is not None:
        return options.seed
    return 0 if config is None else config.run.seed
