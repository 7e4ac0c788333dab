"""The `p3o` command. Thin: parses words, maps errors to exit codes.

Exit codes: 0 done; 2 bad configuration or input, with one message on stderr and no traceback;
1 failure while running.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_p3o.config import RunConfig, json_schema, load_config
from megatron_p3o.errors import ConfigurationError, RunError, UserError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="RL post-training on Megatron-Core with the P3O objective.",
)

# Dotted overrides are options that typer does not know; they arrive in `context.args`.
_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_OVERRIDES)
def train(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN.yaml", help="The run's configuration.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run dir from its latest checkpoint.")
    ] = False,
) -> None:
    """Train. Override any field: --section.field VALUE.

    Starts the layout's ranks on this node; under torchrun it is one of them.
    """
    config = load_config(run, context.args)
    # torch is imported only for a configuration that is worth it.
    from megatron_p3o.trainer.launch import launch_ranks, run_as_rank

    if "WORLD_SIZE" in os.environ:
        run_as_rank(config, resume=resume)
    else:
        launch_ranks(config, resume=resume)


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration."""
    print(json_schema())


@app.command(context_settings=_OVERRIDES)
def check(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN.yaml", help="The run's configuration.")],
) -> None:
    """Check a configuration and its input files; start and write nothing."""
    config: RunConfig = load_config(run, context.args)
    from megatron_p3o.preflight import check_run

    inputs = check_run(config, resume=False)
    for notice in config.notices():
        print(f"warning: {notice}")
    print(f"{run}: {config.objective.name} on a {inputs.architecture.family} model, ready to train")


@app.command()
def reshard(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint; it is only read.")],
    destination: Annotated[
        str | None, typer.Argument(metavar="DST", help="Where to write; must not exist.")
    ] = None,
    inspect: Annotated[
        bool, typer.Option("--inspect", help="Print what SRC holds; write nothing.")
    ] = False,
    to: Annotated[str | None, typer.Option(help="hf, torch_dist or torch.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")] = 1,
    vpp: Annotated[int, typer.Option(help="Model chunks of each pipeline rank.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert ranks.")] = 1,
    etp: Annotated[
        int | None, typer.Option(help="Tensor ranks of an expert; as --tp when left out.")
    ] = None,
    chunk_layers: Annotated[
        str | None, typer.Option(help="Layers of each pp x vpp chunk, as 3,5; equal when left out.")
    ] = None,
    vocab_divisible_by: Annotated[
        int, typer.Option(help="Megatron's make-vocab-size-divisible-by.")
    ] = 128,
    names: Annotated[
        str, typer.Option(help="For torch: parameter names of te (Transformer Engine) or local.")
    ] = "te",
    dtype: Annotated[str, typer.Option(help="keep, bf16, fp32 or fp8-block.")] = "keep",
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Keep its state, from torch_dist to torch_dist.")
    ] = False,
    max_shard_size: Annotated[str, typer.Option(help="Of one file, for hf.")] = "5GB",
    workers: Annotated[int, typer.Option(help="Rows in work at once.")] = 2,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read DST back and compare every tensor with SRC.")
    ] = False,
    config: Annotated[
        str | None, typer.Option(help="Directory with config.json, for a SRC without one.")
    ] = None,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Copy NaN and infinity as they are.")
    ] = False,
    unsafe_pickle: Annotated[
        bool, typer.Option("--unsafe-pickle", help="Let SRC's pickles run any code.")
    ] = False,
) -> None:
    """Convert weights between Hugging Face, torch_dist and torch checkpoints of any layout."""
    # torch is imported only when there is something to convert.
    from megatron_p3o.weights.resharding import console
    from megatron_p3o.weights.resharding.run import ReshardOptions
    from megatron_p3o.weights.resharding.target import TargetLayout

    config_dir = None if config is None else Path(config)
    if inspect:
        console.inspect(Path(source), config_dir=config_dir, unsafe_pickle=unsafe_pickle)
        return
    if destination is None or to is None:
        raise ConfigurationError(
            f"DST={destination} and --to={to} must both be given; to look at SRC only, add "
            "--inspect"
        )
    layout = TargetLayout(
        tensor=tp,
        pipeline=pp,
        virtual_pipeline=vpp,
        expert=ep,
        expert_tensor=etp,
        chunk_layers=console.parse_chunk_layers(chunk_layers),
        vocab_divisible_by=vocab_divisible_by,
    )
    options = ReshardOptions(
        to=to,
        layout=layout,
        dtype=dtype,
        names=names,
        optimizer=optimizer,
        workers=workers,
        verify=verify,
        max_shard_bytes=console.parse_size(max_shard_size),
        allow_nonfinite=allow_nonfinite,
        unsafe_pickle=unsafe_pickle,
        config_dir=config_dir,
    )
    console.convert(Path(source), Path(destination), options)


def main() -> None:
    """Entry point of the `p3o` script."""
    try:
        app()  # exits by itself: 2 for words it does not know, 130 for Ctrl-C
    except UserError as error:
        print(f"p3o: {error}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"p3o: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
