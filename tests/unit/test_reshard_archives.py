"""Archives: torch reads what is written here, this reads what torch writes, and code is not run."""

import argparse
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_p3o.errors import InputError
from megatron_p3o.weights.resharding import archives
from megatron_p3o.weights.resharding.archives import ArchivePlan, PlannedTensor
from megatron_p3o.weights.resharding.files import OutputFile, StoredTensor
from megatron_p3o.weights.resharding.pickles import StandIn, load_archive, load_pickle

_TENSORS = {
    "a": torch.arange(35, dtype=torch.float32).reshape(5, 7),
    "b": torch.randn(3).bfloat16(),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(7, dtype=torch.int64),
}


def write(path: Path, tensors: dict[str, Tensor], *, offset: int = 0) -> None:
    planned = {name: PlannedTensor(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    plan = ArchivePlan({"model": planned, "iteration": 3, "args": argparse.Namespace(x=1)})
    with OutputFile(path, offset + plan.size) as file:
        slots = plan.place(file, offset)
        for name in reversed(list(tensors)):  # any order
            slot = slots[planned[name]]
            if tensors[name].dim():
                for row in tensors[name]:
                    slot.append(row)
            else:
                slot.append(tensors[name])
        plan.finish(file, offset)


@pytest.mark.parametrize("limit", [0xFFFFFFFF, 100])
def test_torch_and_zipfile_read_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """A low limit makes every number a 64-bit one, as in files above 4 GiB."""
    monkeypatch.setattr(archives, "_LIMIT_32", limit)
    path = tmp_path / "x.pt"
    write(path, _TENSORS)
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = [
            torch.load(path, weights_only=True),
            torch.load(path, weights_only=True, mmap=True),
        ]
    for content in loaded:
        assert content["iteration"] == 3
        assert content["args"] == argparse.Namespace(x=1)
        for name, tensor in _TENSORS.items():
            assert content["model"][name].dtype == tensor.dtype
            assert torch.equal(content["model"][name], tensor)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def read_all(content: dict[str, StoredTensor]) -> dict[str, Tensor]:
    assert all(isinstance(tensor, StoredTensor) for tensor in content.values())
    return {name: tensor.read() for name, tensor in content.items()}


@pytest.mark.parametrize("offset", [0, 1000])
def test_what_is_written_is_read_back(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "x.pt"
    write(path, _TENSORS, offset=offset)
    content = load_archive(path, offset=offset)
    assert content["args"] == argparse.Namespace(x=1)
    for name, tensor in read_all(content["model"]).items():
        assert torch.equal(tensor, _TENSORS[name])


def test_tensors_of_torch_save_are_read(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "view": base[1:3],
        "transposed": base.t(),
        "parameter": torch.nn.Parameter(base + 1),
        "float8": base.to(torch.float8_e4m3fn),
        **_TENSORS,
    }
    path = tmp_path / "x.pt"
    torch.save(tensors, path)
    stored = load_archive(path)
    for name, tensor in read_all(stored).items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor.float(), tensors[name].detach().float()), name
    assert torch.equal(stored["view"].read(1, 2), base[2:3])
    assert torch.equal(stored["transposed"].read(2, 4), base.t()[2:4])


class _Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    content = {"model": {}, "args": _Call(Path.touch, marker)}
    torch.save(content, tmp_path / "x.pt")
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(_Call(eval, "1 + 1")))
    with pytest.raises(InputError, match=r"getattr.*--unsafe-pickle"):
        load_archive(tmp_path / "x.pt")
    assert not marker.exists()
    with pytest.raises(InputError, match=r"builtins\.eval.*--unsafe-pickle"):
        load_pickle(tmp_path / "x.pickle")
    assert load_pickle(tmp_path / "x.pickle", unsafe=True) == 2


def test_objects_of_known_libraries_are_replaced(tmp_path: Path) -> None:
    """As a checkpoint of Megatron-LM has them: numpy's random state, enums of Megatron."""
    from megatron.core.enums import ModelType
    from numpy.random import get_state

    path = tmp_path / "x.pt"
    torch.save({"rng": get_state(), "args": argparse.Namespace(kind=ModelType(1), n=4)}, path)
    content = load_archive(path)
    assert isinstance(content["args"].kind, StandIn)
    assert content["args"].n == 4


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    write(path, _TENSORS)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"x\.pt.*half-written"):
        load_archive(path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="not an archive"):
        load_archive(path)
    with pytest.raises(InputError, match="cannot be read"):
        load_archive(tmp_path / "absent")
    (tmp_path / "y").write_bytes(pickle.dumps([1, 2, 3])[:-4])
    with pytest.raises(InputError, match="pickle that cannot be read"):
        load_pickle(tmp_path / "y")


def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.arange(1000.0), path)
    content = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(content, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, data[:80] if name.endswith("data/0") else data)
    path.write_bytes(content.getvalue())
    with pytest.raises(InputError, match="exceeds its storage"):
        load_archive(path)


def test_a_truncated_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(30))
    with pytest.raises(InputError, match="half-written"):
        StoredTensor(path, 0, torch.float32, (8,)).read()
