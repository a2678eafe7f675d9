"""Reader of GGUF files (versions 2 and 3, little endian), memory-mapped.

Layout: magic, version, counts; metadata (key, type, value); tensor table (name, dims, type, offset); padding; data.
The header is checked against the file's size while it is read, so a torn or hostile file is refused before anything is allocated
from its numbers. Reading a header needs neither torch nor numpy, and texts of its arrays are made when somebody reads them: the process
that only wants the tokenizer stays small, and so does the one that only wants the tensors.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from headrace.errors import ModelLoadError
from headrace.models.gguf_formats import FORMATS, OTHER_FORMATS, BlockFormat

if TYPE_CHECKING:
    import numpy as np
    import torch

_MAX_ARRAY_ITEMS = 1 << 24  # of all metadata arrays together
_MAX_ARRAY_DEPTH = 4
_MAX_DIMS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # metadata type -> struct code
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # before each text


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # rows first, as torch writes it (the file has it the other way round)
    type_number: int
    offset: int  # bytes from the start of the file
    num_bytes: int  # 0 for a format that isn't known here

    @property
    def format(self) -> BlockFormat | None:
        """None: a format that Headrace doesn't read."""
        return FORMATS.get(self.type_number)

    @property
    def type_name(self) -> str:
        if self.format is not None:
            return self.format.name
        return OTHER_FORMATS.get(self.type_number, f"number {self.type_number}")


class GGUFTexts(Sequence[str]):
    """An array of texts, which stay in the file until they are read: a vocabulary is a hundred thousand of them.

    Reading raises ModelLoadError for a text that is no UTF-8.
    """

    def __init__(self, data: mmap.mmap, start: int, count: int, *, where: str) -> None:
        self._data, self._start, self._count, self._where = data, start, count, where

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        data, position, unpack_length = self._data, self._start, _LENGTH.unpack_from
        try:
            for _ in range(self._count):
                start = position + _LENGTH.size
                position = start + unpack_length(data, position)[0]
                yield data[start:position].decode()
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{self._where}: torn GGUF file: a text in the header is not UTF-8. Fetch it again.") from error

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """From the first one on each time: for a few of them."""
        return list(self)[index]


def _end_of_texts(data: mmap.mmap, position: int, count: int) -> int:
    """The byte behind `count` texts, which may lie past the end."""
    size, unpack_length = len(data), _LENGTH.unpack_from
    for _ in range(count):
        position += _LENGTH.size + unpack_length(data, position)[0]
        if position > size:
            break
    return position


class GGUFFile:
    """`metadata`: key -> value (numbers, strings, sequences). `tensors`: name -> GGUFTensor, in the file's order.

    Raises ModelLoadError, naming the file, where it is missing, torn, or not a GGUF file of a known version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 24:
                    raise ModelLoadError(f"{self.path}: torn GGUF file, {size} bytes are less than a header. Fetch it again.")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"{self.path}: can't be read: {error.strerror}.") from error
        self._position = 0
        self._array_items = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._read_header()
        except struct.error as error:
            raise self._torn("it ends within the header") from error
        except UnicodeDecodeError as error:
            raise self._torn("a text in the header is not UTF-8") from error

    def dequantize(self, name: str) -> torch.Tensor:
        """float32 tensor of the file's shape. Raises ModelLoadError for a format that isn't read here."""
        import torch

        from headrace.models.gguf_blocks import dequantize

        tensor = self._readable(name)
        assert tensor.format is not None
        return torch.from_numpy(dequantize(self._bytes(tensor), tensor.format)).view(tensor.shape)

    def rows(self, name: str) -> torch.Tensor:
        """uint8 [rows, bytes of a row]: a copy of a matrix's blocks as they lie in the file. Raises ModelLoadError as `dequantize` does."""
        import torch

        tensor = self._readable(name)
        return torch.from_numpy(self._bytes(tensor).copy()).view(tensor.shape[0], -1)

    def _readable(self, name: str) -> GGUFTensor:
        tensor = self.tensors[name]
        if tensor.format is None:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} has the format {tensor.type_name}, which is not supported. "
                f"Supported are {', '.join(f.name for f in FORMATS.values())}; fetch the model in one of them."
            )
        return tensor

    def _bytes(self, tensor: GGUFTensor) -> np.ndarray:
        import numpy as np

        return np.frombuffer(self._data, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)

    def _torn(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: torn GGUF file: {reason}. Fetch it again.")

    def _take(self, code: str) -> Any:
        reader = struct.Struct("<" + code)
        (value,) = reader.unpack_from(self._data, self._position)
        self._position += reader.size
        return value

    def _take_string(self) -> str:
        length = self._take("Q")
        if length > len(self._data) - self._position:
            raise self._torn(f"a text of {length} bytes goes past its end")
        self._position += length
        return str(self._data[self._position - length : self._position], "utf-8")

    def _take_value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])
        if kind == _STRING:
            return self._take_string()
        if kind != _ARRAY or depth == _MAX_ARRAY_DEPTH:
            raise self._torn(f"metadata of type {kind} at depth {depth}")
        item_kind, count = self._take("I"), self._take("Q")
        self._array_items += count
        if self._array_items > _MAX_ARRAY_ITEMS:
            raise self._torn(f"its metadata arrays hold more than {_MAX_ARRAY_ITEMS} items")
        if item_kind in _SCALARS:
            reader = struct.Struct(f"<{count}{_SCALARS[item_kind]}")
            values = list(reader.unpack_from(self._data, self._position)) if count else []
            self._position += reader.size
            return values
        if item_kind == _STRING:
            return self._take_strings(count)
        return [self._take_value(item_kind, depth + 1) for _ in range(count)]

    def _take_strings(self, count: int) -> GGUFTexts:
        start = self._position
        self._position = _end_of_texts(self._data, start, count)
        if self._position > len(self._data):
            raise self._torn("a list of texts goes past its end")
        return GGUFTexts(self._data, start, count, where=str(self.path))

    def _read_header(self) -> None:
        magic = self._data[:4]
        if magic != b"GGUF":
            raise ModelLoadError(f"{self.path}: not a GGUF file (it starts with {magic!r}).")
        self._position = 4
        version = self._take("I")
        if version not in (2, 3):
            hint = "it is big endian" if version & 0xFFFF == 0 else "convert it again with a current converter"
            raise ModelLoadError(f"{self.path}: GGUF version {version} is not supported, only 2 and 3; {hint}.")
        tensor_count, metadata_count = self._take("Q"), self._take("Q")
        if tensor_count * 24 + metadata_count * 13 > len(self._data):  # the least bytes that entries take
            raise self._torn(f"{tensor_count} tensors and {metadata_count} metadata entries don't fit in {len(self._data)} bytes")
        for _ in range(metadata_count):
            key = self._take_string()
            self.metadata[key] = self._take_value(self._take("I"))
        table = [self._take_tensor() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise self._torn(f"general.alignment is {alignment!r}")
        data_start = -(-self._position // alignment) * alignment
        for name, shape, type_number, offset in table:
            self._add_tensor(name, shape, type_number, data_start + offset)
        if self.metadata.get("split.count", 0) not in (0, 1):
            raise ModelLoadError(f"{self.path}: one of {self.metadata['split.count']} parts; merge them into one file (gguf-split --merge).")

    def _take_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._take_string(), self._take("I")
        if num_dims > _MAX_DIMS:
            raise self._torn(f"tensor {name!r} has {num_dims} dimensions")
        shape = tuple(reversed([self._take("Q") for _ in range(num_dims)]))
        return name, shape, self._take("I"), self._take("Q")

    def _add_tensor(self, name: str, shape: tuple[int, ...], type_number: int, offset: int) -> None:
        block_format = FORMATS.get(type_number)
        num_bytes = 0
        if block_format is not None:
            values = math.prod(shape)
            if values == 0 or (shape and shape[-1] % block_format.block_size):
                raise self._torn(f"tensor {name!r} of shape {shape} is no whole number of {block_format.name} blocks")
            num_bytes = values // block_format.block_size * block_format.block_bytes
        if offset + num_bytes > len(self._data):
            raise self._torn(f"tensor {name!r} ends at byte {offset + num_bytes}, the file at {len(self._data)}")
        if name in self.tensors:
            raise self._torn(f"tensor {name!r} is there twice")
        self.tensors[name] = GGUFTensor(name=name, shape=shape, type_number=type_number, offset=offset, num_bytes=num_bytes)
