"""A rollout engine in the trainer's own process: transformers' model, our decode loop.

Needs no server. Each prompt is prefilled once and its KV cache is then repeated for the group's
samples; sequences that end leave the batch. Sampling and log-probs follow the contract of every
engine: p = softmax(logits / temperature), log-probs of that same p.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from megatron_p3o.config import SamplingSection, TemperatureShiftSection
from megatron_p3o.errors import NonFiniteError, RunError
from megatron_p3o.rollout.emulation import EXACT, ServedNumerics, round_inputs
from megatron_p3o.rollout.engine import Generation, GenerationRequest
from megatron_p3o.rollout.noise import SampleNoise, invert_cdf
from megatron_p3o.rollout.parameters import checkpoint_parameters
from megatron_p3o.rollout.routers import RouterRecorder
from megatron_p3o.types import FinishReason, RoutedExperts, VersionSpan

# Shape legend: P prompts, B sequences being decoded, L tokens so far (left-padded), V vocabulary.


@dataclass(slots=True)
class _Row:
    """A sequence being decoded."""

    request: GenerationRequest
    sample_index: int
    noise: SampleNoise
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    experts: list[Tensor] = field(default_factory=list)
    """[N, M, K] parts, the prompt's first; empty unless experts are reported."""


class EmbeddedEngine:
    """Generates on this rank's device with a whole copy of the model."""

    def __init__(
        self,
        model_dir: Path,
        *,
        sampling: SamplingSection,
        seed: int,
        batch_size: int,
        dtype: torch.dtype,
        device: torch.device,
        eos_token_ids: tuple[int, ...],
        report_experts: bool = False,
        numerics: ServedNumerics = EXACT,
        fp8_weights: Set[str] = frozenset(),
        shift: TemperatureShiftSection | None = None,
    ) -> None:
        """Build the model without weights; `update_weights` must come before `generate`.

        Args:
            model_dir: Hugging Face directory; only its configuration is read here.
            sampling: temperature and length.
            seed: of the sampling noise.
            batch_size: sequences decoded together.
            dtype: of weights and activations; log-probs are taken in fp32.
            device: where the model lives.
            eos_token_ids: tokens that end a response.
            report_experts: give every generation's `routed_experts`.
            numerics: what is rounded as a server would.
            fp8_weights: checkpoint names of the weights that servers hold in FP8.
            shift: draw at another temperature than that of `sampling`.
        """
        config = AutoConfig.from_pretrained(model_dir)
        self._model = (
            AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
            .to(device)
            .eval()
        )
        self._parameters = checkpoint_parameters(self._model)
        self._routers = RouterRecorder(self._model) if report_experts else None
        self._numerics = numerics
        self._rounded = fp8_weights if numerics.number_format is not None else frozenset()
        round_inputs(self._model, self._rounded, numerics)
        self._sampling = sampling
        self._shift = shift
        self._seed = seed
        self._batch_size = batch_size
        self._device = device
        self._eos_token_ids = frozenset(eos_token_ids)
        self._weight_version: int | None = None

    @torch.no_grad()
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy a whole model in, tensor by tensor; see `RolloutEngine.update_weights`."""
        self._weight_version = None  # a half-updated model must not generate
        missing = set(self._parameters)
        for name, tensor in named_tensors:
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != tensor.shape:
                expected = "no such tensor" if parameter is None else tuple(parameter.shape)
                raise RunError(
                    f"weights of version {version}: {name} {tuple(tensor.shape)} does not fit the "
                    f"rollout model, which has {expected}"
                )
            if name in self._rounded:
                tensor = self._numerics.weight(tensor.detach())
            parameter.copy_(tensor)
            missing.discard(name)
        if missing:
            raise RunError(f"weights of version {version} lack {', '.join(sorted(missing)[:8])}")
        self._weight_version = version

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Responses in request order, each request's samples in index order.

        Raises:
            RunError: no weights have been given.
            NonFiniteError: the model's logits are NaN; names prompt, position and version.
        """
        if self._weight_version is None:
            raise RunError("the rollout engine holds no complete weights; publish them first")
        rows = []
        for batch in self._batches(requests):
            cache, mask_PL, logits_PV = self._prefill(batch)
            batch_rows = [(index, row) for index, r in enumerate(batch) for row in self._rows(r)]
            self._note_experts([row for _, row in batch_rows], [i for i, _ in batch_rows])
            for start in range(0, len(batch_rows), self._batch_size):
                part = batch_rows[start : start + self._batch_size]
                prompts_B = torch.tensor([index for index, _ in part], device=self._device)
                part_rows = [row for _, row in part]
                part_cache = self._select(cache, prompts_B)
                self._decode(part_rows, part_cache, mask_PL[prompts_B], logits_PV[prompts_B])
                rows += part_rows
        return [self._generation(row) for row in rows]

    def with_sampling(self, sampling: SamplingSection, *, seed: int) -> "EmbeddedEngine":
        """Another engine on the same model, with the weights that it holds now and no shift of
        the temperature; of use until the next `update_weights`."""
        engine = copy.copy(self)
        engine._sampling, engine._seed, engine._shift = sampling, seed, None
        return engine

    def close(self) -> None:
        """Nothing to release: the model goes with the process."""

    def _batches(
        self, requests: Sequence[GenerationRequest]
    ) -> Iterator[Sequence[GenerationRequest]]:
        """Consecutive requests whose samples fill a batch; a larger group is a batch of its own."""
        batch: list[GenerationRequest] = []
        for request in requests:
            if batch and sum(r.num_samples for r in [*batch, request]) > self._batch_size:
                yield batch
                batch = []
            batch.append(request)
        if batch:
            yield batch

    def _rows(self, request: GenerationRequest) -> list[_Row]:
        return [
            _Row(request, index, SampleNoise(self._seed, request.step, request.prompt_id, index))
            for index in range(request.num_samples)
        ]

    def _prefill(self, batch: Sequence[GenerationRequest]) -> tuple[DynamicCache, Tensor, Tensor]:
        """(KV cache, attention mask [P, L], logits after the prompt [P, V])."""
        length = max(len(request.prompt_ids) for request in batch)
        # Left padding: every prompt ends, and every response begins, at the same column.
        input_ids = torch.zeros(len(batch), length, dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for row, request in enumerate(batch):
            input_ids[row, length - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, length - len(request.prompt_ids) :] = 1
        input_ids, mask = input_ids.to(self._device), mask.to(self._device)
        cache = self._numerics.new_cache(config=self._model.config)
        logits_PV = self._forward(input_ids, mask, cache)
        return cache, mask, logits_PV

    def _decode(
        self, rows: list[_Row], cache: DynamicCache, mask_BL: Tensor, logits_BV: Tensor
    ) -> None:
        """Sample every row to its end; fills the rows in place."""
        for position in range(self._sampling.max_new_tokens):
            tokens = self._sample(rows, position, logits_BV)
            going_on = [i for i, token in enumerate(tokens) if token not in self._eos_token_ids]
            if not going_on or position + 1 == self._sampling.max_new_tokens:
                return
            if len(going_on) < len(rows):
                rows = [rows[i] for i in going_on]
                tokens = [tokens[i] for i in going_on]
                keep_B = torch.tensor(going_on, device=self._device)
                cache, mask_BL = self._select(cache, keep_B), mask_BL[keep_B]
            mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(rows), 1)], dim=1)
            input_ids = torch.tensor(tokens, device=self._device)[:, None]
            logits_BV = self._forward(input_ids, mask_BL, cache)
            self._note_experts(rows, range(len(rows)))

    def _note_experts(self, rows: Sequence[_Row], places: Sequence[int]) -> None:
        """Add what the last forward pass did to the rows, which stood at `places` in its batch."""
        if self._routers is None:
            return
        experts_BLMK = self._routers.last()
        for row, place in zip(rows, places, strict=True):
            # A prompt is padded on the left; a sampled token is alone.
            num_tokens = 1 if row.experts else len(row.request.prompt_ids)
            row.experts.append(experts_BLMK[place, -num_tokens:])

    def _select(self, cache: DynamicCache, rows_B: Tensor) -> DynamicCache:
        """A cache of the given rows, in that order, each as often as it is named."""
        selected = self._numerics.new_cache()
        for index, layer in enumerate(cache.layers):
            assert isinstance(layer, DynamicLayer)
            assert layer.keys is not None and layer.values is not None
            selected.update(layer.keys[rows_B], layer.values[rows_B], index)
        return selected

    def _forward(self, input_ids: Tensor, mask_BL: Tensor, cache: DynamicCache) -> Tensor:
        """Logits of the last position; the cache grows by the input."""
        positions = mask_BL.cumsum(dim=1)[:, -input_ids.shape[1] :] - 1
        if self._routers is not None:
            self._routers.expect(*input_ids.shape)
        output = self._model(
            input_ids=input_ids,
            attention_mask=mask_BL,
            position_ids=positions.clamp_min(0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _sample(self, rows: list[_Row], position: int, logits_BV: Tensor) -> list[int]:
        """Draw one token per row and note it with its log-prob."""
        z_BV, cdf_BV = _distribution(
            logits_BV, self._shift.sampled_at if self._shift else self._sampling.temperature
        )
        uniform_B = torch.tensor(
            [row.noise.uniform(position) for row in rows],
            dtype=torch.float64,
            device=self._device,
        )
        tokens_B = invert_cdf(cdf_BV, uniform_B)
        if self._shift is not None and self._shift.logprobs == "assumed":
            z_BV, cdf_BV = _distribution(logits_BV, self._sampling.temperature)
        # The float64 total is also a more accurate normaliser than an fp32 log-softmax has.
        logp_B = z_BV.gather(1, tokens_B[:, None]).squeeze(1) - cdf_BV[:, -1].log()
        picked, tokens = logp_B.float().tolist(), tokens_B.tolist()
        for row, token, logprob in zip(rows, tokens, picked, strict=True):
            if logprob != logprob:  # NaN
                raise NonFiniteError(
                    f"rollout logits of prompt {row.request.prompt_id}, sample "
                    f"{row.sample_index}, response position {position} are NaN at weight version "
                    f"{self._weight_version}; the last checkpoint is valid"
                )
            row.response_ids.append(token)
            row.logprobs.append(logprob)
            if token in self._eos_token_ids:
                row.finish_reason = "stop"
        return tokens

    def _generation(self, row: _Row) -> Generation:
        assert self._weight_version is not None
        return Generation(
            prompt_id=row.request.prompt_id,
            sample_index=row.sample_index,
            response_ids=tuple(row.response_ids),
            logprobs=tuple(row.logprobs),
            finish_reason=row.finish_reason,
            version_spans=(VersionSpan(self._weight_version, 0, len(row.response_ids)),),
            routed_experts=RoutedExperts.from_tensor(torch.cat(row.experts))
            if row.experts
            else None,
        )


def _distribution(logits_BV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[B, V] logits / temperature, the largest of a row at 0; cumulated exponentials, float64."""
    z_BV = logits_BV.float() / temperature
    z_BV -= z_BV.amax(dim=1, keepdim=True)
    return z_BV, z_BV.exp().cumsum(dim=1, dtype=torch.float64)
