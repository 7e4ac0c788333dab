"""The `p3o` command. Thin: parses words, maps errors to exit codes.

Exit codes: 0 done; 2 bad configuration or input, with one message on stderr and no traceback;
1 failure while running.
"""

import os
import sys
from typing import Annotated

import click
import typer

from megatron_p3o.config import RunConfig, json_schema, load_config
from megatron_p3o.errors import RunError, UserError

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


def main() -> None:
    """Entry point of the `p3o` script."""
    try:
        app(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.exceptions.Abort:
        sys.exit(130)
    except UserError as error:
        print(f"p3o: {error}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"p3o: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
