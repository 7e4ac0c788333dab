"""What a run will need, before it is started: memory, FLOPs, time, bytes to send.

Pure arithmetic over the configuration and the model's config.json: no torch, no GPU, no weights.
docs/plan.md explains the cost model; each module states its own formulas.

    parameters   what is counted          precision    bytes of number types
    batch        microbatches             hardware     data sheets
    activations  what layers keep         memory       a trainer GPU's bytes
    serving      servers and decoding     flops        of passes
    sync         weights to servers       timing       seconds of a step
    advice       warnings                 build        all of it as one `Plan`
    report       tables
"""

from megatron_p3o.plan.build import Plan, make_plan
from megatron_p3o.plan.options import PlanOptions
from megatron_p3o.plan.report import render

__all__ = ["Plan", "PlanOptions", "make_plan", "render"]
