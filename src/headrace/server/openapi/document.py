"""OpenAPI 3.1 from the routes that are registered, the pydantic models that check bodies, and the tables of this package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route

from headrace import __version__
from headrace.server.messages.errors import speaks_anthropic
from headrace.server.messages.schema import MessageShape
from headrace.server.openapi.answers import SCHEMAS, TEXT, Schema, ref
from headrace.server.openapi.operations import FIELDS, OPERATIONS, OPTIONAL, Operation
from headrace.server.request_timeout import NAME as TIMEOUT
from headrace.server.schema import Message

PATH = "/openapi.json"
IMPLICIT_METHODS = {"HEAD", "OPTIONS"}
HEADERS: dict[str, Schema] = {
    "X-Request-Id": {"description": "The id of the request, as it came or a fresh one", "required": True, "schema": TEXT},
    "traceparent": {"description": "The trace of the request with a span of the server, where one came in", "schema": TEXT},
    **{
        f"x-ratelimit-{what}-{unit}": {"description": "Where the key has such a limit", "schema": TEXT if what == "reset" else {"type": "integer"}}
        for unit in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    },
}
TIMEOUT_SCHEMA: Schema = {"type": "number", "minimum": 0.001, "maximum": 999999}
RETRY_AFTER: Schema = {"description": "Seconds", "required": True, "schema": {"type": "integer", "minimum": 1}}


def registered(routes: Sequence[BaseRoute]) -> list[tuple[str, str]]:
    """(method, path) of each route, but for methods that every route has."""
    found = [route for route in routes if isinstance(route, Route)]
    return [(method, route.path_format) for route in found for method in sorted((route.methods or set()) - IMPLICIT_METHODS)]


def openapi(routes: Sequence[BaseRoute], *, secured: bool) -> dict[str, Any]:
    """The document, of all routes that stand in the table; a test holds that all do."""
    bodies = {operation.body for operation in OPERATIONS.values() if operation.body is not None}
    models = [(body, "validation") for body in (*sorted(bodies, key=lambda body: body.__name__), Message, MessageShape)]
    names, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for method, path in registered(routes):
        operation = OPERATIONS.get((method, path))
        if operation is None:
            continue
        body = None if operation.body is None else names[operation.body, "validation"]
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, body, secured=secured)
    components: dict[str, Any] = {
        "schemas": {**_body_schemas(definitions["$defs"]), **SCHEMAS},
        "responses": {name: response for schema in ("Error", "MessagesError") for name, response in _errors(schema).items()},
        "headers": {**HEADERS, "Retry-After": RETRY_AFTER},
    }
    if secured:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": __version__, "description": "An inference server for large language models."},
        "paths": paths,
        "components": components,
    }


def _body_schemas(schemas: dict[str, Schema]) -> dict[str, Schema]:
    for name, fields in FIELDS.items():
        schemas[name]["properties"].update(fields)
        required = [field for field in fields if (name, field) not in OPTIONAL]
        if required:
            schemas[name]["required"] = required
    return schemas


def _errors(schema: str) -> dict[str, Any]:
    statuses = sorted({status for operation in OPERATIONS.values() for status in operation.errors})
    content = {"application/json": {"schema": ref(schema)}}
    return {f"{schema}{status}": _response(HTTPStatus(status).phrase, content, retry=status in (429, 503)) for status in statuses}


def _operation(method: str, path: str, operation: Operation, body: dict[str, Any] | None, *, secured: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": "_".join((method.lower(), *re.findall(r"\w+", path))),
        "summary": operation.summary,
        "responses": _responses(path, operation),
    }
    parameters = [{"name": name, "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}} for name in re.findall(r"{(\w+)}", path)]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in (operation.query or {}).items()]
    if operation.body is not None and "deadline_ms" in operation.body.model_fields:
        parameters.append({"name": TIMEOUT, "in": "header", "description": "Seconds to the first token", "schema": TIMEOUT_SCHEMA})
    if parameters:
        described["parameters"] = parameters
    if body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if operation.form is not None:
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": operation.form}}}
    if secured and 401 in operation.errors:
        described["security"] = [{"bearer": []}, {"header": []}]
    return described


def _responses(path: str, operation: Operation) -> dict[str, Any]:
    if "/" in operation.answer:
        content: dict[str, Any] = {operation.answer: {} if operation.answer == "application/json" else {"schema": TEXT}}
    else:
        content = {"application/json": {"schema": ref(operation.answer)}}
    description = "The answer"
    if operation.events is not None:
        content["text/event-stream"] = {"schema": TEXT}
        description = f"The answer; with stream: true server-sent events, the data of which are {operation.events} objects"
    responses = {"200": _response(description, content)}
    for status in operation.answers_also:
        responses[str(status)] = _response(HTTPStatus(status).phrase, content)
    error = "MessagesError" if speaks_anthropic(path) else "Error"
    return responses | {str(status): {"$ref": f"#/components/responses/{error}{status}"} for status in operation.errors}


def _response(description: str, content: dict[str, Any], *, retry: bool = False) -> dict[str, Any]:
    names = (*HEADERS, "Retry-After") if retry else HEADERS
    return {"description": description, "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in names}, "content": content}
