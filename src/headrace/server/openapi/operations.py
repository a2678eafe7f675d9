"""What each route takes and answers; the table that the document is made of, beside the routes themselves."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from headrace.server.batch_service import ENDPOINTS
from headrace.server.messages.schema import ConversationBody, MessageBody
from headrace.server.openapi.answers import ANY_OBJECT, COUNT, TEXT, Schema, array, nullable, one_of, ref
from headrace.server.responses.schema import InputBody, ResponseBody
from headrace.server.routes_trace import MAX_SECONDS
from headrace.server.schema import BatchBody, ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, ExplainBody, TokenizeBody

READ_ERRORS = (400, 401, 500)
STORED_ERRORS = (400, 401, 404, 500)
JOB_ERRORS = (400, 401, 404, 429, 500, 503)
BODY_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    summary: str
    answer: str  # schema of the answer with status 200, or a media type where it is no JSON
    body: type[BaseModel] | None = None
    form: Schema | None = None  # of a body that is a form with a file
    events: str | None = None  # schema of an event's data, where the answer may be a stream
    query: dict[str, Schema] | None = None
    errors: tuple[int, ...] = READ_ERRORS
    answers_also: tuple[int, ...] = ()  # statuses with the same schema as 200


def limit(most: int) -> Schema:
    return {"type": "integer", "minimum": 1, "maximum": most}


ORDER = one_of("asc", "desc")
FILE_FORM: Schema = {
    "type": "object",
    "properties": {"file": {"contentMediaType": "application/octet-stream"}, "purpose": one_of("batch")},
    "required": ["file", "purpose"],
    "additionalProperties": False,
}
EXPLAIN_QUERY: dict[str, Schema] = {"model": TEXT, "prompt": TEXT, "cache_salt": {**TEXT, "minLength": 1}}


def some(items: Schema) -> Schema:
    return {**array(items), "minItems": 1}


_IDS = array(COUNT)
_PROMPTS: Schema = {"anyOf": [TEXT, some(TEXT), some(COUNT), some(some(COUNT))]}
_TURNS: Schema = some(ref("Message"))
_INPUT: Schema = {"anyOf": [TEXT, array(ANY_OBJECT)]}

# Fields whose lists are checked by hand, because errors of unions are hard to read; pydantic takes anything there.
FIELDS: dict[str, dict[str, Schema]] = {
    "ChatBody": {"messages": _TURNS},
    "CompletionBody": {"prompt": _PROMPTS},
    "ResponseBody": {"input": _INPUT},
    "InputBody": {"input": _INPUT},
    "MessageBody": {"messages": some(ref("MessageShape")), "max_tokens": {"type": "integer", "minimum": 1}},
    "ConversationBody": {"messages": some(ref("MessageShape"))},
    "EmbeddingBody": {"input": _PROMPTS},
    "DetokenizeBody": {"tokens": _IDS},
    "TokenizeBody": {"messages": nullable(_TURNS)},
    "ExplainBody": {"messages": nullable(_TURNS), "prompt": nullable({"anyOf": [TEXT, _IDS]})},
    "BatchBody": {"input_file_id": TEXT, "endpoint": one_of(*ENDPOINTS), "completion_window": one_of("24h")},
}
OPTIONAL = {("TokenizeBody", "messages"), ("ExplainBody", "messages"), ("ExplainBody", "prompt")}  # one of prompt and messages

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        summary="Answer a conversation", body=ChatBody, answer="ChatCompletion", events="ChatCompletionChunk", errors=BODY_ERRORS
    ),
    ("POST", "/v1/completions"): Operation(
        summary="Continue prompts", body=CompletionBody, answer="Completion", events="CompletionChunk", errors=BODY_ERRORS
    ),
    ("POST", "/v1/responses"): Operation(
        summary="Answer a conversation, in the form of OpenAI's responses",
        body=ResponseBody,
        answer="Response",
        events="ResponseEvent",
        errors=BODY_ERRORS,
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        summary="Count the tokens of an input", body=InputBody, answer="InputTokens", errors=BODY_ERRORS
    ),
    ("GET", "/v1/responses/{response_id}"): Operation(summary="A stored response", answer="Response", errors=STORED_ERRORS),
    ("DELETE", "/v1/responses/{response_id}"): Operation(summary="Forget a stored response", answer="ResponseDeleted", errors=STORED_ERRORS),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(summary="End a background response", answer="Response", errors=STORED_ERRORS),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        summary="What the model was given",
        answer="ResponseItems",
        query={"limit": limit(100), "order": ORDER, "after": TEXT},
        errors=STORED_ERRORS,
    ),
    ("POST", "/v1/messages"): Operation(
        summary="Answer a conversation, in the form of Anthropic's API",
        body=MessageBody,
        answer="MessageAnswer",
        events="MessageEvent",
        errors=BODY_ERRORS,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        summary="Count the tokens of a conversation", body=ConversationBody, answer="MessageTokens", errors=BODY_ERRORS
    ),
    ("POST", "/v1/embeddings"): Operation(summary="A vector for each text", body=EmbeddingBody, answer="Embeddings", errors=BODY_ERRORS),
    ("POST", "/tokenize"): Operation(summary="Ids of a text or of a conversation", body=TokenizeBody, answer="Tokens", errors=BODY_ERRORS),
    ("POST", "/detokenize"): Operation(summary="Text of ids", body=DetokenizeBody, answer="DetokenizedText", errors=BODY_ERRORS),
    ("GET", "/v1/cache/explain"): Operation(
        summary="Why a prompt would be found in the prefix cache", query=EXPLAIN_QUERY, answer="CacheExplanation", errors=BODY_ERRORS
    ),
    ("POST", "/v1/cache/explain"): Operation(
        summary="Why a prompt would be found in the prefix cache", body=ExplainBody, answer="CacheExplanation", errors=BODY_ERRORS
    ),
    ("GET", "/v1/models"): Operation(summary="The models served", answer="Models", errors=(400, 401, 500, 503)),
    ("GET", "/v1/models/{name}"): Operation(summary="A model", answer="Model", errors=(400, 401, 404, 500, 503)),
    ("GET", "/health"): Operation(summary="Whether the process is alive", answer="State", errors=(400, 500), answers_also=(503,)),
    ("GET", "/ready"): Operation(summary="Whether requests are served now", answer="State", errors=(400, 500), answers_also=(503,)),
    ("GET", "/metrics"): Operation(summary="Metrics for Prometheus", answer="text/plain"),
    ("GET", "/v1/status"): Operation(summary="How things stand in numbers", answer="Status"),
    ("POST", "/debug/trace"): Operation(
        summary="Record what the engine does for a few seconds, for Perfetto",
        answer="Trace",
        query={"seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS}, "kernels": {"type": "boolean", "default": False}},
        errors=(400, 401, 429, 500, 503),
    ),
    ("GET", "/version"): Operation(summary="The version of the server", answer="Version"),
    ("GET", "/openapi.json"): Operation(summary="This document", answer="application/json"),
    ("POST", "/v1/files"): Operation(summary="Send a file", form=FILE_FORM, answer="File", errors=(400, 401, 408, 413, 429, 500, 503)),
    ("GET", "/v1/files"): Operation(
        summary="The files of this key",
        answer="Files",
        query={"purpose": TEXT, "limit": limit(10_000), "order": ORDER, "after": TEXT},
        errors=JOB_ERRORS,
    ),
    ("GET", "/v1/files/{file_id}"): Operation(summary="A file", answer="File", errors=JOB_ERRORS),
    ("DELETE", "/v1/files/{file_id}"): Operation(summary="Delete a file", answer="FileDeleted", errors=JOB_ERRORS),
    ("GET", "/v1/files/{file_id}/content"): Operation(summary="What a file holds", answer="application/octet-stream", errors=JOB_ERRORS),
    ("POST", "/v1/batches"): Operation(
        summary=f"Answer a file of requests to {', '.join(ENDPOINTS)}", body=BatchBody, answer="Batch", errors=BODY_ERRORS
    ),
    ("GET", "/v1/batches"): Operation(
        summary="The batches of this key", answer="Batches", query={"limit": limit(100), "after": TEXT}, errors=JOB_ERRORS
    ),
    ("GET", "/v1/batches/{batch_id}"): Operation(summary="A batch", answer="Batch", errors=JOB_ERRORS),
    ("POST", "/v1/batches/{batch_id}/cancel"): Operation(summary="Cancel a batch", answer="Batch", errors=JOB_ERRORS),
}
