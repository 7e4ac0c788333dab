"""Rollouts ahead of training: how old batches are, in which order, and what a checkpoint keeps."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_p3o.trainer.ahead import AheadRollouts
from megatron_p3o.trainer.experience import Collected, Weights
from megatron_p3o.types import Sample


class Source:
    """Notes what it is asked for; a batch says its step, its draw and the weights' version."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.drawn = 0
        self.closed = False
        self.walked: list[str] = []

    def collect(self, step: int) -> Collected:
        assert self.version is not None
        self.drawn += 1
        metrics = {"step": step, "draw": self.drawn - 1, "version": self.version}
        return Collected(groups=(), metrics=metrics)

    def publish(self, weights: Weights, version: int) -> None:
        self.walked = [name for name, _ in weights()]
        self.version = version

    def parity_samples(self) -> Mapping[str, Sequence[Sample]]:
        return {"engine": ()}

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]

    def close(self) -> None:
        self.closed = True


def weights() -> Iterator[tuple[str, Tensor]]:
    yield "w", Tensor()


def run(rollouts: AheadRollouts, first_step: int, num_steps: int) -> list[Mapping[str, float]]:
    """As the training loop calls it, one optimizer step a batch."""
    rollouts.publish(weights, first_step)
    batches = []
    for step in range(first_step, num_steps):
        batches.append(rollouts.collect(step).metrics)
        rollouts.publish(weights, step + 1)
    return batches


@given(ahead=st.integers(0, 5), num_steps=st.integers(1, 8))
def test_every_batch_is_as_old_as_asked_for(ahead: int, num_steps: int) -> None:
    source = Source()
    batches = run(AheadRollouts(source, ahead=ahead, num_steps=num_steps), 0, num_steps)
    assert [batch["step"] for batch in batches] == list(range(num_steps))
    assert [batch["draw"] for batch in batches] == list(range(num_steps))
    lags = [step - batch["version"] for step, batch in enumerate(batches)]
    assert lags == [min(step, ahead) for step in range(num_steps)]
    assert source.drawn == num_steps  # nothing is generated for steps that never come


def test_the_first_step_generates_all_that_waits() -> None:
    source = Source()
    rollouts = AheadRollouts(source, ahead=2, num_steps=10)
    rollouts.publish(weights, 0)
    assert source.drawn == 0
    drawn = []
    for step in range(4):
        rollouts.collect(step)
        drawn.append(source.drawn)
        rollouts.publish(weights, step + 1)
    assert drawn == [3, 4, 5, 6]


def test_the_state_is_from_before_the_oldest_batch_that_waits() -> None:
    rollouts = AheadRollouts(Source(), ahead=2, num_steps=10)
    assert rollouts.state() == {"drawn": 0}
    rollouts.publish(weights, 0)
    for step in range(3):
        rollouts.collect(step)
        assert rollouts.state() == {"drawn": step + 1}


@pytest.mark.parametrize("num_steps", [4, 5, 9])
def test_a_resumed_run_draws_the_same_prompts(num_steps: int) -> None:
    """With fresher weights at first: what waited is generated again, with those of the resume."""
    rollouts = AheadRollouts(Source(), ahead=2, num_steps=num_steps)
    run(rollouts, 0, 3)
    state = rollouts.state()
    resumed = AheadRollouts(Source(), ahead=2, num_steps=num_steps)
    resumed.load_state(state)
    batches = run(resumed, 3, num_steps)
    assert [batch["draw"] for batch in batches] == list(range(3, num_steps))
    lags = [step - batch["version"] for step, batch in enumerate(batches, start=3)]
    assert lags == [min(done, 2) for done in range(num_steps - 3)]


def test_loading_forgets_what_waits() -> None:
    source = Source()
    rollouts = AheadRollouts(source, ahead=1, num_steps=10)
    run(rollouts, 0, 2)
    rollouts.load_state({"drawn": 7})
    assert rollouts.state() == {"drawn": 7}
    assert rollouts.collect(7).metrics["draw"] == 7


def test_at_the_end_the_state_is_the_sources() -> None:
    rollouts = AheadRollouts(Source(), ahead=3, num_steps=2)
    run(rollouts, 0, 2)
    assert rollouts.state() == {"drawn": 2}


def test_the_rest_goes_to_the_source() -> None:
    source = Source()
    rollouts = AheadRollouts(source, ahead=1, num_steps=2)
    rollouts.publish(weights, 4)
    assert (source.version, source.walked) == (4, ["w"])
    assert rollouts.parity_samples() == {"engine": ()}
    rollouts.close()
    assert source.closed
