"""The operators and device kernels of steps, one by one, by torch's profiler."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import islice

import torch
from torch.autograd import profiler
from torch.autograd.profiler import DeviceType

from headrace.core.messages import Kernel

MAX_KERNELS = 200_000  # of a profile; the rest is left out
_CLOCK = "headrace clock"  # events whose time is known, at both ends: the profiler's clock is one of its own


class KernelProfile:
    """Of what runs in the thread that makes it, and on `device`. `stop` must come from the same thread."""

    def __init__(self, device: torch.device) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes a line at every start and stop
        self._profiler = profiler.profile(use_kineto=True, use_device="cuda" if device.type == "cuda" else None)
        self._profiler.__enter__()
        self._times = [_clock_event()]

    def stop(self) -> Callable[[], tuple[Kernel, ...]]:
        """What gives the kernels; it may take a second, and any thread may call it."""
        self._times.append(_clock_event())
        self._profiler.__exit__(None, None, None)
        return self._kernels

    def _kernels(self) -> tuple[Kernel, ...]:
        results = self._profiler.kineto_results
        assert results is not None, "stop comes first"
        events = results.events()
        first, last = sorted((event for event in events if event.name() == _CLOCK), key=lambda event: event.start_ns())
        origin = first.start_ns()
        begin, end = self._times
        rate = (end - begin) / (last.start_ns() - origin)  # seconds in a nanosecond of the profiler's
        return tuple(
            Kernel(
                name=event.name()[:200],
                device="cpu" if event.device_type() == DeviceType.CPU else f"cuda:{event.device_index()}",
                track=event.device_resource_id(),
                begin=begin + rate * (event.start_ns() - origin),
                end=begin + rate * (event.end_ns() - origin),
            )
            for event in islice((event for event in events if event.name() != _CLOCK), MAX_KERNELS)
        )


def _clock_event() -> float:
    """An event, and when it began."""
    at = time.monotonic()
    with profiler.record_function(_CLOCK):
        return at
