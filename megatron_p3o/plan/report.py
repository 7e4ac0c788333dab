"""A plan as tables. GB are 10^9 bytes."""

from textwrap import fill

from rich.console import Console
from rich.table import Table

from megatron_p3o.plan.build import Plan
from megatron_p3o.plan.memory import CONTEXT_BYTES, FRAGMENTATION
from megatron_p3o.plan.sync import COMPARED

_WIDTH = 100
_TENTH_OF_A_GB = 5e7


def render(plan: Plan) -> str:
    """Tables as text, 100 columns wide at most."""
    console = Console(width=_WIDTH, color_system=None, highlight=False, force_terminal=False)
    with console.capture() as captured:
        _print(console, _cluster(plan))
        for table in (_parameters(plan), _memory(plan), _servers(plan), _step(plan), _sync(plan)):
            if table is not None:
                console.print()
                # Rich would fold a title to the table's own width.
                title, table.title = str(table.title), None
                console.print(title)
                console.print(table)
        console.print()
        _print(console, _assumptions(plan))
        for warning in plan.warnings:
            _print(console, f"warning: {warning}")
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _print(console: Console, text: str) -> None:
    wrapped = fill(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    console.print(wrapped, soft_wrap=True, markup=False)


def _cluster(plan: Plan) -> str:
    layout = plan.layout
    axes = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor", "data")
    sizes = ", ".join(
        f"{axis} {getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > 1
    )
    trainers = f"{layout.world_size} trainer GPUs ({sizes or 'one rank'})"
    if plan.servers is None:
        return f"{plan.family} on {trainers}; {plan.options.gpu}; estimates, nothing was measured"
    count = plan.servers.count * plan.servers.gpus_each
    return (
        f"{plan.family} on {trainers} and {count} server GPUs; {plan.options.gpu}; estimates, "
        "nothing was measured"
    )


def _parameters(plan: Plan) -> Table:
    table = _table("Parameters", "", "number")
    counts, worst = plan.parameters, plan.stages[plan.largest_stage]
    table.add_row("model", _count(counts.total))
    if counts.moe_layer is not None:
        table.add_row("met by one token", _count(counts.active))
    table.add_row("embedding and output weight", _count(counts.embedding))
    if counts.dense_layer is not None:
        table.add_row("layer", _count(counts.dense_layer))
    if counts.moe_layer is not None:
        table.add_row("layer with experts", _count(counts.moe_layer))
    table.add_row(f"rank of stage {plan.largest_stage}, the largest", _count(worst.total))
    if worst.expert:
        table.add_row("  of which in experts", _count(worst.expert))
    return table


def _memory(plan: Plan) -> Table:
    worst = plan.worst_stage
    title = f"Memory of a trainer GPU, stage {worst.stage}, GB of {_gb(plan.memory_bytes)}"
    table = _table(title, "", "GB")
    for part, size in worst.resident.items():
        table.add_row(part, _gb(size))
    for part, size in worst.phases[worst.peak_phase].items():
        if size:
            table.add_row(f"{worst.peak_phase}: {part}", _gb(size))
    table.add_row(
        f"allowance ({CONTEXT_BYTES / 1e9:.0f} GB + {FRAGMENTATION:.0%})", _gb(worst.allowance)
    )
    table.add_row("total", _gb(worst.total), style="bold")
    if worst.host_checkpoint:
        table.add_row("host memory for a checkpoint", _gb(worst.host_checkpoint))
    return table


def _servers(plan: Plan) -> Table | None:
    servers = plan.servers
    if servers is None:
        return None
    table = _table("A rollout server", "", "")
    table.add_row("servers x GPUs", f"{servers.count} x {servers.gpus_each}")
    table.add_row("weights on a GPU", f"{_gb(servers.weight_bytes)} GB")
    table.add_row("KV cache of a token on a GPU", f"{servers.kv_bytes_per_token / 1e3:.1f} kB")
    table.add_row(
        f"room for the KV cache ({servers.memory_fraction:.0%} of memory)",
        f"{servers.kv_tokens:,} tokens",
    )
    table.add_row("sequences of the greatest length", f"{servers.longest_sequences}")
    table.add_row("sequences at once, at most", f"{servers.concurrency}")
    return table


def _step(plan: Plan) -> Table:
    table = _table("A step (one rollout batch)", "", "PFLOP", "seconds")
    flops, times, rollout = plan.cost.flops, plan.cost.times, plan.cost.rollout
    if rollout is not None:
        bound = "memory" if rollout.is_memory_bound else "compute"
        table.add_row(
            f"rollout ({rollout.concurrency} at once, {bound}-bound, "
            f"{rollout.decode_step_s * 1e3:.1f} ms a token)",
            _peta(flops.rollout),
            _seconds(times.rollout_s),
        )
    table.add_row("score", _peta(flops.score + flops.reference), _seconds(times.score_s))
    table.add_row(
        f"train ({times.microbatches} microbatches, bubble {times.bubble:.0%})",
        _peta(flops.train),
        _seconds(times.train_s),
    )
    table.add_row("sync", "", _seconds(times.sync_s))
    table.add_row("synchronous step", "", _seconds(times.synchronous_s), style="bold")
    if times.one_step_off_s is not None:
        table.add_row("step, one step off", "", _seconds(times.one_step_off_s), style="bold")
    table.add_row("run, as configured", "", f"{times.run_s / 3600:.1f} h", style="bold")
    return table


def _sync(plan: Plan) -> Table | None:
    sync = plan.sync
    if not sync.num_servers:
        return None
    table = _table("A weight sync", "", "GB")
    for precision in COMPARED:
        table.add_row(f"to one server, {precision}", _gb(sync.by_precision[precision]))
    table.add_row("to one server, as configured", _gb(sync.bytes_per_server))
    table.add_row(f"to all {sync.num_servers}", _gb(sync.total_bytes))
    return table


def _assumptions(plan: Plan) -> str:
    options, gpu = plan.options, plan.gpu
    fp8 = "none" if gpu.fp8_flops is None else f"{gpu.fp8_flops / 1e12:g}"
    return (
        f"assumed: mfu {options.mfu:g} of the peak FLOP/s, mbu {options.mbu:g} of the memory's and "
        f"nbu {options.nbu:g} of a link's bandwidth; prompts of {plan.prompt_tokens} tokens, "
        f"responses of {plan.response_tokens}; tokens spread evenly over experts; nodes of "
        f"{options.gpus_per_node} GPUs; {options.gpu}: dense TFLOP/s "
        f"{gpu.bf16_flops / 1e12:g} bf16, {fp8} fp8; "
        f"HBM {gpu.hbm_bytes_s / 1e12:g} TB/s; NVLink {gpu.nvlink_bytes_s / 1e9:g}, "
        f"network {gpu.network_bytes_s / 1e9:g} GB/s"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, show_header=any(columns))
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right")
    return table


def _count(number: int) -> str:
    return f"{number:,}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= _TENTH_OF_A_GB else f"{size / 1e9:.3g}"


def _peta(flops: float) -> str:
    return f"{flops / 1e15:,.3g}" if flops < 1e18 else f"{flops / 1e15:,.0f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 0.05 else f"{seconds:.2g}"
