"""Tensors of the protocol as plain values and back; both as raw bytes and as typed contents."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import InvalidRequest
from headrace.server.body import MAX_JSON_VALUES

# datatype -> (little-endian dtype of the raw form, field of the typed form)
NUMBERS = {
    "BOOL": ("?", "bool_contents"),
    "INT8": ("<i1", "int_contents"),
    "INT16": ("<i2", "int_contents"),
    "INT32": ("<i4", "int_contents"),
    "INT64": ("<i8", "int64_contents"),
    "UINT8": ("<u1", "uint_contents"),
    "UINT16": ("<u2", "uint_contents"),
    "UINT32": ("<u4", "uint_contents"),
    "UINT64": ("<u8", "uint64_contents"),
    "FP32": ("<f4", "fp32_contents"),
    "FP64": ("<f8", "fp64_contents"),
}
MAX_RANK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    values: list[Any]  # in row-major order; BYTES are texts


def read_tensors(request: Any) -> list[Tensor]:
    """The inputs of a `ModelInferRequest`. Raises `InvalidRequest` that names the input at fault."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequest(f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs; send one for each.")
    tensors: dict[str, Tensor] = {}
    for position, item in enumerate(request.inputs):
        name = item.name[:200]
        if name in tensors:
            raise InvalidRequest(f"The input {name} is given twice; send it once.", param=name)
        if item.parameters:
            raise InvalidRequest(f"The input {name} has parameters; shared memory is not supported, send the tensor itself.", param=name)
        count = number_of_elements(name, item.shape)
        typed = [] if item.datatype not in NUMBERS else getattr(item.contents, NUMBERS[item.datatype][1])
        if item.datatype == "BYTES":
            values = texts(name, raw_elements(name, raw[position], count) if raw else list(item.contents.bytes_contents))
        elif item.datatype not in NUMBERS:
            known = ", ".join((*NUMBERS, "BYTES"))
            raise InvalidRequest(f"The input {name} has the datatype {item.datatype[:40]!r}; use one of {known}.", param=name)
        else:
            values = raw_numbers(name, item.datatype, raw[position]) if raw else list(typed)
        if len(values) != count:
            raise InvalidRequest(f"The input {name} has {len(values)} elements, but its shape {list(item.shape)} means {count}.", param=name)
        if item.datatype == "FP32":
            values = [float(str(np.float32(value))) for value in values]  # 0.7 means 0.7, as it does in JSON
        tensors[name] = Tensor(name=name, shape=tuple(item.shape), values=values)
    return list(tensors.values())


def number_of_elements(name: str, shape: Any) -> int:
    if len(shape) > MAX_RANK or any(size < 0 for size in shape):
        raise InvalidRequest(f"The input {name} has no usable shape: at most {MAX_RANK} sizes, none below 0.", param=name)
    count = math.prod(shape)
    if count > MAX_JSON_VALUES:
        raise InvalidRequest(f"The input {name} holds more than {MAX_JSON_VALUES} elements; send fewer.", param=name)
    return count


def raw_numbers(name: str, datatype: str, data: bytes) -> list[Any]:
    dtype = np.dtype(NUMBERS[datatype][0])
    if len(data) % dtype.itemsize or len(data) > MAX_JSON_VALUES * dtype.itemsize:
        raise InvalidRequest(f"The raw contents of the input {name} are {len(data)} bytes, which are no {datatype} of its shape.", param=name)
    values: list[Any] = np.frombuffer(data, dtype).tolist()
    return values


def raw_elements(name: str, data: bytes, count: int) -> list[bytes]:
    """Each element behind its length in four bytes; at most `count` and one more are read."""
    elements: list[bytes] = []
    start = 0
    while start < len(data) and len(elements) <= count:
        (size,) = struct.unpack_from("<I", data, start) if len(data) - start >= 4 else (len(data),)
        start += 4 + size
        if start > len(data):
            raise InvalidRequest(f"The raw contents of the input {name} are torn: each text comes behind its length in four bytes.", param=name)
        elements.append(data[start - size : start])
    return elements


def texts(name: str, elements: list[bytes]) -> list[str]:
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        raise InvalidRequest(f"The input {name} is no UTF-8 text.", param=name) from None


def add_output(response: Any, name: str, datatype: str, values: list[Any], *, raw: bool) -> None:
    """Adds a vector: of BYTES (texts) or of INT64."""
    output = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    if datatype == "BYTES":
        elements = [value.encode() for value in values]
        if raw:
            response.raw_output_contents.append(b"".join(struct.pack("<I", len(element)) + element for element in elements))
        else:
            output.contents.bytes_contents.extend(elements)
    elif raw:
        response.raw_output_contents.append(np.asarray(values, "<i8").tobytes())
    else:
        output.contents.int64_contents.extend(values)
