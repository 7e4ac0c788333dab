"""What MODEL_OR_RUN names on a command line: weights, tokenizer, and the run whose data is used.

model directory    its weights; data from elsewhere
checkpoint         the same, of any format that `p3o reshard` reads
run dir            the weights of checkpoints/latest; data and sampling of its config.yaml
RUN.yaml           the weights of model.path; its data and sampling

Weights are read in this process, whatever the layout that wrote them; no Megatron is needed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_p3o.architecture import ModelArchitecture, read_architecture
from megatron_p3o.config import RunConfig, load_config
from megatron_p3o.data import PromptItem
from megatron_p3o.errors import ConfigurationError, InputError
from megatron_p3o.model_files import check_tokenizer
from megatron_p3o.run_dir import RunDir
from megatron_p3o.weights import param_rows
from megatron_p3o.weights.resharding.detect import open_source
from megatron_p3o.weights.resharding.endpoints import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedTarget:
    """A checkpoint that can be read, with what its model is."""

    directory: Path
    """Where the weights are from."""
    model_dir: Path
    """Configuration and tokenizer."""
    architecture: ModelArchitecture
    source: Source

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights of the model by checkpoint name, fp32, on the CPU, one after the other."""
        # A checkpoint may hold layers that predict further tokens, which the model does not have.
        wanted = {row.megatron for row in param_rows(self.architecture)}
        for row in self.source.rows:
            if row.megatron in wanted:
                parts = self.source.read(row).converted(torch.float32).parts()
                for name, part in zip(row.hf, parts, strict=True):
                    assert isinstance(part, Tensor), name
                    yield name, part


def run_config(target: Path, run: Path | None) -> RunConfig | None:
    """The run whose data and sampling are used; None: nothing names one.

    Args:
        target: MODEL_OR_RUN.
        run: of --run.

    Raises:
        ConfigurationError: both name a run, or a configuration is wrong.
    """
    if target.is_file() and run is not None:
        raise ConfigurationError(
            f"MODEL_OR_RUN={str(target)!r} with --run={str(run)!r} names two runs; leave --run "
            "out, or give a model directory or checkpoint"
        )
    if run is not None:
        return load_config(run)
    if target.is_file():
        return load_config(target)
    if is_run_dir(target):
        return load_config(target / "config.yaml")
    return None


def is_run_dir(target: Path) -> bool:
    return (target / "config.yaml").is_file()


def open_target(target: Path, config: RunConfig | None) -> OpenedTarget:
    """Open the checkpoint; a run dir's is its newest.

    Args:
        target: MODEL_OR_RUN.
        config: of `run_config`.

    Raises:
        InputError: it is no checkpoint, an incomplete one, or one without config.json.
    """
    if config is not None and target.is_file():
        target = Path(config.model.path)
    if is_run_dir(target):
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
    return OpenedTarget(
        directory=target,
        model_dir=source.files,
        architecture=read_architecture(source.files),
        source=source,
    )


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    """Raises InputError where there is none that can be read."""
    check_tokenizer(model_dir)
    try:
        return AutoTokenizer.from_pretrained(model_dir)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{str(model_dir)!r} has no tokenizer that can be read ({error}); copy the model's "
            "tokenizer files into it"
        ) from error


def check_lengths(
    prompts: Iterable[tuple[PromptItem, tuple[int, ...]]],
    max_new_tokens: int,
    architecture: ModelArchitecture,
) -> None:
    """Raises InputError unless the longest prompt and its response fit the model."""
    item, token_ids = max(prompts, key=lambda prompt: len(prompt[1]))
    num_tokens, room = len(token_ids), architecture.max_position_embeddings
    if num_tokens + max_new_tokens > room:
        raise InputError(
            f"prompt {item.prompt_id} has {num_tokens} tokens and --max-new-tokens="
            f"{max_new_tokens} follow, but the model has {room} positions "
            "(max_position_embeddings); shorten the prompt or lower --max-new-tokens"
        )


def _latest_checkpoint(directory: Path) -> Path:
    """Of a run dir; raises InputError unless it is complete."""
    run_dir = RunDir(directory)
    if not (run_dir.checkpoints / "latest").is_file():
        raise InputError(
            f"MODEL_OR_RUN={str(directory)!r} is a run dir without a complete checkpoint "
            "(checkpoints/latest); train it with checkpoint.every above 0, or give its config.yaml "
            "to use the model that it starts from"
        )
    return run_dir.latest_checkpoint()
