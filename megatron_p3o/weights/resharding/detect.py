"""What kind of checkpoint a path holds, and the source that reads it."""

import json
from pathlib import Path

from megatron_p3o.errors import InputError
from megatron_p3o.weights.resharding.dist_source import DistSource
from megatron_p3o.weights.resharding.endpoints import Source
from megatron_p3o.weights.resharding.hf_source import HfSource
from megatron_p3o.weights.resharding.torch_files import DIRECTORY, TRACKER
from megatron_p3o.weights.resharding.torch_source import TorchSource


def open_source(
    path: Path, *, config_dir: Path | None = None, unsafe_pickle: bool = False
) -> Source:
    """Find out the format and open it.

    Args:
        path: a Hugging Face directory, a Megatron checkpoint, a directory of Megatron checkpoints
            with its tracker file, or a run dir of this project.
        config_dir: directory with the config.json of a Megatron checkpoint that has none.
        unsafe_pickle: allow pickles to import and call anything.

    Raises:
        InputError: it is none of these, or it cannot be read.
    """
    if not path.is_dir():
        raise InputError(f"SRC={str(path)!r} is not a directory; give a checkpoint directory")
    directory = _newest(path)
    if (directory / "metadata.json").is_file():
        _check_backend(directory)
        return DistSource(directory, config_dir=config_dir, unsafe=unsafe_pickle)
    if any(DIRECTORY.match(child.name) for child in directory.iterdir()):
        return TorchSource(directory, config_dir=config_dir, unsafe=unsafe_pickle)
    if (directory / "config.json").is_file():
        return HfSource(directory)
    raise InputError(
        f"SRC={str(path)!r} is no known checkpoint: it has neither config.json with safetensors "
        "(Hugging Face), nor metadata.json (torch_dist), nor mp_rank_* directories (torch), nor "
        f"{TRACKER} or checkpoints/latest that name one; give the checkpoint's own directory"
    )


def _newest(path: Path) -> Path:
    """The checkpoint itself, where `path` is a directory of checkpoints or a run dir."""
    if (path / "checkpoints" / "latest").is_file():
        path = path / "checkpoints"
    if (path / "latest").is_file():
        return _named(path, (path / "latest").read_text(encoding="utf-8").strip())
    if (path / TRACKER).is_file():
        name = (path / TRACKER).read_text(encoding="utf-8").strip()
        return _named(path, f"iter_{int(name):07}" if name.isdecimal() else name)
    return path


def _named(path: Path, name: str) -> Path:
    if not (path / name).is_dir():
        raise InputError(
            f"SRC={str(path)!r}: its newest checkpoint {name!r} is missing; copy it, or give the "
            "directory of another checkpoint"
        )
    return path / name


def _check_backend(directory: Path) -> None:
    path = directory / "metadata.json"
    try:
        backend = json.loads(path.read_text(encoding="utf-8"))["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{str(path)!r} is not Megatron's ({error}); copy it again") from error
    if backend != "torch_dist":
        raise InputError(
            f"{str(path)!r}: sharded_backend={backend!r} is not supported; it must be 'torch_dist'"
        )
