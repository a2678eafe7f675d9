"""What a key may use in a minute: requests and tokens, as buckets that fill up again steadily.

The tokens of a request are estimated when it is admitted and settled when it ends. A bucket may owe: an answer may turn out longer than
was estimated, and then the next request waits until that is paid.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal

from headrace.config import ApiKey
from headrace.errors import RateLimitExceeded

ASSUMED_ANSWER = 1024  # tokens of a choice that are charged in advance, at most

Clock = Callable[[], float]  # monotonic seconds
Unit = Literal["requests", "tokens"]


class Bucket:
    def __init__(self, unit: Unit, per_minute: int, clock: Clock) -> None:
        self.unit = unit
        self.limit = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._updated = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._updated) * self.limit / 60)
        self._updated = now
        return self._level

    def take(self, count: int) -> None:
        """Raises `RateLimitExceeded`. What is more than the whole bucket is let in when that is full."""
        needed = min(count, self.limit)
        missing = needed - self.level
        if missing > 1e-9:
            seconds = missing * 60 / self.limit
            raise RateLimitExceeded(
                f"This API key may use {self.limit} {self.unit} per minute; {count} are asked for and {max(0, math.floor(self.level))} are left. "
                f"Try again in {duration(seconds)}.",
                retry_after=math.ceil(seconds),
            )
        self._level -= count

    def give_back(self, count: int) -> None:
        """A negative count takes more."""
        self._level = min(self.limit, self.level + count)

    def headers(self) -> dict[str, str]:
        level = self.level
        return {
            f"x-ratelimit-limit-{self.unit}": str(self.limit),
            f"x-ratelimit-remaining-{self.unit}": str(max(0, math.floor(level + 1e-9))),
            f"x-ratelimit-reset-{self.unit}": duration((self.limit - level) * 60 / self.limit),
        }


class Charge:
    """The tokens of one request, taken in advance."""

    def __init__(self, bucket: Bucket | None, estimate: int) -> None:
        self._bucket = bucket
        self._estimate = estimate
        if bucket is not None:
            bucket.take(estimate)

    def settle(self, num_tokens: int) -> None:
        """What it really used. The first call counts."""
        if self._bucket is not None:
            self._bucket.give_back(self._estimate - num_tokens)
            self._bucket = None


class KeyLimits:
    """The limits of one key; `ApiKey` without limits, and requests where no key is asked for, have none."""

    def __init__(self, key: ApiKey | None = None, *, clock: Clock = time.monotonic) -> None:
        self.name = None if key is None else key.name
        self._priority = None if key is None else key.priority
        requests, tokens = (None, None) if key is None else (key.requests_per_minute, key.tokens_per_minute)
        self._requests = None if requests is None else Bucket("requests", requests, clock)
        self._tokens = None if tokens is None else Bucket("tokens", tokens, clock)

    def take_request(self) -> None:
        """Raises `RateLimitExceeded`."""
        if self._requests is not None:
            self._requests.take(1)

    def charge(self, *, prompt_tokens: int, answer_tokens: int, num_choices: int = 1) -> Charge:
        """`answer_tokens`: of a choice, at most. Raises `RateLimitExceeded`."""
        return Charge(self._tokens, prompt_tokens + num_choices * min(answer_tokens, ASSUMED_ANSWER))

    def priority(self, asked: int) -> int:
        """What a request gets: lower runs first, and no lower than the key may."""
        return asked if self._priority is None else max(asked, self._priority)

    def headers(self) -> dict[str, str]:
        """How OpenAI tells clients where they stand; nothing about what has no limit."""
        return {name: value for bucket in (self._requests, self._tokens) if bucket is not None for name, value in bucket.headers().items()}


def duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 6s, 1m30s."""
    milliseconds = math.ceil(max(0.0, seconds) * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(math.ceil(milliseconds / 1000), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
