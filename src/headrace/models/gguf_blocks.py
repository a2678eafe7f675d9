"""Block formats of GGUF tensors: packed bytes -> float32, in the same floating point steps as the `gguf` package.

A tensor is a run of blocks; a block holds `block_size` values in `block_bytes` bytes. Values of one byte or less lie "group by group":
the lowest bits of a group's bytes are the first values, the next bits the following ones. A K block (256 values) has its own scales
for sub-blocks of 16 or 32 values, themselves scaled by one float16.

Shape suffixes: N blocks, S sub-blocks of a block, V values.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.models.gguf_formats import BlockFormat

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_VALUES_AT_ONCE = 1 << 18  # the temporaries of so many values stay in the processor's cache


def dequantize(raw: Bytes, block_format: BlockFormat) -> Floats:
    """`raw`: uint8, whole blocks. Returns float32 [values], writable, not aliasing `raw`."""
    blocks = raw.reshape(-1, block_format.block_bytes)
    out = np.empty((len(blocks), block_format.block_size), dtype=np.float32)
    step = max(1, _VALUES_AT_ONCE // block_format.block_size)
    unpack = _UNPACK[block_format.name]
    for first in range(0, len(blocks), step):
        out[first : first + step] = unpack(blocks[first : first + step])
    return out.reshape(-1)


def _float16(blocks: Bytes, offset: int) -> Floats:
    """The float16 at a byte offset of each block, as float32 [N, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _fields(packed: Bytes, *, bits: int, group: int) -> Bytes:
    """[N, bytes] -> [N, V]: fields of `bits` bits, low ones first, over groups of `group` bytes."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return ((packed.reshape(len(packed), -1, 1, group) >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


def _q4_0(blocks: Bytes) -> Floats:
    q = _fields(blocks[:, 2:], bits=4, group=16).view(np.int8) - np.int8(8)
    return q.astype(np.float32) * _float16(blocks, 0)


def _q4_1(blocks: Bytes) -> Floats:
    out = _fields(blocks[:, 4:], bits=4, group=16).astype(np.float32)
    out *= _float16(blocks, 0)
    out += _float16(blocks, 2)
    return out


def _with_fifth_bit(high: Bytes, low: Bytes) -> Bytes:
    return _fields(low, bits=4, group=16) | (np.unpackbits(high, axis=-1, bitorder="little") << np.uint8(4))


def _q5_0(blocks: Bytes) -> Floats:
    q = _with_fifth_bit(blocks[:, 2:6], blocks[:, 6:]).view(np.int8) - np.int8(16)
    return q.astype(np.float32) * _float16(blocks, 0)


def _q5_1(blocks: Bytes) -> Floats:
    out = _with_fifth_bit(blocks[:, 4:8], blocks[:, 8:]).astype(np.float32)
    out *= _float16(blocks, 0)
    out += _float16(blocks, 2)
    return out


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _float16(blocks, 0)


def _sub_blocks(values: NDArray[np.uint8] | NDArray[np.int8], scale_NS: Floats, minimum_NS: Floats | None = None) -> Floats:
    """value * scale - minimum, with one scale and minimum per sub-block."""
    count, subs = scale_NS.shape
    out = values.reshape(count, subs, -1).astype(np.float32)
    out *= scale_NS[:, :, None]
    if minimum_NS is not None:
        out -= minimum_NS[:, :, None]
    return out.reshape(count, -1)


def _q2_k(blocks: Bytes) -> Floats:
    scales = blocks[:, :16]
    scale_NS = _float16(blocks, 80) * (scales & np.uint8(15)).astype(np.float32)
    minimum_NS = _float16(blocks, 82) * (scales >> np.uint8(4)).astype(np.float32)
    return _sub_blocks(_fields(blocks[:, 16:80], bits=2, group=32), scale_NS, minimum_NS)


def _q3_k(blocks: Bytes) -> Floats:
    low = _fields(blocks[:, 96:104], bits=4, group=8)
    high = _fields(blocks[:, 104:108], bits=2, group=4)
    scales = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    absent = _fields(blocks[:, :32], bits=1, group=32) ^ np.uint8(1)  # a clear bit stands for "4 less"
    q = _fields(blocks[:, 32:96], bits=2, group=32).view(np.int8) - (absent << np.uint8(2)).view(np.int8)
    return _sub_blocks(q, _float16(blocks, 108) * scales.astype(np.float32))


def _six_bit_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """12 bytes -> 8 scales and 8 minima of 6 bits: the first four whole, the last four split over nibbles and top bits."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    top = np.uint8(0x30)
    scales = np.concatenate((first & np.uint8(63), (third & np.uint8(15)) | ((first >> np.uint8(2)) & top)), axis=1)
    minima = np.concatenate((second & np.uint8(63), (third >> np.uint8(4)) | ((second >> np.uint8(2)) & top)), axis=1)
    return scales, minima


def _q4_k(blocks: Bytes) -> Floats:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    scale_NS = _float16(blocks, 0) * scales.astype(np.float32)
    minimum_NS = _float16(blocks, 2) * minima.astype(np.float32)
    return _sub_blocks(_fields(blocks[:, 16:], bits=4, group=32), scale_NS, minimum_NS)


def _q5_k(blocks: Bytes) -> Floats:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    scale_NS = _float16(blocks, 0) * scales.astype(np.float32)
    minimum_NS = _float16(blocks, 2) * minima.astype(np.float32)
    high = _fields(blocks[:, 16:48], bits=1, group=32)
    return _sub_blocks(_fields(blocks[:, 48:], bits=4, group=32) | (high << np.uint8(4)), scale_NS, minimum_NS)


def _q6_k(blocks: Bytes) -> Floats:
    low = _fields(blocks[:, :128], bits=4, group=64)
    high = _fields(blocks[:, 128:192], bits=2, group=32)
    q = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    return _sub_blocks(q, _float16(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32))


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4")


def _f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _f64(blocks: Bytes) -> Floats:
    return blocks.view("<f8").astype(np.float32)


_UNPACK: dict[str, Callable[[Bytes], Floats]] = {  # [N, bytes of a block] -> [N, V]
    "F32": _f32,
    "F16": _f16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "F64": _f64,
    "BF16": _bf16,
}
