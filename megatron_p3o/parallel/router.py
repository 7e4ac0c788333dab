"""What the routers of a mixture-of-experts model do, measured over a step's response tokens.

For each layer, with E experts, k of them per token and router probabilities p (softmax over all
experts):

    load_e = tokens sent to expert e            load balance  max_e load_e / mean_e load_e
    balance loss  E * sum_e (load_e / (k n)) * mean_t p_te          1 when experts are used evenly
    entropy       mean_t -sum_e p_te log p_te                       nats

The balance loss is that of the Switch Transformer (arXiv:2101.03961, equation 4) for k experts per
token. All are exact over the optimizer step's response tokens, so they do not depend on the layout
or on microbatches, unlike the auxiliary loss that Megatron adds per microbatch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_p3o.parallel.batching import Microbatch
from megatron_p3o.parallel.model import PolicyModel
from megatron_p3o.parallel.router_replay import LayerReplay, RouterReplay, model_routers
from megatron_p3o.parallel.setup import ParallelContext

# Shape legend: L layers, E experts, N this rank's positions of a microbatch, T response tokens
# among them.


class RouterStats(NamedTuple):
    """Means over layers, except the worst load."""

    load_max_over_mean: float
    load_max_over_mean_worst: float
    """Of the layer with the most uneven load."""
    balance_loss: float
    entropy: float
    replay_disagreement: float = 0.0
    """Share of the replayed choices that the layer's own router would not have made."""


class RouterMonitor:
    """Sums up the routers' choices during the passes that ask for it."""

    def __init__(
        self, model: PolicyModel, context: ParallelContext, replay: RouterReplay | None = None
    ) -> None:
        self._context = context
        self._config = model.config
        self._positions: Tensor | None = None
        self._is_recording = False
        num_experts = model.config.num_moe_experts or 0
        # Per layer: tokens per expert, probability per expert, entropy, differing choices, tokens.
        self._sums = torch.zeros(
            model.config.num_layers, 2 * num_experts + 3, dtype=torch.float64, device=context.device
        )
        for layer, router in model_routers(model):
            layer_replay = None if replay is None else replay.layers[layer]
            router.routing = partial(self._observe, layer, layer_replay, router.routing)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Forget what was recorded, and record the forward passes inside the block."""
        self._sums.zero_()
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def expect(self, microbatch: Microbatch) -> None:
        """Say whose forward pass comes next."""
        if not self._is_recording or self._config.num_moe_experts is None:
            return
        num_rows, length = microbatch.input_ids.shape
        cols, rows = microbatch.token_cols, microbatch.token_rows
        if self._config.sequence_parallel:
            length //= self._context.layout.tensor
            cols = cols - length * self._context.coordinates.tensor
            here = (cols >= 0) & (cols < length)
            cols, rows = cols[here], rows[here]
        # Inside the model the sequence axis comes first.
        self._positions = cols * num_rows + rows

    def stats(self) -> RouterStats | None:
        """Of the passes last recorded, over all ranks; None for a dense model. Collective.

        Every token of a layer is on one rank only, since mixture-of-experts models share positions
        over tensor ranks: a sum over all ranks is complete and counts nothing twice.
        """
        num_experts = self._config.num_moe_experts
        if num_experts is None:
            return None
        sums = self._context.sum_everywhere(self._sums)
        sums = sums[sums[:, -1] > 0]  # the layers that route
        load_LE, probability_LE = sums[:, :num_experts], sums[:, num_experts:-3]
        entropy_L, differing_L, tokens_L = sums[:, -3:].unbind(dim=1)
        imbalance_L = load_LE.amax(dim=1) / load_LE.mean(dim=1)
        products_L = (load_LE * probability_LE).sum(dim=1)
        balance_L = num_experts * products_L / (self._config.moe_router_topk * tokens_L**2)
        return RouterStats(
            load_max_over_mean=float(imbalance_L.mean()),
            load_max_over_mean_worst=float(imbalance_L.max()),
            balance_loss=float(balance_L.mean()),
            entropy=float((entropy_L / tokens_L).mean()),
            replay_disagreement=float(
                (differing_L / (self._config.moe_router_topk * tokens_L)).mean()
            ),
        )

    def _observe(
        self,
        layer: int,
        replay: LayerReplay | None,
        routing: Callable[..., Any],
        logits: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Stands in for a router's `routing`, which gives (probabilities, map [N, E])."""
        result = routing(logits, *args, **kwargs)
        if self._is_recording:
            assert self._positions is not None
            chosen_TE = result[1][self._positions]
            logits_TE = logits.detach().flatten(0, -2)[self._positions]
            log_p_TE = torch.log_softmax(logits_TE.double(), dim=-1)
            p_TE = log_p_TE.exp()
            num_differing = p_TE.new_zeros(1)
            if replay is not None:
                assert replay.differs_NK is not None
                num_differing += replay.differs_NK[self._positions].sum()
            parts = [
                chosen_TE.double().sum(dim=0),
                p_TE.sum(dim=0),
                -(p_TE * log_p_TE).sum()[None],
                num_differing,
                p_TE.new_full((1,), len(p_TE)),
            ]
            self._sums[layer] += torch.cat(parts)
        return result
