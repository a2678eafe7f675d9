"""A collector of OpenTelemetry in this process: takes spans over OTLP/HTTP, and keeps them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

Plain = str | bool | int | float | list[Any]


class Spans:
    """What has come. `status`: what a request is answered with."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.received: list[Any] = []  # opentelemetry.proto.trace.v1.Span
        self.resource: dict[str, Plain] = {}

    def take(self, data: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.resource = attributes(group.resource)
            for scope in group.scope_spans:
                assert scope.scope.name == "headrace"
                self.received += scope.spans

    def named(self, name: str) -> list[Any]:
        return [span for span in self.received if span.name == name]

    def one(self, name: str) -> Any:
        (span,) = self.named(name)
        return span


def attributes(holder: Any) -> dict[str, Plain]:
    """Of a span or a resource, as plain values."""
    return {item.key: _plain(item.value) for item in holder.attributes}


def _plain(value: Any) -> Plain:
    kind = value.WhichOneof("value")
    found: Plain = [_plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
    return found


@contextlib.contextmanager
def collector(port: int = 0) -> Iterator[Spans]:
    spans = Spans()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/v1/traces" or self.headers["Content-Type"] != "application/x-protobuf":
                self.send_error(404)
                return
            if spans.status == 200:
                spans.take(data)
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_response(spans.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    spans.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
