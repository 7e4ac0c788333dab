"""`p3o eval` and `p3o eval compare`: their words. Import torch only once the words are right."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from megatron_p3o.errors import ConfigurationError
from megatron_p3o.evaluation.compare import compare
from megatron_p3o.evaluation.options import EvalOptions
from megatron_p3o.evaluation.report import print_comparison

COMPARE = "eval compare"
_WIDTH = 120
"""Columns of the tables, whatever the terminal has."""

_Target = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL_OR_RUN",
        help="A Hugging Face directory, a checkpoint, a run dir or a RUN.yaml.",
    ),
]
_Run = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN.yaml", help="Use its data, sampling and precision with MODEL's weights."
    ),
]
_Data = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSONL or parquet, in place of the run's data."),
]
_N = Annotated[int, typer.Option("--n", help="Samples of each prompt.")]
_K = Annotated[
    str | None, typer.Option("--k", help="Of pass@k, as 1,4,16; powers of 4 up to n if left out.")
]
_Threshold = Annotated[
    float | None, typer.Option(help="Least reward of a correct sample; the run's, or 0.5.")
]
_Reward = Annotated[
    str | None, typer.Option(help="Verifier, as data.reward.name; the run's, or integer_match.")
]
_Chat = Annotated[
    bool | None, typer.Option("--chat/--no-chat", help="Whether prompts are user turns.")
]
_PromptField = Annotated[str | None, typer.Option(help="Field of the data with the prompt.")]
_AnswerField = Annotated[str | None, typer.Option(help="Field of the data with the answer.")]
_Temperature = Annotated[float | None, typer.Option(help="The run's, or 1.")]
_MaxNewTokens = Annotated[int | None, typer.Option(help="Longest response; the run's, or 128.")]
_Seed = Annotated[int | None, typer.Option(help="Of samples and intervals; the run's, or 0.")]
_Limit = Annotated[int | None, typer.Option(help="Only the first prompts.")]
_BatchSize = Annotated[
    int | None, typer.Option(help="Sequences at once; the run's rollout.batch_size, or 64.")
]
_Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where to write; <RUN>/eval/<checkpoint> for a run dir."),
]
_Engine = Annotated[str, typer.Option(help="embedded, or sglang for running servers.")]
_Servers = Annotated[
    list[str] | None,
    typer.Option(metavar="URL", help="Servers that serve the model; repeatable, or with commas."),
]
_ResultsA = Annotated[Path, typer.Argument(metavar="A", help="Output of p3o eval.")]
_ResultsB = Annotated[Path, typer.Argument(metavar="B", help="Another, of the same data.")]
_CompareSeed = Annotated[int, typer.Option(min=0, help="Of intervals and p-values.")]
_Show = Annotated[int, typer.Option(min=0, help="Prompts to list that changed most.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")]


class EvalWords(TyperGroup):
    """Commands of which one is named by two words: `eval compare` beside `eval MODEL_OR_RUN`.

    A model directory named compare is ./compare.
    """

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]
        if " ".join(args[:2]) == COMPARE:
            args = [COMPARE, *args[2:]]
        return super().resolve_command(ctx, args)


def evaluate(
    target: _Target,
    run: _Run = None,
    data: _Data = None,
    n: _N = 16,
    k: _K = None,
    threshold: _Threshold = None,
    reward: _Reward = None,
    chat: _Chat = None,
    prompt_field: _PromptField = None,
    answer_field: _AnswerField = None,
    temperature: _Temperature = None,
    max_new_tokens: _MaxNewTokens = None,
    seed: _Seed = None,
    limit: _Limit = None,
    batch_size: _BatchSize = None,
    engine: _Engine = "embedded",
    servers: _Servers = None,
    out: _Out = None,
) -> None:
    """Sample, judge, and report pass@k and mean reward. See also: p3o eval compare A B."""
    urls = [url.strip().rstrip("/") for words in servers or () for url in words.split(",")]
    options = EvalOptions(
        target=target,
        run=run,
        data=data,
        num_samples=n,
        ks=_numbers(k),
        threshold=threshold,
        reward=reward,
        chat=chat,
        prompt_field=prompt_field,
        answer_field=answer_field,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        limit=limit,
        batch_size=batch_size,
        engine=engine,
        servers=tuple(urls),
        out=out,
    )
    options.check()
    from megatron_p3o.evaluation.run import evaluate as run_evaluation

    notes = Console(stderr=True, highlight=False)
    run_evaluation(
        options,
        Console(highlight=False, width=_WIDTH),
        progress=lambda what: notes.print(Text(what, style="dim")),
    )


def compare_results(
    a: _ResultsA,
    b: _ResultsB,
    seed: _CompareSeed = 0,
    show: _Show = 10,
    as_json: _Json = False,
) -> None:
    """Compare two evaluations of the same data, prompt by prompt."""
    found = compare(a, b, seed=seed)
    if as_json:
        print(json.dumps(found.to_json(show), indent=2))
        return
    console = Console(highlight=False, width=_WIDTH)
    console.print(Text(f"A {a}\nB {b}"))
    print_comparison(found, console, num_changed=show)


def _numbers(words: str | None) -> tuple[int, ...]:
    if words is None:
        return ()
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError as error:
        raise ConfigurationError(
            f"--k={words} must be whole numbers with commas between them, such as 1,4,16"
        ) from error
