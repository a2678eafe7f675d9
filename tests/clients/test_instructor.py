"""Instructor, in each of the ways in which it can ask for a form."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
import pytest

from tests.clients.conftest import KEY, Server
from tests.clients.tasks import ANSWER, FORM_QUESTION, QUESTION, Place

MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]


def client(server: Server, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=server.openai_url, api_key=KEY, max_retries=0), mode=mode)


def request(server: Server, question: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 200,
        "max_retries": 0,
        **fields,
    }


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_typed_and_streamed(server: Server, mode: instructor.Mode):
    place = client(server, mode).create(**request(server, FORM_QUESTION), response_model=Place)
    *_, last = client(server, mode).create_partial(**request(server, FORM_QUESTION), response_model=Place)
    assert isinstance(place, Place)
    assert isinstance(Place.model_validate(last.model_dump()), Place)  # the parts of a stream have names of their own in the prompt


def test_chat_without_a_form(server: Server):
    answer = client(server, instructor.Mode.TOOLS).create(**request(server, QUESTION, max_tokens=24), response_model=None)
    assert ANSWER in answer.choices[0].message.content


def test_anthropic(server: Server):
    wrapped = instructor.from_anthropic(anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0))
    fields = request(server, FORM_QUESTION)
    assert isinstance(wrapped.create(**fields, extra_body={"temperature": fields.pop("temperature")}, response_model=Place), Place)
