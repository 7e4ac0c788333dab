"""FLOPs, seconds, servers and sync of `p3o plan` by hand, on hardware with round numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_p3o.config import RunConfig
from megatron_p3o.plan import Plan, PlanOptions, make_plan
from megatron_p3o.plan.batch import Lengths
from megatron_p3o.plan.flops import (
    ForwardFlops,
    Work,
    score_passes,
    score_work,
    train_work,
)
from megatron_p3o.plan.hardware import GPUS, Gpu
from megatron_p3o.plan.serving import Generators, rollout_time
from tests.unit.plan_runs import DENSE, EXPERTS, GOLDEN, SERVERS, architecture, run_config

SLOW = Gpu(
    fp32_flops=10.0,
    bf16_flops=100.0,
    fp8_flops=200.0,
    memory_bytes=1e6,
    hbm_bytes_s=1000.0,
    nvlink_bytes_s=100.0,
    network_bytes_s=10.0,
)
LENGTHS = Lengths(prompt=5, response=4)


def test_a_dense_model_by_hand(tmp_path: Path) -> None:
    flops = ForwardFlops.of(architecture(tmp_path, DENSE))
    layer = 192 + 3 * 16 * 8
    assert (flops.linear, flops.router) == (2 * 2 * layer, 0)
    assert flops.attention == 2 * 2 * (8 + 8)  # 2 layers, 8 channels of queries and of values
    assert flops.head == 2 * 10 * 8
    # 8 tokens enter, 4 are predicted, and half of the 8 x 8 pairs are attended to.
    decoder = 8 * 2304 + 64 * 32
    assert score_work(flops, LENGTHS).total == decoder + 4 * 160
    assert train_work(flops, LENGTHS, "none").total == 3 * decoder + 4 * 4 * 160
    assert train_work(flops, LENGTHS, "selective").total == 3 * decoder + 64 * 32 + 2560
    assert train_work(flops, LENGTHS, "full").total == 4 * decoder + 2560


def test_a_token_meets_its_experts_alone(tmp_path: Path) -> None:
    flops = ForwardFlops.of(architecture(tmp_path, EXPERTS))
    assert flops.linear == 2 * 2 * (192 + 2 * 3 * 6 * 8)
    assert flops.router == 2 * 2 * 4 * 8


def test_six_flops_a_parameter() -> None:
    """The rule of thumb for training: 6 x parameters x tokens, for short sequences."""
    config = run_config(GOLDEN / "Qwen3-8B-Base")
    made = make_plan(config, PlanOptions(gpus_per_node=1))
    # The embedding is looked up; 4 of 8 tokens are predicted, at 8 FLOPs a weight.
    table = made.parameters.embedding // 2
    tokens = 16 * 8
    expected = 6 * (made.parameters.total - 2 * table) * tokens + 8 * table * tokens / 2
    assert made.cost.flops.train == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("steps", "is_fused", "passes"),
    [(1, False, 1), (1, True, 0), (4, False, 7 / 4), (4, True, 3 / 4)],
)
def test_scoring_passes(steps: int, is_fused: bool, passes: float) -> None:
    assert score_passes(steps, is_fused=is_fused) == passes


def test_only_linear_layers_run_in_fp8() -> None:
    work = Work(fp8=400.0, other=100.0)
    assert work.seconds(SLOW, "fp8-delayed") == 400 / 200 + 100 / 100
    assert work.seconds(SLOW, "bf16") == 5
    assert work.seconds(SLOW, "fp32") == 50
    assert work.seconds(replace(SLOW, fp8_flops=None), "fp8-delayed") == 5


def plan(config: RunConfig, **options: Any) -> Plan:
    return make_plan(config, PlanOptions(**{"gpus_per_node": 1, **options}))


def test_training_time_by_hand(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = architecture(tmp_path / "model", DENSE, num_hidden_layers=4)
    config = run_config(tmp_path / "model", layout={"pipeline": 4}, rollout=SERVERS)
    times = plan(config, nodes=8, mfu=0.5).cost.times
    # Two data-parallel ranks: 8 sequences each, in 4 microbatches of 2.
    assert times.microbatches == 4
    assert times.bubble == 3 / (4 + 3)
    work = train_work(ForwardFlops.of(model), LENGTHS, "none").total
    peak = GPUS["h100"].bf16_flops
    assert times.train_s == pytest.approx(8 * work / (4 * peak * 0.5) * 7 / 4)
    score = score_work(ForwardFlops.of(model), LENGTHS).total
    assert times.score_s == pytest.approx(8 * score / (4 * peak * 0.5) * 7 / 4)


def test_a_virtual_pipeline_has_smaller_bubbles(tmp_path: Path) -> None:
    architecture(tmp_path, DENSE, num_hidden_layers=8)
    config = run_config(tmp_path, layout={"pipeline": 4, "virtual_pipeline": 2})
    assert plan(config, nodes=4).cost.times.bubble == 3 / (8 * 2 + 3)


def test_uneven_ranks_wait_for_the_busiest(tmp_path: Path) -> None:
    architecture(tmp_path, DENSE)
    even, uneven = (plan(run_config(tmp_path), nodes=nodes) for nodes in (2, 3))
    # 16 sequences: 8 each, or 6 on the busiest.
    assert uneven.cost.times.train_s == pytest.approx(even.cost.times.train_s * 6 / 8)
    assert any("cannot be shared evenly over 3" in warning for warning in uneven.warnings)
    assert not any("evenly" in warning for warning in even.warnings)


def test_decoding_by_hand(tmp_path: Path) -> None:
    model = architecture(tmp_path, DENSE)
    config = run_config(tmp_path, rollout=SERVERS)
    who = Generators(count=2, gpus_each=1, concurrency=4, kv_bytes_per_token=32.0)
    options = PlanOptions(mfu=0.5, mbu=0.5)
    time = rollout_time(config, model, who, LENGTHS, SLOW, options)
    # All weights but the embedding's rows, and four caches of 5 + 4 / 2 tokens.
    read = 2 * (1352 - 80) + 4 * 32 * 7
    token = 2304 + 64 * 7 + 160
    assert read / (1000 * 0.5) < 4 * token / (100 * 0.5)
    assert not time.is_memory_bound
    assert time.decode_step_s == pytest.approx(4 * token / 50)
    # 8 sequences a server, four at once, four tokens each.
    assert time.decode_s == pytest.approx(2 * 4 * time.decode_step_s)
    assert time.prefill_s == pytest.approx(2 * (5 * 2304 + 64 * 25 / 2) / 50)
    assert time.flops == 4 * (5 * 2304 + 800) + 16 * 4 * token
    fast = rollout_time(config, model, who, LENGTHS, replace(SLOW, bf16_flops=1e6), options)
    assert fast.is_memory_bound
    assert fast.decode_step_s == read / 500


def test_decoding_reads_the_experts_that_a_batch_meets(tmp_path: Path) -> None:
    model = architecture(tmp_path, EXPERTS)
    config = run_config(tmp_path, rollout=SERVERS)
    who = Generators(count=2, gpus_each=2, concurrency=3, kv_bytes_per_token=0.0)
    gpu = replace(SLOW, bf16_flops=1e9)
    time = rollout_time(config, model, who, LENGTHS, gpu, PlanOptions(mbu=1.0))
    experts = 2 * 576
    others = 1816 - 80 - experts
    met = 1 - (1 - 2 / 4) ** 3
    assert time.decode_step_s == pytest.approx((others + met * experts) * 2 / 2 / 1000)


def test_the_longest_response_bounds_a_batch(tmp_path: Path) -> None:
    model = architecture(tmp_path, DENSE)
    config = run_config(tmp_path, rollout=SERVERS, sampling={"max_new_tokens": 30})
    who = Generators(count=100, gpus_each=1, concurrency=4, kv_bytes_per_token=32.0)
    time = rollout_time(
        config, model, who, Lengths(prompt=5, response=2), SLOW, PlanOptions(mfu=0.5)
    )
    assert time.total_s == time.longest_s > time.decode_s + time.prefill_s


def test_servers_by_hand(tmp_path: Path) -> None:
    architecture(tmp_path, DENSE)
    config = run_config(
        tmp_path,
        rollout={**SERVERS, "launch": {"replicas": 2, "args": ["--mem-fraction-static", "0.5"]}},
    )
    servers = plan(config, gpu_memory_gb=1e-5, server_nodes=3).servers
    assert servers is not None
    assert (servers.count, servers.gpus_each, servers.memory_fraction) == (6, 1, 0.5)
    assert servers.weight_bytes == 2 * 1352
    assert servers.kv_bytes_per_token == 2 * 2 * 4 * 2  # layers, key and value, channels, bytes
    assert servers.kv_tokens == (5000 - 2704) // 32
    assert servers.longest_sequences == (5000 - 2704) // (32 * 8)


def test_a_kv_cache_in_fp8_holds_twice_as_much(tmp_path: Path) -> None:
    architecture(tmp_path, DENSE)
    precision = {"rollout_kv_cache": "fp8_e4m3"}
    servers = plan(run_config(tmp_path, rollout=SERVERS, precision=precision)).servers
    assert servers is not None
    assert servers.kv_bytes_per_token == 16


def test_sync_by_hand(tmp_path: Path) -> None:
    architecture(tmp_path, DENSE)
    config = run_config(tmp_path, rollout=SERVERS, layout={"pipeline": 2})
    sync = plan(config, nodes=2, nbu=0.5).sync
    assert sync.bytes_per_server == sync.by_precision["bf16"] == 2 * 1352
    # Seven matrices a layer, each of one block, and what is not one of them in bf16.
    assert sync.by_precision["fp8-block"] == 2 * (576 + 7 * 4) + 2 * (1352 - 2 * 576)
    assert sync.total_bytes == 2 * 2704
    network = GPUS["h100"].network_bytes_s
    assert sync.send_s == pytest.approx(2 * 2704 / (network * 0.5))
    assert sync.gather_s == pytest.approx(2704 / (network * 0.5))
    # On one node the model is gathered by NVLink.
    near = make_plan(config, PlanOptions(gpus_per_node=2, nbu=0.5)).sync
    assert near.gather_s == pytest.approx(2704 / (GPUS["h100"].nvlink_bytes_s * 0.5))


def test_modes_add_up(tmp_path: Path) -> None:
    architecture(tmp_path, DENSE)
    times = plan(run_config(tmp_path, rollout=SERVERS)).cost.times
    parts = times.rollout_s, times.score_s, times.train_s, times.sync_s
    assert times.synchronous_s == pytest.approx(sum(parts))
    assert times.one_step_off_s == pytest.approx(
        max(times.rollout_s, times.score_s + times.train_s) + times.sync_s
    )
    assert times.run_s == pytest.approx(times.sync_s + 10 * times.synchronous_s)
    ahead = plan(run_config(tmp_path, rollout={**SERVERS, "max_staleness": 1})).cost.times
    assert ahead.one_step_off_s is not None
    assert ahead.run_s == pytest.approx(ahead.sync_s + ahead.rollout_s + 10 * ahead.one_step_off_s)
    embedded = plan(run_config(tmp_path)).cost.times
    assert embedded.one_step_off_s is None


def test_a_recording_costs_no_rollout(tmp_path: Path) -> None:
    architecture(tmp_path, DENSE)
    replayed = plan(run_config(tmp_path, rollout={"engine": "replay", "replay_path": "x.jsonl"}))
    assert replayed.cost.rollout is None
    assert replayed.cost.times.rollout_s == replayed.cost.times.sync_s == 0


@settings(max_examples=20, deadline=None)
@given(
    response=st.integers(1, 4095),
    prompt=st.integers(1, 1024),
    nodes=st.sampled_from([1, 2, 4]),
)
def test_more_tokens_take_longer_and_more_nodes_do_not(
    response: int, prompt: int, nodes: int
) -> None:
    config = run_config(
        GOLDEN / "Qwen3-8B-Base",
        rollout=SERVERS,
        data={"max_prompt_tokens": 1024},
        sampling={"max_new_tokens": 4096},
        train={"prompts_per_step": 64},
    )
    options = PlanOptions(nodes=nodes, prompt_tokens=prompt, response_tokens=response)
    times = make_plan(config, options).cost.times
    longer = make_plan(config, replace(options, response_tokens=response + 1)).cost.times
    assert longer.train_s > times.train_s
    assert longer.rollout_s >= times.rollout_s
    larger = make_plan(config, replace(options, nodes=2 * nodes, server_nodes=2)).cost.times
    assert larger.train_s <= times.train_s
    assert larger.rollout_s <= times.rollout_s
    assert make_plan(config, replace(options, mfu=0.7)).cost.times.train_s == pytest.approx(
        times.train_s / 2
    )
