"""The messages of the protocol, made of the compiled `inference.proto` and `status.proto`.

They live in a descriptor pool of their own: clients in the same process (tritonclient) register the same names in the default one.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"
POOL = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(files(__package__).joinpath("inference.binpb").read_bytes()).file:
    POOL.Add(_file)


def message(name: str) -> Any:
    """The class of a message, by its full name."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


ModelInferRequest = message("inference.ModelInferRequest")
ModelInferResponse = message("inference.ModelInferResponse")
ModelStreamInferResponse = message("inference.ModelStreamInferResponse")
Status = message("google.rpc.Status")
RetryInfo = message("google.rpc.RetryInfo")
