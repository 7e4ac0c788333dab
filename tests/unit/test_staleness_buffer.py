"""The bound on the age of what is trained on."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_p3o.rollout import StalenessBuffer
from megatron_p3o.types import Sample, SampleGroup


def group(prompt_id: str, *versions: int) -> SampleGroup:
    return SampleGroup(
        prompt_id=prompt_id,
        samples=tuple(
            Sample(
                prompt_id=prompt_id,
                sample_index=index,
                prompt_ids=(1,),
                response_ids=(2,),
                rollout_logprobs=(-1.0,),
                finish_reason="stop",
                weight_version_min=version,
                weight_version_max=version + 1,
            )
            for index, version in enumerate(versions)
        ),
    )


def test_a_group_with_one_sample_too_old_is_refused_whole() -> None:
    buffer = StalenessBuffer(max_lag=2)
    buffer.put(7, [group("a", 5, 6), group("b", 6, 4), group("c", 7, 7)])
    taken = buffer.take(7, weight_version=7)
    assert [g.prompt_id for g in taken.fresh] == ["a", "c"]
    assert [g.prompt_id for g in taken.stale] == ["b"]
    assert buffer.take(7, weight_version=7).fresh == ()


def test_steps_do_not_mix_whatever_finishes_first() -> None:
    buffer = StalenessBuffer(max_lag=1)
    buffer.put(1, [group("later", 0)])
    buffer.put(0, [group("sooner", 0)])
    assert [g.prompt_id for g in buffer.take(0, 0).fresh] == ["sooner"]
    assert [g.prompt_id for g in buffer.take(1, 1).fresh] == ["later"]


@given(st.integers(0, 5), st.integers(0, 20), st.lists(st.integers(0, 20), min_size=1))
def test_nothing_older_than_the_bound_gets_through(
    max_lag: int, version: int, sampled: list[int]
) -> None:
    buffer = StalenessBuffer(max_lag=max_lag)
    buffer.put(0, [group(str(i), v) for i, v in enumerate(sampled)])
    taken = buffer.take(0, version)
    lags = [version - g.samples[0].weight_version_min for g in taken.fresh]
    assert all(lag <= max_lag for lag in lags)
    assert len(taken.fresh) + len(taken.stale) == len(sampled)
    assert len(taken.fresh) == sum(version - v <= max_lag for v in sampled)
