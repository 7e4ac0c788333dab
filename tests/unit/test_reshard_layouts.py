"""What a layout's files hold, written by hand: names, order of rows, copies, padding."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_p3o.errors import ConfigurationError, InputError
from megatron_p3o.weights import ReshardOptions, TargetLayout, reshard
from megatron_p3o.weights.resharding.detect import open_source
from tests.unit.reshard_models import VOCAB, make_model
from tests.unit.test_reshard import assert_same_model, load_weights, run

FILE = "model_optim_rng.pt"


def rank_file(directory: Path, name: str) -> dict[str, Any]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(directory / "release" / name / FILE, weights_only=True)


def layer(weights: dict[str, Tensor], number: int, name: str) -> Tensor:
    return weights[f"model.layers.{number}.{name}.weight"]


def test_rows_of_qkv_and_gate_up_by_hand(tmp_path: Path) -> None:
    """4 heads, 2 groups, head_dim 8: tensor rank 1 holds [q2 q3 k1 v1]; gate rows, then up rows."""
    weights = load_weights(make_model(tmp_path / "hf", "qwen2"))
    target = TargetLayout(tensor=2)
    model = rank_file(
        run(tmp_path / "hf", tmp_path / "torch", "torch", layout=target), "mp_rank_01"
    )
    model = model["model"]
    q, k, v = (layer(weights, 1, f"self_attn.{n}_proj") for n in "qkv")
    rows = torch.cat([q[16:24], q[24:32], k[8:16], v[8:16]])
    assert torch.equal(model["decoder.layers.1.self_attention.linear_qkv.weight"], rows)
    q, k, v = (weights[f"model.layers.1.self_attn.{n}_proj.bias"] for n in "qkv")
    bias = torch.cat([q[16:32], k[8:16], v[8:16]])
    assert torch.equal(model["decoder.layers.1.self_attention.linear_qkv.bias"], bias)
    gate, up = layer(weights, 1, "mlp.gate_proj"), layer(weights, 1, "mlp.up_proj")
    assert torch.equal(
        model["decoder.layers.1.mlp.linear_fc1.weight"], torch.cat([gate[24:], up[24:]])
    )
    down = layer(weights, 1, "mlp.down_proj")
    assert torch.equal(model["decoder.layers.1.mlp.linear_fc2.weight"], down[:, 24:])


@pytest.mark.parametrize(
    ("heads", "groups", "tensor"), [(4, 4, 4), (4, 2, 4), (4, 1, 2), (4, 1, 4), (8, 2, 4)]
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_any_number_of_key_value_heads(
    tmp_path: Path, family: str, heads: int, groups: int, tensor: int
) -> None:
    """MHA, GQA and MQA, with bias or norms, on as many ranks as heads."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": heads * 8}
    start = make_model(tmp_path / "start", family, num_hidden_layers=1, **sizes)
    cut = run(start, tmp_path / "cut", "torch", layout=TargetLayout(tensor=tensor))
    stored = rank_file(cut, "mp_rank_00")["model"]
    qkv = stored["decoder.layers.0.self_attention.linear_qkv.weight"]
    # Nothing is stored twice: the ranks share (heads + 2 groups) x head_dim rows.
    assert len(qkv) * tensor == (heads + 2 * groups) * 8
    assert_same_model(start, run(cut, tmp_path / "end", "hf"))


@pytest.mark.parametrize(("divisor", "tensor", "padded"), [(1, 1, 101), (8, 2, 112), (128, 4, 512)])
@pytest.mark.parametrize("kind", ["torch", "torch_dist"])
def test_vocabulary_padding_of_any_divisor(
    tmp_path: Path, kind: str, divisor: int, tensor: int, padded: int
) -> None:
    start = make_model(tmp_path / "start", "llama", num_hidden_layers=1)
    layout = TargetLayout(tensor=tensor, vocab_divisible_by=divisor)
    cut = run(start, tmp_path / "cut", kind, layout=layout)
    shapes = [shape for row, _, shape, _ in open_source(cut).describe() if "embedding" in row]
    assert sum(shape[0] for shape in shapes) == padded
    if kind == "torch":
        name = f"mp_rank_{tensor - 1:02}"
        last = rank_file(cut, name)["model"]["output_layer.weight"]
        first_row = padded - padded // tensor
        assert torch.equal(last[max(0, VOCAB - first_row) :].sum(), torch.tensor(0).bfloat16())
    assert_same_model(start, run(cut, tmp_path / "end", "hf"))


def test_chunks_of_a_virtual_pipeline_by_hand(tmp_path: Path) -> None:
    """Chunks of 2, 1, 0 and 1 layers go to (stage 0, 1, 0, 1): layer 3 is in stage 1's model1."""
    weights = load_weights(make_model(tmp_path / "hf", "llama"))
    layout = TargetLayout(pipeline=2, virtual_pipeline=2, chunk_layers=(2, 1, 0, 1))
    cut = run(tmp_path / "hf", tmp_path / "torch", "torch", layout=layout)
    first, second = rank_file(cut, "mp_rank_00_000"), rank_file(cut, "mp_rank_00_001")
    norm = "decoder.layers.{}.mlp.linear_fc1.layer_norm_weight"

    def holds(chunk: dict[str, Tensor], index: int, number: int) -> bool:
        stored = chunk[norm.format(index)]
        return torch.equal(stored, layer(weights, number, "post_attention_layernorm"))

    assert holds(first["model0"], 0, 0)
    assert holds(first["model0"], 1, 1)
    assert holds(second["model0"], 0, 2)
    assert first["model1"] == {}
    assert holds(second["model1"], 0, 3)
    assert "embedding.word_embeddings.weight" in first["model0"]
    assert {"decoder.final_layernorm.weight", "output_layer.weight"} <= second["model1"].keys()
    assert_same_model(tmp_path / "hf", run(cut, tmp_path / "end", "hf"))


def test_tied_embeddings_have_a_copy_on_the_last_stage(tmp_path: Path) -> None:
    start = make_model(tmp_path / "hf", "llama", tied=True)
    cut = run(start, tmp_path / "torch", "torch", layout=TargetLayout(tensor=2, pipeline=2))
    for rank in (0, 1):
        first = rank_file(cut, f"mp_rank_{rank:02}_000")["model"]
        last = rank_file(cut, f"mp_rank_{rank:02}_001")["model"]
        assert torch.equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"])
    alone = run(start, tmp_path / "alone", "torch")
    assert "output_layer.weight" not in rank_file(alone, "mp_rank_00")["model"]

    path = cut / "release" / "mp_rank_01_001" / FILE
    content = rank_file(cut, "mp_rank_01_001")
    content["model"]["output_layer.weight"][3, 3] += 1
    torch.save(content, path)
    with pytest.raises(InputError, match=r"output_layer\.weight.*differs from the first stage"):
        open_source(cut)


def test_a_head_that_is_stored_although_tied(tmp_path: Path) -> None:
    start = make_model(tmp_path / "start", "llama", tied=True)
    weights = load_weights(start)
    head = weights["model.embed_tokens.weight"].clone()
    with_head = make_model(tmp_path / "with", "llama", tied=True)
    save_file({**weights, "lm_head.weight": head}, with_head / "model.safetensors")
    end = run(with_head, tmp_path / "end", "hf")
    assert_same_model(start, end)
    head[5, 5] += 1
    save_file({**weights, "lm_head.weight": head}, with_head / "model.safetensors")
    with pytest.raises(InputError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
        open_source(with_head)


@pytest.mark.parametrize("names", ["te", "local"])
def test_experts_have_the_names_and_places_of_their_rank(tmp_path: Path, names: str) -> None:
    """4 experts on 2 expert ranks: expert 3 is the second one of rank 1."""
    weights = load_weights(make_model(tmp_path / "hf", "qwen3_moe", num_hidden_layers=1))
    layout = TargetLayout(tensor=2, expert=2, expert_tensor=1)
    cut = run(tmp_path / "hf", tmp_path / "torch", "torch", layout=layout, names=names)
    # Ranks 0 and 1 are (tensor, expert) = (0, 0) and (1, 1).
    found = sorted(path.name for path in (cut / "release").iterdir())
    assert found == ["mp_rank_00_000", "mp_rank_01_001"]
    model = rank_file(cut, "mp_rank_01_001")["model"]
    name = "mlp.experts.linear_fc2.weight1"
    if names == "local":
        name = "mlp.experts.local_experts.1.linear_fc2.weight"
    expected = layer(weights, 0, "mlp.experts.3.down_proj")
    assert torch.equal(model[f"decoder.layers.0.{name}"], expected)
    assert_same_model(tmp_path / "hf", run(cut, tmp_path / "end", "hf"))


def test_grouped_gemm_experts_are_read(tmp_path: Path) -> None:
    """Megatron's GroupedMLP keeps all experts of a rank in two tensors, transposed."""
    start = make_model(tmp_path / "hf", "qwen3_moe")
    layout = TargetLayout(tensor=2, expert=2)
    cut = run(start, tmp_path / "torch", "torch", layout=layout, names="local")
    for path in (cut / "release").iterdir():
        content = rank_file(cut, path.name)
        model = content["model"]
        for number in range(4):
            prefix = f"decoder.layers.{number}.mlp.experts"
            fc1, fc2 = (
                [model.pop(f"{prefix}.local_experts.{e}.linear_fc{n}.weight") for e in (0, 1)]
                for n in (1, 2)
            )
            hidden = fc1[0].shape[1]
            model[f"{prefix}.weight1"] = torch.stack([w.t() for w in fc1]).reshape(hidden, -1)
            model[f"{prefix}.weight2"] = torch.stack([w.t() for w in fc2]).reshape(-1, hidden)
        torch.save(content, path / FILE)
    assert_same_model(start, run(cut, tmp_path / "end", "hf"))


def test_the_layer_for_further_tokens(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published: a layer after the last, with copies of embedding and head."""
    start = make_model(tmp_path / "start", "deepseek_v3")
    weights = load_weights(start)
    last, extra = "model.layers.3.", "model.layers.4."
    added = {extra + n[len(last) :]: t + 1 for n, t in weights.items() if n.startswith(last)}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{extra}{name}.weight"] = torch.randn(32).bfloat16()
    added[extra + "eh_proj.weight"] = torch.randn(32, 64).bfloat16()
    added[extra + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    added[extra + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file({**weights, **added}, start / "model.safetensors")
    layout = TargetLayout(tensor=2, pipeline=2, expert=2)
    dist = run(start, tmp_path / "dist", "torch_dist", layout=layout)
    cut = run(dist, tmp_path / "torch", "torch", layout=layout)
    model = rank_file(cut, "mp_rank_01_001_001")["model"]
    stored = model["mtp.layers.0.transformer_layer.mlp.experts.linear_fc2.weight1"]
    expected = added[extra + "mlp.experts.3.down_proj.weight"]
    assert torch.equal(stored, expected[:, 8:])
    assert_same_model(start, run(cut, tmp_path / "end", "hf"))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (TargetLayout(tensor=3), r"--tp=3 cannot cut .*num_attention_heads=4.*legal value is 2"),
        (TargetLayout(pipeline=3), r"--pp=3 x --vpp=1 must divide.*num_layers=4"),
        (TargetLayout(pipeline=2, chunk_layers=(1, 2)), r"--chunk-layers=1,2 must sum.*=4, not 3"),
        (TargetLayout(pipeline=2, chunk_layers=(4,)), r"must hold --pp x --vpp = 2 numbers"),
        (TargetLayout(tensor=0), r"--tp=0 must be >= 1"),
        (TargetLayout(tensor=2, expert_tensor=4), r"--etp=4 must divide --tp=2"),
        (TargetLayout(expert=2), r"--ep=2 shares experts.*has none"),
    ],
    ids=str,
)
def test_layouts_that_do_not_fit_are_refused(
    tmp_path: Path, layout: TargetLayout, message: str
) -> None:
    start = make_model(tmp_path / "start", "llama")
    with pytest.raises(ConfigurationError, match=message):
        reshard(start, tmp_path / "end", ReshardOptions(to="torch", layout=layout))
    assert not (tmp_path / "end").exists()


def test_experts_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    start = make_model(tmp_path / "start", "qwen3_moe", num_hidden_layers=1)
    options = ReshardOptions(to="torch", layout=TargetLayout(expert=3))
    with pytest.raises(ConfigurationError, match=r"--ep=3 must divide.*num_experts=4"):
        reshard(start, tmp_path / "end", options)
