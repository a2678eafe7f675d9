"""JSON schemas of what the server answers."""

from __future__ import annotations

from typing import Any

from headrace.observe.work import KINDS

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def record(optional: dict[str, Schema] | None = None, /, **required: Schema) -> Schema:
    """An object with these fields; those that are optional may be missing."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def page(kind: str, items: Schema) -> Schema:
    ends = {"first_id": nullable(TEXT), "last_id": nullable(TEXT), "has_more": BOOLEAN}
    return record(object=one_of(kind), data=array(items), **ends)


def deleted(kind: str) -> Schema:
    return record(id=TEXT, object=one_of(kind), deleted={"type": "boolean", "const": True})


_IDS = array(COUNT)
_FINISH = nullable(one_of("stop", "length", "tool_calls"))
_STOP_REASON = nullable({"anyOf": [INTEGER, TEXT]})
_TOOL_CALL = record(id=TEXT, type=one_of("function"), function=record(name=TEXT, arguments=TEXT))
_TOOL_CALL_DELTA = record({"id": TEXT, "type": one_of("function")}, index=COUNT, function=record({"name": TEXT}, arguments=TEXT))
_USAGE = record(
    {"completion_tokens_details": record(reasoning_tokens=COUNT)},
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=record(cached_tokens=COUNT),
)
_ENGINE_COUNTS = ("prompt_tokens", "generation_tokens", "prefix_query_tokens", "prefix_hit_tokens", "preemptions", "recomputed_tokens")
_WORK_SECONDS = record(**dict.fromkeys(KINDS, NUMBER))
_ENGINE_STATUS = record(
    at=NUMBER,
    steps_total=COUNT,
    runner_seconds_total=NUMBER,
    idle_seconds_total=NUMBER,
    work_seconds_total=_WORK_SECONDS,
    work_paths={"type": "object", "additionalProperties": record(steps_total=COUNT, tokens_total=ANY_OBJECT, seconds_total=ANY_OBJECT)},
    remarks=array(record(kind=one_of(*KINDS), share=NUMBER, text=TEXT)),
    running=COUNT,
    waiting=COUNT,
    swapped=COUNT,
    kv_blocks=record(total=COUNT, used=COUNT, cached=COUNT, free=COUNT),
    **{f"{name}_total": COUNT for name in _ENGINE_COUNTS},
)
_IDS_ASKED_FOR = {"token_ids": _IDS, "prompt_token_ids": _IDS, "prompt_logprobs": nullable(array(nullable(ANY_OBJECT)))}
_BATCH_TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")


def _choices(kind: str, choice: Schema, usage: Schema | None = None) -> Schema:
    optional = {} if usage is not None else {"usage": nullable(ref("Usage"))}
    required = {} if usage is None else {"usage": usage}
    return record(optional, id=TEXT, object=one_of(kind), created=COUNT, model=TEXT, choices=array(choice), **required)


_COMPLETION_CHOICE = record(_IDS_ASKED_FOR, index=COUNT, text=TEXT, logprobs=nullable(ANY_OBJECT), finish_reason=_FINISH, stop_reason=_STOP_REASON)
_CHAT_CHOICE = record(
    _IDS_ASKED_FOR,
    index=COUNT,
    message=record(
        {"reasoning_content": TEXT, "tool_calls": array(_TOOL_CALL)}, role=one_of("assistant"), content=nullable(TEXT), refusal={"type": "null"}
    ),
    logprobs=nullable(ANY_OBJECT),
    finish_reason=_FINISH,
    stop_reason=_STOP_REASON,
)
_DELTA = record({"role": one_of("assistant"), "content": TEXT, "reasoning_content": TEXT, "tool_calls": array(_TOOL_CALL_DELTA)})
_CHAT_CHUNK_CHOICE = record(
    {**_IDS_ASKED_FOR, "stop_reason": _STOP_REASON}, index=COUNT, delta=_DELTA, logprobs=nullable(ANY_OBJECT), finish_reason=_FINISH
)
_MODEL = record(
    id=TEXT, object=one_of("model"), created=COUNT, owned_by=TEXT, root=TEXT, parent={"type": "null"}, max_model_len={"type": "integer", "minimum": 1}
)

SCHEMAS: dict[str, Schema] = {
    "Error": record(error=record(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT))),
    "MessagesError": record({"request_id": TEXT}, type=one_of("error"), error=record(type=TEXT, message=TEXT)),
    "Usage": _USAGE,
    "Completion": _choices("text_completion", _COMPLETION_CHOICE, ref("Usage")),
    "CompletionChunk": _choices("text_completion", _COMPLETION_CHOICE),
    "ChatCompletion": _choices("chat.completion", _CHAT_CHOICE, ref("Usage")),
    "ChatCompletionChunk": _choices("chat.completion.chunk", _CHAT_CHUNK_CHOICE),
    "Response": record(
        id=TEXT,
        object=one_of("response"),
        created_at=NUMBER,
        status=one_of("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
        model=TEXT,
        output=array(record(id=TEXT, type=one_of("message", "function_call", "reasoning"), status=TEXT)),
        error=nullable(ANY_OBJECT),
        incomplete_details=nullable(ANY_OBJECT),
        metadata=ANY_OBJECT,
        store=BOOLEAN,
        background=BOOLEAN,
        tools=array(ANY_OBJECT),
        usage=nullable(record(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT)),
    ),
    "ResponseEvent": record(type=TEXT, sequence_number=COUNT),
    "ResponseDeleted": deleted("response"),
    "ResponseItems": page("list", record(id=TEXT, type=TEXT)),
    "InputTokens": record(object=one_of("response.input_tokens"), input_tokens=COUNT),
    "MessageAnswer": record(
        id=TEXT,
        type=one_of("message"),
        role=one_of("assistant"),
        model=TEXT,
        content=array(record(type=one_of("text", "thinking", "tool_use"))),
        stop_reason=one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        stop_sequence=nullable(TEXT),
        usage=record(input_tokens=COUNT, output_tokens=COUNT),
    ),
    "MessageEvent": record(type=TEXT),
    "MessageTokens": record(input_tokens=COUNT),
    "Embeddings": record(
        object=one_of("list"),
        model=TEXT,
        data=array(record(object=one_of("embedding"), index=COUNT, embedding={"anyOf": [array(NUMBER), TEXT]})),
        usage=record(prompt_tokens=COUNT, total_tokens=COUNT),
    ),
    "Tokens": record({"token_strs": array(TEXT)}, count=COUNT, max_model_len=COUNT, tokens=_IDS),
    "DetokenizedText": record(prompt=TEXT),
    "CacheExplanation": record(
        object=one_of("cache.explanation"),
        model=TEXT,
        num_tokens=COUNT,
        block_size=COUNT,
        cached_blocks=COUNT,
        cached_tokens=COUNT,
        first_missing_block=nullable(COUNT),
        reason=TEXT,
        message=TEXT,
        first_difference=nullable(ANY_OBJECT),
        evicted_seconds_ago=nullable(NUMBER),
        awaited_tokens=nullable(INTEGER),
    ),
    "Model": _MODEL,
    "Models": record(object=one_of("list"), data=array(ref("Model"))),
    "State": record(status=one_of("starting", "ready", "draining", "restarting", "dead")),
    "Trace": record(displayTimeUnit=one_of("ms"), otherData=ANY_OBJECT, traceEvents=array(record(name=TEXT, ph=TEXT, pid=COUNT, tid=COUNT))),
    "Status": record(
        object=one_of("status"),
        version=TEXT,
        model=TEXT,
        state=one_of("starting", "ready", "draining", "restarting", "dead"),
        max_model_len=nullable(COUNT),
        max_num_seqs=COUNT,
        engine_restarts_total=COUNT,
        first_tokens_total=COUNT,
        first_token_seconds_total=NUMBER,
        engine=nullable(_ENGINE_STATUS),
    ),
    "Version": record(version=TEXT),
    "File": record(id=TEXT, object=one_of("file"), bytes=COUNT, created_at=COUNT, filename=TEXT, purpose=TEXT),
    "Files": page("list", ref("File")),
    "FileDeleted": deleted("file"),
    "Batch": record(
        id=TEXT,
        object=one_of("batch"),
        endpoint=TEXT,
        errors=nullable(record(object=one_of("list"), data=array(ANY_OBJECT))),
        input_file_id=TEXT,
        completion_window=one_of("24h"),
        status=one_of("validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"),
        output_file_id=nullable(TEXT),
        error_file_id=nullable(TEXT),
        created_at=COUNT,
        expires_at=COUNT,
        **dict.fromkeys(_BATCH_TIMES, nullable(COUNT)),
        request_counts=record(total=COUNT, completed=COUNT, failed=COUNT),
        metadata=nullable(ANY_OBJECT),
    ),
    "Batches": page("list", ref("Batch")),
}
