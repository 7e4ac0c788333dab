"""Floating-point operations of forward passes; a product and its sum are two.

For a sequence of S tokens of which R are predicted:

    linear      2 S x weights of the matrices that a token meets (of experts, those it is sent to)
    attention   causal half of 2 S^2 (Q + V) a layer: scores of Q query channels and their product
                with V value channels, all heads together; 2 S^2 Q x layers where V = Q
    head        2 R V H: the output weight is applied to predicted tokens alone

A backward pass takes twice the forward pass, and the head once more, since it computes its logits
again. Padding, and microbatches that only fill up the interleaved schedule, are not counted.
"""

from dataclasses import dataclass

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.plan.batch import Lengths
from megatron_p3o.plan.hardware import Gpu
from megatron_p3o.plan.parameters import layer_weights


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs, apart by whether FP8 can speed them up."""

    fp8: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        return self.fp8 + self.other

    def __add__(self, more: "Work") -> "Work":
        return Work(self.fp8 + more.fp8, self.other + more.other)

    def __mul__(self, factor: float) -> "Work":
        return Work(self.fp8 * factor, self.other * factor)

    def seconds(self, gpu: Gpu, precision: str) -> float:
        """On one GPU at its peak."""
        other = "bf16" if precision.startswith("fp8") else precision
        return self.fp8 / gpu.peak(precision) + self.other / gpu.peak(other)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardFlops:
    """Of one model's forward pass, all layers together."""

    linear: float
    """A token, in matrices that may be FP8."""
    router: float
    """A token, in routers."""
    attention: float
    """A token and a token that it attends to."""
    head: float
    """A predicted token."""

    @classmethod
    def of(cls, architecture: ModelArchitecture) -> "ForwardFlops":
        moe, mla, heads = architecture.moe, architecture.mla, architecture.num_attention_heads
        linear = router = 0
        for layer in range(architecture.num_layers):
            for weight in layer_weights(architecture, layer):
                if weight.fp8:
                    met = moe.experts_per_token if moe and weight.cut == "expert" else 1
                    linear += 2 * weight.num_elements // weight.copies * met
                elif weight.name == "router":
                    router += 2 * weight.num_elements
        channels = 2 * heads * architecture.head_dim
        if mla is not None:
            channels = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
        return cls(
            linear=linear,
            router=router,
            attention=2 * channels * architecture.num_layers,
            head=2 * architecture.vocab_size * architecture.hidden_size,
        )

    def layers(self, num_tokens: int) -> Work:
        """A sequence through the decoder."""
        return Work(self.linear * num_tokens, self.router * num_tokens) + self.attend(num_tokens)

    def attend(self, num_tokens: int) -> Work:
        """Causal attention of a sequence."""
        return Work(other=self.attention * num_tokens**2 / 2)

    def decode(self, context: float) -> Work:
        """One token behind `context` others, and its logits."""
        return Work(self.linear, self.router + self.attention * context + self.head)


def train_work(flops: ForwardFlops, lengths: Lengths, recompute: str) -> Work:
    """Forward and backward pass of one sequence, recomputation included."""
    forward = flops.layers(lengths.inputs)
    again = {"full": forward, "selective": flops.attend(lengths.inputs)}.get(recompute, Work())
    return forward * 3 + again + Work(other=4 * flops.head * lengths.response)


def score_work(flops: ForwardFlops, lengths: Lengths) -> Work:
    """A forward pass with log-probs of one sequence."""
    return flops.layers(lengths.inputs) + Work(other=flops.head * lengths.response)


def score_passes(optimizer_steps: int, *, is_fused: bool) -> float:
    """Scoring passes over a rollout batch of that many optimizer steps.

    The samples of the first step are scored once; those of later steps once for the proximal
    log-probs and once for their own step. Fused scoring saves the pass before each step.
    """
    later = optimizer_steps - 1
    passes = later if is_fused else 1 + 2 * later
    return passes / optimizer_steps
