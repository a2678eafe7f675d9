"""From the body of a chat to its turn and its sampling parameters."""

from __future__ import annotations

from headrace.errors import InvalidRequest
from headrace.sampling_params import MAX_LOGPROBS
from headrace.server.chat_prompt import choose_template, message_list
from headrace.server.chat_reasoning import ReasoningOptions
from headrace.server.chat_tools import tool_choice, tool_list
from headrace.server.chat_turn import ChatTurn, TemplateOptions, prepare_turn
from headrace.server.parse import ParsedRequest, Prompt, common, fit, sampling_params, shown, truncate
from headrace.server.schema import ChatBody, ChatOptions
from headrace.server.service import LoadedModel
from headrace.server.structured import structured_outputs


def chat_turn(body: ChatOptions, model: LoadedModel, *, trust_request: bool, bounded: bool) -> ChatTurn:
    """The turn of a chat, or of messages that are only counted."""
    proceed = bool(body.continue_final_message)
    if proceed and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt contradict each other; set one of them only.", param="continue_final_message"
        )
    if body.add_special_tokens:
        raise InvalidRequest("add_special_tokens must be false with messages: the template writes the start token.", param="add_special_tokens")
    options = TemplateOptions(
        template=choose_template(body, model, trust_request=trust_request),
        kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=proceed,
    )
    chat = body if isinstance(body, ChatBody) else ChatBody()  # whoever only counts tokens asks nothing of the answer
    return prepare_turn(
        model,
        messages=message_list(body.messages),
        template=options,
        tools=tool_list(body.tools),
        tool_choice=tool_choice(body.tool_choice),
        parallel_tool_calls=chat.parallel_tool_calls is not False,
        structured=structured_outputs(chat),
        reasoning=ReasoningOptions(include=chat.include_reasoning is not False, budget=chat.thinking_token_budget, effort=body.reasoning_effort),
        bounded=bounded,
    )


def chat_logprobs(body: ChatBody) -> int | None:
    """How many alternatives a chat asks for; None: no logprobs at all."""
    if body.top_logprobs is not None:
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(f"top_logprobs must be from 0 to {MAX_LOGPROBS}, not {shown(body.top_logprobs)}.", param="top_logprobs")
        if not body.logprobs:
            raise InvalidRequest("top_logprobs is allowed only together with logprobs: true.", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def chat_limit(body: ChatBody) -> tuple[int | None, str]:
    """The limit of a chat's answer and the field it came from."""
    if body.max_completion_tokens is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequest("max_completion_tokens and max_tokens contradict each other; send one of them.", param="max_completion_tokens")
    return body.max_completion_tokens, "max_completion_tokens"


def parse_chat(body: ChatBody, model: LoadedModel, model_name: str, turn: ChatTurn) -> ParsedRequest:
    limit, limit_field = chat_limit(body)
    if limit == 0:
        raise InvalidRequest(f"{limit_field} must be at least 1.", param=limit_field)
    logprobs = chat_logprobs(body)
    params = sampling_params(body, model, max_tokens=limit, limit_field=limit_field, logprobs=logprobs)
    kept = truncate(turn.prompt_token_ids, body.truncate_prompt_tokens, model)
    fitted = fit(kept, params, model, default=None, limit_field=limit_field, prompt_field="messages")
    prompt = Prompt(
        token_ids=kept,
        params=turn.apply(fitted),
        echo_text=turn.last_text if body.echo else "",
        new_parser=turn.new_parser,
        new_counter=turn.new_counter,
    )
    return common(body, model_name=model_name, prompt_field="messages", prompts=[prompt], n=params.n, logprobs=logprobs)
