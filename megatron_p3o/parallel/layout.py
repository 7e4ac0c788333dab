"""Which rank holds what: pure arithmetic on the sizes of the parallel axes. Imports no Megatron.

Ranks are numbered in Megatron's default order "tp-cp-ep-dp-pp" (megatron/core/parallel_state.py):
tensor varies fastest, then context, then data, and pipeline slowest, so that the ranks of one
tensor group are neighbours and share a node's fast links.
"""

import math
from dataclasses import dataclass

from megatron_p3o.config import LayoutSection
from megatron_p3o.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """A rank's position on each axis of the layers without experts."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertCoordinates:
    """A rank's position on the axes of the experts."""

    expert_tensor: int
    expert: int
    copy: int
    """Which of the equal copies of the experts it belongs to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Sizes of all parallel axes, validated once.

    Experts are shared over the ranks of one pipeline stage, tensor x context x data, so expert
    axes do not appear in the world size. There the order is expert tensor, expert, copies of the
    experts.

    Example:
        ParallelLayout(tensor=2, pipeline=2, data=2).world_size == 8
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for axis in self.__dataclass_fields__:
            size = getattr(self, axis)
            if size < 1:
                raise ConfigurationError(f"layout.{axis}={size} must be >= 1; use 1 to turn it off")
        self._check_experts()

    def _check_experts(self) -> None:
        stage = self.tensor * self.context * self.data
        taken = self.expert * self.expert_tensor
        if stage % taken == 0:
            return
        ranks = f"{stage} ranks (tensor {self.tensor} x context {self.context} x data {self.data})"
        legal = [n for n in range(1, stage + 1) if stage % (n * self.expert_tensor) == 0]
        if not legal:
            nearest = max(n for n in range(1, self.expert_tensor) if stage % n == 0)
            raise ConfigurationError(
                f"layout.expert_tensor={self.expert_tensor} must divide a pipeline stage's "
                f"{ranks}; the nearest legal value is {nearest}"
            )
        nearest = min(legal, key=lambda n: abs(n - self.expert))
        data = taken // math.gcd(taken, self.tensor * self.context)
        raise ConfigurationError(
            f"layout.expert={self.expert} x layout.expert_tensor={self.expert_tensor} must divide "
            f"a pipeline stage's {ranks}; the nearest legal layout.expert is {nearest}, and "
            f"layout.data={data} would suit the experts"
        )

    @classmethod
    def for_world(cls, section: LayoutSection, world_size: int) -> "ParallelLayout":
        """The layout that `world_size` ranks form; `data` follows from it when left out.

        Raises:
            ConfigurationError: the ranks do not form the layout.
        """
        per_copy = section.model_parallel_size
        axes = f"tensor {section.tensor} x pipeline {section.pipeline} x context {section.context}"
        if section.data is not None:
            needed = per_copy * section.data
            if world_size != needed:
                raise ConfigurationError(
                    f"layout needs {needed} ranks ({axes} x data {section.data}) but {world_size} "
                    f"were started; start {needed} ranks or change layout.data"
                )
        elif world_size % per_copy:
            nearest = max(1, world_size // per_copy) * per_copy
            raise ConfigurationError(
                f"layout needs a multiple of {per_copy} ranks ({axes}) but {world_size} were "
                f"started; start {nearest} ranks or shrink an axis"
            )
        return cls(
            tensor=section.tensor,
            pipeline=section.pipeline,
            virtual_pipeline=section.virtual_pipeline,
            context=section.context,
            expert=section.expert,
            expert_tensor=section.expert_tensor,
            data=world_size // per_copy,
        )

    @property
    def world_size(self) -> int:
        return math.prod((self.tensor, self.context, self.data, self.pipeline))

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.world_size
        rank, tensor = divmod(rank, self.tensor)
        rank, context = divmod(rank, self.context)
        pipeline, data = divmod(rank, self.data)
        return Coordinates(tensor=tensor, context=context, data=data, pipeline=pipeline)

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        assert 0 <= rank < self.world_size
        rank %= self.world_size // self.pipeline
        rank, expert_tensor = divmod(rank, self.expert_tensor)
        copy, expert = divmod(rank, self.expert)
        return ExpertCoordinates(expert_tensor=expert_tensor, expert=expert, copy=copy)

    def rank(self, coordinates: Coordinates) -> int:
        """Inverse of `coordinates`."""
        c = coordinates
        return c.tensor + self.tensor * (
            c.context + self.context * (c.data + self.data * c.pipeline)
        )
