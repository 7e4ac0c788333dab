"""Causal self-attention on the CPU for Megatron's local spec: padded, packed and context-parallel.

Megatron's own CPU attention knows neither packed sequences nor context parallelism; this is
torch's scaled_dot_product_attention, one call per sequence and shard:

    padded      all rows have one length: one call over the batch
    packed      a call per sequence, so no mask of the whole pack is ever formed
    context     keys and values are gathered over the context ranks (queries never are); each of
                this rank's two zig-zag chunks attends to the keys up to its own end, so the work
                of every rank is 1 / size of the whole: see `parallel.context` for the order

Sequences are right-padded, so the causal mask alone keeps real tokens from seeing padding.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

# Shape legend: S this context rank's positions of a row (of all its sequences when packed), L this
# rank's positions of one sequence, R context ranks, B rows, N query heads, K key heads, D channels.


class CpuAttention(MegatronModule):
    """Megatron's core attention: [S, B, heads, D] in and [S, B, heads * D] out.

    Packed input has no batch dimension: [S, heads, D] in and [S, heads * D] out.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        if pg_collection is None:
            self._group = parallel_state.get_context_parallel_group()
        else:
            self._group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Tensor:
        assert attention_mask is None, "right padding and the causal mask need no mask tensor"
        if packed_seq_params is None:
            return self._attend(query, key, value, [query.shape[0]]).flatten(2).contiguous()
        cu_seqlens = packed_seq_params.cu_seqlens_q
        lengths = ((cu_seqlens[1:] - cu_seqlens[:-1]) // self._group.size()).tolist()
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        return self._attend(query, key, value, lengths).squeeze(1).flatten(1).contiguous()

    def _attend(
        self, query_SBND: Tensor, key_SBKD: Tensor, value_SBKD: Tensor, lengths: list[int]
    ) -> Tensor:
        """Every sequence for itself; [S, B, N, D]."""
        size, rank = self._group.size(), self._group.rank()
        queries = query_SBND.split(lengths)
        if size == 1:
            keys, values = key_SBKD.split(lengths), value_SBKD.split(lengths)
            rows = [
                self._sdpa(q, k, v, is_causal=True)
                for q, k, v in zip(queries, keys, values, strict=True)
            ]
            return torch.cat(rows)
        # One exchange for keys and values of all sequences.
        gathered = _GatherShards.apply(torch.cat([key_SBKD, value_SBKD], dim=-1), self._group)
        rows = []
        for query_LBND, shards in zip(queries, gathered.split(lengths, dim=1), strict=True):
            channels = [
                key_SBKD.shape[-1],
                value_SBKD.shape[-1],
            ]  # not the same in latent attention
            key, value = in_order(shards).split(channels, dim=-1)
            for query, index in zip(query_LBND.chunk(2), (rank, 2 * size - 1 - rank), strict=True):
                rows.append(self._attend_to_prefix(query, key, value, start=index * len(query)))
        return torch.cat(rows)

    def _attend_to_prefix(self, query: Tensor, key: Tensor, value: Tensor, *, start: int) -> Tensor:
        """Queries at positions `start` and on, over the keys up to the last of them."""
        stop = start + len(query)
        visible = torch.arange(stop) <= torch.arange(start, stop)[:, None]
        return self._sdpa(query, key[:stop], value[:stop], attn_mask=visible)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = F.scaled_dot_product_attention(
            query, key, value, scale=self.softmax_scale, enable_gqa=True, **mask
        )
        return context.permute(2, 0, 1, 3)


def in_order(shards: Tensor) -> Tensor:
    """Zig-zag shards of one sequence, [R, L, ...], to the whole sequence, [R * L, ...]."""
    front, back = shards.chunk(2, dim=1)
    return torch.cat([front.flatten(0, 1), back.flip(0).flatten(0, 1)])


class _GatherShards(torch.autograd.Function):
    """Every rank's shard, [R, S, ...]; the gradient of each is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        # gloo joins and splits along the first dimension only.
        joined = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
        dist.all_gather_into_tensor(joined, local.contiguous(), group=group)
        return joined.unflatten(0, (group.size(), -1))

    @staticmethod
    def backward(ctx: Any, grad_shards: Tensor) -> tuple[Tensor, None]:
        grad = grad_shards.new_empty(grad_shards.shape[1:])
        dist.reduce_scatter_tensor(grad, grad_shards.flatten(0, 1).contiguous(), group=ctx.group)
        return grad, None
