"""Every field that the official clients offer is taken, or refused with a reason of its own; none is merely unknown."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from anthropic.types.output_config_param import OutputConfigParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.shared.reasoning_effort import ReasoningEffort
from pydantic import BaseModel

from headrace.server.messages import schema as messages
from headrace.server.responses import schema as responses
from headrace.server.schema import ChatBody, CompletionBody, EmbeddingBody
from headrace.server.unsupported import UNSUPPORTED


@pytest.mark.parametrize(
    ("params", "body", "refused"),
    [
        (ChatParams, ChatBody, UNSUPPORTED),
        (CompletionParams, CompletionBody, UNSUPPORTED),
        (EmbeddingCreateParams, EmbeddingBody, {}),
        (ResponseCreateParamsBase, responses.ResponseBody, responses.UNSUPPORTED),
        (InputTokenCountParams, responses.InputBody, responses.UNSUPPORTED),
        (MessageCreateParamsBase, messages.MessageBody, messages.UNSUPPORTED),
        (MessageCountTokensParams, messages.ConversationBody, messages.UNSUPPORTED),
    ],
)
def test_fields(params: Any, body: type[BaseModel], refused: dict[str, Any]) -> None:
    assert params.__annotations__.keys() - body.model_fields.keys() - refused.keys() - {"stream"} == set()


def literals(kind: Any) -> set[str]:
    """The texts that a type allows."""
    return {kind} if isinstance(kind, str) else set().union(*map(literals, get_args(kind)))


def test_values() -> None:
    tiers = literals(get_type_hints(ChatParams)["service_tier"])
    assert tiers <= literals(ChatBody.model_fields["service_tier"].annotation)
    for field in (ChatBody.model_fields["reasoning_effort"], responses.Reasoning.model_fields["effort"]):
        assert literals(ReasoningEffort) <= literals(field.annotation)
    assert literals(get_type_hints(OutputConfigParam)["effort"]) <= literals(messages.OutputConfig.model_fields["effort"].annotation)
