"""The `p3o` command. Thin: parses words, maps errors to exit codes.

Exit codes: 0 done; 2 bad configuration or input, with one message on stderr and no traceback;
1 failure while running.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_p3o.config import RunConfig, json_schema, load_config
from megatron_p3o.doctor.command import doctor
from megatron_p3o.errors import RunError, UserError
from megatron_p3o.evaluation.command import COMPARE, EvalWords, compare_results, evaluate
from megatron_p3o.inspect_run.commands import samples, watch
from megatron_p3o.probe.command import probe
from megatron_p3o.study.commands import app as study_app

app = typer.Typer(
    cls=EvalWords,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="RL post-training on Megatron-Core with the P3O objective.",
)

app.command("eval")(evaluate)
app.command(COMPARE)(compare_results)
# Here, since study tools import no torch.
study_app.command("probe")(probe)
app.add_typer(study_app, name="study")
app.command("watch")(watch)
app.command("samples")(samples)

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


@app.command(context_settings=_OVERRIDES)
def serve(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN.yaml", help="The run's configuration.")],
    logs: Annotated[
        Path | None, typer.Option(help="Directory of the logs; <run.dir>.servers if left out.")
    ] = None,
) -> None:
    """Start this node's SGLang servers (rollout.launch) and keep them alive until Ctrl-C."""
    config = load_config(run, context.args)
    from megatron_p3o.trainer.display import log_lines
    from megatron_p3o.trainer.serve import serve as serve_until_told

    with log_lines():
        serve_until_told(config, logs)


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


app.command(context_settings=_OVERRIDES)(doctor)


# The words of `p3o plan`; what they mean and their defaults are in `plan.PlanOptions`.
_Nodes = Annotated[int | None, typer.Option(help="Nodes of trainers.")]
_ServerNodes = Annotated[int, typer.Option(help="Nodes that start rollout.launch.replicas each.")]
_GpusPerNode = Annotated[int, typer.Option(help="GPUs of a node.")]
_Gpu = Annotated[str, typer.Option(help="a100, h100, h200 or b200.")]
_GpuMemory = Annotated[float | None, typer.Option(help="Memory of a GPU, 10^9 bytes.")]
_Mfu = Annotated[float, typer.Option(help="Share of the peak FLOP/s that passes reach.")]
_Mbu = Annotated[float, typer.Option(help="Share of the memory bandwidth that decoding reaches.")]
_Nbu = Annotated[float, typer.Option(help="Share of a link's bandwidth that a sync reaches.")]
_Prompt = Annotated[
    int | None, typer.Option(help="Mean length of prompts; data.max_prompt_tokens if left out.")
]
_Response = Annotated[
    int | None, typer.Option(help="Mean of responses; sampling.max_new_tokens if left out.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")]


@app.command(context_settings=_OVERRIDES)
def plan(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN.yaml", help="The run's configuration.")],
    nodes: _Nodes = None,
    server_nodes: _ServerNodes = 1,
    gpus_per_node: _GpusPerNode = 8,
    gpu: _Gpu = "h100",
    gpu_memory_gb: _GpuMemory = None,
    mfu: _Mfu = 0.35,
    mbu: _Mbu = 0.5,
    nbu: _Nbu = 0.7,
    prompt_tokens: _Prompt = None,
    response_tokens: _Response = None,
    as_json: _Json = False,
) -> None:
    """Estimate memory, FLOPs and time of a run from its configuration and config.json alone."""
    config = load_config(run, context.args)
    from megatron_p3o.plan import PlanOptions, make_plan, render

    options = PlanOptions(
        nodes=nodes,
        server_nodes=server_nodes,
        gpus_per_node=gpus_per_node,
        gpu=gpu,
        gpu_memory_gb=gpu_memory_gb,
        mfu=mfu,
        mbu=mbu,
        nbu=nbu,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
    )
    made = make_plan(config, options)
    print(json.dumps(made.to_json(), indent=2) if as_json else render(made), end="\n" * as_json)


# The words of `p3o reshard`.
_Source = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint; it is only read.")]
_Destination = Annotated[
    str | None, typer.Argument(metavar="DST", help="Where to write; must not exist.")
]
_Inspect = Annotated[bool, typer.Option("--inspect", help="Print what SRC holds; write nothing.")]
_To = Annotated[str | None, typer.Option(help="hf, torch_dist or torch.")]
_Tp = Annotated[int, typer.Option(help="Tensor ranks.")]
_Pp = Annotated[int, typer.Option(help="Pipeline ranks.")]
_Vpp = Annotated[int, typer.Option(help="Model chunks of each pipeline rank.")]
_Ep = Annotated[int, typer.Option(help="Expert ranks.")]
_Etp = Annotated[int | None, typer.Option(help="Tensor ranks of an expert; as --tp if left out.")]
_ChunkLayers = Annotated[
    str | None, typer.Option(help="Layers of each pp x vpp chunk, as 3,5; equal if left out.")
]
_Divisor = Annotated[int, typer.Option(help="Megatron's make-vocab-size-divisible-by.")]
_Names = Annotated[
    str, typer.Option(help="For torch: parameter names of te (Transformer Engine) or local.")
]
_Dtype = Annotated[str, typer.Option(help="keep, bf16, fp32 or fp8-block.")]
_Optimizer = Annotated[
    bool, typer.Option("--optimizer", help="Keep its state, from torch_dist to torch_dist.")
]
_ShardSize = Annotated[str, typer.Option(help="Greatest size of one file, for hf.")]
_Workers = Annotated[int, typer.Option(help="Rows in work at once.")]
_Verify = Annotated[
    bool, typer.Option("--verify", help="Read DST back and compare every tensor with SRC.")
]
_Config = Annotated[
    str | None, typer.Option(help="Directory with config.json, for a SRC without one.")
]
_Nonfinite = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Copy NaN and infinity as they are.")
]
_Unsafe = Annotated[bool, typer.Option("--unsafe-pickle", help="Let SRC's pickles run any code.")]


@app.command()
def reshard(
    source: _Source,
    destination: _Destination = None,
    inspect: _Inspect = False,
    to: _To = None,
    tp: _Tp = 1,
    pp: _Pp = 1,
    vpp: _Vpp = 1,
    ep: _Ep = 1,
    etp: _Etp = None,
    chunk_layers: _ChunkLayers = None,
    vocab_divisible_by: _Divisor = 128,
    names: _Names = "te",
    dtype: _Dtype = "keep",
    optimizer: _Optimizer = False,
    max_shard_size: _ShardSize = "5GB",
    workers: _Workers = 2,
    verify: _Verify = False,
    config: _Config = None,
    allow_nonfinite: _Nonfinite = False,
    unsafe_pickle: _Unsafe = False,
) -> None:
    """Convert weights between Hugging Face, torch_dist and torch checkpoints of any layout."""
    # torch is imported only when there is something to convert.
    from megatron_p3o.weights.resharding import console

    if inspect:
        console.inspect(source, config_dir=config, unsafe_pickle=unsafe_pickle)
        return
    console.convert(
        source,
        destination,
        to=to,
        sizes={"tensor": tp, "pipeline": pp, "virtual_pipeline": vpp, "expert": ep},
        expert_tensor=etp,
        chunk_layers=chunk_layers,
        vocab_divisible_by=vocab_divisible_by,
        names=names,
        dtype=dtype,
        optimizer=optimizer,
        max_shard_size=max_shard_size,
        workers=workers,
        verify=verify,
        config_dir=config,
        allow_nonfinite=allow_nonfinite,
        unsafe_pickle=unsafe_pickle,
    )


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
