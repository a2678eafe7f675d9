"""Weights in the layout of the CPU kernels: GGUF blocks of 16 rows interleaved, as `csrc/linear.h` describes it.

Packing moves bits about and changes no value. Shape suffixes: G groups of 16 rows, B blocks of a row, R rows of a group, Q quads of four
values in 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat:
    name: str
    type_number: int  # what a GGUF file writes
    block_values: int
    block_bytes: int  # in the file
    group_bytes: int  # of 16 packed blocks
    arrange: Callable[[Tensor], Tensor]  # uint8 [G, B, 16, block_bytes] -> [G, B, group_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [rows, columns]; `data` is uint8 [G, B, group_bytes] on the CPU."""

    data: Tensor
    type_number: int
    rows: int
    columns: int


def pack(type_number: int, raw: Tensor, rows: int, columns: int) -> PackedWeight:
    """`raw`: uint8, the blocks of a weight [rows, columns] as a GGUF file holds them. Raises ValueError for another size or format."""
    block_format = FORMATS.get(type_number)
    if block_format is None:
        raise ValueError(f"GGUF type {type_number} has no packed kernel; there is one for {', '.join(f.name for f in FORMATS.values())}.")
    if columns % block_format.block_values or rows < 1 or columns < 1:
        raise ValueError(f"A weight [{rows}, {columns}] is no whole number of {block_format.name} blocks of {block_format.block_values}.")
    blocks = columns // block_format.block_values
    if raw.dtype != torch.uint8 or raw.numel() != rows * blocks * block_format.block_bytes:
        raise ValueError(f"A {block_format.name} weight [{rows}, {columns}] takes {rows * blocks * block_format.block_bytes} bytes, not {raw.numel()}.")
    groups = -(-rows // GROUP_ROWS)
    data = torch.empty(groups, blocks, block_format.group_bytes, dtype=torch.uint8)
    raw_NB = raw.reshape(rows, blocks, block_format.block_bytes)
    whole = rows // GROUP_ROWS
    step = max(1, (1 << 22) // (GROUP_ROWS * blocks * block_format.block_bytes))  # temporaries of a few MiB
    for first in range(0, whole, step):
        last = min(first + step, whole)
        part = raw_NB[first * GROUP_ROWS : last * GROUP_ROWS].reshape(last - first, GROUP_ROWS, blocks, -1).transpose(1, 2)
        data[first:last] = block_format.arrange(part)
    if whole < groups:  # the rows that are missing in the last group are zeros
        rest = torch.zeros(GROUP_ROWS, blocks, block_format.block_bytes, dtype=torch.uint8)
        rest[: rows - whole * GROUP_ROWS] = raw_NB[whole * GROUP_ROWS :]
        data[whole:] = block_format.arrange(rest.transpose(0, 1)[None])
    return PackedWeight(data=data, type_number=type_number, rows=rows, columns=columns)


def _join(*parts: Tensor) -> Tensor:
    """Concatenates [G, B, ...] along all that follows B."""
    return torch.cat([part.reshape(*part.shape[:2], -1) for part in parts], dim=-1)


def _by_row(blocks_GBR: Tensor, first: int, count: int) -> Tensor:
    """Bytes of each row, row after row."""
    return blocks_GBR[..., first : first + count]


def _quads(bytes_GBRV: Tensor) -> Tensor:
    """[G, B, 16, 4 n] -> [G, B, n, 16, 4]."""
    return bytes_GBRV.unflatten(-1, (-1, 4)).transpose(2, 3)


def _q4_0(blocks: Tensor) -> Tensor:
    # a block's byte i holds values i and i + 16, that is quads i / 4 and i / 4 + 4: the kernels' order already
    return _join(_quads(blocks[..., 2:]), _by_row(blocks, 0, 2))


def _q4_1(blocks: Tensor) -> Tensor:
    return _join(_quads(blocks[..., 4:]), _by_row(blocks, 0, 2), _by_row(blocks, 2, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return _join(_quads(blocks[..., 2:]), _by_row(blocks, 0, 2))


def _nibbles(values_GBR32: Tensor) -> Tensor:
    """Values 0..15 of 32 neighbours -> the kernels' nibbles, [G, B, 4, 16, 4]."""
    return _quads(values_GBR32[..., :16] | (values_GBR32[..., 16:] << 4))


def _q4_k(blocks: Tensor) -> Tensor:
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 0x30)), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 0x30)), dim=-1)
    parts = [_by_row(blocks, 0, 2), _by_row(blocks, 2, 2)]
    for sub in range(8):
        packed = blocks[..., 16 + sub // 2 * 32 :][..., :32]  # 32 bytes hold two neighbouring sub-blocks
        parts += [_nibbles(packed >> 4 if sub % 2 else packed & 15), scales[..., sub], minima[..., sub]]
    return _join(*parts)


def _q6_k(blocks: Tensor) -> Tensor:
    parts = [_by_row(blocks, 208, 2)]
    for sub in range(8):
        half, part = sub // 4, sub % 4  # 128 values: 64 bytes of low nibbles, 32 bytes of bit pairs
        low = blocks[..., half * 64 + part % 2 * 32 :][..., :32]
        pairs = (blocks[..., 128 + half * 32 :][..., :32] >> (2 * part)) & 3
        quads = _quads(pairs).unflatten(2, (2, 4))  # of quads 0..3 and 4..7
        high = quads[:, :, :, 0] | (quads[:, :, :, 1] << 2) | (quads[:, :, :, 2] << 4) | (quads[:, :, :, 3] << 6)
        scales = blocks[..., 192 + 2 * sub :]
        parts += [_nibbles(low >> 4 if part >= 2 else low & 15), high, scales[..., 0], scales[..., 1]]
    return _join(*parts)


FORMATS: dict[int, PackedFormat] = {
    number: PackedFormat(name=name, type_number=number, block_values=values, block_bytes=size, group_bytes=group, arrange=arrange)
    for number, name, values, size, group, arrange in (
        (2, "Q4_0", 32, 18, 288, _q4_0),
        (3, "Q4_1", 32, 20, 320, _q4_1),
        (8, "Q8_0", 32, 34, 544, _q8_0),
        (12, "Q4_K", 256, 144, 2368, _q4_k),
        (14, "Q6_K", 256, 210, 3360, _q6_k),
    )
}
