"""Checkpoints in and out: bitwise round trips over every tensor layout, and what is refused."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron_p3o.architecture import padded_vocab_size, read_architecture
from megatron_p3o.config import LayoutSection
from megatron_p3o.errors import InputError
from megatron_p3o.splitting import check_layout
from megatron_p3o.weights import (
    HfReader,
    ParamRow,
    TensorShard,
    hf_tensors,
    load_hf_weights,
    param_rows,
    save_hf,
)

_VOCAB, _HIDDEN, _FFN, _HEAD_DIM = 100, 32, 48, 8
_WHOLE = TensorShard(0, 1)


def _save_tiny(
    model_dir: Path,
    family: str,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "1GB",
) -> dict[str, Tensor]:
    """Save a random two-layer model; returns its parameters by Hugging Face name."""
    shared: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": _HIDDEN,
        "intermediate_size": _FFN,
        "vocab_size": _VOCAB,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": _HEAD_DIM,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(0)
    model: PreTrainedModel
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shared))
    else:  # whose hidden size must be a multiple of the heads
        model = LlamaForCausalLM(LlamaConfig(**shared | {"hidden_size": heads * _HEAD_DIM}))
    for parameter in model.parameters():  # norms start as ones, which would hide mix-ups
        torch.nn.init.normal_(parameter)
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(model_dir, max_shard_size=shard_size)
    return dict(model.named_parameters())


def _local_shape(row: ParamRow, tensor_size: int) -> list[int]:
    """Shape of a rank's parameter, from Megatron's rules rather than from the layouts."""
    shapes = list(row.hf.values())
    rows = sum(shape[0] for shape in shapes)
    if row.megatron in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return [padded_vocab_size(_VOCAB, tensor_size) // tensor_size, shapes[0][1]]
    if "linear_proj" in row.megatron or "linear_fc2" in row.megatron:
        return [rows, shapes[0][1] // tensor_size]
    if "norm" in row.megatron:
        return [rows]
    if "router" in row.megatron:
        return [rows, shapes[0][1]]
    return [rows // tensor_size, shapes[0][1]]


def _load_all_ranks(
    model_dir: Path, tensor_size: int, *, te_names: bool = False
) -> list[dict[str, Tensor]]:
    """Each tensor rank's parameters, filled from the directory."""
    architecture = read_architecture(model_dir)
    check_layout(architecture, LayoutSection(tensor=tensor_size))
    ranks = []
    for rank in range(tensor_size):
        targets = {
            (row.te_name if te_names and row.te_name else row.megatron): torch.full(
                _local_shape(row, tensor_size), torch.nan
            )
            for row in param_rows(architecture)
        }
        with HfReader(model_dir) as reader:
            shard = TensorShard(rank, tensor_size)
            load_hf_weights(reader, architecture, targets, dense=shard, expert=shard)
        ranks.append(targets)
    return ranks


class _Gather:
    """Stands in for the collective: shards in rank order, and a record of what was asked for."""

    def __init__(self, ranks: Sequence[dict[str, Tensor]]) -> None:
        self._ranks = ranks
        self.asked: list[str] = []

    def __call__(self, name: str) -> list[Tensor]:
        self.asked.append(name)
        return [rank[name] for rank in self._ranks]


def _assert_same(named: Sequence[tuple[str, Tensor]], expected: dict[str, Tensor]) -> None:
    assert len(named) == len(expected)
    assert {name for name, _ in named} == set(expected)
    for name, tensor in named:
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor_sizes"),
    [(6, 6, (1, 2, 3)), (6, 3, (1, 3)), (4, 2, (1, 2)), (3, 1, (1,))],
    ids=["mha", "gqa3", "gqa2", "mqa"],
)
def test_round_trip_is_bitwise(
    tmp_path: Path,
    family: str,
    tied: bool,
    heads: int,
    kv_heads: int,
    tensor_sizes: tuple[int, ...],
) -> None:
    source = _save_tiny(tmp_path, family, heads=heads, kv_heads=kv_heads, tied=tied)
    architecture = read_architecture(tmp_path)
    for tensor_size in tensor_sizes:
        ranks = _load_all_ranks(tmp_path, tensor_size)
        _assert_same(list(hf_tensors(architecture, _Gather(ranks))), source)


def test_targets_may_have_transformer_engine_names(tmp_path: Path) -> None:
    source = _save_tiny(tmp_path, "llama")
    (targets,) = _load_all_ranks(tmp_path, 1, te_names=True)
    assert torch.equal(
        targets["decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"],
        source["model.layers.1.input_layernorm.weight"],
    )
    assert torch.equal(
        targets["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"],
        source["model.layers.1.post_attention_layernorm.weight"],
    )


def test_tied_last_stage_gets_the_embedding_in_its_own_dtype(tmp_path: Path) -> None:
    source = _save_tiny(tmp_path, "llama", tied=True, dtype=torch.bfloat16)
    targets = {
        "output_layer.weight": torch.full((128, _HIDDEN), torch.nan, requires_grad=True),
        "decoder.layers.1.mlp.linear_fc2.weight": torch.full((_HIDDEN, _FFN), torch.nan),
    }
    with HfReader(tmp_path) as reader:
        load_hf_weights(reader, read_architecture(tmp_path), targets, dense=_WHOLE, expert=_WHOLE)
    output = targets["output_layer.weight"]
    assert torch.equal(output[:_VOCAB], source["model.embed_tokens.weight"].float())
    assert torch.equal(output[_VOCAB:], torch.zeros(28, _HIDDEN))


def test_an_unknown_parameter_is_named(tmp_path: Path) -> None:
    _save_tiny(tmp_path, "llama")
    name = "decoder.layers.0.self_attention.q_layernorm.weight"
    with HfReader(tmp_path) as reader, pytest.raises(ValueError, match=name):
        load_hf_weights(
            reader,
            read_architecture(tmp_path),
            {name: torch.empty(_HEAD_DIM)},
            dense=_WHOLE,
            expert=_WHOLE,
        )


def _rewrite(model_dir: Path, **changes: Tensor | None) -> None:
    """Replace tensors of model.safetensors, or remove those given as None."""
    path = model_dir / "model.safetensors"
    tensors: dict[str, Any] = load_file(path) | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, path)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, r"lack model\.norm\.weight"),
        ("model.norm.weight", torch.ones(33), r"\[33\], config\.json calls for \[32\]"),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(32, 48), r"calls for \[48, 32\]"),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(32), "has no place"),
        ("model.layers.2.mlp.up_proj.weight", torch.ones(48, 32), "has no place"),
    ],
)
def test_weights_that_contradict_the_configuration(
    tmp_path: Path, name: str, tensor: Tensor | None, message: str
) -> None:
    _save_tiny(tmp_path, "llama")
    _rewrite(tmp_path, **{name: tensor})
    with pytest.raises(InputError, match=message) as caught:
        _load_all_ranks(tmp_path, 1)
    assert name in str(caught.value)


def test_derived_buffers_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    source = _save_tiny(tmp_path, "llama")
    _rewrite(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    (targets,) = _load_all_ranks(tmp_path, 1)
    assert torch.equal(targets["decoder.final_layernorm.weight"], source["model.norm.weight"])


def test_a_stored_head_beside_tied_embeddings_must_be_the_embedding(tmp_path: Path) -> None:
    source = _save_tiny(tmp_path, "llama", tied=True)
    head = source["model.embed_tokens.weight"].detach().clone()
    _rewrite(tmp_path, **{"lm_head.weight": head})
    (targets,) = _load_all_ranks(tmp_path, 1)
    assert torch.equal(targets["embedding.word_embeddings.weight"][:_VOCAB], head)
    head[-1, -1] += 1
    _rewrite(tmp_path, **{"lm_head.weight": head})
    with pytest.raises(InputError, match=r"lm_head\.weight differs"):
        _load_all_ranks(tmp_path, 1)


def test_reader_spans_shards(tmp_path: Path) -> None:
    source = _save_tiny(tmp_path, "qwen3", shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with HfReader(tmp_path) as reader:
        assert set(reader.names()) == set(source)
        for name, parameter in source.items():
            assert torch.equal(reader.get(name, shape=tuple(parameter.shape)), parameter)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_saved_models_load_in_transformers(tmp_path: Path, max_shard_bytes: int) -> None:
    source = _save_tiny(tmp_path / "source", "qwen3", tied=True)
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    # Fused storage, as a GateUp split gives: safetensors refuses tensors that share memory.
    halves = torch.randn(2 * _FFN, _HIDDEN).chunk(2)
    changed = {name: parameter.detach() for name, parameter in source.items()}
    changed["model.layers.0.mlp.gate_proj.weight"] = halves[0]
    changed["model.layers.0.mlp.up_proj.weight"] = halves[1]
    saved = tmp_path / "out" / "model"
    save_hf(saved, changed.items(), tmp_path / "source", max_shard_bytes=max_shard_bytes)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
    assert (saved / "tokenizer.json").read_text() == "{}"
    sizes = [path.stat().st_size for path in saved.glob("*.safetensors")]
    assert (len(sizes) == 1) == (max_shard_bytes == 10**9)
    assert max(sizes) < max_shard_bytes + 4000  # and a header
    model = AutoModelForCausalLM.from_pretrained(saved)
    _assert_same(list(model.named_parameters()), changed)
    assert read_architecture(saved) == read_architecture(tmp_path / "source")


def test_saved_config_declares_the_dtype_of_the_tensors(tmp_path: Path) -> None:
    """Else transformers would round fp32 weights to the bf16 that the source declared."""
    source = _save_tiny(tmp_path / "source", "llama", dtype=torch.bfloat16)
    precise = {name: torch.randn(parameter.shape) for name, parameter in source.items()}
    save_hf(tmp_path / "saved", precise.items(), tmp_path / "source")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    _assert_same(list(model.named_parameters()), precise)


def test_saving_is_all_or_nothing(tmp_path: Path) -> None:
    source = _save_tiny(tmp_path / "source", "llama")

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(source.items())[:3]
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        save_hf(tmp_path / "saved", broken(), tmp_path / "source", max_shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    with pytest.raises(InputError, match="already exists"):
        save_hf(tmp_path / "source", source.items(), tmp_path / "source")


def test_each_row_is_gathered_once_in_order(tmp_path: Path) -> None:
    """The gather is collective, so every rank must ask for the same names in the same order."""
    _save_tiny(tmp_path, "qwen3", tied=True)
    architecture = read_architecture(tmp_path)
    gather = _Gather(_load_all_ranks(tmp_path, 1))
    list(hf_tensors(architecture, gather))
    assert gather.asked == [row.megatron for row in param_rows(architecture)]


def test_a_file_that_safetensors_refuses_is_named(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'  # a hole before the data
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(content)
    with HfReader(tmp_path) as reader, pytest.raises(InputError, match=r"model\.safetensors"):
        reader.get("a", shape=(1,))


def test_experts_are_cut_over_their_own_ranks(tmp_path: Path) -> None:
    """Two tensor ranks, three expert tensor ranks: each row by its own, and back bitwise."""
    config = Qwen3MoeConfig(
        num_hidden_layers=2,
        hidden_size=_HIDDEN,
        intermediate_size=_FFN,
        vocab_size=_VOCAB,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=_HEAD_DIM,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        mlp_only_layers=[1],
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    rows = {row.megatron: row for row in param_rows(architecture)}
    shards: dict[str, list[Tensor]] = {}
    for name, row in rows.items():
        size = 3 if row.expert else 2
        for rank in range(size):
            target = torch.full(_local_shape(row, size), torch.nan)
            with HfReader(tmp_path) as reader:
                load_hf_weights(
                    reader,
                    architecture,
                    {row.te_name or name: target},
                    dense=TensorShard(rank, 2),
                    expert=TensorShard(rank, 3),
                )
            shards.setdefault(name, []).append(target)
    expert = shards["decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight"]
    assert [tuple(shard.shape) for shard in expert] == [(8, _HIDDEN)] * 3
    stored = load_file(tmp_path / "model.safetensors")
    _assert_same(list(hf_tensors(architecture, shards.__getitem__)), stored)
