"""Spans to a collector of OpenTelemetry, over OTLP/HTTP. Nothing of OpenTelemetry is imported before a `Tracing` is made.

A span is made where a request goes on, handed over without waiting, and sent by a thread of its own; where the collector doesn't answer, spans
are dropped. Which traces are kept is the caller's choice (`traceparent`), and for those that begin here that of OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

Value = str | bool | int | float | Sequence[str]

CLOSE_S = 3.0  # for spans that are still to be sent at the end

logger = logging.getLogger("headrace.tracing")


class Span:
    """One span. Times are seconds of the monotonic clock."""

    def __init__(self, tracer: Any, span: Any, offset_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._offset_ns = offset_ns  # from the monotonic clock to Unix time
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.span_id = f"{context.span_id:016x}"
        self.sampled: bool = context.trace_flags.sampled

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(dict(attributes))

    def child(self, name: str, begin: float, end: float, attributes: Mapping[str, Value] | None = None) -> None:
        """A part that has ended; also after the end of the whole."""
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(self._span)
        part = self._tracer.start_span(name, context=context, start_time=self._unix_ns(begin), attributes=attributes and dict(attributes))
        part.end(self._unix_ns(max(begin, end)))

    def end(self, at: float, *, error: str | None = None) -> None:
        """`error`: its type, where it is the server's."""
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR))
            self._span.set_attribute("error.type", error)
        self._span.end(self._unix_ns(at))

    def _unix_ns(self, at: float) -> int:
        return int(at * 1e9) + self._offset_ns


class Tracing:
    """Sends spans to `endpoint`, a whole URL. Raises `ImportError` where OpenTelemetry isn't installed.

    Everything else is set by the OTEL_* variables of the SDK: headers and certificates, sampler, resource, sizes of batches.
    """

    def __init__(self, endpoint: str, *, version: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):  # they would write a line for every batch
            logging.getLogger(name).setLevel(logging.CRITICAL)
        given = OTELResourceDetector().detect().attributes
        resource = Resource.create({SERVICE_VERSION: version} | ({} if SERVICE_NAME in given else {SERVICE_NAME: "headrace"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(_reporting(self._exporter, endpoint)))
        self._tracer = self._provider.get_tracer("headrace", version)

    def begin(self, name: str, *, at: float, parent: tuple[str, str, bool] | None = None, state: Sequence[str] = ()) -> Span:
        """The span of a request. `parent`: trace id, span id (hexadecimal) and whether it is sampled; `state`: the headers `tracestate`."""
        from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, TraceState, set_span_in_context

        context = None
        if parent is not None:
            trace_id, span_id, sampled = parent
            flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
            remote = SpanContext(int(trace_id, 16), int(span_id, 16), True, flags, TraceState.from_header(list(state)))
            context = set_span_in_context(NonRecordingSpan(remote))
        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(name, context=context, kind=SpanKind.SERVER, start_time=int(at * 1e9) + offset_ns)
        return Span(self._tracer, span, offset_ns)

    def close(self) -> None:
        """Sends what there is, for a few seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing end", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()  # ends its attempts


def _reporting(exporter: Any, endpoint: str) -> Any:
    """The exporter, with one line in the log when sending begins to fail and one when it works again."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Reporting(SpanExporter):
        failing = False

        def export(self, spans: Any) -> Any:
            result = exporter.export(spans)
            failed = result is not SpanExportResult.SUCCESS
            if failed != self.failing:
                self.failing = failed
                if failed:
                    logger.warning("spans cannot be sent to %s; they are dropped until it takes them", endpoint)
                else:
                    logger.info("spans are sent to %s again", endpoint)
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return Reporting()
