"""One evaluation from its words to its files."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from megatron_p3o.api_key import read_api_key
from megatron_p3o.data import RewardRunner, check_failures
from megatron_p3o.evaluation.embedded import embedded_engine
from megatron_p3o.evaluation.inputs import EvalInputs, read_inputs
from megatron_p3o.evaluation.items import EvalItem, write_results
from megatron_p3o.evaluation.options import EvalOptions
from megatron_p3o.evaluation.report import print_figures
from megatron_p3o.evaluation.samples import Generate, sample_items
from megatron_p3o.evaluation.servers import ServerEngine, served_models
from megatron_p3o.evaluation.summary import figures

Progress = Callable[[str], None]
"""Told how far it is."""
_ROUNDS = 8  # full loads of the servers between two reports: each report waits for the slowest


@dataclass(frozen=True, kw_only=True, slots=True)
class _Engine:
    generate: Generate
    num_sequences: int
    """Between two reports of progress."""
    settings: Mapping[str, Any]
    """What the summary says of it."""


def evaluate(options: EvalOptions, console: Console, *, progress: Progress) -> None:
    """Generate, judge, print, write.

    Raises:
        UserError: bad input; nothing was written.
        RunError: generation or too many rewards failed; nothing was written.
    """
    inputs = read_inputs(options)
    engine = _engine(options, inputs)
    items = _items(inputs, engine, progress)
    _check_rewards(items, inputs)
    found = figures(items, inputs.ks, threshold=inputs.threshold, seed=inputs.seed)
    summary = {"settings": {**inputs.settings(), **engine.settings}, **found.to_json()}
    write_results(inputs.out, items, summary)
    title = (
        f"{inputs.target.directory}: {found.num_prompts} prompts x {found.samples_per_prompt} "
        f"samples; temperature {inputs.sampling.temperature:g}, correct from reward "
        f"{inputs.threshold:g}, seed {inputs.seed}"
    )
    print_figures(found, title, console)
    console.print(Text(f"written to {inputs.out}"), soft_wrap=True)


def _engine(options: EvalOptions, inputs: EvalInputs) -> _Engine:
    if options.engine == "embedded":
        return _Engine(
            generate=embedded_engine(inputs).generate,
            num_sequences=inputs.batch_size,
            settings={"engine": "embedded", "precision": inputs.precision.rollout},
        )
    api_key = read_api_key(inputs.rollout)
    models = served_models(
        options.servers,
        inputs.target.directory,
        is_checkpoint=inputs.target.source.format != "hf",
        api_key=api_key,
    )
    engine = ServerEngine(
        options.servers,
        sampling=inputs.sampling,
        eos_token_ids=inputs.target.architecture.eos_token_ids,
        rollout=inputs.rollout,
        api_key=api_key,
    )
    return _Engine(
        generate=engine.generate,
        num_sequences=_ROUNDS * inputs.rollout.concurrency * len(options.servers),
        settings={"engine": "sglang", "servers": [asdict(model) for model in models]},
    )


def _items(inputs: EvalInputs, engine: _Engine, progress: Progress) -> list[EvalItem]:
    at_once = max(1, engine.num_sequences // inputs.num_samples)
    items: list[EvalItem] = []
    with RewardRunner(inputs.data.reward) as rewards:
        for start in range(0, len(inputs.prompts), at_once):
            part = inputs.prompts[start : start + at_once]
            items += sample_items(
                part, inputs.num_samples, engine.generate, inputs.tokenizer, rewards
            )
            progress(f"{len(items)}/{len(inputs.prompts)} prompts")
    return items


def _check_rewards(items: list[EvalItem], inputs: EvalInputs) -> None:
    errors = [
        f"prompt {item.prompt_id}: {error}"
        for item in items
        for error in item.reward_errors
        if error is not None
    ]
    total = sum(item.num_samples for item in items)
    check_failures(len(errors), total, inputs.data.reward, errors[0] if errors else None)
