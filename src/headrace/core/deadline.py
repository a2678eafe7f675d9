"""Whether a first token can be there in time: a request that cannot make it is better refused at once than computed in vain."""

from __future__ import annotations

from headrace.core.kv_manager import KVManager
from headrace.core.request import Request, RequestState
from headrace.core.step_time import StepTimeModel
from headrace.core.step_work import StepWork


def seconds_to_first_token(num_tokens: int, *, num_cached: int, step_tokens: int, step_time: StepTimeModel) -> float:
    """The least time in which a prompt is computed, in steps of `step_tokens` that it has for itself. 0 where no such step is known yet."""
    seconds, position = 0.0, num_cached
    while position < num_tokens:
        chunk = min(step_tokens, num_tokens - position)
        if not step_time.knows_prompts_of(chunk):
            return 0.0
        seconds += step_time.predict(StepWork().with_prompt(chunk, position))
        position += chunk
    return seconds


class Deadlines:
    """Of live requests that have one, with the least time from their start to their first token."""

    def __init__(self, kv: KVManager, step_time: StepTimeModel, *, step_tokens: int) -> None:
        self._kv = kv
        self._step_time = step_time
        self._step_tokens = step_tokens
        self._live: dict[Request, tuple[float, float]] = {}

    def add(self, request: Request, now: float) -> str | None:
        """Why the request cannot make it, even if it were served before all others; else None."""
        deadline = request.message.deadline
        if deadline is None:
            return None
        num_cached = len(self._kv.match(request.table, request.token_ids)) * self._kv.block_size
        least = seconds_to_first_token(request.num_prompt, num_cached=num_cached, step_tokens=self._step_tokens, step_time=self._step_time)
        if now + least >= deadline:
            return _words(now, deadline, least)
        self._live[request] = (deadline, least)
        return None

    def late(self, now: float) -> list[tuple[Request, str]]:
        """Requests without a token that cannot make it any more, and why: those that wait as soon as there is too little time left."""
        found = []
        for request, (deadline, least) in self._live.items():
            needed = least if request.state is RequestState.WAITING else 0.0  # of one that has run, a part is computed
            if request.num_output == 0 and now + needed >= deadline:
                found.append((request, _words(now, deadline, least)))
        return found

    def forget(self, request: Request) -> None:
        self._live.pop(request, None)


def _words(now: float, deadline: float, least: float) -> str:
    if now >= deadline:
        return "The deadline passed before the first token."
    return f"The deadline cannot be met: the prompt alone takes {1000 * least:.0f} ms by the measured speed. Allow more time, or shorten the prompt."
