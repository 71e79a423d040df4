"""The service of `inference.proto`: its messages, and what adds it to Serve's gRPC proxies.

The messages are made from a descriptor in code, so that no generated file ties the package to a
version of protobuf. Clients compile `inference.proto` themselves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = [
    "DESCRIPTOR",
    "Reply",
    "Request",
    "add_to_server",
    "event_bodies",
    "status_code",
]

_FIELD = descriptor_pb2.FieldDescriptorProto
_EVENT = b"data: "
_DONE = b"[DONE]"

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.UNIMPLEMENTED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.OUT_OF_RANGE,
    503: grpc.StatusCode.UNAVAILABLE,
}


def _descriptor() -> descriptor_pb2.FileDescriptorProto:
    """Return the descriptor of `inference.proto`."""
    file = descriptor_pb2.FileDescriptorProto(
        name="stepgraph/inference.proto", package="stepgraph", syntax="proto3"
    )
    request = file.message_type.add(name="Request")
    _add_field(request, "path", 1, _FIELD.TYPE_STRING)
    _add_field(request, "body", 2, _FIELD.TYPE_BYTES)
    headers = request.field.add(
        name="headers",
        number=3,
        label=_FIELD.LABEL_REPEATED,
        type=_FIELD.TYPE_MESSAGE,
        type_name=".stepgraph.Request.HeadersEntry",
    )
    headers.json_name = "headers"
    entry = request.nested_type.add(name="HeadersEntry")
    entry.options.map_entry = True
    _add_field(entry, "key", 1, _FIELD.TYPE_STRING)
    _add_field(entry, "value", 2, _FIELD.TYPE_STRING)
    _add_field(file.message_type.add(name="Reply"), "body", 1, _FIELD.TYPE_BYTES)
    service = file.service.add(name="Inference")
    types = {"input_type": ".stepgraph.Request", "output_type": ".stepgraph.Reply"}
    service.method.add(name="Call", **types)
    service.method.add(name="Stream", server_streaming=True, **types)
    return file


def _add_field(message: Any, name: str, number: int, kind: Any) -> None:
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL, type=kind)
    field.json_name = name


DESCRIPTOR = _descriptor()
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(DESCRIPTOR)
Request: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("stepgraph.Request"))
Reply: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("stepgraph.Reply"))


def add_to_server(servicer: Any, server: Any) -> None:
    """Add the service to a gRPC server: an entry of `grpc_servicer_functions` of Serve."""
    options = {
        "request_deserializer": Request.FromString,
        "response_serializer": Reply.SerializeToString,
    }
    handlers = {
        "Call": grpc.unary_unary_rpc_method_handler(servicer.Call, **options),
        "Stream": grpc.unary_stream_rpc_method_handler(servicer.Stream, **options),
    }
    name = "stepgraph.Inference"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def status_code(http_status: int) -> grpc.StatusCode:
    """Return the gRPC status for an HTTP status of an error."""
    return _CODES.get(http_status, grpc.StatusCode.INTERNAL)


async def event_bodies(parts: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event in parts of a body, without the `[DONE]`."""
    rest = b""
    async for part in parts:
        *events, rest = (rest + part).split(b"\n\n")
        for event in events:
            data = event.removeprefix(_EVENT)
            if data != _DONE:
                yield data
    if rest:  # a response that is no stream
        yield rest
