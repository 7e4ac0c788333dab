"""A stream of tensors as buckets: few large messages instead of thousands of small ones.

Wire rule of the receiving side (SGLang's `flattened_bucket`): bytes of all tensors end to end, and
each must start at a multiple of its dtype's size, without padding between them. Tensors of larger
elements come first in a bucket, so every place before a tensor is a multiple of its element size.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megatron_p3o.types import BucketEntry, WeightBucket


def fill_buckets(
    named_tensors: Iterable[tuple[str, Tensor]], max_bytes: int
) -> Iterator[WeightBucket]:
    """Buckets of at most `max_bytes`, except that a larger tensor has one of its own.

    Memory: the tensors of the bucket being filled and one buffer that all buckets are views of, so
    a bucket is valid until the next one is asked for.

    Args:
        named_tensors: on one device, any dtypes; consumed as the buckets are.
        max_bytes: greatest size of a bucket.

    Yields:
        Buckets that hold every tensor once, in the stream's order up to the order inside a bucket.
        The last one, and only it, says so.

    Raises:
        ValueError: there are no tensors.
    """
    assert max_bytes > 0, max_bytes
    pending: list[tuple[str, Tensor]] = []
    pending_bytes = 0
    buffer: Tensor | None = None
    for name, tensor in named_tensors:
        if pending and pending_bytes + tensor.nbytes > max_bytes:
            if buffer is None and pending_bytes <= max_bytes:
                buffer = _allocate(max_bytes, pending)
            # The tensor in hand will follow, so this bucket is not the last.
            bucket = _bucket(pending, pending_bytes, buffer, is_last=False)
            pending, pending_bytes = [], 0
            yield bucket
            del bucket
        pending.append((name, tensor))
        pending_bytes += tensor.nbytes
    if not pending:
        raise ValueError("a model without tensors cannot be published")
    yield _bucket(pending, pending_bytes, buffer, is_last=True)


def _bucket(
    named_tensors: Sequence[tuple[str, Tensor]],
    nbytes: int,
    buffer: Tensor | None,
    *,
    is_last: bool,
) -> WeightBucket:
    """The tensors copied into the buffer, or into memory of their own where it is too small."""
    if buffer is None or nbytes > len(buffer):
        buffer = _allocate(nbytes, named_tensors)
    ordered = sorted(named_tensors, key=lambda item: -item[1].element_size())
    stops = accumulate(tensor.nbytes for _, tensor in ordered)
    entries = tuple(
        BucketEntry(name, tensor.dtype, tuple(tensor.shape), stop - tensor.nbytes, stop)
        for (name, tensor), stop in zip(ordered, stops, strict=True)
    )
    for (_, tensor), entry in zip(ordered, entries, strict=True):
        place = buffer[entry.start : entry.stop].view(entry.dtype).view(entry.shape)
        place.copy_(tensor)
    return WeightBucket(entries=entries, data=buffer[:nbytes], is_last=is_last)


def _allocate(nbytes: int, named_tensors: Sequence[tuple[str, Tensor]]) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=named_tensors[0][1].device)
