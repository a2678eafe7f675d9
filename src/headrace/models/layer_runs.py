"""Neighbouring layers of a packed decoder that one call of the kernels computes: between them there is nothing left for Python to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels import cpu
from headrace.kernels.attention import AttentionMetadata
from headrace.models.rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConstants:
    """What layers of a run have in common."""

    eps: float  # of both norms
    num_heads: int
    inner: int
    scale: float
    logit_softcap: float | None


class FusedLayer(Protocol):
    """A layer of which `cpu.layers_add_` knows everything."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Its norms and matrices, in the order that `cpu.layers_add_` takes them."""
        ...

    @property
    def formats(self) -> tuple[int, ...]:
        """Of the four matrices."""
        ...

    @property
    def window(self) -> int: ...


class LayerRun:
    """Layers `first`, `first` + 1, ... of a model."""

    def __init__(self, first: int, layers: Sequence[FusedLayer], constants: LayerConstants) -> None:
        self.first, self.last = first, first + len(layers)  # the last one is not part of it
        self._layers = list(layers)
        self._constants = constants
        self._windows = [layer.window for layer in layers]
        self._formats = [number for layer in layers for number in layer.formats]
        self._tensors = self._gather()

    def add(self, h_TE: Tensor, cos_sin: tuple[Tensor, Tensor], kv_caches: Sequence[tuple[Tensor, Tensor]], meta: AttentionMetadata) -> None:
        """Changes h. kv_caches: of all layers of the model."""
        constants = self._constants
        cpu.layers_add_(
            h_TE,
            self._gather() if torch.compiler.is_compiling() else self._tensors,  # what is compiled knows tensors by their names in the model
            self._formats,
            constants.eps,
            constants.num_heads,
            constants.inner,
            cos_sin,
            [cache for pair in kv_caches[self.first : self.last] for cache in pair],
            meta,
            scale=constants.scale,
            windows=self._windows,
            logit_softcap=constants.logit_softcap,
        )

    def _gather(self) -> list[Tensor]:
        return [tensor for layer in self._layers for tensor in layer.tensors()]


def find_runs(layers: Sequence[FusedLayer], constants: Sequence[LayerConstants | None], ropes: Sequence[RopeConfig | None]) -> list[LayerRun | int]:
    """All layers of a model in order: runs, and the numbers of layers that need calls of their own (their constants are None)."""
    found: list[LayerRun | int] = []
    for (shared, _), members in groupby(range(len(layers)), lambda i: (constants[i], ropes[i])):
        indices = list(members)
        found += indices if shared is None else [LayerRun(indices[0], [layers[i] for i in indices], shared)]
    return found
