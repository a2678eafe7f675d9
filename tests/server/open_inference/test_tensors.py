import struct
from typing import Any

import numpy as np
import pytest

from headrace.errors import InvalidRequest
from headrace.server.body import MAX_JSON_VALUES
from headrace.server.open_inference import wire
from headrace.server.open_inference.tensors import NUMBERS, add_output, read_tensors


def request(datatype: str, shape: list[int], *, raw: bytes | None = None, **contents: Any) -> Any:
    message = wire.ModelInferRequest()
    tensor = message.inputs.add(name="x", datatype=datatype, shape=shape)
    for name, values in contents.items():
        getattr(tensor.contents, name).extend(values)
    if raw is not None:
        message.raw_input_contents.append(raw)
    return message


def values(message: Any) -> list[Any]:
    (tensor,) = read_tensors(message)
    return tensor.values


@pytest.mark.parametrize("datatype", [name for name in NUMBERS if name != "BOOL"])
def test_numbers_are_read_raw_and_typed(datatype: str):
    dtype, field = NUMBERS[datatype]
    assert values(request(datatype, [2], raw=np.array([7, 1], dtype).tobytes())) == [7, 1]
    assert values(request(datatype, [1, 2], **{field: [7, 1]})) == [7, 1]


def test_booleans_texts_and_fractions():
    assert values(request("BOOL", [2], raw=b"\1\0")) == [True, False]
    assert values(request("BOOL", [1], bool_contents=[True])) == [True]
    assert values(request("BYTES", [2], raw=struct.pack("<I2sI", 2, "é".encode(), 0))) == ["é", ""]
    assert values(request("BYTES", [2], bytes_contents=["é".encode(), b""])) == ["é", ""]
    assert values(request("FP32", [1], raw=np.float32(0.7).tobytes())) == [0.7]
    assert values(request("FP32", [1], fp32_contents=[0.1])) == [0.1]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (request("INT64", [3], raw=bytes(16)), "2 elements"),
        (request("INT64", [1], raw=bytes(7)), "7 bytes"),
        (request("INT64", [2], int64_contents=[1]), "1 elements"),
        (request("INT64", [1]), "0 elements"),
        (request("INT64", [-1], raw=bytes(8)), "shape"),
        (request("INT64", [1] * 9, raw=bytes(8)), "shape"),
        (request("INT64", [2**40, 2**40]), "more than"),
        (request("INT64", [MAX_JSON_VALUES + 1]), "more than"),
        (request("INT64", [1], raw=bytes(8 * MAX_JSON_VALUES + 8)), "bytes"),
        (request("FP16", [1], raw=bytes(2)), "datatype"),
        (request("BYTES", [1], raw=struct.pack("<I", 5) + b"abc"), "torn"),
        (request("BYTES", [1], raw=b"ab"), "torn"),
        (request("BYTES", [1], raw=bytes(8)), "2 elements"),
        (request("BYTES", [1], bytes_contents=[b"\xff"]), "UTF-8"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(message: Any, words: str):
    with pytest.raises(InvalidRequest, match=words) as caught:
        read_tensors(message)
    assert caught.value.param == "x"


def test_inputs_that_contradict_each_other():
    twice = request("INT64", [1], int64_contents=[1])
    twice.inputs.add(name="x")
    with pytest.raises(InvalidRequest, match="twice"):
        read_tensors(twice)
    lacking = request("INT64", [1], raw=bytes(8))
    lacking.inputs.add(name="y", datatype="INT64", shape=[1])
    with pytest.raises(InvalidRequest, match="raw_input_contents has 1 entries for 2 inputs"):
        read_tensors(lacking)
    shared = request("INT64", [1])
    shared.inputs[0].parameters["shared_memory_region"].string_param = "a"
    with pytest.raises(InvalidRequest, match="shared memory"):
        read_tensors(shared)


@pytest.mark.parametrize("raw", [True, False])
def test_outputs_are_read_again(raw: bool):
    response = wire.ModelInferResponse()
    add_output(response, "a", "BYTES", ["é", ""], raw=raw)
    add_output(response, "b", "INT64", [2**40, -1], raw=raw)
    message = wire.ModelInferRequest(raw_input_contents=response.raw_output_contents)
    for output in response.outputs:
        message.inputs.add(name=output.name, datatype=output.datatype, shape=output.shape).contents.CopyFrom(output.contents)
    assert [tensor.values for tensor in read_tensors(message)] == [["é", ""], [2**40, -1]]
