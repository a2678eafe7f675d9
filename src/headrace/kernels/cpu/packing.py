"""Weights in the layout of the CPU kernels: GGUF blocks of 16 rows interleaved, as `csrc/linear.h` describes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# what a GGUF file writes -> its name
FORMATS: dict[int, str] = {2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 12: "Q4_K", 14: "Q6_K"}

GROUP_ROWS = 16
# values of a block, its bytes in the file, and the bytes of the same block of 16 packed rows
BLOCK_SIZES: dict[int, tuple[int, int, int]] = {2: (32, 18, 288), 3: (32, 20, 320), 8: (32, 34, 544), 12: (256, 144, 2368), 14: (256, 210, 3360)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [rows, columns]; `data` is uint8 [groups of 16 rows, blocks of a row, bytes] on the CPU, about as large as in the file."""

    data: Tensor
    type_number: int
    rows: int
    columns: int


def pack(type_number: int, raw: Tensor, rows: int, columns: int) -> PackedWeight:
    """`raw`: uint8, the blocks of a weight [rows, columns] as a GGUF file holds them; no value changes.

    The kernels must be loaded. Raises ValueError for another format, RuntimeError for another size.
    """
    if type_number not in FORMATS:
        raise ValueError(f"GGUF type {type_number} has no packed kernel; there is one for {', '.join(FORMATS.values())}.")
    data = torch.ops.headrace_cpu.pack(raw.contiguous(), type_number, rows, columns)
    return PackedWeight(data=data, type_number=type_number, rows=rows, columns=columns)
