"""Names in Megatron's legacy `torch` checkpoints, shared by source and sink.

    <root>/latest_checkpointed_iteration.txt          "12", or "release"
    <root>/iter_0000012/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

TT is the tensor rank, PPP the pipeline rank and EEE the expert rank where there are several
(megatron/training/checkpointing.py). A file holds `model`, or `model0`, `model1`, ...
with a virtual pipeline: the parameters of that rank under local names, layers counted in the chunk
and experts in the expert rank.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_p3o.weights.families import ParamRow
from megatron_p3o.weights.resharding.target import TargetLayout, rename_layer, row_expert

FILE_NAMES = ("model_optim_rng.pt", "model_rng.pt")
TRACKER = "latest_checkpointed_iteration.txt"
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
DIRECTORY = re.compile(r"^mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?$")
_EXPERT_INDEX = re.compile(r"(\.local_experts\.|\.linear_fc[12]\.weight)(\d+)")


@dataclass(frozen=True, order=True, slots=True)
class FileRank:
    """Whose file it is."""

    pipeline: int
    expert: int
    tensor: int


def directory_name(rank: FileRank, layout: TargetLayout) -> str:
    name = f"mp_rank_{rank.tensor:02}"
    if layout.pipeline > 1:
        name += f"_{rank.pipeline:03}"
    if layout.expert > 1:
        name += f"_{rank.expert:03}"
    return name


def file_ranks(layout: TargetLayout) -> list[FileRank]:
    """The files that the ranks of a layout write: pairs of tensor and expert rank that occur."""
    assert layout.expert_tensor is not None
    per_stage = layout.tensor * layout.expert * layout.expert_tensor
    pairs = {
        (rank % layout.tensor, rank // layout.expert_tensor % layout.expert)
        for rank in range(per_stage)
    }
    return [
        FileRank(stage, expert, tensor)
        for stage in range(layout.pipeline)
        for tensor, expert in sorted(pairs)
    ]


def local_names(row: ParamRow, layer: int | None, first_expert: int) -> Iterator[str]:
    """What a rank may call the row: Transformer Engine's spelling, then that of local layers.

    Args:
        row: of the table.
        layer: index in the model chunk.
        first_expert: the global index of the rank's first expert.
    """
    expert = row_expert(row)
    for name in (row.te_name, row.megatron):
        if name is None:
            continue
        if layer is not None:
            name = rename_layer(name, layer)
        if expert is not None:
            name = _EXPERT_INDEX.sub(rf"\g<1>{expert - first_expert}", name, count=1)
        yield name
