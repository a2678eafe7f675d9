"""What a packed model is made from: the matrices as bytes in a format of the CPU kernels, the vectors as float32."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import torch
from torch import Tensor

from headrace.errors import ModelLoadError
from headrace.kernels import cpu
from headrace.models.quantize import BLOCK, Q4_1, Q8_0, quantize
from headrace.models.weights import GGUFSource, WeightSource

Bits = Literal[8, 4]
FLOAT16 = 1  # GGUF's number
TYPE_NUMBERS = {torch.float32: 0, torch.float16: FLOAT16, torch.bfloat16: 30}


class PackedSource(Protocol):
    where: str

    def shape(self, name: str) -> tuple[int, ...]: ...

    def type_number(self, name: str) -> int:
        """The format, one of `cpu.FORMATS`, that a matrix is packed in."""
        ...

    def rows(self, name: str) -> Tensor:
        """uint8 [rows, bytes of a row] of a matrix, in its format."""
        ...

    def vector(self, name: str) -> Tensor:
        """float32."""
        ...


class BlockSource:
    """A GGUF file's own blocks; matrices in a format without a kernel become float16."""

    def __init__(self, source: GGUFSource) -> None:
        self._source, self.where = source, source.where

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def type_number(self, name: str) -> int:
        number = self._source.file.tensors[name].type_number
        return number if number in cpu.FORMATS else FLOAT16

    def rows(self, name: str) -> Tensor:
        if self._source.file.tensors[name].type_number in cpu.FORMATS:
            return self._source.load_rows(name)
        return _as_bytes(self._source.load(name), torch.float16, name, self.where, "load it without --quantization gguf")

    def vector(self, name: str) -> Tensor:
        return self._source.load(name)


class FloatSource:
    """Any checkpoint with its matrices in `dtype`."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self._source, self._dtype, self.where = source, dtype, source.where

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def type_number(self, name: str) -> int:
        return TYPE_NUMBERS[self._dtype]

    def rows(self, name: str) -> Tensor:
        return _as_bytes(self._source.load(name), self._dtype, name, self.where, "use --dtype float32")

    def vector(self, name: str) -> Tensor:
        return self._source.load(name).float()


class QuantizedSource:
    """Any checkpoint with its matrices in 8 or 4 bits, made while it is loaded. Embeddings and the head, named in `eights`, take 8 at least."""

    def __init__(self, source: WeightSource, bits: Bits, eights: Iterable[str]) -> None:
        self._source, self._bits, self._eights, self.where = source, bits, frozenset(eights), source.where

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def type_number(self, name: str) -> int:
        if self.shape(name)[-1] % BLOCK:
            return FLOAT16  # rows that blocks don't fit
        return Q8_0 if self._bits == 8 or name in self._eights else Q4_1

    def rows(self, name: str) -> Tensor:
        type_number, values = self.type_number(name), self._source.load(name)
        if type_number == FLOAT16:
            return _as_bytes(values, torch.float16, name, self.where, "use --quantization none")
        try:
            return quantize(values, type_number)
        except ValueError as error:
            raise ModelLoadError(f"{self.where}: tensor {name!r} has {error}; use --quantization none.") from error

    def vector(self, name: str) -> Tensor:
        return self._source.load(name).float()


def _as_bytes(values: Tensor, dtype: torch.dtype, name: str, where: str, remedy: str) -> Tensor:
    narrowed = values.to(dtype).contiguous()
    if dtype == torch.float16 and values.dtype != dtype and not bool(narrowed.isfinite().all()):
        raise ModelLoadError(f"{where}: tensor {name!r} has values beyond float16; {remedy}.")
    return narrowed.view(torch.uint8)
