"""Checks of a run's inputs that need its files, before anything heavy starts or is written.

The launcher runs them before it starts ranks, and every rank runs them again before it creates the
run dir, so that a run started by torchrun or Slurm is refused just as early.
"""

import hashlib
import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_p3o.api_key import read_api_key
from megatron_p3o.architecture import ModelArchitecture, read_architecture
from megatron_p3o.config import RunConfig
from megatron_p3o.data import PromptSet, load_prompts, resolve_reward
from megatron_p3o.errors import ConfigurationError, InputError, UserError
from megatron_p3o.fp8_shapes import check_fp8
from megatron_p3o.model_files import check_tokenizer, fingerprint
from megatron_p3o.run_dir import RunDir, read_trainer_state
from megatron_p3o.splitting import check_layout


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInputs:
    """What the checks read."""

    architecture: ModelArchitecture
    reference_architecture: ModelArchitecture | None
    """None without a reference KL."""
    prompts: PromptSet | None
    """None when a recorded run is replayed."""
    eval_prompts: PromptSet | None
    """What the run is evaluated on; None where it is not."""
    identity: dict[str, Any]
    """What a resumed run must share with the run that was interrupted; JSON-ready."""
    resume_from: Path | None
    """The checkpoint to continue from."""


def check_run(config: RunConfig, *, resume: bool) -> RunInputs:
    """Read and check the model directory, the prompts, the reward, the run dir.

    Raises:
        UserError: whatever is wrong; nothing has been written.
    """
    architecture = read_architecture(config.model.path)
    check_layout(architecture, config.layout)
    check_fp8(architecture, config)
    if config.model.moe_aux_loss_coefficient > 0 and architecture.moe is None:
        raise ConfigurationError(
            f"model.moe_aux_loss_coefficient={config.model.moe_aux_loss_coefficient} balances "
            "experts, but the model has none; remove it"
        )
    if config.model.router_replay and architecture.moe is None:
        raise ConfigurationError(
            "model.router_replay=true replays the choice of experts, but the model has none; "
            "remove it"
        )
    if config.rollout.engine == "sglang":
        _check_servers(config)
    _check_trackers(config)
    reference = _read_reference(config, architecture)
    prompts = None
    if config.rollout.engine != "replay":
        check_tokenizer(config.model.path)
        prompts = load_prompts(config.data)
        resolve_reward(config.data.reward.name)
    elif not Path(str(config.rollout.replay_path)).is_file():
        raise InputError(
            f"rollout.replay_path={config.rollout.replay_path!r} is not a file; give the "
            "samples.jsonl of a recorded run"
        )
    eval_prompts = _read_eval_prompts(config)
    identity = {
        "model": fingerprint(config.model.path),
        "reference": None if reference is None else fingerprint(config.reference_path),
        "data": _data_identity(config, prompts),
        "seed": config.run.seed,
    }
    return RunInputs(
        architecture=architecture,
        reference_architecture=reference,
        prompts=prompts,
        eval_prompts=eval_prompts,
        identity=identity,
        resume_from=_check_run_dir(config, identity, resume=resume),
    )


def _read_reference(config: RunConfig, policy: ModelArchitecture) -> ModelArchitecture | None:
    if not config.reference.kl_coefficient:
        return None
    if config.reference.model_path is None:
        return policy
    try:
        reference = read_architecture(config.reference_path)
        check_layout(reference, config.layout)
    except UserError as error:
        raise type(error)(f"reference.model_path={config.reference_path!r}: {error}") from error
    if reference.vocab_size != policy.vocab_size:
        raise InputError(
            f"reference.model_path={config.reference_path!r} has a vocabulary of "
            f"{reference.vocab_size} tokens and model.path={config.model.path!r} of "
            f"{policy.vocab_size}; both must share one tokenizer: choose a reference of the same "
            "family"
        )
    return reference


def _read_eval_prompts(config: RunConfig) -> PromptSet | None:
    if not config.eval.every:
        return None
    check_tokenizer(config.model.path)
    try:
        prompts = load_prompts(config.eval_data)
        resolve_reward(config.eval_data.reward.name)
    except UserError as error:
        raise type(error)(f"to evaluate on: {error}") from error
    return PromptSet(prompts[: config.eval.limit])


def _check_servers(config: RunConfig) -> None:
    read_api_key(config.rollout)
    python = config.rollout.launch.python
    if not config.rollout.servers and python is not None and shutil.which(python) is None:
        raise InputError(
            f"rollout.launch.python={python!r} is no program; give the interpreter of SGLang's "
            "environment (on a CPU: make sglang, .venv-sglang/bin/python)"
        )


def _check_trackers(config: RunConfig) -> None:
    wanted = {
        "run.tensorboard": ("tensorboard", config.run.tensorboard),
        "logging.wandb": ("wandb", config.logging.wandb is not None),
        "logging.mlflow": ("mlflow", config.logging.mlflow is not None),
    }
    for field, (package, is_wanted) in wanted.items():
        if is_wanted and not _is_installed(package):
            raise ConfigurationError(
                f"{field} needs the package {package}, which is not installed; run "
                f"pip install 'megatron-p3o[{package}]', or remove {field}"
            )


def _is_installed(package: str) -> bool:
    """Whether a package can be imported. A directory of its name without code, such as the wandb/
    that wandb leaves where it ran, has no origin."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _data_identity(config: RunConfig, prompts: PromptSet | None) -> dict[str, Any]:
    options = {"chat", "system_prompt", "shuffle"}
    return {"content": _content_digest(config, prompts), **config.data.model_dump(include=options)}


def _content_digest(config: RunConfig, prompts: PromptSet | None) -> str:
    if prompts is not None:
        return prompts.fingerprint()
    with Path(str(config.rollout.replay_path)).open("rb") as recording:
        return hashlib.file_digest(recording, "sha256").hexdigest()


def _check_run_dir(config: RunConfig, identity: dict[str, Any], *, resume: bool) -> Path | None:
    run_dir = RunDir(Path(config.run.dir))
    if not resume:
        if run_dir.exists():
            raise ConfigurationError(
                f"run.dir={config.run.dir!r} already exists; add --resume to continue it, or "
                "choose another directory"
            )
        return None
    if not run_dir.exists():
        raise ConfigurationError(
            f"run.dir={config.run.dir!r} does not exist, so --resume has nothing to continue; "
            "leave --resume out"
        )
    checkpoint = run_dir.latest_checkpoint()
    saved = read_trainer_state(checkpoint)["identity"]
    fields = {"model": "model.path", "data": "data", "seed": "run.seed", "reference": "reference"}
    for part, field in fields.items():
        if saved.get(part) != identity[part]:
            raise ConfigurationError(
                f"{field} differs from the run in {config.run.dir!r} (was {saved.get(part)!r}, is "
                f"{identity[part]!r}); a resumed run must keep its model, data, seed and reference "
                "model: restore them or choose another run.dir"
            )
    return checkpoint
