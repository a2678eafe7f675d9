"""What a finished row means for its request: the token, whether it ends, and the message for the client."""

from __future__ import annotations

from headrace.core.messages import FinishReason, Row, SampledRow, TokenLogprobs, TokenOutput
from headrace.core.request import Request


def collect_prompt_logprobs(request: Request, row: Row, sampled: SampledRow) -> None:
    """Keep the scores of prompt positions row.start + 1 .., but for those that an earlier computation has brought already."""
    if not sampled.prompt_logprobs or not request.wants_prompt_logprobs:
        return
    num_known = len(request.prompt_logprobs) - row.start  # of this row's scores
    assert num_known >= 0, "scores of prompt positions are missing"
    request.prompt_logprobs.extend(sampled.prompt_logprobs[num_known:])


def append_tokens(request: Request, token_ids: tuple[int, ...], *, complete: bool) -> tuple[int, FinishReason | None, int | None]:
    """Add new tokens up to the one that ends the request: (how many, finish_reason, stop_reason). `complete`: see `SampledRow`."""
    if len(token_ids) == 1:
        request.token_ids.append(token_ids[0])
        return 1, *_finish_of(request, complete=complete)
    for count, token in enumerate(token_ids, start=1):
        request.token_ids.append(token)
        finish_reason, stop_reason = _finish_of(request, complete=complete and count == len(token_ids))
        if finish_reason is not None:
            return count, finish_reason, stop_reason
    return len(token_ids), None, None


def _finish_of(request: Request, *, complete: bool) -> tuple[FinishReason | None, int | None]:
    """(finish_reason, stop_reason) after the newest token; (None, None) where the request goes on."""
    token = request.token_ids[-1]
    message = request.message
    params = message.params
    if (message.eos_token_ids or params.stop_token_ids) and request.num_output >= params.min_tokens:
        if token in message.eos_token_ids:
            return "stop", None
        if token in params.stop_token_ids:
            return "stop", token
    if complete:  # whatever min_tokens says: nothing could follow
        return "stop", None
    if len(request.token_ids) >= request.max_total_tokens:
        return "length", None
    return None, None


def make_output(
    request: Request,
    *,
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs, ...] | None = None,
    finish_reason: FinishReason | None = None,
    stop_reason: int | None = None,
    ends_in_text: bool = False,
    pooled: bytes | None = None,
    error_code: str | None = None,
    error_message: str | None = None,
) -> TokenOutput:
    """The next output of a request; the first one says what was cached, and brings the prompt's scores if they are complete."""
    first = not request.has_output
    request.has_output = True
    complete = first and error_code is None and request.wants_prompt_logprobs and len(request.prompt_logprobs) == request.num_prompt - 1
    return TokenOutput(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=tuple(request.prompt_logprobs) if complete else None,
        cached_tokens=request.num_cached if first else None,
        pooled=pooled,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        ends_in_text=ends_in_text,
        error_code=error_code,
        error_message=error_message,
        num_preemptions=request.num_preemptions,
    )


def refusal(request_id: str, code: str, message: str) -> TokenOutput:
    """The terminal output of a request that never came in."""
    return TokenOutput(request_id=request_id, finish_reason="error", error_code=code, error_message=message)
