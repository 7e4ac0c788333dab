"""Matrices cut into blocks of one size, smaller at the right and lower edge."""

import torch
from torch import Tensor


def num_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks of a matrix of shape [rows, columns], down and across."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])


def to_blocks(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """[rows, columns] as [block rows, rows, block columns, columns], with zeros at the edges."""
    down, across = num_blocks(tuple(matrix.shape), block)
    missing = (down * block[0] - matrix.shape[0], across * block[1] - matrix.shape[1])
    if any(missing):
        matrix = torch.nn.functional.pad(matrix, (0, missing[1], 0, missing[0]))
    return matrix.reshape(down, block[0], across, block[1])
