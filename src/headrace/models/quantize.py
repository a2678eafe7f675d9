"""Matrices to small integers in blocks of 32 values of a row, each block with its own float16 scale: the bytes that the CPU kernels pack.

`int8` makes GGUF's Q8_0 (8.5 bits a weight), `int4` its Q4_1 (5 bits: a scale and a minimum).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
Q4_1, Q8_0 = 3, 8  # GGUF's numbers
_ROWS_AT_ONCE = 1 << 19  # values whose temporaries are alive at once
_SHRINK = (1.0, 0.94, 0.88, 0.82)  # shares of a block's range that are tried: a narrower grid is finer, and cuts outliers off


def quantize(weight: Tensor, type_number: int) -> Tensor:
    """`weight`: [rows, columns], columns a multiple of BLOCK. Returns uint8 [rows, bytes of a row]. A scale beyond float16 raises ValueError."""
    make = {Q4_1: _q4_1, Q8_0: _q8_0}[type_number]
    step = max(1, _ROWS_AT_ONCE // weight.shape[1])
    rows = [make(part.float().reshape(-1, BLOCK)).reshape(len(part), -1) for part in weight.split(step)]
    return torch.cat(rows)


def _bytes(*halves_N1: Tensor) -> list[Tensor]:
    parts = [half.to(torch.float16) for half in halves_N1]
    if not all(bool(part.isfinite().all()) for part in parts):
        raise ValueError("values that are not finite, or too large for a float16 scale")
    return [part.contiguous().view(torch.uint8) for part in parts]


def _q8_0(blocks_NV: Tensor) -> Tensor:
    (scale_bytes,) = _bytes(blocks_NV.abs().amax(1, keepdim=True) / 127)
    scale_N1 = scale_bytes.view(torch.float16).float()
    q = (blocks_NV / torch.where(scale_N1 == 0, 1.0, scale_N1)).round().clamp(-127, 127)
    return torch.cat((scale_bytes, q.to(torch.int8).view(torch.uint8)), dim=1)


def _q4_1(blocks_NV: Tensor) -> Tensor:
    low_N1, high_N1 = blocks_NV.aminmax(dim=1, keepdim=True)
    best, best_error = None, None
    for share in _SHRINK:
        cut = (high_N1 - low_N1) * ((1 - share) / 2)
        candidate = _fit(blocks_NV, low_N1 + cut, high_N1 - cut)
        error_N1 = (_restored(*candidate) - blocks_NV).square().sum(1, keepdim=True)
        if best is None or best_error is None:
            best, best_error = candidate, error_N1
        else:
            better = error_N1 < best_error
            best = tuple(torch.where(better, new, old) for new, old in zip(candidate, best, strict=True))
            best_error = torch.where(better, error_N1, best_error)
    assert best is not None
    q, scale_N1, minimum_N1 = best
    q = q.to(torch.uint8)
    nibbles = q[:, : BLOCK // 2] | (q[:, BLOCK // 2 :] << 4)
    return torch.cat((*_bytes(scale_N1, minimum_N1), nibbles), dim=1)


def _fit(blocks_NV: Tensor, low_N1: Tensor, high_N1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values 0..15 on a grid from low to high, then the scale and minimum (float16) that suit these values best in the least squares sense."""
    scale_N1 = (high_N1 - low_N1) / 15
    q = ((blocks_NV - low_N1) / torch.where(scale_N1 == 0, 1.0, scale_N1)).round().clamp(0, 15)
    q_mean, mean = q.mean(1, keepdim=True), blocks_NV.mean(1, keepdim=True)
    spread = (q - q_mean).square().sum(1, keepdim=True)
    slope = ((q - q_mean) * (blocks_NV - mean)).sum(1, keepdim=True) / torch.where(spread == 0, 1.0, spread)
    slope = torch.where(spread == 0, scale_N1, slope)
    return q, slope.half().float(), (mean - slope * q_mean).half().float()


def _restored(q: Tensor, scale_N1: Tensor, minimum_N1: Tensor) -> Tensor:
    return q * scale_N1 + minimum_N1
