"""Variable-length samples to packs under a token budget, balanced by cost over data-parallel ranks.

The cost of a sequence of S tokens is `S + S^2 / crossover`: matrix products grow with S, causal
attention with S^2, and at S = crossover both take the same time. Packs are filled longest sample
first, each into the cheapest pack with room (Graham's LPT rule), so packs end up alike, and so do
the ranks, which get equally many each. A pipeline needs equal counts: all its stages run one
schedule, and data-parallel ranks meet at its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_p3o.architecture import ModelArchitecture


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceCost:
    """Relative cost of one sequence's forward and backward pass."""

    crossover: float
    """Tokens at which attention scores cost as much as all matrix products with weights."""

    @classmethod
    def of(cls, architecture: ModelArchitecture) -> "SequenceCost":
        """From the model's multiplications per layer.

        Per token, weights: attention's projections, gated MLP (3 x hidden x ffn; the chosen and
        the shared experts' together, and the mean over layers that differ). Causal attention of S
        tokens: half of S^2 x query channels for the scores, and of S^2 x value channels for their
        product with the values.
        """
        a = architecture
        projections, channels = _attention_sizes(a)
        ffn: float = a.ffn_hidden_size
        if a.moe is not None:
            chosen = a.moe.experts_per_token * a.moe.ffn_hidden_size + a.moe.shared_ffn_hidden_size
            ffn += (chosen - ffn) * len(a.moe.layers) / a.num_layers
        return cls(crossover=(projections + 3 * a.hidden_size * ffn) / channels)

    def __call__(self, length: int) -> float:
        return length + length * length / self.crossover


def _attention_sizes(architecture: ModelArchitecture) -> tuple[int, float]:
    """(weights of a layer's projections, mean channels of queries and values over all heads)."""
    a, mla = architecture, architecture.mla
    if mla is None:
        query, key = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
        return a.hidden_size * (2 * query + 2 * key), query
    query = a.num_attention_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    value = a.num_attention_heads * mla.v_head_dim
    if mla.q_lora_rank is None:
        of_queries = a.hidden_size * query
    else:
        of_queries = mla.q_lora_rank * (a.hidden_size + query)
    of_keys = a.hidden_size * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    of_keys += mla.kv_lora_rank * (a.num_attention_heads * mla.qk_nope_head_dim + value)
    return of_queries + of_keys + value * a.hidden_size, (query + value) / 2


def pack(
    lengths: Sequence[int], *, max_tokens: int, num_ranks: int, cost: SequenceCost
) -> list[list[list[int]]]:
    """Share sequences over ranks and packs.

    Args:
        lengths: tokens of each sequence, padding included; each at most `max_tokens`.
        max_tokens: budget of one pack.
        num_ranks: data-parallel ranks.
        cost: what is balanced.

    Returns:
        [rank][pack][indices into `lengths`], ascending within a pack; equally many packs on every
        rank, at least one, and some may be empty. The same for the same arguments.
    """
    assert all(length <= max_tokens for length in lengths)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    per_rank = max(1, -(-_first_fit(order, lengths, max_tokens) // num_ranks))
    packs = None
    while packs is None:
        packs = _fill(order, lengths, max_tokens, per_rank * num_ranks, cost)
        per_rank += 1
    return _share(packs, [sum(cost(lengths[i]) for i in members) for members in packs], num_ranks)


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> int:
    """How many packs first-fit-decreasing takes: a start close to the least possible number."""
    room: list[int] = []
    for index in order:
        place = next((p for p, left in enumerate(room) if left >= lengths[index]), None)
        if place is None:
            place = len(room)
            room.append(max_tokens)
        room[place] -= lengths[index]
    return len(room)


def _fill(
    order: Sequence[int],
    lengths: Sequence[int],
    max_tokens: int,
    num_packs: int,
    cost: SequenceCost,
) -> list[list[int]] | None:
    """Each sequence to the cheapest pack with room; None where one finds no room."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    costs, room = [0.0] * num_packs, [max_tokens] * num_packs
    for index in order:
        open_packs = [p for p in range(num_packs) if room[p] >= lengths[index]]
        if not open_packs:
            return None
        place = min(open_packs, key=costs.__getitem__)
        packs[place].append(index)
        costs[place] += cost(lengths[index])
        room[place] -= lengths[index]
    return [sorted(members) for members in packs]


def _share(
    packs: Sequence[list[int]], costs: Sequence[float], num_ranks: int
) -> list[list[list[int]]]:
    """Packs to ranks: dearest first, each to the cheapest rank that is not full."""
    per_rank = len(packs) // num_ranks
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for place in sorted(range(len(packs)), key=lambda p: (-costs[p], p)):
        open_ranks = [r for r in range(num_ranks) if len(ranks[r]) < per_rank]
        rank = min(open_ranks, key=totals.__getitem__)
        ranks[rank].append(packs[place])
        totals[rank] += costs[place]
    return ranks
