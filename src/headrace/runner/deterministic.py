"""Makes a model's results independent of the batch, in every dtype.

A matrix product picks its kernel, and so the order of its sums, by the number of rows. Here every part that holds weights sees always the
same number of rows: its tokens are cut into tiles of `TILE`, the last one filled up with zeros. What a token's row gives does not depend
on its place in the tile or on its neighbours, so a token's hidden state is the same to the last bit alone, batched, cut into chunks or
after a prefix hit. Attention does the same for itself (`AttentionMetadata.deterministic`). Price: a decode step of a few rows
computes 16, and long prompts are computed in many small products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.models.decoder import Decoder
from headrace.models.layers import MLP, Linear, RMSNorm
from headrace.models.packed import PackedMLP

TILE = 16  # rows; a multiple of 16 keeps elementwise kernels on one code path for all of a tile


def make_deterministic(model: Decoder) -> None:
    """Changes `model` in place."""
    for module in model.modules():
        if isinstance(module, PackedMLP):  # our kernels keep the promise by themselves, and want to know which tokens they have
            module.activation = tiled(module.activation)
        elif isinstance(module, Linear | MLP | RMSNorm):
            module.forward = tiled(module.forward)
    model.compute_logits = tiled(model.compute_logits)


def tiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`function` on x [T, ...], called with [TILE, ...] only. Its rows must not depend on each other."""

    def call(x: Tensor) -> Tensor:
        count = x.shape[0]
        missing = -count % TILE
        if missing:
            x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))
        if x.shape[0] == TILE:
            return function(x.contiguous())[:count]
        return torch.cat([function(part.contiguous()) for part in x.split(TILE)])[:count]

    return call
