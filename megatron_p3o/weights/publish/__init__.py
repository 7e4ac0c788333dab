"""The trainer's weights on their way to rollout servers: numbers, buckets, files, checksums."""

from megatron_p3o.weights.publish.buckets import fill_buckets
from megatron_p3o.weights.publish.checksums import ChecksumReport, ServerChecksums
from megatron_p3o.weights.publish.directory import VersionWriter, served_config
from megatron_p3o.weights.publish.served import ServedFormat, served_tensors

__all__ = [
    "ChecksumReport",
    "ServedFormat",
    "ServerChecksums",
    "VersionWriter",
    "fill_buckets",
    "served_config",
    "served_tensors",
]
