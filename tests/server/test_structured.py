"""Which form of an answer a body asks for, and which fault is named where it asks for none that makes sense."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.sampling_params import StructuredOutputs
from headrace.server.schema import CompletionBody, validate
from headrace.server.structured import structured_outputs
from tests.server.fakes import World

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


def form(**fields: Any) -> StructuredOutputs | None:
    return structured_outputs(validate(CompletionBody, {"prompt": "x", **fields}))


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", **fields}}


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA, "response_format.schema"),
        ({"response_format": json_schema(schema=SCHEMA, strict=True)}, "json_schema", SCHEMA, "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema=True, strict=None, description="d")}, "json_schema", True, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "json_object": False}}, "regex", "a", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "ü"]}}, "choice", ["a", "ü"], "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"', "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
        ({"guided_choice": ["a"], "response_format": {"type": "text"}}, "choice", ["a"], "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"', "guided_grammar"),
    ],
)
def test_forms(fields: dict[str, Any], kind: str, source: Any, param: str) -> None:
    found = form(**fields)
    assert found is not None
    assert (found.kind, found.param) == (kind, param)
    assert found.source == source or json.loads(found.source) == source
    if isinstance(source, dict):
        assert list(json.loads(found.source)["properties"]) == ["b", "a"]  # the order of the answer's properties


@pytest.mark.parametrize("fields", [{}, {"response_format": None, "guided_json": None}, {"response_format": {"type": "text"}}])
def test_no_form(fields: dict[str, Any]) -> None:
    assert form(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": []}, "response_format"),
        ({"response_format": {"type": ["text"]}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema()}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema=7)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema={}, strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": json_schema(schema={}, other=1)}, "response_format.json_schema.other"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": 7}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"guided_choice": "red"}, "guided_choice"),
    ],
)
def test_faults(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        form(**fields)
    assert caught.value.param == param


async def test_the_form_reaches_the_engine_on_both_routes(world: World) -> None:
    assert (await world.complete(prompt=["a", "b"], structured_outputs={"regex": "a"})).status_code == 200
    assert (await world.chat(response_format={"type": "json_object"}, n=2)).status_code == 200
    found = [request.params.structured for request in world.generator.requests]
    assert found == [StructuredOutputs(kind="regex", source="a", param="structured_outputs.regex")] * 2 + [
        StructuredOutputs(kind="json_object", param="response_format")
    ]


async def test_a_fault_is_a_400(world: World) -> None:
    response = await world.chat(response_format={"type": "json_schema"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format.json_schema"
    assert world.generator.requests == []
