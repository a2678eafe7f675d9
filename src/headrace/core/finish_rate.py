"""How fast requests end, for the time after which one that was turned away may come again."""

from __future__ import annotations

FOLLOW = 0.1  # how fast the measured time between two ends follows


class FinishRate:
    def __init__(self) -> None:
        self._last: float | None = None
        self._seconds: float | None = None

    @property
    def seconds_per_finish(self) -> float:
        """0 where it is not known yet."""
        return self._seconds or 0.0

    def observe(self, num_finished: int, now: float) -> None:
        """So many requests (at least one) have ended at `now`."""
        if self._last is not None:
            seconds = max(0.0, now - self._last) / num_finished
            if self._seconds is None:
                self._seconds = seconds
            self._seconds += FOLLOW * (seconds - self._seconds)
        self._last = now
