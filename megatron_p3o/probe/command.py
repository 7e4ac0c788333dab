"""`p3o study probe`: its words. Imports torch only once the words are right."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from megatron_p3o.probe.options import ProbeOptions
from megatron_p3o.probe.precisions import DEFAULT_PRECISIONS
from megatron_p3o.run_dir import replace_text

_WIDTH = 140
"""Columns of the tables, whatever the terminal has: a number that is cut short is another one."""

_Target = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL_OR_RUN",
        help="A Hugging Face directory, a checkpoint, a run dir or a RUN.yaml.",
    ),
]
_Run = Annotated[
    Path | None,
    typer.Option(metavar="RUN.yaml", help="Use its data and sampling with MODEL's weights."),
]
_Prompts = Annotated[
    Path | None, typer.Option(metavar="FILE.jsonl", help="Prompts, in place of the run's.")
]
_Chat = Annotated[
    bool | None, typer.Option("--chat/--no-chat", help="Whether prompts are user turns.")
]
_NumPrompts = Annotated[int, typer.Option(help="The first prompts that a run would draw.")]
_Samples = Annotated[int, typer.Option(help="Responses to each prompt.")]
_MaxNewTokens = Annotated[int | None, typer.Option(help="Longest response; the run's, or 128.")]
_Temperature = Annotated[float | None, typer.Option(help="The run's, or 1.")]
_Seed = Annotated[int | None, typer.Option(help="Of prompts and samples; the run's, or 0.")]
_Precision = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help=f"A way of serving; repeatable. {', '.join(DEFAULT_PRECISIONS)}."
    ),
]
_Ablate = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="parts, layers or none; repeatable. parts if left out."),
]
_AblatePrecision = Annotated[str, typer.Option(help="The precision whose parts are rounded alone.")]
_BatchSize = Annotated[
    int | None, typer.Option(help="Sequences at once; the run's rollout.batch_size, or 64.")
]
_Out = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write everything here too.")]


def probe(
    target: _Target,
    run: _Run = None,
    prompts: _Prompts = None,
    chat: _Chat = None,
    num_prompts: _NumPrompts = 16,
    samples: _Samples = 4,
    max_new_tokens: _MaxNewTokens = None,
    temperature: _Temperature = None,
    seed: _Seed = None,
    precision: _Precision = None,
    ablate: _Ablate = None,
    ablate_precision: _AblatePrecision = "fp8-block",
    batch_size: _BatchSize = None,
    out: _Out = None,
) -> None:
    """Measure what serving a checkpoint in low precision costs, and which part costs it."""
    options = ProbeOptions(
        target=target,
        run=run,
        prompts=prompts,
        chat=chat,
        num_prompts=num_prompts,
        samples_per_prompt=samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        precisions=tuple(precision or DEFAULT_PRECISIONS),
        ablate=tuple(ablate or ("parts",)),
        ablate_precision=ablate_precision,
        batch_size=batch_size,
        out=out,
    )
    options.check()
    from megatron_p3o.probe.inputs import read_inputs
    from megatron_p3o.probe.measure import measure
    from megatron_p3o.probe.report import print_result, to_json

    console = Console(highlight=False, width=_WIDTH)
    notes = Console(stderr=True, highlight=False)
    result = measure(
        read_inputs(options),
        options.serving(),
        samples_per_prompt=options.samples_per_prompt,
        ablate=options.ablation_kinds(),
        ablate_precision=options.ablated(),
        progress=lambda what: notes.print(Text(what, style="dim")),
    )
    print_result(result, console)
    if options.out is not None:
        replace_text(options.out, json.dumps(to_json(result), indent=2) + "\n")
