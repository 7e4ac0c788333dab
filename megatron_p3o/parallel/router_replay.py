"""Send tokens to the experts that the rollout chose, whatever this model's routers would choose.

The weights of the experts are still computed from this model's router logits, restricted to the
replayed experts, so the router learns. Megatron's routers ask an object of this kind for their
top-k (`router_replay` of `megatron.core.transformer.moe.router.TopKRouter`); Megatron's own one
keeps all routers of the process in one global list, which the virtual pipeline and the reference
model would share, so ours is bound to one model.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_p3o.parallel.batching import Microbatch
from megatron_p3o.parallel.model import PolicyModel
from megatron_p3o.parallel.setup import ParallelContext

# Shape legend: N this rank's positions of a microbatch, E experts, K experts per token, M
# mixture-of-experts layers of the whole model, B and S as in `Microbatch`.

TopK = Callable[..., tuple[Tensor, Tensor]]


class LayerReplay:
    """The choices of one layer."""

    def __init__(self) -> None:
        self.differs_NK: Tensor | None = None
        """Of the last pass: whether the replayed expert is none of the router's own K. False
        where nothing was replayed."""
        self._target_NK: Tensor | None = None
        self._is_recomputed = False
        self._awaiting_recomputation: deque[Tensor] = deque()

    def expect(self, target_NK: Tensor, *, is_recomputed: bool) -> None:
        """The experts of the coming forward pass; -1 leaves a position to the router.

        Args:
            target_NK: expert indices.
            is_recomputed: the pass runs once without gradient, and again during the backward pass
                of its microbatch. Backward passes come in the order of the forward passes.
        """
        self._target_NK = target_NK
        self._is_recomputed = is_recomputed

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: TopK,
    ) -> tuple[Tensor, Tensor]:
        """(scores [N, K], expert indices [N, K]); the name and signature are Megatron's."""
        own_NK = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
        target_NK = self._next_target()
        assert target_NK.shape == own_NK.shape
        chosen_NK = torch.where(target_NK >= 0, target_NK, own_NK)
        self.differs_NK = (chosen_NK[:, :, None] != own_NK[:, None, :]).all(dim=-1)
        return scores.gather(1, chosen_NK), chosen_NK

    def _next_target(self) -> Tensor:
        assert self._target_NK is not None
        if not self._is_recomputed:
            return self._target_NK
        if torch.is_grad_enabled():  # the recomputation, perhaps after later microbatches' passes
            return self._awaiting_recomputation.popleft()
        self._awaiting_recomputation.append(self._target_NK)
        return self._target_NK


class RouterReplay:
    """The choices of one model's routers on this rank."""

    def __init__(self, model: PolicyModel, context: ParallelContext) -> None:
        self._model = model
        self._context = context
        self.layers: dict[int, LayerReplay] = {}
        """By the layer's place in the whole model."""
        for layer, router in model_routers(model):
            self.layers[layer] = router.router_replay = LayerReplay()
        frequency = model.config.moe_layer_freq
        pattern = frequency if isinstance(frequency, list) else [1] * model.config.num_layers
        routing = [layer for layer, is_routing in enumerate(pattern) if is_routing]
        self._place = {layer: place for place, layer in enumerate(routing)}

    def expect(self, microbatch: Microbatch) -> None:
        """Say whose forward pass comes next."""
        assert microbatch.routed_experts is not None
        # Inside the model the sequence axis comes first, and is cut over tensor ranks.
        experts = microbatch.routed_experts.transpose(0, 1)
        if self._model.config.sequence_parallel:
            length = len(experts) // self._context.layout.tensor
            experts = experts.narrow(0, length * self._context.coordinates.tensor, length)
        experts_NMK = experts.flatten(0, 1).long()
        is_recomputed = (
            torch.is_grad_enabled() and self._model.config.recompute_granularity == "full"
        )
        for layer, replay in self.layers.items():
            replay.expect(experts_NMK[:, self._place[layer]], is_recomputed=is_recomputed)


def model_routers(model: PolicyModel) -> Iterator[tuple[int, Any]]:
    """(place of the layer in the whole model, router) of this rank's layers that have one."""
    for module in model.modules:
        for layer in module.decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                # Megatron numbers layers globally, from 1.
                yield layer.layer_number - 1, layer.mlp.router
