"""The files of a Hugging Face model directory, checked and told apart without torch.

The safetensors files are checked to be complete from their headers alone (8 bytes little-endian
header length, then a JSON header with the byte range of every tensor; see the safetensors README).
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron_p3o.errors import InputError

# Fingerprints read whole files up to their product, 16 MiB, and evenly spaced blocks beyond.
_SAMPLE_BYTES = 64 * 1024
_NUM_SAMPLES = 256


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
        raise model_error(
            model_dir,
            f"neither model.safetensors nor {index_name} is there; save the model's weights as "
            "safetensors (save_pretrained does)",
        )
    weight_map = read_json(model_dir, index_name).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise model_error(
            model_dir, f"{index_name} has no weight_map of names; copy the model again"
        )
    headers = {}
    for shard in sorted(set(weight_map.values())):
        path = model_dir / shard
        if not path.is_file():
            raise model_error(
                model_dir, f"{index_name} names {shard}, which is missing; copy it again"
            )
        headers[path] = _read_header(model_dir, path)
    for name, shard in weight_map.items():
        if name not in headers[model_dir / shard]:
            raise model_error(model_dir, f"{index_name} places {name} in {shard}, which lacks it")
    return headers


def fingerprint(model_dir: str | Path) -> str:
    """SHA-256 hex digest that tells whether a model directory still holds the same model.

    Covers config.json and each weight file's name, size, header and bytes: all bytes up to
    16 MiB, 256 evenly spaced blocks of a larger file, so that a model of any size takes moments.

    Raises:
        InputError: as `read_architecture`, for missing or incomplete files.
    """
    model_dir = Path(model_dir)
    read_json(model_dir, "config.json")
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


def check_tokenizer(model_dir: str | Path) -> None:
    """Raises InputError unless the directory holds a tokenizer's files."""
    # Without any of these transformers makes an empty tokenizer instead of failing.
    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    model_dir = Path(model_dir)
    if not any((model_dir / name).is_file() for name in files):
        raise model_error(
            model_dir,
            f"there is no tokenizer (none of {', '.join(files)}); copy the model's tokenizer files "
            "into it",
        )


def model_error(model_dir: Path, problem: str) -> InputError:
    """An error that names the directory."""
    return InputError(f"model.path={str(model_dir)!r}: {problem}")


def read_json(model_dir: Path, name: str) -> dict[str, Any]:
    """The object that a file of the directory holds.

    Raises:
        InputError: the file cannot be read or holds no JSON object.
    """
    try:
        content = json.loads((model_dir / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise model_error(model_dir, f"{name} cannot be read ({error.strerror}); add it") from error
    except ValueError as error:
        raise model_error(model_dir, f"{name} is not JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise model_error(model_dir, f"{name} must hold a JSON object; copy it again")
    return content


def _read_header(model_dir: Path, path: Path) -> dict[str, tuple[int, ...]]:
    size = path.stat().st_size
    remedy = "copy it again, whole (a Git LFS pointer is not the file)"
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if 8 + header_size > size:
            raise model_error(
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
        raise model_error(model_dir, f"{path.name} is not a safetensors file; {remedy}") from error
    if declared != size:
        raise model_error(
            model_dir,
            f"{path.name} is half-written: its header declares {declared} bytes, the file has "
            f"{size}; {remedy}",
        )
    return shapes
