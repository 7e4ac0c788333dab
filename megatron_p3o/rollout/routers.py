"""Sees which experts transformers' routers choose."""

import torch
from torch import Tensor

# Shape legend: B rows, L positions of a row, M mixture-of-experts layers, K experts per token.


class RouterRecorder:
    """Keeps the choices of the last forward pass of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        """
        Args:
            model: its routers are the modules `*.mlp.gate`, which return (logits, weights of the
                chosen experts, indices of the chosen experts [B * L, K]).
        """
        routers = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
        assert routers, "the model has no routers"
        self._num_layers = len(routers)
        self._chosen: list[Tensor] = []
        self._shape = (0, 0)
        for router in routers:
            router.register_forward_hook(self._note)

    def expect(self, num_rows: int, num_positions: int) -> None:
        """Say of which shape the input of the coming forward pass is."""
        self._chosen, self._shape = [], (num_rows, num_positions)

    def last(self) -> Tensor:
        """[B, L, M, K] int16 of the last forward pass, on the CPU."""
        assert len(self._chosen) == self._num_layers
        experts_NMK = torch.stack(self._chosen, dim=1).to("cpu", torch.int16)
        return experts_NMK.unflatten(0, self._shape)

    def _note(self, module: torch.nn.Module, inputs: object, output: tuple[Tensor, ...]) -> None:
        # Layers run in order.
        self._chosen.append(output[2])
