"""Weights in the layout of the CPU kernels: GGUF blocks of 16 rows interleaved, as `csrc/linear.h` describes it."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

# what a GGUF file writes -> its name
FORMATS: dict[int, str] = {
    0: "F32",
    1: "F16",
    30: "BF16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
}

PACKED_AS = {11: 14}  # Q3_K has no kernel of its own; Q6_K holds its values exactly

GROUP_ROWS = 16
# values of a block, its bytes in the file, and the bytes of the same block of 16 packed rows
BLOCK_SIZES: dict[int, tuple[int, int, int]] = {
    0: (1, 4, 64),
    1: (1, 2, 32),
    30: (1, 2, 32),
    2: (32, 18, 288),
    3: (32, 20, 320),
    6: (32, 22, 352),
    7: (32, 24, 384),
    8: (32, 34, 544),
    11: (256, 110, 3360),
    12: (256, 144, 2368),
    13: (256, 176, 2880),
    14: (256, 210, 3360),
}

_HUGE_PAGE = 1 << 21
_MADV_HUGEPAGE = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [rows, columns]; `data` is uint8 on the CPU, about as large as in the file (of Q3_K: twice)."""

    data: Tensor
    type_number: int
    rows: int
    columns: int


def packed_bytes(type_number: int, rows: int, columns: int) -> int:
    """Size of a packed weight. Raises ValueError for a format or a shape that can't be packed."""
    if type_number not in FORMATS:
        raise ValueError(f"GGUF type {type_number} has no packed kernel; there is one for {', '.join(FORMATS.values())}.")
    values, _, group_bytes = BLOCK_SIZES[type_number]
    if rows < 1 or columns < 1 or columns % values:
        raise ValueError(f"A weight [{rows}, {columns}] is no whole number of {FORMATS[type_number]} blocks of {values}.")
    return -(-rows // GROUP_ROWS) * (columns // values) * group_bytes


class Arena:
    """One piece of memory for many tensors, in huge pages where the system has them: weights that lie in it are read up to a fourth faster.

    What is taken keeps the memory alive; nothing is given back one by one.
    """

    ALIGNMENT = 64

    def __init__(self, num_bytes: int) -> None:
        self._buffer = _huge_pages(torch.empty(num_bytes + _HUGE_PAGE, dtype=torch.uint8))
        self._used = -self._buffer.data_ptr() % _HUGE_PAGE

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], uninitialised, aligned to ALIGNMENT bytes. Raises ValueError where the arena is full."""
        if self._used + num_bytes > self._buffer.numel():
            raise ValueError(f"An arena of {self._buffer.numel()} bytes has no {num_bytes} left.")
        taken = self._buffer[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // self.ALIGNMENT) * self.ALIGNMENT
        return taken


def _huge_pages(tensor: Tensor) -> Tensor:
    """Ask the system to back a large CPU tensor, before it is written, with huge pages; returns the tensor. No more than a hint."""
    first = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    length = tensor.data_ptr() + tensor.untyped_storage().nbytes() - first
    if length >= _HUGE_PAGE and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return tensor


def pack(type_number: int, raw: Tensor, rows: int, columns: int, *, arena: Arena | None = None) -> PackedWeight:
    """`raw`: uint8, the blocks of a weight [rows, columns] as a GGUF file holds them; no value changes. `arena`: where the result goes.

    The kernels must be loaded. Raises ValueError for another format or shape, RuntimeError for another number of bytes.
    """
    num_bytes = packed_bytes(type_number, rows, columns)
    data = torch.empty(num_bytes, dtype=torch.uint8) if arena is None else arena.take(num_bytes)
    torch.ops.headrace_cpu.pack_(data, raw.contiguous(), type_number, rows, columns)
    return PackedWeight(data=data, type_number=PACKED_AS.get(type_number, type_number), rows=rows, columns=columns)
