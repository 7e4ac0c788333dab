import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_p3o.config import LayoutSection
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.parallel.layout import Coordinates, ExpertCoordinates, ParallelLayout


def test_ranks_follow_megatrons_order() -> None:
    layout = ParallelLayout(tensor=2, pipeline=2, data=2)
    assert layout.world_size == 8
    assert layout.coordinates(0) == Coordinates(tensor=0, context=0, data=0, pipeline=0)
    assert layout.coordinates(1) == Coordinates(tensor=1, context=0, data=0, pipeline=0)
    assert layout.coordinates(2) == Coordinates(tensor=0, context=0, data=1, pipeline=0)
    assert layout.coordinates(5) == Coordinates(tensor=1, context=0, data=0, pipeline=1)


@given(*(st.integers(1, 4),) * 4)
def test_rank_is_the_inverse_of_coordinates(
    tensor: int, context: int, data: int, pipe: int
) -> None:
    layout = ParallelLayout(tensor=tensor, context=context, data=data, pipeline=pipe)
    seen = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(seen)) == layout.world_size
    assert [layout.rank(c) for c in seen] == list(range(layout.world_size))


def test_data_follows_from_the_world_size() -> None:
    layout = ParallelLayout.for_world(LayoutSection(tensor=2, pipeline=2), 12)
    assert layout == ParallelLayout(tensor=2, pipeline=2, data=3)


@pytest.mark.parametrize(
    ("section", "world_size", "message"),
    [
        (LayoutSection(tensor=2, pipeline=2, data=2), 4, "needs 8 ranks .* but 4 were started"),
        (LayoutSection(data=2), 3, "needs 2 ranks .* but 3 were started"),
        (LayoutSection(tensor=2), 3, "multiple of 2 ranks .* start 2 ranks"),
        (LayoutSection(tensor=4), 2, "multiple of 4 ranks .* start 4 ranks"),
    ],
)
def test_ranks_that_do_not_form_the_layout(
    section: LayoutSection, world_size: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ParallelLayout.for_world(section, world_size)


def test_expert_ranks_follow_megatrons_order() -> None:
    layout = ParallelLayout(tensor=2, pipeline=2, data=4, expert=2, expert_tensor=2)
    assert layout.world_size == 16
    seen = [layout.expert_coordinates(rank) for rank in range(16)]
    assert seen[:5] == [
        ExpertCoordinates(expert_tensor=0, expert=0, copy=0),
        ExpertCoordinates(expert_tensor=1, expert=0, copy=0),
        ExpertCoordinates(expert_tensor=0, expert=1, copy=0),
        ExpertCoordinates(expert_tensor=1, expert=1, copy=0),
        ExpertCoordinates(expert_tensor=0, expert=0, copy=1),
    ]
    assert seen[8:] == seen[:8]  # the second pipeline stage


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"data": 2, "expert": 4},
            "layout.expert=4 x layout.expert_tensor=1 must divide a pipeline stage's 2 ranks "
            r"\(tensor 1 x context 1 x data 2\); the nearest legal layout.expert is 2, and "
            "layout.data=4 would suit",
        ),
        (
            {"data": 6, "expert": 2, "expert_tensor": 2},
            "the nearest legal layout.expert is 1, and layout.data=4 would suit",
        ),
        (
            {"tensor": 3, "expert_tensor": 2},
            "layout.expert_tensor=2 must divide .* 3 ranks .* the nearest legal value is 1",
        ),
    ],
)
def test_experts_must_divide_the_ranks_of_a_stage(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ParallelLayout(**sizes)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"layout\.tensor=0 must be >= 1"):
        ParallelLayout(tensor=0)
