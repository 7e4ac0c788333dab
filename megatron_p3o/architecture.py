"""What a Hugging Face model directory says about its model, read without torch.

`config.json` is read strictly. Every field is either read into `ModelArchitecture`, or must hold
the only value for which this code computes the same, or is known not to matter; any other field is
refused by name. An ignored rope or attention field would train a different
model without a sign of it.

Both spellings are read: transformers 5 (`rope_parameters`, `dtype`) and transformers 4
(`rope_theta`, `rope_scaling`, `torch_dtype`). The safetensors files are checked to be complete
from their headers alone (8 bytes little-endian header length, then a JSON header with the byte
range of every tensor; see the safetensors README).
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_p3o.errors import ConfigurationError, InputError

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

_FAMILY_OF: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Fields that change the computation, with the values under which it is the one computed here.
# attention_bias: Hugging Face then also puts a bias on the output projection, which Megatron has
# only together with biases in the MLP.
_FIXED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False,),
    "use_sliding_window": (False, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
}

# sliding_window and max_window_layers are unused while use_sliding_window is false.
_IRRELEVANT_FIELDS: Mapping[str, frozenset[str]] = {
    "llama": frozenset({"is_llama_config"}),
    "qwen2": frozenset({"sliding_window", "max_window_layers"}),
    "qwen3": frozenset({"sliding_window", "max_window_layers"}),
}
_IRRELEVANT_ANYWHERE = frozenset(
    {
        *("transformers_version", "_name_or_path", "_attn_implementation_autoset"),
        *("use_cache", "torchscript", "return_dict", "output_attentions", "output_hidden_states"),
        *(
            "bos_token_id",
            "pad_token_id",
            "unk_token_id",
            "tokenizer_class",
            "transformers.js_config",
        ),
        *("max_length", "do_sample", "temperature", "top_k", "top_p", "is_decoder"),
        *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
    }
)

# Megatron's RotaryEmbedding._apply_scaling fixes these and takes only the factor.
_MEGATRON_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Fingerprints read whole files up to their product, 16 MiB, and evenly spaced blocks beyond.
_SAMPLE_BYTES = 64 * 1024
_NUM_SAMPLES = 256


@dataclass(frozen=True, kw_only=True)
class ModelArchitecture:
    """Every field that decides a GPT-like decoder with RMSNorm, RoPE and a gated SiLU MLP."""

    family: Family
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Channels of one attention head; heads x head_dim need not equal hidden_size."""
    ffn_hidden_size: int
    vocab_size: int
    """Rows of the embedding, without Megatron's padding."""
    max_position_embeddings: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    """{"rope_type": "llama3", "factor": ...}, or None for plain RoPE."""
    tie_word_embeddings: bool
    qkv_bias: bool
    """A bias on the query, key and value projections, none on the output projection."""
    qk_layernorm: bool
    """RMSNorm over each head of query and key, before RoPE."""
    initializer_range: float
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response; generation_config.json takes precedence over config.json."""
    torch_dtype: str
    """Name of the dtype that config.json declares, such as "bfloat16"."""


def read_architecture(model_dir: str | Path) -> ModelArchitecture:
    """Read and check a Hugging Face model directory: its configuration and its weight files.

    Raises:
        InputError: the directory, config.json or weights are missing or incomplete, the
            architecture is not supported, or a field asks for a computation not built here.
    """
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise _error(model_dir, "no such directory; give a Hugging Face model directory")
    config = _Fields(model_dir, _read_json(model_dir, "config.json"))
    family = _family(config)
    read_weight_headers(model_dir)

    hidden_size = config.positive_int("hidden_size")
    num_heads = config.positive_int("num_attention_heads")
    default_head_dim = 128 if family == "qwen3" else hidden_size // num_heads
    num_kv_heads = config.positive_int("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            f"num_key_value_heads={num_kv_heads} must divide num_attention_heads={num_heads}; "
            "mend config.json"
        )
    rope_theta, rope_scaling = _rope(config)
    architecture = ModelArchitecture(
        family=family,
        num_layers=config.positive_int("num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=config.positive_int("head_dim", default=default_head_dim),
        ffn_hidden_size=config.positive_int("intermediate_size"),
        vocab_size=config.positive_int("vocab_size"),
        max_position_embeddings=config.positive_int("max_position_embeddings"),
        norm_epsilon=config.positive_float("rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2",
        qk_layernorm=family == "qwen3",
        initializer_range=config.positive_float("initializer_range", default=0.02),
        eos_token_ids=_eos_token_ids(config),
        torch_dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
    )
    _check_other_fields(config, family)
    return architecture


def read_weight_headers(model_dir: str | Path) -> dict[Path, dict[str, tuple[int, ...]]]:
    """Tensor shapes by file and name, for every safetensors file that holds the model's weights.

    As transformers does, `model.safetensors` is preferred over the index.

    Raises:
        InputError: no weights, a shard that the index names is missing or lacks a tensor, or a
            file whose size is not what its header declares.
    """
    model_dir = Path(model_dir)
    single = model_dir / "model.safetensors"
    if single.is_file():
        return {single: _read_header(model_dir, single)}
    index_name = "model.safetensors.index.json"
    if not (model_dir / index_name).is_file():
        raise _error(
            model_dir,
            f"neither model.safetensors nor {index_name} is there; save the model's weights as "
            "safetensors (save_pretrained does)",
        )
    weight_map = _read_json(model_dir, index_name).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise _error(model_dir, f"{index_name} has no weight_map of names; copy the model again")
    headers = {}
    for shard in sorted(set(weight_map.values())):
        path = model_dir / shard
        if not path.is_file():
            raise _error(model_dir, f"{index_name} names {shard}, which is missing; copy it again")
        headers[path] = _read_header(model_dir, path)
    for name, shard in weight_map.items():
        if name not in headers[model_dir / shard]:
            raise _error(model_dir, f"{index_name} places {name} in {shard}, which lacks it")
    return headers


def check_layout(architecture: ModelArchitecture, *, tensor: int, pipeline: int) -> None:
    """Check that the model can be split `tensor` x `pipeline` ways.

    Raises:
        ConfigurationError: a size does not divide what it splits; the legal values are named.
    """
    split = {
        name: getattr(architecture, name)
        for name in ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size")
    }
    _check_divides("layout.tensor", tensor, split)
    _check_divides("layout.pipeline", pipeline, {"num_layers": architecture.num_layers})


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int, divisible_by: int = 128) -> int:
    """Least multiple of `divisible_by` x `tensor_parallel_size` that holds the vocabulary.

    As `_vocab_size_with_padding` of Megatron-LM.
    """
    multiple = divisible_by * tensor_parallel_size
    return math.ceil(vocab_size / multiple) * multiple


def fingerprint(model_dir: str | Path) -> str:
    """SHA-256 hex digest that tells whether a model directory still holds the same model.

    Covers config.json and each weight file's name, size, header and bytes: all bytes up to
    16 MiB, 256 evenly spaced blocks of a larger file, so that a model of any size takes moments.

    Raises:
        InputError: as `read_architecture`, for missing or incomplete files.
    """
    model_dir = Path(model_dir)
    _read_json(model_dir, "config.json")
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    for path in read_weight_headers(model_dir):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(int.from_bytes(file.read(8), "little")))
            for start in range(0, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES)):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _error(model_dir: Path, problem: str) -> InputError:
    return InputError(f"model.path={str(model_dir)!r}: {problem}")


def _read_json(model_dir: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((model_dir / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise _error(model_dir, f"{name} cannot be read ({error.strerror}); add it") from error
    except ValueError as error:
        raise _error(model_dir, f"{name} is not JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise _error(model_dir, f"{name} must hold a JSON object; copy it again")
    return content


def _read_header(model_dir: Path, path: Path) -> dict[str, tuple[int, ...]]:
    size = path.stat().st_size
    remedy = "copy it again, whole (a Git LFS pointer is not the file)"
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if 8 + header_size > size:
            raise _error(
                model_dir, f"{path.name} is half-written: {size} bytes end in its header; {remedy}"
            )
        raw = file.read(header_size)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        ends = [entry["data_offsets"][1] for entry in header.values()]
        declared = 8 + header_size + max(ends, default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise _error(model_dir, f"{path.name} is not a safetensors file; {remedy}") from error
    if declared != size:
        raise _error(
            model_dir,
            f"{path.name} is half-written: its header declares {declared} bytes, the file has "
            f"{size}; {remedy}",
        )
    return shapes


class _Fields:
    """The fields of a JSON object, typed, with a record of those that were read."""

    def __init__(self, model_dir: Path, values: Mapping[str, Any]) -> None:
        self.model_dir = model_dir
        self._values = values
        self._read: set[str] = set()

    def error(self, problem: str) -> InputError:
        return _error(self.model_dir, f"config.json: {problem}")

    def get(self, field: str) -> Any:
        """The value, or None for a missing field."""
        self._read.add(field)
        return self._values.get(field)

    def positive_int(self, field: str, *, default: int | None = None) -> int:
        value = self.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{field}={value!r} must be a positive integer; mend it")
        return value

    def positive_float(self, field: str, *, default: float | None = None) -> float:
        value = self.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(f"{field}={value!r} must be a number above 0; mend it")
        return float(value)

    def flag(self, field: str) -> bool:
        value = self.get(field) or False
        if not isinstance(value, bool):
            raise self.error(f"{field}={value!r} must be true or false; mend it")
        return value

    def unread(self) -> dict[str, Any]:
        return {name: value for name, value in self._values.items() if name not in self._read}


def _family(config: _Fields) -> Family:
    names, model_type = config.get("architectures"), config.get("model_type")
    for name, family in _FAMILY_OF.items():
        if names in ([name], None) and model_type == family:
            return family
    raise config.error(
        f"architectures={names!r} with model_type={model_type!r} is not supported; use a model of "
        f"{' or '.join(_FAMILY_OF)}"
    )


def _check_other_fields(config: _Fields, family: Family) -> None:
    """Refuse a computation that no field of `ModelArchitecture` expresses."""
    irrelevant = _IRRELEVANT_ANYWHERE | _IRRELEVANT_FIELDS[family]
    for field, value in config.unread().items():
        if field in irrelevant:
            continue
        if field == "layer_types" and set(value or ()) <= {"full_attention"}:
            continue
        if field not in _FIXED_FIELDS:
            raise config.error(
                f"{field}={value!r} is not known here and may change the computation; use a "
                "model without it"
            )
        if value not in _FIXED_FIELDS[field]:
            raise config.error(
                f"{field}={value!r} is not supported, it must be {_FIXED_FIELDS[field][0]!r}; use "
                "a model with that value"
            )


def _rope(config: _Fields) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling); where both spellings are there, in transformers' order of precedence."""
    legacy, present = config.get("rope_scaling"), config.get("rope_parameters")
    values = {"rope_theta": config.get("rope_theta"), **(legacy or present or {})}
    if values["rope_theta"] is None:
        values["rope_theta"] = 10000.0
    rope = _Fields(config.model_dir, values)
    theta = rope.positive_float("rope_theta")
    rope_type, legacy_type = rope.get("rope_type"), rope.get("type")
    rope_type = rope_type or legacy_type or "default"
    scaling = None
    if rope_type == "llama3":
        scaling = {"rope_type": "llama3", "factor": rope.positive_float("factor")}
        for field, value in _MEGATRON_LLAMA3_ROPE.items():
            if rope.get(field) != value:
                raise rope.error(
                    f"rope field {field}={rope.get(field)!r} is not supported, Megatron's llama3 "
                    f"rope has {value!r}; use a model with that value"
                )
    elif rope_type != "default":
        raise rope.error(f"rope_type={rope_type!r} is not supported; use default or llama3")
    for field, value in rope.unread().items():
        raise rope.error(
            f"rope field {field}={value!r} is not known for rope_type={rope_type!r}; use a model "
            "without it"
        )
    return theta, scaling


def _eos_token_ids(config: _Fields) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if (config.model_dir / "generation_config.json").is_file():
        generation = _read_json(config.model_dir, "generation_config.json")
        if generation.get("eos_token_id") is not None:
            value = generation["eos_token_id"]
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise config.error(f"eos_token_id={value!r} must be an integer or a list of them; mend it")
    return tuple(ids)


def _check_divides(field: str, size: int, split: Mapping[str, int]) -> None:
    """`size` must divide every value of `split`."""
    common = math.gcd(*split.values())
    if common % size == 0:
        return
    legal = [value for value in range(1, common + 1) if common % value == 0]
    nearest = min(legal, key=lambda value: abs(value - size))
    rule = " and ".join(f"{name}={value}" for name, value in split.items() if value % size)
    raise ConfigurationError(
        f"{field}={size} must divide the model's {rule}; the nearest legal value is {nearest} "
        f"(legal: {', '.join(map(str, legal))})"
    )
