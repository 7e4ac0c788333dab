"""The configuration: what is accepted, what is refused and how, and the way to YAML and back."""

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_p3o.config import (
    GRPOObjective,
    P3OObjective,
    ReinforceObjective,
    json_schema,
    load_config,
    parse_config,
    parse_overrides,
    to_yaml,
)
from megatron_p3o.config.objectives import OBJECTIVE_NAMES
from megatron_p3o.errors import ConfigurationError

MINIMAL: Mapping[str, Any] = {
    "run": {"dir": "runs/x"},
    "model": {"path": "models/m"},
    "data": {"source": "generator", "generator": "arithmetic"},
    "train": {"steps": 4, "prompts_per_step": 8, "samples_per_prompt": 8},
}

SERVED = {"rollout.engine": "sglang", "rollout.launch.replicas": 1}
SFT = {"objective.name": "sft", "rollout.engine": "answers"}


def tree_with(changes: Mapping[str, Any]) -> dict[str, Any]:
    """MINIMAL with dotted fields set."""
    tree = copy.deepcopy(dict(MINIMAL))
    for dotted, value in changes.items():
        *parents, leaf = dotted.split(".")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = value
    return tree


def refusal(changes: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parse_config(tree_with(changes))
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(dict(MINIMAL)))
    return path


def test_defaults_are_the_papers_algorithm_and_untruncated_sampling() -> None:
    config = parse_config(MINIMAL)
    assert config.objective == P3OObjective(
        cap="ess", regularizer="adaptive", kl_estimator="k3", advantage="group_zscore"
    )
    assert config.objective.entropy_coefficient == 0
    assert config.ess.scope == "step"
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (1, 1, -1)
    assert config.layout.data is None
    assert config.layout.model_parallel_size == 1
    assert config.data.system_prompt is None


def test_the_tree_is_frozen() -> None:
    config = parse_config(MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 5


@pytest.mark.parametrize(
    ("name", "kind"),
    [("p3o", P3OObjective), ("reinforce", ReinforceObjective), ("grpo", GRPOObjective)],
)
def test_the_name_chooses_the_objective(name: str, kind: type) -> None:
    assert type(parse_config(tree_with({"objective.name": name})).objective) is kind


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train.stepz", 3),
        ("trian", {"steps": 3}),
        ("data.reward.nmae", "integer_match"),
        ("objective.clip", 0.2),
        ("run.loud", None),
    ],
)
def test_unknown_fields_are_refused_by_their_full_name(field: str, value: Any) -> None:
    message = refusal({"objective.name": "p3o", field: value})
    assert message == f"{field}={value!r}: no such field; remove it or mend its name"


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("train.steps", "8", "integer"),
        ("train.steps", True, "integer"),
        ("train.steps", [8], "integer"),
        ("train.steps", 8.5, "integer"),
        ("train.steps", None, "integer"),
        ("train.steps", 0, "greater than 0"),
        ("train.steps", -1, "greater than 0"),
        ("run.seed", -1, "greater than or equal to 0"),
        ("run.record", "yes", "boolean"),
        ("run.record", 1, "boolean"),
        ("run.dir", 3, "string"),
        ("optimizer.lr", "fast", "number"),
        ("optimizer.lr", "1e-5x", "number"),
        ("optimizer.lr", True, "number"),
        ("optimizer.lr", 0, "greater than 0"),
        ("optimizer.betas", [0.9, 0.95, 0.99], "at most 2 items"),
        ("optimizer.betas", 0.9, "array"),
        ("sampling.temperature", 0, "greater than 0"),
        ("layout.tensor", "2", "integer"),
        ("layout.data", 0, "greater than 0"),
        ("data.source", "csv", "'jsonl', 'parquet' or 'generator'"),
        ("data.reward.max_failure_fraction", 1.5, "less than or equal to 1"),
        ("objective.cap", "clip", "'ess', 'none' or 'constant'"),
        ("precision.trainer", "fp8", "'fp8-blockwise' or 'fp8-mxfp8'"),
        ("rollout.max_staleness", -1, "greater than or equal to 0"),
    ],
)
def test_wrong_values_are_refused_with_field_value_and_rule(
    field: str, value: Any, rule: str
) -> None:
    message = refusal({"objective.name": "p3o", field: value})
    assert len(message.splitlines()) == 1
    assert message.startswith(field)
    assert repr(value) in message
    assert rule in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"sampling.top_p": 0.9},
            ["sampling.top_p=0.9", "top_p=1", "every policy ratio wrong", "remove"],
        ),
        ({"sampling.top_k": 50}, ["sampling.top_k=50", "top_k=-1", "remove"]),
        (
            {"train.samples_per_prompt": 1},
            ["train.samples_per_prompt=1", ">= 2", "objective.advantage=none"],
        ),
        (
            {"train.samples_per_prompt": 1, "objective.name": "grpo"},
            ["train.samples_per_prompt=1", "group_zscore"],
        ),
        (
            {"train.optimizer_steps_per_rollout": 3},
            ["train.optimizer_steps_per_rollout=3", "train.prompts_per_step=8", "divisor"],
        ),
        ({"data.source": "jsonl"}, ["data.path", "data.source=jsonl", "set it"]),
        ({"data.generator": None}, ["data.generator", "set it"]),
        ({"data.path": "p.jsonl"}, ["data.path='p.jsonl'", "data.source=generator", "remove"]),
        (
            {"data.chat": False, "data.system_prompt": "Be brief."},
            ["data.system_prompt='Be brief.'", "data.chat=true", "remove"],
        ),
        (
            {"layout.sequence_parallel": True},
            ["layout.sequence_parallel=true", "layout.tensor >= 2", "got 1", "layout.tensor=2"],
        ),
        (
            {"layout.context": 5, "data.max_prompt_tokens": 3, "sampling.max_new_tokens": 6},
            ["layout.context=5", "2 x context", "8 tokens", "nearest legal value is 4"],
        ),
        (
            {"train.packing": True},
            ["train.max_tokens_per_microbatch=None", "train.packing=true", "set both or neither"],
        ),
        (
            {"train.max_tokens_per_microbatch": 4096},
            ["train.max_tokens_per_microbatch=4096", "got false", "set both or neither"],
        ),
        (
            {
                "train.packing": True,
                "train.max_tokens_per_microbatch": 7,
                "layout.context": 4,
                "rollout.engine": "replay",
                "rollout.replay_path": "s.jsonl",
            },
            ["train.max_tokens_per_microbatch=7", "layout.context=4", "raise it to 8"],
        ),
        (
            {
                "train.packing": True,
                "train.max_tokens_per_microbatch": 1152,
                "data.max_prompt_tokens": 1026,
                "layout.context": 2,
            },
            ["must hold the longest sequence: 1153 tokens", "1156 when padded", "to 1156 or lower"],
        ),
        (
            {"layout.virtual_pipeline": 2},
            ["layout.virtual_pipeline=2", "layout.pipeline >= 2", "set layout.pipeline=2"],
        ),
        (
            {"layout.first_stage_layers": 3},
            ["layout.first_stage_layers=3", "layout.pipeline >= 2", "remove"],
        ),
        (
            {"layout.account_for_loss": True},
            ["layout.account_for_loss=True", "layout.pipeline >= 2", "remove"],
        ),
        (
            {
                "layout.pipeline": 2,
                "layout.last_stage_layers": 3,
                "layout.account_for_embedding": True,
            },
            ["layout.last_stage_layers=3", "layout.account_for_embedding=true", "remove one"],
        ),
        (
            {"train.scoring": "fused", "layout.pipeline": 2},
            ["train.scoring=fused", "layout.pipeline=1", "got 2", "train.scoring=separate"],
        ),
        (
            {"optimizer.lr": 1e-5, "optimizer.min_lr": 1e-4},
            ["optimizer.min_lr=0.0001", "optimizer.lr=1e-05", "lower it"],
        ),
        ({"ess.mean_ratio_band": [1.1, 1.5]}, ["ess.mean_ratio_band=[1.1, 1.5]", "contain 1"]),
        ({"rollout.engine": "replay"}, ["rollout.replay_path=None", "set both or neither"]),
        (
            {"rollout.replay_path": "s.jsonl"},
            ["rollout.replay_path='s.jsonl'", "rollout.engine=replay", "embedded"],
        ),
        (
            {
                "rollout.max_staleness": 1,
                "rollout.engine": "replay",
                "rollout.replay_path": "s.jsonl",
            },
            ["rollout.max_staleness=1", "engine that generates", "got replay", "set it to 0"],
        ),
        (
            {**SFT, "rollout.max_staleness": 2},
            ["rollout.max_staleness=2", "engine that generates", "got answers", "set it to 0"],
        ),
        (
            {"rollout.temperature_shift": {"sampled_at": 2.0}, **SERVED},
            ["rollout.temperature_shift", "rollout.engine=embedded", "got sglang", "remove it"],
        ),
        (
            {"rollout.temperature_shift": {"sampled_at": 2.0}, **SFT},
            ["rollout.temperature_shift", "rollout.engine=embedded", "got answers", "remove it"],
        ),
        (
            {"objective.name": "sft"},
            ["objective.name=sft", "rollout.engine=embedded", "rollout.engine=answers"],
        ),
        (
            {"rollout.engine": "answers"},
            ["objective.name=p3o", "rollout.engine=answers", "objective.name=sft", "or neither"],
        ),
        ({"rollout.engine": "sglang"}, ["has no servers", "rollout.launch.replicas"]),
        (
            {"rollout.servers": ["http://a:1", "http://a:1/"]},
            ["rollout.servers=['http://a:1', 'http://a:1/']", "twice"],
        ),
        ({"rollout.servers": ["a:30000"]}, ["rollout.servers='a:30000'", "http://host:port"]),
        ({"rollout.servers": ["http://a"]}, ["'http://a' names no port", "http://host:port"]),
        ({"rollout.servers": ["http://a:x"]}, ["'http://a:x' has no valid port"]),
        ({"rollout.servers": ["http://a:1/v1"]}, ["'http://a:1/v1' has a path"]),
        (
            {"rollout.servers": ["http://key@a:1"]},
            ["carries more than a host and a port", "rollout.api_key_env"],
        ),
        ({"rollout.router": "http://a:1"}, ["rollout.router='http://a:1'", "rollout.servers"]),
        (
            {"rollout.api_key_env": "A", "rollout.api_key_file": "b"},
            ["rollout.api_key_env='A'", "rollout.api_key_file='b'", "keep one"],
        ),
        (
            {"precision.fp8.bf16_layers_at_end": 1, "precision.trainer": "bf16"},
            ["precision.fp8.bf16_layers_at_end", "got bf16", "remove it", "fp8-blockwise"],
        ),
        (
            {"precision.fp8.format": "e4m3"},
            ["precision.fp8.format", "FP8 precision.trainer", "got fp32", "remove it"],
        ),
        (
            {"precision.fp8.amax_history": 4, "precision.trainer": "fp8-tensorwise"},
            ["precision.fp8.amax_history", "fp8-delayed", "got fp8-tensorwise", "remove it"],
        ),
        (
            {"precision.fp8.amax_from": "most_recent", "precision.trainer": "fp8-blockwise"},
            ["precision.fp8.amax_from", "fp8-delayed", "got fp8-blockwise", "remove it"],
        ),
        (
            {"precision.fp8.margin": 1, "precision.trainer": "fp8-mxfp8"},
            ["precision.fp8.margin", "fp8-delayed", "got fp8-mxfp8", "remove it"],
        ),
        (
            {"precision.fp8.bf16_layers_at_start": 1, "precision.trainer": "fp8-delayed"},
            ["precision.fp8.bf16_layers_at_start", "fp8-delayed", "all layers", "fp8-tensorwise"],
        ),
        (
            {"precision.fp8.param_gather": True, "precision.trainer": "fp8-mxfp8"},
            ["precision.fp8.param_gather=true", "fp8-mxfp8", "remove it"],
        ),
        (
            {
                "precision.fp8.param_gather": True,
                "precision.trainer": "fp8-blockwise",
                "optimizer.distributed": False,
            },
            ["precision.fp8.param_gather=true", "optimizer.distributed=true", "got false"],
        ),
        (
            {"precision.rollout_activations": "unquantized"},
            ["precision.rollout_activations=unquantized", "got fp32", "fp8-block"],
        ),
        (
            {"precision.rollout_format": "e2m1", "precision.rollout": "bf16"},
            ["precision.rollout_format=e2m1", "got bf16", "remove it", "fp8-block"],
        ),
        (
            {**SERVED, "precision.rollout": "fp8-tensor"},
            ["precision.rollout=fp8-tensor", "rollout.engine=embedded", "use fp8-block"],
        ),
        (
            {**SERVED, "precision.rollout": "fp8-block", "precision.rollout_format": "e5m2"},
            ["precision.rollout_format=e5m2", "rollout.engine=embedded", "remove it"],
        ),
        (
            {
                **SERVED,
                "precision.rollout": "fp8-block",
                "precision.rollout_activations": "unquantized",
            },
            ["precision.rollout_activations=unquantized", "rollout.engine=embedded", "remove it"],
        ),
        (
            {
                "precision.trainer": "fp8-blockwise",
                "train.packing": True,
                "train.max_tokens_per_microbatch": 1152,
                "data.max_prompt_tokens": 1026,
            },
            ["1153 tokens", "1168 when padded to a multiple of 16", "raise it to 1168"],
        ),
        (
            {"objective": {"name": "p3o", "cap": "constant"}},
            ["objective.cap_constant=None", "objective.cap=constant", "set both or neither"],
        ),
        (
            {"objective": {"name": "p3o", "regularizer_constant": 0.1}},
            ["objective.regularizer_constant=0.1", "adaptive", "set both or neither"],
        ),
        (
            {"objective": {"name": "grpo", "normalization_length": 9}},
            ["objective.normalization_length=9", "constant_length", "got token_mean", "remove"],
        ),
        (
            {"objective": {"name": "p3o", "correction": {"mode": "mask", "high": 2.0}}},
            ["objective.correction.mode=mask", "objective.name=p3o", "reject"],
        ),
        (
            {**SFT, "objective": {"name": "sft", "correction": {"mode": "mask", "high": 2.0}}},
            ["objective.correction.mode=mask", "objective.name=sft", "remove it"],
        ),
        (
            {"reference.model_path": "models/r"},
            ["reference.model_path='models/r'", "reference.kl_coefficient=0", "remove"],
        ),
    ],
)
def test_contradictions_are_refused_with_a_remedy(
    changes: dict[str, Any], words: list[str]
) -> None:
    message = refusal(changes)
    assert len(message.splitlines()) == 1
    assert [word for word in words if word not in message] == []


def test_a_group_of_one_is_fine_without_group_advantages() -> None:
    config = parse_config(
        tree_with(
            {
                "train.samples_per_prompt": 1,
                "objective": {"name": "reinforce", "advantage": "none"},
            }
        )
    )
    assert config.train.samples_per_prompt == 1


def test_p4o_with_one_optimizer_step_is_allowed_but_said() -> None:
    def notices(name: str, steps: int) -> list[str]:
        changes = {"objective.name": name, "train.optimizer_steps_per_rollout": steps}
        return parse_config(tree_with(changes)).notices()

    (notice,) = notices("p4o", 1)
    assert "objective.name=p4o" in notice and "this is p3o" in notice
    assert notices("p4o", 2) == notices("p3o", 1) == []


def test_the_reference_is_the_initial_model_unless_named() -> None:
    assert parse_config(tree_with({"reference.kl_coefficient": 0.1})).reference_path == "models/m"
    named = {"reference": {"kl_coefficient": 0.1, "model_path": "models/r"}}
    assert parse_config(tree_with(named)).reference_path == "models/r"


def test_every_offending_field_is_named_at_once() -> None:
    message = refusal({"train.steps": 0, "run.seed": "a", "model": {}})
    assert [line.split("=")[0].split(" ")[0] for line in message.splitlines()] == [
        "run.seed",
        "model.path",
        "train.steps",
    ]
    assert "model.path is missing; set it" in message


def test_overrides_in_both_spellings(file: Path) -> None:
    config = load_config(
        file, ["--optimizer.lr", "1e-5", "--run.seed=3", "--data.reward.name=math_equivalence"]
    )
    assert config.optimizer.lr == 1e-5
    assert config.run.seed == 3
    assert config.data.reward.name == "math_equivalence"
    assert config.train.steps == 4


def test_a_later_override_wins_and_values_are_yaml(file: Path) -> None:
    words = ["--train.steps", "5", "--train.steps=6", "--optimizer.betas", "[0.8, 0.9]"]
    config = load_config(file, [*words, "--run.dir", "runs/a=b", "--run.record", "false"])
    assert config.train.steps == 6
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.run.dir == "runs/a=b"
    assert config.run.record is False


def test_override_values_may_be_negative_or_start_with_a_dash() -> None:
    assert parse_overrides(["--sampling.top_k", "-1", "--run.dir", "--x"]) == [
        ("sampling.top_k", -1),
        ("run.dir", "--x"),
    ]


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "0.00001", ".1e-4"])
def test_scientific_notation_is_a_number_in_files_and_overrides(file: Path, text: str) -> None:
    assert load_config(file, ["--optimizer.lr", text]).optimizer.lr == 1e-5
    file.write_text(file.read_text() + f"optimizer:\n  lr: {text}\n")
    assert load_config(file).optimizer.lr == 1e-5


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optimizer.lr", "1"], "override 'optimizer.lr' must be --section.field VALUE"),
        (["--lr", "1"], "override '--lr' must be --section.field VALUE"),
        (["--lr=1.5"], "override '--lr=1.5' must be --section.field VALUE"),
        (["--run.seed", "1", "stray"], "override 'stray' must be --section.field VALUE"),
        (["--optimizer.lr"], "override --optimizer.lr needs a value"),
        (["--optimizer.betas", "[1"], "override --optimizer.betas '[1' is not YAML"),
        (["--run.dir.x", "1"], "override --run.dir.x: run.dir is a value, not a section"),
        (["--run.sede", "1"], "run.sede=1: no such field"),
        (["--train.steps", "many"], "train.steps='many'"),
    ],
)
def test_malformed_overrides_are_refused(file: Path, words: list[str], expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(file, words)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"a: [1", "is not YAML"),
        (b"", "must hold a mapping"),
        (b"- 1\n", "must hold a mapping"),
        (b"run: 3\n", "run=3"),
    ],
)
def test_unusable_files_are_refused_by_path(
    tmp_path: Path, content: bytes | None, expected: str
) -> None:
    path = tmp_path / "bad.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        load_config(path)
    assert expected in str(caught.value)


FULL: Mapping[str, Any] = {
    "run.seed": 2**63 - 1,
    "run.num_threads_per_rank": 3,
    "layout": {"tensor": 3, "pipeline": 2, "data": 4},
    "optimizer": {"lr": 3e-7, "min_lr": 1e-8, "schedule": "cosine", "betas": [0.8, 0.999]},
    "objective": {"name": "p3o", "cap": "constant", "cap_constant": 0.5, "kl_estimator": "k1"},
    "data.generator_args": {"operations": ["+", "-"], "max_operand": 99, "template": "{a}{op}{b}="},
    "data.system_prompt": "Answer: yes",
    "ess.mean_ratio_band": [0.5, 2],
    "reference": {"kl_coefficient": 0.01, "kl_estimator": "k2", "model_path": "models/r"},
    "train.dynamic_sampling.max_rounds": 3,
}
FP8: Mapping[str, Any] = {
    "precision": {
        "trainer": "fp8-delayed",
        "fp8": {"format": "e4m3", "margin": 1, "amax_history": 4, "amax_from": "most_recent"},
        "rollout": "fp8-tensor",
        "rollout_activations": "unquantized",
        "rollout_format": "e2m1",
        "rollout_kv_cache": "fp8_e5m2",
    },
    "rollout.max_staleness": 2,
    "rollout.temperature_shift": {"sampled_at": 1.5, "logprobs": "assumed"},
}


@pytest.mark.parametrize(
    "changes",
    [{}, FULL, FP8, SFT, *({"objective.name": n} for n in OBJECTIVE_NAMES if n != "sft")],
)
def test_yaml_round_trip(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = parse_config(tree_with(changes))
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path) == config


@given(
    lr=st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False),
    directory=st.text(min_size=1),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_number_and_text_survives_the_round_trip(lr: float, directory: str, seed: int) -> None:
    config = parse_config(tree_with({"optimizer.lr": lr, "run.dir": directory, "run.seed": seed}))
    assert config.optimizer.lr == lr
    assert config.run.dir == directory
    assert parse_config(yaml.safe_load(to_yaml(config))) == config


def test_the_schema_is_json_and_describes_fields() -> None:
    schema = json.loads(json_schema())
    assert schema["required"] == ["run", "model", "data", "train"]
    sections = schema["$defs"]
    train = sections["TrainSection"]
    assert train["additionalProperties"] is False
    assert train["properties"]["steps"]["exclusiveMinimum"] == 0
    assert "Rollout batches" in train["properties"]["steps"]["description"]
    assert (
        "Logits are divided by it"
        in (sections["SamplingSection"]["properties"]["temperature"]["description"])
    )
    names = schema["properties"]["objective"]["discriminator"]["mapping"]
    assert set(names) == set(OBJECTIVE_NAMES)


def test_infinite_numbers_and_empty_paths_are_refused() -> None:
    for field, value in (("optimizer.lr", math.inf), ("ess.mean_ratio_band", [0.5, math.inf])):
        assert "finite number" in refusal({field: value})
    assert "at least 1 character" in refusal({"run.dir": ""})


def test_text_that_looks_like_a_number_stays_text_in_quotes(file: Path) -> None:
    assert load_config(file, ["--run.dir", "'1e5'"]).run.dir == "1e5"
    with pytest.raises(
        ConfigurationError, match=r"run\.dir=100000\.0: Input should be a valid str"
    ):
        load_config(file, ["--run.dir", "1e5"])


def test_the_objective_is_p3o_unless_named(file: Path) -> None:
    config = load_config(file, ["--objective.cap", "none"])
    assert config.objective.name == "p3o" and config.objective.cap == "none"
    message = r"objective\.name='ppo' must be one of p3o, p4o, reinforce, rloo, grpo"
    with pytest.raises(ConfigurationError, match=message):
        load_config(file, ["--objective.name", "ppo"])


def test_open_servers_without_a_key_are_warned_of() -> None:
    open_servers = {
        "rollout.engine": "sglang",
        "rollout.launch.replicas": 1,
        "rollout.launch.host": "0.0.0.0",
    }
    (notice,) = parse_config(tree_with(open_servers)).notices()
    assert "rollout.launch.host='0.0.0.0'" in notice and "rollout.api_key_env" in notice
    for change in ({"rollout.api_key_env": "KEY"}, {"rollout.launch.host": "127.0.0.1"}):
        assert parse_config(tree_with({**open_servers, **change})).notices() == []


@pytest.mark.parametrize(
    ("trainer", "format_given", "format_meant"),
    [
        ("fp8-delayed", "auto", "hybrid"),
        ("fp8-tensorwise", "auto", "hybrid"),
        ("fp8-blockwise", "auto", "e4m3"),
        ("fp8-mxfp8", "auto", "e4m3"),
        ("fp8-delayed", "e4m3", "e4m3"),
        ("fp8-blockwise", "hybrid", "hybrid"),
    ],
)
def test_the_fp8_format_follows_from_the_recipe_unless_given(
    trainer: str, format_given: str, format_meant: str
) -> None:
    fields = {"precision.trainer": trainer, "precision.fp8.format": format_given}
    precision = parse_config(tree_with(fields)).precision
    assert precision.fp8_format == format_meant
    assert precision.fp8_recipe == trainer.removeprefix("fp8-")
    assert precision.trainer_is_fp8 and not precision.rollout_is_fp8


SP_OF_3 = {"layout.tensor": 3, "layout.sequence_parallel": True}


@pytest.mark.parametrize(
    ("changes", "multiple"),
    [
        ({}, 1),
        ({"layout.tensor": 2}, 1),
        ({"layout.context": 2}, 4),
        (SP_OF_3, 3),
        ({**SP_OF_3, "layout.context": 2}, 12),
        # With FP8 each rank's part is a multiple of 16 tokens, or 32.
        ({"precision.trainer": "bf16"}, 1),
        ({"precision.trainer": "fp8-delayed"}, 16),
        ({"precision.trainer": "fp8-mxfp8"}, 32),
        ({"precision.trainer": "fp8-blockwise", "layout.tensor": 2}, 16),
        ({"precision.trainer": "fp8-blockwise", "layout.context": 2}, 32),
        ({"precision.trainer": "fp8-tensorwise", **SP_OF_3}, 48),
        ({"precision.trainer": "fp8-mxfp8", **SP_OF_3, "layout.context": 2}, 192),
    ],
)
def test_what_sequences_are_padded_to(changes: dict[str, Any], multiple: int) -> None:
    assert parse_config(tree_with(changes)).sequence_multiple == multiple
