"""Recording samples and replaying them: exact, resumable, and clear about bad files."""

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_p3o.errors import InputError, RunError
from megatron_p3o.rollout import ReplayRollouts, SampleRecorder
from megatron_p3o.types import Sample

SAMPLE = Sample(
    prompt_id="0-7",
    sample_index=0,
    prompt_ids=(1, 4, 9),
    response_ids=(55, 2),
    rollout_logprobs=(-0.1 - 0.2, -math.pi * 1e-8),
    finish_reason="stop",
    weight_version_min=6,
    weight_version_max=7,
    prompt_text='"1+1"\n=',
    response_text="\u00fc\u2028",
    reward=1 / 3,
)


def record(path: Path, steps: Iterable[int], *, first_step: int = 0) -> None:
    """Two groups of two samples a step, their members interleaved."""
    recorder = SampleRecorder(path, first_step=first_step)
    for step in steps:
        samples = [
            replace(SAMPLE, prompt_id=f"{step}-{prompt}", sample_index=index)
            for index in (0, 1)
            for prompt in (9, 2)
        ]
        recorder.write(step, [(sample, 0.5) for sample in samples])
    recorder.close()


def line(**changes: Any) -> str:
    return json.dumps({"step": 0, "advantage": None, **SAMPLE.to_json(), **changes})


def test_a_sample_replays_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    failed = replace(SAMPLE, sample_index=1, reward=None, reward_error="timed out after 10 s")
    recorder = SampleRecorder(path, first_step=0)
    recorder.write(3, [(SAMPLE, 0.1 + 0.2), (failed, None)])
    recorder.close()
    (group,) = ReplayRollouts(path).groups(3)
    assert group.prompt_id == "0-7"
    assert group.samples == (SAMPLE, failed)
    lines = [json.loads(text) for text in path.read_bytes().splitlines()]
    assert [(r["step"], r["advantage"]) for r in lines] == [(3, 0.1 + 0.2), (3, None)]


@given(logprobs=st.lists(st.floats(allow_nan=False), max_size=5), text=st.text())
def test_any_log_prob_and_text_survives_json(logprobs: list[float], text: str) -> None:
    sample = replace(
        SAMPLE,
        response_ids=tuple(range(len(logprobs))),
        rollout_logprobs=tuple(logprobs),
        response_text=text,
    )
    assert Sample.from_json(json.loads(json.dumps(sample.to_json()))) == sample


def test_a_step_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    recorder = SampleRecorder(path, first_step=0)
    recorder.write(0, [(SAMPLE, 0.0)])
    assert ReplayRollouts(path).steps() == [0]
    recorder.close()


def test_resuming_drops_later_steps_and_half_a_line(tmp_path: Path) -> None:
    path, whole = tmp_path / "samples.jsonl", tmp_path / "whole.jsonl"
    record(path, range(4))
    with path.open("a") as file:
        file.write('{"step": 1, "advant')
    record(path, [2, 3, 4], first_step=2)
    record(whole, range(5))
    assert path.read_bytes() == whole.read_bytes()
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_starting_from_step_0_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    record(path, range(2))
    SampleRecorder(path, first_step=0).close()
    assert path.read_bytes() == b""


def test_groups_come_in_recorded_order_with_all_their_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    record(path, [5, 0])
    replay = ReplayRollouts(path)
    assert replay.steps() == [0, 5]
    for step in (5, 0):
        groups = replay.groups(step)
        assert [group.prompt_id for group in groups] == [f"{step}-9", f"{step}-2"]
        for group in groups:
            assert [(s.prompt_id, s.sample_index) for s in group.samples] == [
                (group.prompt_id, 0),
                (group.prompt_id, 1),
            ]


def test_blank_lines_are_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(f"\n{line()}\n  \n{line(sample_index=1)}\n\n")
    (group,) = ReplayRollouts(path).groups(0)
    assert [sample.sample_index for sample in group.samples] == [0, 1]


def test_a_step_that_was_not_recorded_is_named_with_those_that_were(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    record(path, [0, 1])
    message = r"step 2 is not in .*2 steps from 0 to 1; lower train\.steps"
    with pytest.raises(RunError, match=message):
        ReplayRollouts(path).groups(2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read .No such file"),
        (b"", "holds no samples; record a run with run.record=true"),
        (b"\n\n", "holds no samples"),
        (b"{}\n", "line 1: not a recorded sample .KeyError"),
        (b"[1, 2]\n", "line 1: not a recorded sample"),
        (b"null\n", "line 1: not a recorded sample"),
        (f"{line()}\n{line()[:40]}".encode(), "line 2: not JSON"),
        (f"{line()}\n\n{line(step='x')}\n".encode(), "line 3: not a recorded sample"),
        (line(step=None).encode(), "line 1: not a recorded sample"),
        (line(prompt_ids=None).encode(), "line 1: not a recorded sample"),
        (line(rollout_logprobs=[-0.5]).encode(), "line 1: .*2 response tokens but 1 rollout log"),
        (b'{"step": "\xff"}\n', "line 1: not UTF-8"),
    ],
)
def test_bad_recordings_are_refused_by_path_and_line(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "samples.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        ReplayRollouts(path)
    assert f"rollout.replay_path={str(path)!r}" in str(caught.value)


@pytest.mark.parametrize(
    "field",
    [
        "step",
        "prompt_id",
        "sample_index",
        "prompt_ids",
        "response_ids",
        "rollout_logprobs",
        "finish_reason",
        "weight_version_min",
        "weight_version_max",
    ],
)
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    path = tmp_path / "samples.jsonl"
    damaged = json.loads(line())
    del damaged[field]
    path.write_text(f"{line()}\n{json.dumps(damaged)}\n")
    with pytest.raises(InputError, match=f"line 2: .*{field}"):
        ReplayRollouts(path)


def test_samples_that_no_microbatch_holds_are_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(line() + "\n" + line(prompt_ids=[1, 4, 9, 9], sample_index=1) + "\n")
    # Three prompt and two response tokens: all but the last enter the model.
    assert len(ReplayRollouts(path, max_sequence_tokens=5).groups(0)[0].samples) == 2
    with pytest.raises(InputError, match="line 2: sample 0-7/1 has 5 tokens, more than the 4"):
        ReplayRollouts(path, max_sequence_tokens=4)
