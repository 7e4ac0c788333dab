"""Log-probs of given tokens under transformers' model in fp32, with any part of it rounded.

The whole sequence goes through the model at once. What a server rounds as it decodes is rounded
here by the same code as in the embedded engine: weights when they are set, inputs of linear layers
and keys and values token by token.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_p3o.probe.parts import NOTHING, RoundedParts
from megatron_p3o.rollout import ServedNumerics
from megatron_p3o.rollout.emulation import EXACT, round_inputs
from megatron_p3o.rollout.parameters import checkpoint_parameters

# Shape legend: B sequences, L tokens of the longest, N chosen tokens, H hidden, V vocabulary.

_CHUNK_TOKENS = 256
"""Tokens whose logits exist at once, [chunk, V] in fp32."""


class Scorer:
    """Holds one copy of the model; parts are rounded in place and restored from the weights."""

    def __init__(
        self,
        model_dir: Path,
        weights: Mapping[str, Tensor],
        *,
        temperature: float,
        batch_size: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            model_dir: Hugging Face directory; only its configuration is read here.
            weights: the exact ones, fp32, by checkpoint name.
            temperature: that logits are divided by.
            batch_size: sequences in one forward pass.
            device: where the model lives.
        """
        config = AutoConfig.from_pretrained(model_dir)
        self._model = (
            AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="sdpa"
            )
            .to(device)
            .eval()
        )
        self.parameters = checkpoint_parameters(self._model)
        """What the model computes with now, by checkpoint name."""
        self._weights = weights
        self._temperature = temperature
        self._batch_size = batch_size
        self._device = device
        self._numerics = EXACT
        self._rounded: frozenset[str] = frozenset()
        self._set(frozenset(self.parameters), EXACT)

    @torch.inference_mode()
    def score(
        self,
        sequences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
        numerics: ServedNumerics = EXACT,
        parts: RoundedParts = NOTHING,
    ) -> list[Tensor]:
        """Log-probs (nats) of the response tokens of each (prompt, response).

        Args:
            sequences: token ids.
            numerics: how parts are rounded.
            parts: what is rounded.

        Returns:
            `[response tokens]` float64 on the CPU, in the order of the sequences.
        """
        self._round_weights(parts.weights, numerics)
        # Sequences of one length together; a causal model does not see padding on the right.
        order = sorted(range(len(sequences)), key=lambda i: sum(map(len, sequences[i])))
        scores: dict[int, Tensor] = {}
        with round_inputs(self._model, parts.inputs, numerics):
            for start in range(0, len(order), self._batch_size):
                batch = order[start : start + self._batch_size]
                found = self._score_batch([sequences[i] for i in batch], numerics, parts.kv_layers)
                scores |= zip(batch, found, strict=True)
        return [scores[index] for index in range(len(sequences))]

    def _score_batch(
        self,
        batch: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
        numerics: ServedNumerics,
        kv_layers: frozenset[int],
    ) -> Sequence[Tensor]:
        # The last token of a response predicts nothing.
        inputs = [(*prompt, *response)[:-1] for prompt, response in batch]
        input_ids = torch.zeros(len(batch), max(map(len, inputs)), dtype=torch.int64)
        for row, tokens in enumerate(inputs):
            input_ids[row, : len(tokens)] = torch.tensor(tokens)
        cache = None
        if kv_layers:
            cache = numerics.new_cache(config=self._model.config, kv_layers=kv_layers)
        hidden_BLH = self._model.base_model(
            input_ids=input_ids.to(self._device),
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        hidden_NH = torch.cat(
            [
                hidden_BLH[row, len(prompt) - 1 : len(prompt) - 1 + len(response)]
                for row, (prompt, response) in enumerate(batch)
            ]
        )
        chosen_N = torch.tensor([token for _, response in batch for token in response])
        logprobs_N = torch.cat([*self._logprobs(hidden_NH, chosen_N.to(self._device))])
        return logprobs_N.cpu().split([len(response) for _, response in batch])

    def _logprobs(self, hidden_NH: Tensor, chosen_N: Tensor) -> Iterator[Tensor]:
        head = self._model.get_output_embeddings()
        for hidden, chosen in zip(
            hidden_NH.split(_CHUNK_TOKENS), chosen_N.split(_CHUNK_TOKENS), strict=True
        ):
            z_NV = head(hidden).float() / self._temperature
            z_NV -= z_NV.amax(dim=1, keepdim=True)
            total_N = z_NV.exp().sum(dim=1, dtype=torch.float64)
            yield z_NV.gather(1, chosen[:, None]).squeeze(1) - total_N.log()

    def _round_weights(self, names: frozenset[str], numerics: ServedNumerics) -> None:
        """Round these weights and no others; only those that change are written."""
        if (numerics.number_format, numerics.weights) != (
            self._numerics.number_format,
            self._numerics.weights,
        ):
            self._set(self._rounded, EXACT)
            self._rounded = frozenset()
        self._set(self._rounded - names, EXACT)
        self._set(names - self._rounded, numerics)
        self._numerics, self._rounded = numerics, names

    @torch.no_grad()
    def _set(self, names: frozenset[str], numerics: ServedNumerics) -> None:
        for name in names:
            exact = self._weights[name]
            rounded = exact if numerics.number_format is None else numerics.weight(exact)
            self.parameters[name].copy_(rounded)
