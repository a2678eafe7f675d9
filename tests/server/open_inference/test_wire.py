"""The messages are the protocol's: as tritonclient has them, and as inference.proto says."""

import re
from importlib.resources import files
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc import service_pb2

from headrace.server.open_inference import wire

PROTO = files("headrace.server.open_inference").joinpath("inference.proto").read_text()
OURS = wire.POOL.FindFileByName("inference.proto")


def fields(message: Descriptor) -> dict[str, Any]:
    """All that decides how a message is written, with those inside of it."""
    found: dict[str, Any] = {
        field.name: (field.number, field.type, field.is_repeated, field.message_type and field.message_type.full_name) for field in message.fields
    }
    return found | {nested.name: fields(nested) for nested in message.nested_types}


@pytest.mark.parametrize("name", sorted(OURS.message_types_by_name))
def test_messages_are_those_of_tritonclient(name: str):
    assert fields(OURS.message_types_by_name[name]) == fields(service_pb2.DESCRIPTOR.message_types_by_name[name])


def test_calls_are_those_of_tritonclient():
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    methods = OURS.services_by_name["GRPCInferenceService"].methods
    assert len(methods) == 7
    for method in methods:
        other = theirs[method.name]
        kinds = (other.input_type.full_name, other.output_type.full_name, other.client_streaming, other.server_streaming)
        assert (method.input_type.full_name, method.output_type.full_name, method.client_streaming, method.server_streaming) == kinds


def test_the_compiled_file_is_the_proto():
    said = re.findall(r"^\s*(?:repeated )?(?:map<\w+, \w+>|[\w.]+) (\w+) = (\d+);", PROTO, re.MULTILINE)
    messages = list(OURS.message_types_by_name.values())
    messages += [nested for message in messages for nested in message.nested_types if not nested.GetOptions().map_entry]
    compiled = [(field.name, str(field.number)) for message in messages for field in message.fields]
    assert sorted(said) == sorted(compiled)
    assert re.findall(r"rpc (\w+)", PROTO) == [method.name for method in OURS.services_by_name["GRPCInferenceService"].methods]
