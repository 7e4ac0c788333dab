"""Vocabulary-parallel log-probs and entropy of the sampled tokens, chunked over tokens.

    z = (hidden @ weight^T) / temperature        [chunk, V / tensor] in fp32, one chunk at a time
    logp_t = z_t[label_t] - logsumexp(z_t)       H_t = logsumexp(z_t) - sum_v p_v z_v

Each tensor rank holds the rows `[rank * V/tensor, (rank+1) * V/tensor)` of the output weight, as
Megatron's ColumnParallelLinear cuts it; three all-reduces a chunk (max, sum, picked logit) finish
the softmax, as in megatron/core/tensor_parallel/cross_entropy.py. The backward pass computes the
chunk's logits again instead of keeping them, so neither pass ever holds more than one chunk of
logits, whatever the number of tokens:

    dlogp_t/dz_v = [v = label_t] - p_v            dH_t/dz_v = -p_v (log p_v + H_t)

Rows that only pad the vocabulary to a multiple (`vocab_size` and above) are masked out.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Stands for -inf where p log p is formed: exp of it is exactly 0 in fp32, and it stays finite.
_LEAST_LOGP = -1e4

# Shape legend: T tokens, C tokens of one chunk, H hidden size, V this rank's vocabulary rows.


def token_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    chunk_tokens: int,
    tensor_group: dist.ProcessGroup | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each distribution, in fp32 and nats.

    Args:
        hidden_TH: hidden states that predict the labels, the same on every tensor rank.
        weight_VH: this rank's rows of the output weight.
        labels_T: int64 token ids of the whole vocabulary.
        temperature: logits are divided by it.
        vocab_size: true size; padding rows beyond it take no part.
        chunk_tokens: tokens whose logits exist at once.
        tensor_group: ranks that share the vocabulary; None for one rank.
        with_entropy: without it the entropy is returned as zeros, at no cost.

    Returns:
        (logprobs_T, entropy_T). Both carry gradient to `hidden_TH` (complete on every tensor
        rank) and to `weight_VH` (this rank's rows).
    """
    return _TokenLogprobs.apply(  # type: ignore[no-any-return]
        hidden_TH,
        weight_VH,
        labels_T,
        _Head(temperature, vocab_size, chunk_tokens, tensor_group, with_entropy),
    )


class _Head:
    """The output distribution of one chunk at a time; holds no tensors of its own."""

    def __init__(
        self,
        temperature: float,
        vocab_size: int,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
    ) -> None:
        self.temperature = temperature
        self.vocab_size = vocab_size
        self.chunk_tokens = chunk_tokens
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self.with_entropy = with_entropy

    def chunks(self, num_tokens: int) -> list[slice]:
        return [
            slice(start, min(start + self.chunk_tokens, num_tokens))
            for start in range(0, num_tokens, self.chunk_tokens)
        ]

    def log_softmax(self, hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
        """This rank's columns of log p, [C, V] fp32; -inf at padding rows."""
        z_CV = torch.matmul(hidden_CH, weight_VH.t()).float().div_(self.temperature)
        num_valid = self.vocab_size - self.rank * weight_VH.shape[0]
        if num_valid < weight_VH.shape[0]:
            z_CV[:, max(num_valid, 0) :] = -torch.inf
        max_C = z_CV.amax(dim=1)
        self._reduce(max_C, dist.ReduceOp.MAX)
        z_CV.sub_(max_C[:, None])
        sum_C = z_CV.exp().sum(dim=1)
        self._reduce(sum_C, dist.ReduceOp.SUM)
        return z_CV.sub_(sum_C.log_()[:, None])

    def locate(self, labels_C: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """(column of each label on this rank, whether it is here); the column is 0 elsewhere."""
        column_C = labels_C - self.rank * num_rows
        here_C = (column_C >= 0) & (column_C < num_rows)
        return column_C * here_C, here_C

    def pick(self, logp_CV: Tensor, labels_C: Tensor) -> Tensor:
        """Log-prob of each label, [C], complete on every rank."""
        column_C, here_C = self.locate(labels_C, logp_CV.shape[1])
        picked_C = logp_CV.gather(1, column_C[:, None]).squeeze(1)
        picked_C = torch.where(here_C, picked_C, 0.0)
        self._reduce(picked_C, dist.ReduceOp.SUM)
        return picked_C

    def entropy(self, logp_CV: Tensor) -> Tensor:
        """-sum_v p_v log p_v, [C], complete on every rank; 0 * log 0 counts as 0."""
        entropy_C = -(logp_CV.exp() * logp_CV.clamp_min(_LEAST_LOGP)).sum(dim=1)
        self._reduce(entropy_C, dist.ReduceOp.SUM)
        return entropy_C

    def _reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if self.group is not None:
            dist.all_reduce(values, op=op, group=self.group)

    def complete_hidden_grad(self, grad_TH: Tensor) -> None:
        """Add the other ranks' share of the gradient: each saw only its rows of the vocabulary."""
        self._reduce(grad_TH, dist.ReduceOp.SUM)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor]:
        num_tokens = labels_T.numel()
        logprobs_T = hidden_TH.new_zeros(num_tokens, dtype=torch.float32)
        entropy_T = torch.zeros_like(logprobs_T)
        for chunk in head.chunks(num_tokens):
            logp_CV = head.log_softmax(hidden_TH[chunk], weight_VH)
            logprobs_T[chunk] = head.pick(logp_CV, labels_T[chunk])
            if head.with_entropy:
                entropy_T[chunk] = head.entropy(logp_CV)
        ctx.save_for_backward(hidden_TH, weight_VH, labels_T, entropy_T)
        ctx.head = head
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_T: Tensor, grad_entropy_T: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        hidden_TH, weight_VH, labels_T, entropy_T = ctx.saved_tensors
        head: _Head = ctx.head
        grad_hidden_TH = torch.zeros_like(hidden_TH)
        grad_weight_VH = torch.zeros_like(weight_VH)
        for chunk in head.chunks(labels_T.numel()):
            logp_CV = head.log_softmax(hidden_TH[chunk], weight_VH)
            grad_logp_C = grad_logprobs_T[chunk]
            if head.with_entropy:
                p_CV = logp_CV.exp()
                grad_z_CV = logp_CV.clamp_min_(_LEAST_LOGP).add_(entropy_T[chunk][:, None])
                grad_z_CV.mul_(-grad_entropy_T[chunk][:, None]).sub_(grad_logp_C[:, None])
                grad_z_CV.mul_(p_CV)
            else:
                grad_z_CV = logp_CV.exp_().mul_(-grad_logp_C[:, None])
            column_C, here_C = head.locate(labels_T[chunk], weight_VH.shape[0])
            grad_z_CV.scatter_add_(1, column_C[:, None], (grad_logp_C * here_C)[:, None])
            grad_z_CV = grad_z_CV.div_(head.temperature).to(weight_VH.dtype)
            grad_hidden_TH[chunk] = grad_z_CV @ weight_VH
            grad_weight_VH.addmm_(grad_z_CV.t(), hidden_TH[chunk])
        head.complete_hidden_grad(grad_hidden_TH)
        return grad_hidden_TH, grad_weight_VH, None, None
