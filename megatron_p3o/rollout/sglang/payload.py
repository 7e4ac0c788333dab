"""A bucket as the text that a server on the same host turns back into tensors.

On a GPU the text holds a CUDA IPC handle, so that the server reads the sender's memory; each tensor
rank needs a payload of its own then, because opening a handle counts as one use of the memory. On a
CPU it holds the bytes. (Torch's named shared memory would save a copy, but its manager process
outlives the sender for as long as the server runs.)

A server unpickles it with a list of allowed names, so the bucket's description travels as plain
namespaces, which are on that list and have the attributes that the server reads.
"""

import base64
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_p3o.types import WeightBucket

# Place of the device in the arguments of torch's rebuild_cuda_tensor.
_DEVICE_ARGUMENT = 6


def bucket_payloads(bucket: WeightBucket, tensor_size: int) -> list[str]:
    """Base64 texts for the tensor ranks of one server, in rank order.

    The bucket's memory must stay as it is until the server has answered.
    """
    description = [
        SimpleNamespace(
            name=entry.name,
            shape=torch.Size(entry.shape),
            dtype=entry.dtype,
            start_idx=entry.start,
            end_idx=entry.stop,
            numel=entry.stop - entry.start,
        )
        for entry in bucket.entries
    ]
    if bucket.data.is_cuda:
        # The server reads as soon as it has the handle, whatever is queued on this stream.
        torch.cuda.synchronize(bucket.data.device)
        content = {"flattened_tensor": bucket.data, "metadata": description}
        return [_text(_shared(content)) for _ in range(tensor_size)]
    # A view would be pickled with all the memory it is a view of.
    content = {"flattened_tensor": bucket.data.clone(), "metadata": description}
    return [_text(pickle.dumps(content))] * tensor_size


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _shared(content: Any) -> bytes:
    stream = io.BytesIO()
    _SharingPickler(stream).dump(content)
    return stream.getvalue()


class _SharingPickler(ForkingPickler):
    """Names CUDA devices by UUID, since each process may count its devices differently."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(obj)
        uuid = str(torch.cuda.get_device_properties(obj.device).uuid)
        place = _DEVICE_ARGUMENT
        return rebuild, (*arguments[:place], uuid, *arguments[place + 1 :])
