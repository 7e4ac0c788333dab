"""Bytes of activations that a rank keeps from forward to backward, tensor by tensor.

Korthikanti et al. (arXiv:2205.05198, section 4) count s b h (10 + 24/t + 5 a s / (h t)) bytes a
layer for GPT-3's layer: GELU, dropout masks, attention that keeps its scores. Counted anew here in
their way, for the layers that are built on a GPU: RMSNorm, flash attention (no scores kept), no
dropout, gated SiLU as Megatron computes it without fusion, grouped-query or latent attention.

For each token of this context rank's share of a microbatch, with b bytes a number, b' bytes of a
linear layer's kept input (1 with FP8, else b), t tensor ranks, 1/s = 1/t with sequence parallelism
and 1 without, Q and K the channels of all query and all key heads, F the MLP's width:

    norm before attention   H b/s    its input
                            H b'/s   its output, the input of the projections
    attention               (Q + 2 K) b/t    query, key and value with positions
                            (Q + K) b/t      query and key before their norms, if they have norms
                            Q b/t            its output (and Q/t more as an FP8 input)
                            4 heads/t        log-sum-exp in fp32; not with recompute: selective
    norm before the MLP     H b/s + H b'/s   as above
    MLP                     2 F b/t + F b/t + F b'/t    gate and up, silu(gate), their product
    norms behind (GLM-4)    2 H b/s

    latent attention   b/s for each channel of the latents before their norms, b'/s behind them;
                       query, key (Q each) and value (V) b/t, output V b/t
    experts            k of E for each token, evenly spread: each token's hidden state is kept k
                       times, once on each expert-tensor rank, with F_e the width of an expert:
                       k e H b'/s + k (4 F_e b + F_e b')/s  (gate and up 2, silu, product, and the
                       product times the router's weight); router 9 E/s (logits and probabilities
                       in fp32, choice); shared experts as an MLP

    recompute: full    H b/s, the layer's input, for every layer, and all of the above for one
"""

from dataclasses import dataclass

from megatron_p3o.architecture import MlaArchitecture, ModelArchitecture, MoeArchitecture
from megatron_p3o.config import LayoutSection
from megatron_p3o.plan.precision import Precision

_FP32 = 4
_ROUTER_BYTES = 2 * _FP32 + 1  # of each expert: logit, probability, choice


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """What decides the bytes of a layer, the model aside."""

    layout: LayoutSection
    precision: Precision
    recompute: str

    @property
    def positions(self) -> float:
        """Share of the tokens that per-position tensors have on one tensor rank."""
        return 1 / self.layout.tensor if self.layout.sequence_parallel else 1.0

    @property
    def number(self) -> int:
        return self.precision.trainer_bytes

    def hidden(self, architecture: ModelArchitecture) -> float:
        """Bytes of a hidden state of one token on one tensor rank."""
        return architecture.hidden_size * self.number * self.positions


def kept_by_layer(architecture: ModelArchitecture, layer: int, cost: LayerCost) -> dict[str, float]:
    """Bytes for each token of the context rank, by tensor, if the layer is not recomputed."""
    hidden = cost.hidden(architecture)
    as_input = architecture.hidden_size * cost.precision.linear_input_bytes * cost.positions
    moe, mla = architecture.moe, architecture.mla
    attention = _attention(architecture, cost) if mla is None else _latent(architecture, mla, cost)
    if moe is not None and layer in moe.layers:
        mlp = _experts(architecture.hidden_size, moe, cost)
    else:
        mlp = _mlp("MLP", architecture.ffn_hidden_size, cost)
    kept = {
        "attention norm input": hidden,
        "attention norm output": as_input,
        **attention,
        "MLP norm input": hidden,
        "MLP norm output": as_input,
        **mlp,
    }
    if architecture.has_post_norms:
        kept["inputs of the norms behind"] = 2 * hidden
    if cost.recompute == "selective":
        kept.pop("log-sum-exp")
    return kept


def _attention(a: ModelArchitecture, cost: LayerCost) -> dict[str, float]:
    number, tensor = cost.number, cost.layout.tensor
    query, key = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    kept = {
        "query, key, value": (query + 2 * key) * number / tensor,
        "attention output": query * _output_bytes(cost) / tensor,
        "log-sum-exp": _FP32 * a.num_attention_heads / tensor,
    }
    if a.qk_layernorm:
        kept["query and key before their norms"] = (query + key) * number / tensor
    return kept


def _latent(a: ModelArchitecture, mla: MlaArchitecture, cost: LayerCost) -> dict[str, float]:
    number, tensor = cost.number, cost.layout.tensor
    query = a.num_attention_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    value = a.num_attention_heads * mla.v_head_dim
    latent = (mla.q_lora_rank or 0) + mla.kv_lora_rank
    before = (latent + mla.qk_rope_head_dim) * number
    behind = latent * cost.precision.linear_input_bytes
    return {
        "latents": (before + behind) * cost.positions,
        "query, key, value": (2 * query + value) * number / tensor,
        "attention output": value * _output_bytes(cost) / tensor,
        "log-sum-exp": _FP32 * a.num_attention_heads / tensor,
    }


def _output_bytes(cost: LayerCost) -> int:
    """Of attention's output, which the attention kernel keeps and the projection's input shares;
    an FP8 input is a tensor of its own."""
    return cost.number + cost.precision.is_fp8_trainer * cost.precision.linear_input_bytes


def _mlp(name: str, ffn: int, cost: LayerCost) -> dict[str, float]:
    local = ffn / cost.layout.tensor
    return {
        f"{name} gate, up, silu(gate)": 3 * local * cost.number,
        f"{name} product": local * cost.precision.linear_input_bytes,
    }


def _experts(hidden: int, moe: MoeArchitecture, cost: LayerCost) -> dict[str, float]:
    input_bytes = cost.precision.linear_input_bytes
    routed = moe.experts_per_token * cost.positions
    ffn = moe.ffn_hidden_size
    kept = {
        "router": _ROUTER_BYTES * moe.num_experts * cost.positions,
        "expert inputs": routed * cost.layout.expert_tensor * hidden * input_bytes,
        "expert gate, up, silu(gate), product": routed * 4 * ffn * cost.number,
        "expert weighted product": routed * ffn * input_bytes,
    }
    if cost.precision.is_fp8_trainer:
        kept["router input"] = hidden * cost.number * cost.positions
    if moe.shared_ffn_hidden_size:
        kept |= _mlp("shared expert", moe.shared_ffn_hidden_size, cost)
    return kept


def temporaries_of_layer(architecture: ModelArchitecture, layer: int, cost: LayerCost) -> float:
    """Bytes for each token at the widest point of a backward pass, beside what is kept.

    Gradients of gate, up, their product and of the layer's output, and the gathered input of a
    sequence-parallel layer. A forward pass without gradient holds as much.
    """
    number, moe = cost.number, architecture.moe
    hidden = 2 * architecture.hidden_size * number
    if moe is not None and layer in moe.layers:
        routed = moe.experts_per_token * cost.positions
        ffn = 3 * routed * moe.ffn_hidden_size * number
        return hidden * (1 + routed * cost.layout.expert_tensor) + ffn
    return hidden + 3 * architecture.ffn_hidden_size * number / cost.layout.tensor
