"""Every objective against a float64 numpy oracle of its paper's formula, and what they share.

Each oracle takes whole sequences and gives the objective as the paper states it (a mean over
tokens or sequences) with its gradient; the loss must give the same after its token weights and one
division by the token count.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_p3o.algorithms import (
    LOSSES,
    EssSums,
    TrustStats,
    required_inputs,
    sequence_stats,
    sequence_sums,
    token_weights,
    total_loss,
)
from megatron_p3o.algorithms.correction import correction_weights
from megatron_p3o.config import (
    CISPOObjective,
    CorrectionSection,
    DAPOObjective,
    DrGRPOObjective,
    GRPOObjective,
    GSPOObjective,
    ObjectiveBase,
    P3OObjective,
    P4OObjective,
    PPODecoupledObjective,
    ReferenceSection,
    ReinforceObjective,
    RLOOObjective,
    SAPOObjective,
    SFTObjective,
)
from megatron_p3o.config.objectives import OBJECTIVE_NAMES
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.types import LossOutput, TokenStats

LENGTH = 50  # of constant_length
CONFIGS: Mapping[str, ObjectiveBase] = {
    "p3o": P3OObjective(),
    "p4o": P4OObjective(),
    "reinforce": ReinforceObjective(),
    "rloo": RLOOObjective(),
    "grpo": GRPOObjective(normalization="sequence_mean"),
    "dapo": DAPOObjective(),
    "dr_grpo": DrGRPOObjective(normalization_length=LENGTH),
    "gspo": GSPOObjective(clip_low=0.1, clip_high=0.2),
    "cispo": CISPOObjective(clip_high=1.5),
    "sapo": SAPOObjective(tau_positive=1.5, tau_negative=2.3),
    "ppo_decoupled": PPODecoupledObjective(behavior_weight_cap=1.3),
    "sft": SFTObjective(),
}


@dataclass(frozen=True)
class Sequences:
    """Whole sequences; every list holds one float64 array of tokens per sequence."""

    logp: list[np.ndarray]
    logb: list[np.ndarray]
    logprox: list[np.ndarray]
    advantages: list[float]

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.logp]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


token = st.tuples(st.floats(-3, 3), st.floats(-2, 2), st.floats(-20, -0.01))
sequence = st.tuples(st.floats(-3, 3), st.lists(token, min_size=1, max_size=5))
batches = st.lists(sequence, min_size=1, max_size=5)
Batch = Sequence[tuple[float, Sequence[tuple[float, float, float]]]]
FIXED: Batch = [
    (1.3, [(0.5, 0.3, -1.0), (-0.4, 0.1, -2.5), (1.9, -0.6, -0.2)]),
    (-0.7, [(-1.5, -0.2, -3.0)]),
    (0.4, [(0.05, 0.9, -0.4), (-0.02, 0.0, -6.0)]),
    (-2.0, [(0.7, 0.35, -1.1), (0.6, -1.4, -0.9), (-0.1, 0.2, -2.2), (0.0, 0.0, -0.3)]),
]


def sequences_of(batch: Batch) -> Sequences:
    """From (advantage, [(log pi/b, log pi/p, log pi)])."""
    logp = [np.array([t[2] for t in tokens]) for _, tokens in batch]
    return Sequences(
        logp=logp,
        logb=[p - np.array([t[0] for t in ts]) for p, (_, ts) in zip(logp, batch, strict=True)],
        logprox=[p - np.array([t[1] for t in ts]) for p, (_, ts) in zip(logp, batch, strict=True)],
        advantages=[advantage for advantage, _ in batch],
    )


def stats_of(
    data: Sequences, config: ObjectiveBase, dtype: torch.dtype = torch.float64
) -> TokenStats:
    """The same as a microbatch holds it, entropy and reference included."""
    logp = torch.tensor(np.concatenate(data.logp), dtype=dtype)
    logb = torch.tensor(np.concatenate(data.logb), dtype=dtype)
    prox = torch.tensor(np.concatenate(data.logprox), dtype=dtype)
    lengths = torch.tensor(data.lengths)
    index = torch.arange(len(lengths)).repeat_interleave(lengths)
    weights = token_weights(data.lengths, config.normalization, constant_length=LENGTH)
    sums = sequence_sums(logp - logb, prox - logb, index, len(lengths))
    return TokenStats(
        logprobs=logp.clone().requires_grad_(),
        rollout_logprobs=logb,
        proximal_logprobs=prox,
        advantages=torch.tensor(data.advantages, dtype=dtype)[index],
        token_weights=torch.tensor(weights, dtype=dtype)[index],
        entropy=0.1 - logp,
        sequences=sequence_stats(sums, lengths, index, dtype),
        reference_logprobs=logb - 0.3,
    )


def trust_of(data: Sequences) -> TrustStats:
    logp, logb, prox = map(np.concatenate, (data.logp, data.logb, data.logprox))
    parts = (logp - logb, logp - prox, prox - logb)
    return TrustStats.from_sums(*(EssSums.from_log_ratios(torch.tensor(part)) for part in parts))


def gradient_of(output: LossOutput, stats: TokenStats) -> np.ndarray:
    (gradient,) = torch.autograd.grad(output.loss_sum, stats.logprobs)
    return gradient.numpy()


# --- oracles: (loss, its gradient with respect to every logp, in token order)

Terms = tuple[np.ndarray, np.ndarray]  # per token: loss term, its derivative
Oracle = tuple[float, np.ndarray]


def token_mean(data: Sequences, terms: list[Terms]) -> Oracle:
    value, slope = (np.concatenate(part) for part in zip(*terms, strict=True))
    return value.sum() / data.num_tokens, slope / data.num_tokens


def sequence_mean(data: Sequences, terms: list[Terms]) -> Oracle:
    m = len(terms)
    slopes = [slope / (m * len(slope)) for _, slope in terms]
    return float(np.mean([value.mean() for value, _ in terms])), np.concatenate(slopes)


def constant_length(data: Sequences, terms: list[Terms]) -> Oracle:
    m = len(terms)
    slopes = [slope / (m * LENGTH) for _, slope in terms]
    return float(np.mean([value.sum() / LENGTH for value, _ in terms])), np.concatenate(slopes)


def each(data: Sequences, term: Callable[..., Terms]) -> list[Terms]:
    columns = zip(data.logp, data.logb, data.logprox, data.advantages, strict=True)
    return [term(*column) for column in columns]


def ppo(r: np.ndarray, a: float, low: float, high: float) -> Terms:
    """-min(r A, clip(r) A) and its derivative by log r."""
    value = -np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a)
    active = r <= 1 + high if a > 0 else r >= 1 - low
    return value, np.where(active, -r * a, 0.0)


def ess_of(log_ratios: list[np.ndarray]) -> float:
    w = np.exp(np.concatenate(log_ratios))
    return w.sum() ** 2 / (len(w) * (w**2).sum())


def differences(first: list[np.ndarray], second: list[np.ndarray]) -> list[np.ndarray]:
    return [a - b for a, b in zip(first, second, strict=True)]


def k3_terms(log_ratios: np.ndarray) -> Terms:
    return log_ratios + np.exp(-log_ratios) - 1, 1 - np.exp(-log_ratios)


def p3o_oracle(data: Sequences) -> Oracle:
    e = ess_of(differences(data.logp, data.logb))

    def term(p: np.ndarray, b: np.ndarray, _: np.ndarray, a: float) -> Terms:
        weight = np.minimum(np.exp(p - b), e)
        kl, slope = k3_terms(p - b)
        return -weight * a * p + (1 - e) * kl, -weight * a + (1 - e) * slope

    return token_mean(data, each(data, term))


def p4o_oracle(data: Sequences) -> Oracle:
    e_b = ess_of(differences(data.logp, data.logb))
    e_p = ess_of(differences(data.logp, data.logprox))
    e = min(e_b, e_p)
    total = (1 - e_b) + (1 - e_p)
    share = (1 - e_b) / total if total > 0 else 1.0

    def term(p: np.ndarray, b: np.ndarray, q: np.ndarray, a: float) -> Terms:
        weight = np.minimum(np.exp(p - b), e)
        kl, slope = k3_terms(p - np.log(share * np.exp(b) + (1 - share) * np.exp(q)))
        return -weight * a * p + (1 - e) * kl, -weight * a + (1 - e) * slope

    return token_mean(data, each(data, term))


def reinforce_oracle(data: Sequences) -> Oracle:
    return token_mean(data, each(data, lambda p, b, q, a: (-a * p, np.full_like(p, -a))))


def clipped_oracle(
    low: float, high: float, mean: Callable[[Sequences, list[Terms]], Oracle]
) -> Callable[[Sequences], Oracle]:
    return lambda data: mean(data, each(data, lambda p, b, q, a: ppo(np.exp(p - b), a, low, high)))


def gspo_oracle(data: Sequences) -> Oracle:
    """1/m sum_i min(s_i A_i, clip(s_i) A_i), s_i the geometric mean of the ratios."""
    m = len(data.logp)
    value, slopes = 0.0, []
    for p, b, a in zip(data.logp, data.logb, data.advantages, strict=True):
        term, slope = ppo(np.exp(np.mean(p - b)), a, 0.1, 0.2)
        value += float(term) / m
        slopes.append(np.full_like(p, slope / (m * len(p))))
    return value, np.concatenate(slopes)


def cispo_oracle(data: Sequences) -> Oracle:
    def term(p: np.ndarray, b: np.ndarray, _: np.ndarray, a: float) -> Terms:
        weight = np.clip(np.exp(p - b), 0.0, 2.5)
        return -weight * a * p, -weight * a

    return token_mean(data, each(data, term))


def sapo_oracle(data: Sequences) -> Oracle:
    def term(p: np.ndarray, b: np.ndarray, _: np.ndarray, a: float) -> Terms:
        r = np.exp(p - b)
        tau = 1.5 if a > 0 else 2.3
        soft = 1 / (1 + np.exp(-tau * (r - 1)))
        return -4 / tau * soft * a, -4 * soft * (1 - soft) * r * a

    return sequence_mean(data, each(data, term))


def ppo_decoupled_oracle(data: Sequences) -> Oracle:
    def term(p: np.ndarray, b: np.ndarray, q: np.ndarray, a: float) -> Terms:
        value, slope = ppo(np.exp(p - q), a, 0.2, 0.2)
        weight = np.minimum(np.exp(q - b), 1.3)
        return weight * value, weight * slope

    return token_mean(data, each(data, term))


def sft_oracle(data: Sequences) -> Oracle:
    return token_mean(data, each(data, lambda p, b, q, a: (-p, np.full_like(p, -1.0))))


ORACLES: Mapping[str, Callable[[Sequences], Oracle]] = {
    "p3o": p3o_oracle,
    "p4o": p4o_oracle,
    "reinforce": reinforce_oracle,
    "rloo": reinforce_oracle,
    "grpo": clipped_oracle(0.2, 0.2, sequence_mean),
    "dapo": clipped_oracle(0.2, 0.28, token_mean),
    "dr_grpo": clipped_oracle(0.2, 0.2, constant_length),
    "gspo": gspo_oracle,
    "cispo": cispo_oracle,
    "sapo": sapo_oracle,
    "ppo_decoupled": ppo_decoupled_oracle,
    "sft": sft_oracle,
}


def test_every_objective_has_an_oracle() -> None:
    assert tuple(ORACLES) == tuple(CONFIGS) == OBJECTIVE_NAMES


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
@settings(max_examples=40)
@given(batches)
def test_the_loss_is_the_papers(name: str, batch: Batch) -> None:
    data, config = sequences_of(batch), CONFIGS[name]
    stats = stats_of(data, config)
    output = LOSSES[name](stats, trust_of(data), config)
    value, gradient = ORACLES[name](data)
    n = data.num_tokens
    assert output.num_tokens == n
    assert output.loss_sum.item() / n == pytest.approx(value, rel=1e-9, abs=1e-9)
    assert gradient_of(output, stats) / n == pytest.approx(gradient, rel=1e-8, abs=1e-9)
    assert not any(metric.requires_grad for metric in output.metrics.values())


def test_the_fixed_batch_clips_and_caps() -> None:
    """Otherwise a loss without its clip would pass as well."""
    data = sequences_of(FIXED)
    for name, metric in [
        ("p3o", "p3o/cap_fraction"),
        ("p4o", "p4o/cap_fraction"),
        ("grpo", "grpo/clip_fraction"),
        ("dapo", "dapo/clip_fraction"),
        ("dr_grpo", "dr_grpo/clip_fraction"),
        ("gspo", "gspo/clip_fraction"),
        ("cispo", "cispo/clip_fraction"),
        ("ppo_decoupled", "ppo_decoupled/clip_fraction"),
        ("ppo_decoupled", "ppo_decoupled/cap_fraction"),
    ]:
        output = LOSSES[name](stats_of(data, CONFIGS[name]), trust_of(data), CONFIGS[name])
        assert 0 < output.metrics[metric].item() < data.num_tokens, metric


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "sapo", "ppo_decoupled"])
def test_gradcheck_where_nothing_stops_the_gradient(name: str) -> None:
    data, config = sequences_of(FIXED), CONFIGS[name]
    stats, trust = stats_of(data, config), trust_of(data)

    def loss(logprobs: Tensor) -> Tensor:
        return LOSSES[name](replace(stats, logprobs=logprobs), trust, config).loss_sum

    assert torch.autograd.gradcheck(loss, stats.logprobs)


# --- what all share


def split(stats: TokenStats, parts: Sequence[Sequence[int]]) -> list[TokenStats]:
    """The tokens of each part; sequences are cut wherever the parts say."""

    def take(value: object, part: Sequence[int]) -> object:
        return value[list(part)] if isinstance(value, Tensor) else value

    assert stats.sequences is not None
    fields = [f for f in TokenStats.__dataclass_fields__ if f != "sequences"]
    names = stats.sequences.__dataclass_fields__
    return [
        TokenStats(
            **{name: take(getattr(stats, name), part) for name in fields},  # type: ignore[arg-type]
            sequences=replace(
                stats.sequences,
                **{name: take(getattr(stats.sequences, name), part) for name in names},
            ),
        )
        for part in parts
    ]


VARIANTS: list[tuple[str, ObjectiveBase]] = [
    *CONFIGS.items(),
    *(
        (name, CONFIGS[name].model_copy(update={"correction": correction}))
        for name in ("reinforce", "grpo", "gspo", "sapo")
        for correction in (
            CorrectionSection(mode="truncate", level="token", high=1.2),
            CorrectionSection(mode="mask", level="sequence", low=0.3, high=3.0),
            CorrectionSection(mode="reject", level="geometric", low=0.7, high=1.4),
        )
    ),
    (
        "p3o",
        P3OObjective(correction=CorrectionSection(mode="reject", level="sequence", high=1.5)),
    ),
]
REFERENCE = ReferenceSection(kl_coefficient=0.2)


@pytest.mark.parametrize(("name", "config"), VARIANTS)
def test_no_objective_depends_on_the_split_even_within_sequences(
    name: str, config: ObjectiveBase
) -> None:
    data = sequences_of(FIXED)
    config = config.model_copy(update={"entropy_coefficient": 0.05})
    stats, trust = stats_of(data, config), trust_of(data)
    whole = total_loss(stats, trust, config, REFERENCE)
    n = data.num_tokens
    parts = split(stats, [range(0, n, 3), range(1, n, 3), range(2, n, 3), []])
    outputs = [total_loss(part, trust, config, REFERENCE) for part in parts]
    total = sum(output.loss_sum for output in outputs)
    assert isinstance(total, Tensor)
    assert total.item() == pytest.approx(whole.loss_sum.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(total, stats.logprobs)
    assert gradient.numpy() == pytest.approx(gradient_of(whole, stats), rel=1e-12, abs=1e-14)
    for metric, value in whole.metrics.items():
        parted = sum(output.metrics[metric].item() for output in outputs)
        assert parted == pytest.approx(value.item(), rel=1e-12, abs=1e-14), metric


@given(batches, st.data())
def test_sequence_sums_merge_over_any_cut(batch: Batch, data: st.DataObject) -> None:
    sequences = sequences_of(batch)
    total = torch.tensor(np.concatenate(differences(sequences.logp, sequences.logb)))
    gap = torch.tensor(np.concatenate(differences(sequences.logprox, sequences.logb)))
    lengths = torch.tensor(sequences.lengths)
    index = torch.arange(len(lengths)).repeat_interleave(lengths)
    n = len(index)
    shard = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    sums = torch.zeros(2, len(lengths), dtype=torch.float64)
    for rank in range(3):
        mine = shard == rank
        sums += sequence_sums(total[mine], gap[mine], index[mine], len(lengths))
    stats = sequence_stats(sums, lengths, index, torch.float64)
    want = np.concatenate(
        [
            np.full(len(p), (p - b).mean())
            for p, b in zip(sequences.logp, sequences.logb, strict=True)
        ]
    )
    assert stats.log_ratios.numpy() == pytest.approx(want, rel=1e-12, abs=1e-12)
    assert stats.lengths.tolist() == lengths[index].tolist()


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_no_tokens_give_a_zero_that_backpropagates_and_the_same_names(name: str) -> None:
    hidden = torch.ones(2, requires_grad=True)
    stats = replace(TokenStats.empty(), logprobs=hidden[:0])
    trust = trust_of(sequences_of(FIXED))
    empty = total_loss(stats, trust, CONFIGS[name], REFERENCE)
    empty.loss_sum.backward()
    assert hidden.grad is not None and hidden.grad.tolist() == [0.0, 0.0]
    assert empty.loss_sum.item() == 0 and empty.num_tokens == 0
    full = total_loss(stats_of(sequences_of(FIXED), CONFIGS[name]), trust, CONFIGS[name], REFERENCE)
    assert {"loss/score", "loss/kl", "loss/reference_kl"} <= empty.metrics.keys()
    assert empty.metrics.keys() == full.metrics.keys()


@pytest.mark.parametrize(("name", "config"), VARIANTS)
def test_nan_is_never_hidden(name: str, config: ObjectiveBase) -> None:
    data = sequences_of(FIXED)
    trust = trust_of(data)
    data.logp[1][0] = math.nan
    stats = stats_of(data, config)
    assert LOSSES[name](stats, trust, config).loss_sum.isnan()


@pytest.mark.parametrize("name", [name for name in OBJECTIVE_NAMES if name != "sft"])
def test_on_policy_every_gradient_is_that_of_reinforce(name: str) -> None:
    batch = [(a, [(0.0, 0.0, t[2]) for t in tokens]) for a, tokens in FIXED]
    data = sequences_of(batch)
    config = CONFIGS[name].model_copy(update={"normalization": "token_mean"})
    stats = stats_of(data, config)
    gradient = gradient_of(LOSSES[name](stats, trust_of(data), config), stats)
    assert gradient == pytest.approx(-stats.advantages.numpy(), rel=1e-12)


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_the_entropy_bonus_lowers_every_loss(name: str) -> None:
    data = sequences_of(FIXED)
    stats, trust = stats_of(data, CONFIGS[name]), trust_of(data)
    bonus = CONFIGS[name].model_copy(update={"entropy_coefficient": 0.1})
    gain = (
        LOSSES[name](stats, trust, CONFIGS[name]).loss_sum
        - LOSSES[name](stats, trust, bonus).loss_sum
    )
    assert stats.entropy is not None
    want = 0.1 * (stats.token_weights * stats.entropy).sum().item()
    assert gain.item() == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", lambda x: x, lambda x: np.ones_like(x)),
        ("k2", lambda x: x**2 / 2, lambda x: x),
        ("k3", lambda x: x + np.exp(-x) - 1, lambda x: 1 - np.exp(-x)),
    ],
)
def test_the_reference_kl_adds_to_every_loss(
    name: str, estimator: str, value: Callable, slope: Callable
) -> None:
    data, config = sequences_of(FIXED), CONFIGS[name]
    stats, trust = stats_of(data, config), trust_of(data)
    section = ReferenceSection.model_validate({"kl_coefficient": 0.3, "kl_estimator": estimator})
    plain = total_loss(stats, trust, config, ReferenceSection())
    output = total_loss(stats, trust, config, section)
    x = np.concatenate(differences(data.logp, data.logb)) + 0.3
    w = stats.token_weights.numpy()
    kl = 0.3 * (w * value(x)).sum()
    assert (output.loss_sum - plain.loss_sum).item() == pytest.approx(kl, rel=1e-9)
    assert output.metrics["loss/reference_kl"].item() == pytest.approx(kl, rel=1e-9)
    assert output.metrics["reference/kl"].item() == pytest.approx(value(x).sum(), rel=1e-9)
    gained = gradient_of(output, stats) - gradient_of(plain, stats)
    assert gained == pytest.approx(0.3 * w * slope(x), rel=1e-8, abs=1e-10)


@given(st.floats(-60, 60), st.floats(0.01, 0.99))
def test_p3os_regulariser_always_pulls_towards_the_rollout_policy(
    log_ratio: float, ess: float
) -> None:
    data = sequences_of([(0.0, [(log_ratio, 0.0, -1.0)])])
    stats = stats_of(data, CONFIGS["p3o"])
    trust = replace(trust_of(sequences_of(FIXED)), ess=ess)
    (slope,) = gradient_of(LOSSES["p3o"](stats, trust, CONFIGS["p3o"]), stats)
    moved = float((stats.logprobs - stats.rollout_logprobs).detach())
    assert np.sign(slope) == np.sign(moved)
    assert abs(slope) <= (1 - ess) * math.exp(10)


def test_p4o_without_drift_is_p3o_bitwise() -> None:
    batch = [(a, [(t[0], 0.0, t[2]) for t in tokens]) for a, tokens in FIXED]
    data = sequences_of(batch)
    trust = trust_of(data)
    assert trust.ess_drift == 1
    outputs = {}
    for name in ("p3o", "p4o"):
        stats = stats_of(data, CONFIGS[name])
        output = LOSSES[name](stats, trust, CONFIGS[name])
        outputs[name] = (output.loss_sum.item(), gradient_of(output, stats).tolist())
    assert outputs["p3o"] == outputs["p4o"]


def test_p4o_leans_on_the_anchor_that_was_left_the_further() -> None:
    # With e_b = 1 the mixture is the proximal policy alone, and its KL is to that.
    data = sequences_of([(0.0, [(0.0, 0.5, -1.0)]), (0.0, [(0.0, -0.4, -1.5)])])
    trust = trust_of(data)
    assert trust.ess == 1 and trust.ess_drift < 1
    stats = stats_of(data, CONFIGS["p4o"])
    output = LOSSES["p4o"](stats, trust, CONFIGS["p4o"])
    want = (1 - trust.ess_drift) * sum(x + math.exp(-x) - 1 for x in (0.5, -0.4))
    assert output.metrics["loss/kl"].item() == pytest.approx(want, rel=1e-12)


def test_sapos_gate_is_one_on_policy_and_falls_on_both_sides() -> None:
    def gate(log_ratio: float, advantage: float) -> float:
        data = sequences_of([(advantage, [(log_ratio, 0.0, -1.0)])])
        stats = stats_of(data, CONFIGS["sapo"])
        output = LOSSES["sapo"](stats, trust_of(data), CONFIGS["sapo"])
        return output.metrics["sapo/gate_mean"].item()

    assert gate(0.0, 1.0) == 1
    assert gate(-1.0, 1.0) < 1 and gate(1.0, 1.0) < gate(0.5, 1.0) < 1
    assert gate(1.0, -1.0) < gate(1.0, 1.0)  # the larger tau fades sooner


# --- corrections


def correction_oracle(data: Sequences, section: CorrectionSection, ratio: str) -> np.ndarray:
    """`[T]` weights, from the ratios of whole sequences."""
    numerator = data.logp if ratio == "total" else data.logprox
    weights = []
    for difference in differences(numerator, data.logb):
        level = {
            "token": difference,
            "sequence": np.full_like(difference, difference.sum()),
            "geometric": np.full_like(difference, difference.mean()),
        }[section.level]
        r = np.exp(level)
        low = section.low or 0.0
        assert section.high is not None
        inside = (r >= low) & (r <= section.high)
        weights.append(
            {
                "truncate": np.minimum(r, section.high),
                "mask": np.where(inside, r, 0.0),
                "reject": inside.astype(float),
            }[section.mode]
        )
    return np.concatenate(weights)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask", "reject"])
@pytest.mark.parametrize("low", [None, 0.6])
@settings(max_examples=20)
@given(batch=batches)
def test_corrections_weigh_as_stated(
    level: str, mode: str, low: float | None, batch: Batch
) -> None:
    if low is not None and mode == "truncate":
        return
    section = CorrectionSection.model_validate(
        {"mode": mode, "level": level, "high": 1.5, "low": low}
    )
    data = sequences_of(batch)
    for name, ratio in (("reinforce", "total"), ("grpo", "mismatch"), ("sapo", "mismatch")):
        plain = CONFIGS[name]
        config = plain.model_copy(update={"correction": section})
        stats = stats_of(data, config)
        output = LOSSES[name](stats, trust_of(data), config)
        # The objective's own ratio is pi / p where the correction carries p / b.
        base = stats
        if section.carries_ratio and name != "reinforce":
            base = replace(stats, rollout_logprobs=stats.proximal_logprobs)
        expected = gradient_of(LOSSES[name](base, trust_of(data), plain), stats)
        weights = correction_oracle(data, section, ratio)
        assert gradient_of(output, stats) == pytest.approx(weights * expected, rel=1e-9, abs=1e-12)
        assert output.metrics["correction/weight_mean"].item() == pytest.approx(weights.sum())


def test_a_correction_leaves_kl_and_entropy_alone() -> None:
    section = CorrectionSection(mode="reject", high=1e-9)  # drops every token
    config = GRPOObjective(kl_coefficient=0.5, entropy_coefficient=0.1, correction=section)
    data = sequences_of(FIXED)
    stats = stats_of(data, config)
    output = LOSSES["grpo"](stats, trust_of(data), config)
    assert output.metrics["loss/score"].item() == 0
    plain = config.model_copy(update={"correction": CorrectionSection()})
    kept = LOSSES["grpo"](stats, trust_of(data), plain)
    assert output.metrics["loss/kl"].item() == kept.metrics["loss/kl"].item() > 0
    assert output.metrics["correction/outside_fraction"].item() == data.num_tokens
    assert output.num_tokens == data.num_tokens


def test_truncation_of_a_gap_that_is_everywhere_small_changes_nothing() -> None:
    data = sequences_of([(a, [(0.0, 0.0, t[2]) for t in tokens]) for a, tokens in FIXED])
    for name in ("reinforce", "grpo", "gspo", "sapo", "cispo"):
        config = CONFIGS[name].model_copy(
            update={"correction": CorrectionSection(mode="truncate", high=2.0)}
        )
        stats = stats_of(data, config)
        ours = LOSSES[name](stats, trust_of(data), config)
        plain = LOSSES[name](stats, trust_of(data), CONFIGS[name])
        assert ours.loss_sum.item() == pytest.approx(plain.loss_sum.item(), rel=1e-12)


def test_correction_weights_carry_no_gradient() -> None:
    stats = stats_of(sequences_of(FIXED), CONFIGS["reinforce"])
    section = CorrectionSection(mode="truncate", high=1.5)
    weights, metrics = correction_weights(stats, section, "total")
    assert not weights.requires_grad
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("name", ["p3o", "p4o", "ppo_decoupled"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_ratio_is_not_counted_twice(name: str, mode: str) -> None:
    kind = type(CONFIGS[name])
    with pytest.raises(ValueError, match=f"objective.correction.mode={mode} must be off or reject"):
        kind.model_validate({"correction": {"mode": mode, "high": 2.0}})
    kind.model_validate({"correction": {"mode": "reject", "high": 2.0}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "mask"}, "objective.correction.high=None goes with a correction"),
        ({"high": 2.0}, "objective.correction.high=2.0 goes with a correction"),
        ({"mode": "truncate", "high": 2.0, "low": 0.5}, "low=0.5 is not used by"),
        ({"mode": "mask", "high": 0.4, "low": 0.5}, "low=0.5 must be < objective.correction.high"),
    ],
)
def test_bands_that_make_no_sense_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorrectionSection.model_validate(fields)
    assert issubclass(ConfigurationError, ValueError)


# --- what a loss must be given


@pytest.mark.parametrize(
    ("config", "reference", "inputs"),
    [
        (P3OObjective(), ReferenceSection(), set()),
        (P4OObjective(), ReferenceSection(), {"proximal"}),
        (GSPOObjective(), ReferenceSection(), {"sequences"}),
        (
            PPODecoupledObjective(entropy_coefficient=0.1),
            ReferenceSection(),
            {"proximal", "entropy"},
        ),
        (
            GRPOObjective(correction=CorrectionSection(mode="mask", level="geometric", high=2.0)),
            REFERENCE,
            {"proximal", "sequences", "reference"},
        ),
        (
            RLOOObjective(correction=CorrectionSection(mode="truncate", high=2.0)),
            ReferenceSection(),
            {"proximal"},
        ),
    ],
)
def test_required_inputs(config: ObjectiveBase, reference: ReferenceSection, inputs: set) -> None:
    assert required_inputs(config, reference) == inputs


@pytest.mark.parametrize(("name", "config"), VARIANTS)
def test_a_loss_reads_no_optional_input_that_it_does_not_name(
    name: str, config: ObjectiveBase
) -> None:
    data = sequences_of(FIXED)
    stats = stats_of(data, config)
    fields = {
        "proximal": "proximal_logprobs",
        "sequences": "sequences",
        "entropy": "entropy",
        "reference": "reference_logprobs",
    }
    needed = required_inputs(config, ReferenceSection())
    without = {field: None for key, field in fields.items() if key not in needed}
    bare = replace(stats, **without)  # type: ignore[arg-type]
    trust = trust_of(data)
    assert torch.equal(
        LOSSES[name](bare, trust, config).loss_sum, LOSSES[name](stats, trust, config).loss_sum
    )


@settings(max_examples=40)
@given(batches, st.lists(st.floats(0, 3), min_size=25, max_size=25))
def test_sft_is_the_weighted_negative_log_likelihood_whatever_the_policy(
    batch: Batch, weights: list[float]
) -> None:
    """Neither advantages nor ratios nor trust play a part."""
    data = sequences_of(batch)
    stats = stats_of(data, CONFIGS["sft"])
    stats = replace(
        stats, token_weights=torch.tensor(weights[: data.num_tokens], dtype=torch.float64)
    )
    output = LOSSES["sft"](stats, trust_of(data), SFTObjective())
    given_weights = stats.token_weights.numpy()
    want = -(given_weights * np.concatenate(data.logp)).sum()
    assert output.loss_sum.item() == pytest.approx(want, rel=1e-12, abs=1e-12)
    assert output.metrics["loss/score"].item() == output.loss_sum.item()
    assert output.metrics["loss/kl"].item() == 0
    assert gradient_of(output, stats).tolist() == (-given_weights).tolist()
    other = replace(
        stats,
        advantages=-5 * stats.advantages,
        rollout_logprobs=stats.rollout_logprobs - 9,
        proximal_logprobs=stats.proximal_logprobs + 9,
    )
    trust = trust_of(sequences_of(FIXED))
    assert LOSSES["sft"](other, trust, SFTObjective()).loss_sum.item() == output.loss_sum.item()
