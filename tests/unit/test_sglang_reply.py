"""What a server answers is believed only when it fits together."""

import base64
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_p3o.config import SamplingSection
from megatron_p3o.rollout.sglang import (
    BadReply,
    ExpertLayout,
    GenerateOptions,
    Reply,
    Response,
    ServerError,
    WrongWeights,
)
from megatron_p3o.rollout.sglang.client import parse_reply
from megatron_p3o.types import VersionSpan

ANSWER: dict[str, Any] = {
    "output_ids": [5, 9, 1],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 1},
        "output_token_logprobs": [[-0.5, 5, None], [-1.25, 9, None], [0.0, 1, None]],
        "weight_versions": [
            {"version": "3", "start": 0, "end": 2},
            {"version": "4", "start": 2, "end": 3},
        ],
    },
}


def test_a_sound_answer_is_read() -> None:
    assert parse_reply(ANSWER, 8) == Reply(
        token_ids=(5, 9, 1),
        logprobs=(-0.5, -1.25, 0.0),
        version_spans=(VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)),
        finish_reason="stop",
    )


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(answer: dict[str, Any]) -> None:
        *parents, leaf = [int(p) if p.isdecimal() else p for p in path.split(".")]
        node: Any = answer
        for parent in parents:
            node = node[parent]
        node[leaf] = value

    return spoil


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("output_ids", [5, 9], "3 log-probs for 2 tokens"),
        ("meta_info.output_token_logprobs.1.1", 8, "of other tokens"),
        ("meta_info.output_token_logprobs.1.0", 0.5, "log-prob 0.5 at response position 1"),
        ("meta_info.output_token_logprobs.2.0", float("nan"), "log-prob nan"),
        ("meta_info.finish_reason.type", "tired", "finish_reason 'tired'"),
        ("meta_info.finish_reason.type", "length", "3 tokens of at most 8"),
        ("meta_info.weight_versions.1.end", 2, "do not cover the 3 tokens"),
        ("meta_info.weight_versions.1.start", 1, "do not cover the 3 tokens"),
        ("meta_info.weight_versions", [], "do not cover the 3 tokens"),
    ],
)
def test_a_contradiction_is_a_bad_reply(path: str, value: Any, said: str) -> None:
    answer = copy.deepcopy(ANSWER)
    change(path, value)(answer)
    with pytest.raises(BadReply, match=said):
        parse_reply(answer, 8)


def test_too_many_tokens_are_a_bad_reply() -> None:
    with pytest.raises(BadReply, match="3 tokens of at most 2"):
        parse_reply(ANSWER, 2)


def test_tokens_of_unpublished_weights_are_told_apart() -> None:
    answer = copy.deepcopy(ANSWER)
    answer["meta_info"]["weight_versions"][0]["version"] = "unpublished"
    with pytest.raises(WrongWeights, match="'unpublished', which was never published"):
        parse_reply(answer, 8)


def test_an_aborted_request_may_have_no_tokens() -> None:
    answer = {
        "output_ids": [],
        "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": []},
    }
    reply = parse_reply(answer, 8)
    assert (reply.token_ids, reply.version_spans, reply.finish_reason) == ((), (), "abort")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
PATHS = st.sampled_from(
    [
        "output_ids",
        "output_ids.0",
        "meta_info",
        "meta_info.finish_reason",
        "meta_info.finish_reason.type",
        "meta_info.output_token_logprobs",
        "meta_info.output_token_logprobs.0",
        "meta_info.output_token_logprobs.0.0",
        "meta_info.weight_versions",
        "meta_info.weight_versions.0",
        "meta_info.weight_versions.0.version",
        "meta_info.weight_versions.0.start",
        "meta_info.weight_versions.1.end",
    ]
)


@given(PATHS, JSON)
def test_anything_else_is_an_error_that_is_caught_and_never_a_wrong_reply(
    path: str, value: Any
) -> None:
    answer = copy.deepcopy(ANSWER)
    change(path, value)(answer)
    try:
        reply = parse_reply(answer, 8)
    except (ServerError, KeyError, TypeError, ValueError, IndexError, AttributeError):
        return
    assert reply.token_ids == (5, 9, 1)
    assert all(value <= 1e-3 for value in reply.logprobs)
    assert reply.version_spans[0].start == 0 and reply.version_spans[-1].stop == 3


def test_parts_of_a_response_join_with_their_versions() -> None:
    response = Response()
    parts = [((7, 8), 3, "abort"), ((9,), 3, "abort"), ((), 3, "abort"), ((4, 1), 5, "stop")]
    for token_ids, version, finish in parts:
        spans = (VersionSpan(version, 0, len(token_ids)),) if token_ids else ()
        response.extend(
            Reply(
                token_ids=token_ids,
                logprobs=(-0.1,) * len(token_ids),
                version_spans=spans,
                finish_reason=finish,  # type: ignore[arg-type]
            )
        )
    assert response.token_ids == [7, 8, 9, 4, 1]
    assert response.version_spans == [VersionSpan(3, 0, 3), VersionSpan(5, 3, 5)]


def test_a_request_spells_out_how_to_sample() -> None:
    options = GenerateOptions(
        sampling=SamplingSection(temperature=0.7, max_new_tokens=9), eos_token_ids=(1, 2)
    )
    body = options.body((4, 5), 6)
    assert body["input_ids"] == [4, 5]
    assert body["return_logprob"] is True
    assert body["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "max_new_tokens": 6,
        "stop_token_ids": [1, 2],
    }


def test_experts_are_read_of_the_moe_layers_alone() -> None:
    experts = np.arange(2 * 3 * 2, dtype="<i4").reshape(2, 3, 2)  # tokens, layers, experts
    text = base64.b64encode(experts.tobytes()).decode()
    layout = ExpertLayout(num_layers=3, moe_layers=(1, 2), experts_per_token=2)
    found = layout.read(text, num_tokens=2)
    assert found.tensor().tolist() == [[[2, 3], [4, 5]], [[8, 9], [10, 11]]]
    with pytest.raises(BadReply, match=r"12 expert choices, and \(3, 3, 2\)"):
        layout.read(text, num_tokens=3)
    with pytest.raises(ValueError):
        layout.read("?", num_tokens=2)
