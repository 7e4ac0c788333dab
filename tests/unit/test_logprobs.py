import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_p3o.parallel.logprobs import token_logprobs


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(hidden @ weight[:vocab].t() / temperature, dim=-1)
    return logp[torch.arange(len(labels)), labels], -(logp.exp() * logp).sum(dim=-1)


@settings(max_examples=30)
@given(
    num_tokens=st.integers(0, 9),
    chunk=st.integers(1, 10),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    padding=st.integers(0, 3),
    with_entropy=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_log_softmax_under_any_chunking(
    num_tokens: int, chunk: int, temperature: float, padding: int, with_entropy: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    vocab = 11
    hidden = torch.randn(num_tokens, 6, generator=generator).requires_grad_()
    weight = torch.randn(vocab + padding, 6, generator=generator).requires_grad_()
    labels = torch.randint(0, vocab, (num_tokens,), generator=generator)
    g_logp, g_entropy = torch.randn(2, num_tokens, generator=generator)

    logprobs, entropy = token_logprobs(
        hidden,
        weight,
        labels,
        temperature=temperature,
        vocab_size=vocab,
        chunk_tokens=chunk,
        tensor_group=None,
        with_entropy=with_entropy,
    )
    loss = (logprobs * g_logp).sum() + with_entropy * (entropy * g_entropy).sum()
    got = torch.autograd.grad(loss, [hidden, weight])

    hidden64, weight64 = (x.detach().double().requires_grad_() for x in (hidden, weight))
    want_logp, want_entropy = reference(hidden64, weight64, labels, temperature, vocab)
    loss64 = (want_logp * g_logp).sum() + with_entropy * (want_entropy * g_entropy).sum()
    want = torch.autograd.grad(loss64, [hidden64, weight64])

    torch.testing.assert_close(logprobs.double(), want_logp, rtol=1e-5, atol=1e-5)
    if with_entropy:
        torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)
    for ours, exact in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


def test_never_more_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    matmul = torch.matmul

    def counting_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows.append(a.shape[0])
        return matmul(a, b)

    monkeypatch.setattr(torch, "matmul", counting_matmul)
    hidden = torch.randn(10, 4, requires_grad=True)
    logprobs, _ = token_logprobs(
        hidden,
        torch.randn(7, 4),
        torch.zeros(10, dtype=torch.int64),
        temperature=1.0,
        vocab_size=7,
        chunk_tokens=4,
        tensor_group=None,
        with_entropy=False,
    )
    logprobs.sum().backward()
    assert rows == [4, 4, 2, 4, 4, 2]


def test_hand_computed() -> None:
    # Logits [0, ln 3] at temperature 1: p = [1/4, 3/4].
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[0.0], [math.log(3.0)]])
    logprobs, entropy = token_logprobs(
        hidden,
        weight,
        torch.tensor([1]),
        temperature=1.0,
        vocab_size=2,
        chunk_tokens=8,
        tensor_group=None,
        with_entropy=True,
    )
    assert logprobs.item() == pytest.approx(math.log(0.75), abs=1e-6)
    want = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert entropy.item() == pytest.approx(want, abs=1e-6)


def test_a_nan_hidden_state_stays_visible() -> None:
    logprobs, _ = token_logprobs(
        torch.tensor([[float("nan")], [1.0]]),
        torch.tensor([[0.0], [1.0]]),
        torch.tensor([0, 0]),
        temperature=1.0,
        vocab_size=2,
        chunk_tokens=8,
        tensor_group=None,
        with_entropy=True,
    )
    assert torch.isnan(logprobs).tolist() == [True, False]
