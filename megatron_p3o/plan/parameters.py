"""The weights of a model, counted from its architecture: in all, and on every pipeline stage.

A `Weight` is one Megatron parameter with the Hugging Face tensors in it, as the rows of
`megatron_p3o.weights.tables` describe them; here without torch, and with a layer's equal experts
as one entry. Tests compare the counts with those tables and with Megatron's real models.

What a rank holds of a weight of N elements:

    whole    N                                    norms, routers, MLA's projections to latents
    tensor   N / tensor                           attention and MLP matrices, biases of q, k, v
    vocab    H x padded vocabulary / tensor       embedding and output weight
    expert   N / (expert x expert_tensor)         matrices of the experts

Layers are dealt to stages as Megatron deals them: with a virtual pipeline of v chunks, chunk c of
stage p follows chunk c of stage p - 1, and chunk c + 1 of stage 0 follows chunk c of the last one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_p3o.architecture import (
    MlaArchitecture,
    ModelArchitecture,
    MoeArchitecture,
    padded_vocab_size,
)
from megatron_p3o.config import LayoutSection
from megatron_p3o.splitting import stage_layers

Cut = Literal["whole", "tensor", "vocab", "expert"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of one layer; equal experts are one entry."""

    name: str
    hf: tuple[Shape, ...]
    """Shapes of the Hugging Face tensors that it holds."""
    cut: Cut
    fp8: bool = False
    """Whether it may be FP8: the matrices of the decoder's linear layers."""
    copies: int = 1
    """Experts that have such a weight each."""
    is_trained: bool = True
    """False for the biases that choose experts, which are buffers in fp32."""

    @property
    def num_elements(self) -> int:
        return self.copies * sum(math.prod(shape) for shape in self.hf)

    def num_local(self, layout: LayoutSection) -> int:
        """Elements on one rank."""
        match self.cut:
            case "tensor":
                return self.num_elements // layout.tensor
            case "expert":
                return self.num_elements // (layout.expert * layout.expert_tensor)
            case "vocab":
                ((rows, columns),) = self.hf
                return padded_vocab_size(rows, layout.tensor) // layout.tensor * columns
        return self.num_elements


def embedding(architecture: ModelArchitecture) -> Weight:
    return Weight("embedding", ((architecture.vocab_size, architecture.hidden_size),), "vocab")


def output(architecture: ModelArchitecture) -> Weight:
    """The output weight; where it is tied, the copy of the embedding on the last stage."""
    return Weight("output", ((architecture.vocab_size, architecture.hidden_size),), "vocab")


def final_norm(architecture: ModelArchitecture) -> Weight:
    return Weight("final norm", ((architecture.hidden_size,),), "whole")


def layer_weights(architecture: ModelArchitecture, layer: int) -> tuple[Weight, ...]:
    """All weights of one decoder layer, counted from 0."""
    hidden, mla, moe = architecture.hidden_size, architecture.mla, architecture.moe
    attention = _plain_attention(architecture) if mla is None else _latent(architecture, mla)
    mlp = (
        _experts(hidden, moe)
        if moe is not None and layer in moe.layers
        else _mlp(
            "MLP", hidden, architecture.ffn_hidden_size, is_fused=architecture.family == "glm4"
        )
    )
    num_norms = 4 if architecture.has_post_norms else 2
    return (*attention, *mlp, Weight("norms", ((hidden,),) * num_norms, "whole"))


def model_weights(architecture: ModelArchitecture) -> Iterator[Weight]:
    """Every weight once: tied embeddings have one."""
    yield embedding(architecture)
    for layer in range(architecture.num_layers):
        yield from layer_weights(architecture, layer)
    yield final_norm(architecture)
    if not architecture.tie_word_embeddings:
        yield output(architecture)


def _plain_attention(architecture: ModelArchitecture) -> Iterator[Weight]:
    hidden, head = architecture.hidden_size, architecture.head_dim
    query, key = architecture.num_attention_heads * head, architecture.num_key_value_heads * head
    yield Weight(
        "query, key, value", ((query, hidden), (key, hidden), (key, hidden)), "tensor", True
    )
    if architecture.qkv_bias:
        yield Weight("biases of query, key, value", ((query,), (key,), (key,)), "tensor")
    yield Weight("attention output", ((hidden, query),), "tensor", True)
    if architecture.qk_layernorm:
        yield Weight("query and key norms", ((head,), (head,)), "whole")


def _latent(architecture: ModelArchitecture, mla: MlaArchitecture) -> Iterator[Weight]:
    hidden, heads, rank = (
        architecture.hidden_size,
        architecture.num_attention_heads,
        mla.kv_lora_rank,
    )
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        yield Weight("query", ((query, hidden),), "tensor", True)
    else:
        yield Weight("query to latent", ((mla.q_lora_rank, hidden),), "whole", True)
        yield Weight("query from latent", ((query, mla.q_lora_rank),), "tensor", True)
        yield Weight("query latent norm", ((mla.q_lora_rank,),), "whole")
    yield Weight("key-value to latent", ((rank + mla.qk_rope_head_dim, hidden),), "whole", True)
    yield Weight("key-value latent norm", ((rank,),), "whole")
    key_value = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield Weight("key-value from latent", ((key_value, rank),), "tensor", True)
    yield Weight("attention output", ((hidden, heads * mla.v_head_dim),), "tensor", True)


def _mlp(
    name: str,
    hidden: int,
    ffn: int,
    *,
    cut: Cut = "tensor",
    copies: int = 1,
    is_fused: bool = False,
) -> Iterator[Weight]:
    gate_up: tuple[Shape, ...] = ((2 * ffn, hidden),) if is_fused else ((ffn, hidden),) * 2
    yield Weight(f"{name} gate and up", gate_up, cut, True, copies)
    yield Weight(f"{name} down", ((hidden, ffn),), cut, True, copies)


def _experts(hidden: int, moe: MoeArchitecture) -> Iterator[Weight]:
    yield Weight("router", ((moe.num_experts, hidden),), "whole")
    if moe.has_expert_bias:
        yield Weight("router bias", ((moe.num_experts,),), "whole", is_trained=False)
    yield from _mlp("expert", hidden, moe.ffn_hidden_size, cut="expert", copies=moe.num_experts)
    if moe.shared_ffn_hidden_size:
        yield from _mlp("shared expert", hidden, moe.shared_ffn_hidden_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParameters:
    """Trained parameters of the whole model, without padding and copies."""

    total: int
    active: int
    """That one token meets: of the experts only those it is sent to."""
    embedding: int
    """Embedding and output weight; one of them where they are tied."""
    dense_layer: int | None
    """Of a layer without experts; None where there is none."""
    moe_layer: int | None
    """Of a layer with experts, all of them; None where there is none."""


def count_model(architecture: ModelArchitecture) -> ModelParameters:
    moe = architecture.moe
    total = sum(w.num_elements for w in model_weights(architecture) if w.is_trained)
    idle = 0
    moe_layers: tuple[int, ...] = ()
    if moe is not None:
        moe_layers = moe.layers
        expert = 3 * architecture.hidden_size * moe.ffn_hidden_size
        idle = len(moe.layers) * (moe.num_experts - moe.experts_per_token) * expert
    dense_layers = [n for n in range(architecture.num_layers) if n not in moe_layers]

    def of_layer(layers: tuple[int, ...] | list[int]) -> int | None:
        if not layers:
            return None
        weights = layer_weights(architecture, layers[0])
        return sum(w.num_elements for w in weights if w.is_trained)

    tables = 1 if architecture.tie_word_embeddings else 2
    return ModelParameters(
        total=total,
        active=total - idle,
        embedding=tables * embedding(architecture).num_elements,
        dense_layer=of_layer(dense_layers),
        moe_layer=of_layer(moe_layers),
    )


def chunk_layers(num_layers: int, layout: LayoutSection) -> list[list[range]]:
    """[stage][chunk] -> layers, counted from 0. The layout must fit the model."""
    sizes = stage_layers(num_layers, layout)
    assert sizes is not None
    virtual = layout.virtual_pipeline
    counts = [[size // virtual] * virtual for size in sizes]
    counts[0][0] -= layout.account_for_embedding
    counts[-1][-1] -= layout.account_for_loss
    chunks: list[list[range]] = [[] for _ in sizes]
    first = 0
    for chunk in range(virtual):
        for stage in range(layout.pipeline):
            end = first + counts[stage][chunk]
            chunks[stage].append(range(first, end))
            first = end
    return chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class StageParameters:
    """Parameters that each rank of one pipeline stage holds, padding and copies included."""

    layers: int
    dense: int
    """Outside the experts; their optimizer state is shared over data x context ranks."""
    expert: int
    """In the experts; theirs is shared over the copies of the experts."""
    fp8: int
    """Those of both that may be FP8."""

    @property
    def total(self) -> int:
        return self.dense + self.expert


def count_stages(architecture: ModelArchitecture, layout: LayoutSection) -> list[StageParameters]:
    """By stage; all ranks of a stage hold equally many."""
    stages = []
    for stage, chunks in enumerate(chunk_layers(architecture.num_layers, layout)):
        layers = [layer for chunk in chunks for layer in chunk]
        weights = [w for layer in layers for w in layer_weights(architecture, layer)]
        is_last = stage == layout.pipeline - 1
        if stage == 0:
            weights.append(embedding(architecture))
        if is_last:
            weights.append(final_norm(architecture))
            if not architecture.tie_word_embeddings or stage > 0:
                weights.append(output(architecture))
        weights = [w for w in weights if w.is_trained]
        stages.append(
            StageParameters(
                layers=len(layers),
                dense=sum(w.num_local(layout) for w in weights if w.cut != "expert"),
                expert=sum(w.num_local(layout) for w in weights if w.cut == "expert"),
                fp8=sum(w.num_local(layout) for w in weights if w.fp8),
            )
        )
    return stages
