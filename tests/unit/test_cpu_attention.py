"""The CPU's core attention on one rank, against softmax written out in float64."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_p3o.parallel.cpu_attention import CpuAttention

HEADS, KEY_HEADS, CHANNELS = 4, 2, 8


@pytest.fixture
def attention() -> CpuAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        num_query_groups=KEY_HEADS,
        kv_channels=CHANNELS,
        use_cpu_initialization=True,
    )
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return CpuAttention(config, layer_number=1, pg_collection=SimpleNamespace(cp=alone))


def random_input(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(  # type: ignore[return-value]
        torch.randn(*lead, heads, CHANNELS, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )


def oracle(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of one sequence: [S, heads, D] to [S, heads * D]."""
    query, key, value = (x.double() for x in (query, key, value))
    rows = []
    for position in range(len(query)):
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // KEY_HEADS)
            scores = key[: position + 1, group] @ query[position, head] / CHANNELS**0.5
            heads.append(scores.softmax(0) @ value[: position + 1, group])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def assert_same(got: Tensor, want: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    weights = torch.randn(want.shape)
    got_grads = torch.autograd.grad((got * weights).sum(), inputs)
    want_grads = torch.autograd.grad((want * weights).sum(), inputs)
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got_grad, want_grad, rtol=1e-5, atol=1e-6)


def test_padded_rows_attend_to_their_own_past(attention: CpuAttention) -> None:
    inputs = random_input(5, 3)
    want = torch.stack([oracle(*(x[:, row] for x in inputs)) for row in range(3)], dim=1)
    assert_same(attention(*inputs, attention_mask=None), want, inputs)


def test_packed_sequences_do_not_see_each_other(attention: CpuAttention) -> None:
    inputs = random_input(9)
    boundaries = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries)
    parts = [oracle(*(x[a:b] for x in inputs)) for a, b in ((0, 4), (4, 5), (5, 9))]
    got = attention(*inputs, attention_mask=None, packed_seq_params=packed)
    assert_same(got, torch.cat(parts), inputs)
