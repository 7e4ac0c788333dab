"""The order in which prompts are drawn: epoch after epoch, resumable, the same everywhere.

The order of an epoch depends on (seed, epoch, number of prompts) alone, so the whole state is a
position, and every rank that starts from the same seed draws the same prompts without talking.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_p3o.errors import InputError


@dataclass(frozen=True, slots=True)
class DrawnPrompt:
    """One draw: the prompt's position in the set, and the epoch it was drawn in."""

    index: int
    epoch: int

    @property
    def key(self) -> str:
        """`epoch-index`: a prompt id that is unique over the run, as repeats differ in epoch."""
        return f"{self.epoch}-{self.index}"

    @classmethod
    def from_key(cls, key: str) -> "DrawnPrompt":
        """The draw with this key."""
        epoch, _, index = key.partition("-")
        return cls(index=int(index), epoch=int(epoch))


class PromptCursor:
    """Draws prompts without replacement within an epoch, then goes on with the next epoch.

    Args:
        num_prompts: size of the set, >= 1.
        seed: with the epoch it decides the order.
        shuffle: False draws every epoch in source order.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool) -> None:
        assert num_prompts >= 1, "a prompt set is never empty"
        self._identity = {"num_prompts": num_prompts, "seed": seed, "shuffle": shuffle}
        self._start_epoch(0)

    def take(self, count: int) -> list[DrawnPrompt]:
        """The next `count` draws; more than the set has goes over several epochs."""
        drawn = []
        for _ in range(count):
            drawn.append(DrawnPrompt(self._order[self._position], self._epoch))
            self._position += 1
            if self._position == len(self._order):
                self._start_epoch(self._epoch + 1)
        return drawn

    def state(self) -> dict[str, Any]:
        """JSON-ready: what identifies the order, and the place of the next draw in it."""
        return {**self._identity, "epoch": self._epoch, "position": self._position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on after the draws that led to `state`.

        Raises:
            InputError: the state is of another number of prompts, seed or shuffle setting, or is
                damaged; the cursor is left as it was.
        """
        fields = {"num_prompts": "data (number of prompts)", "seed": "run.seed"}
        for name, here in self._identity.items():
            if name in state and state[name] != here:
                raise InputError(
                    f"{fields.get(name, f'data.{name}')} is {here!r} but was {state[name]!r} when "
                    "the checkpoint was written, which gives another order of prompts; restore "
                    "it, or start a run in another run.dir"
                )
        epoch, position = state.get("epoch"), state.get("position")
        if (
            state.keys() != self.state().keys()
            or not (type(epoch) is int and epoch >= 0)
            or not (type(position) is int and 0 <= position < len(self._order))
        ):
            raise InputError(
                f"the checkpoint's prompt cursor is damaged: {dict(state)}; "
                "resume from another checkpoint"
            )
        self._start_epoch(epoch)
        self._position = position

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        num_prompts = self._identity["num_prompts"]
        self._order: list[int] = list(range(num_prompts))
        if self._identity["shuffle"]:
            # Sorting by random(): Python promises that its stream never changes for a text seed,
            # which it does not promise for shuffle(), nor numpy for its permutations.
            stream = random.Random(f"{self._identity['seed']}/{epoch}")
            sort_keys = [stream.random() for _ in range(num_prompts)]
            self._order.sort(key=sort_keys.__getitem__)
