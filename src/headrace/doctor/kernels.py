"""Copies and waits, by the operators and kernels that were recorded: of a server by its own trace, of a module by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.doctor.finding import Finding, fault, well

COPIES = ("aten::copy_", "aten::cat", "Memcpy")  # beginnings of names; what calls them is not counted as well
WAITS = ("aten::_local_scalar_dense", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
COPIED_SHARE = 0.1  # of the time
MODULE_COPIED_SHARE = 0.2  # of a call of a module
LEAST_COPIED_US = 50.0  # of a call: what a few operators take to be called at all, whatever they do
PROFILED_CALLS = 5
WAITS_PER_STEP = 4  # on a GPU; one is needed, to learn the tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    operators: Sequence[tuple[str, float]]  # name, seconds
    seconds: float  # that all of it took
    num_steps: int
    on_gpu: bool

    def matching(self, names: tuple[str, ...]) -> list[tuple[str, float]]:
        return [each for each in self.operators if each[0].startswith(names)]


def recording_of(trace: Mapping[str, Any]) -> Recording:
    """The answer of `POST /debug/trace?kernels=true`."""
    events: list[dict[str, Any]] = trace["traceEvents"]
    groups = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    tracks = [event["args"]["name"] for event in events if event["name"] == "thread_name" and groups.get(event["pid"]) == "Kernels"]
    slices = [event for event in events if event["ph"] == "X"]
    steps = [event for event in slices if event["name"].startswith("step ") and groups.get(event["pid"]) == "Engine"]
    kernels = [event for event in slices if groups.get(event["pid"]) == "Kernels"]
    return Recording(
        operators=[(event["name"], event["dur"] / 1e6) for event in kernels],
        seconds=sum(event["dur"] for event in steps) / 1e6,
        num_steps=len(steps),
        on_gpu=any(not name.startswith("cpu") for name in tracks),
    )


def copies(recording: Recording) -> Finding:
    if not recording.num_steps:
        return well("copies", "no step ran while it was looked at")
    found = recording.matching(COPIES)
    share = sum(seconds for _, seconds in found) / recording.seconds
    evidence = f"{len(found) / recording.num_steps:.0f} copies a step take {share:.0%} of it"
    if share < COPIED_SHARE:
        return well("copies", evidence)
    return fault(
        "copies",
        evidence,
        "give the KV storage the model's dtype (--kv-cache-dtype), and let --compile fuse what is left",
        f"up to {share:.0%} of the step time",
    )


def waits(recording: Recording) -> Finding:
    if not recording.num_steps or not recording.on_gpu:
        return well("syncs", "no device that the CPU could wait for" if recording.num_steps else "no step ran while it was looked at")
    found = recording.matching(WAITS)
    count, seconds = len(found) / recording.num_steps, sum(each for _, each in found)
    if count <= WAITS_PER_STEP:
        return well("syncs", f"the CPU waits {count:.1f} times a step for the device")
    return fault(
        "syncs",
        f"the CPU waits {count:.1f} times a step for the device, {seconds / recording.seconds:.0%} of the time",
        "leave out what reads values back in every step (logprobs of the prompt, penalties), or use --compile",
        "the device computes on while the CPU prepares the next step",
    )


CHECKS: tuple[Callable[[Recording], Finding], ...] = (copies, waits)


def server_findings(trace: Mapping[str, Any]) -> list[Finding]:
    recording = recording_of(trace)
    return [check(recording) for check in CHECKS]


def module_findings(module: Any, arguments: tuple[Any, ...]) -> list[Finding]:
    """Of calls after one that warms up: a pause of the machine in one of them must not make a small copy large."""
    import torch

    def profiled() -> Any:
        with torch.autograd.profiler.profile(use_kineto=True) as profiler:
            module(*arguments)
        return profiler.key_averages()

    with torch.inference_mode():
        module(*arguments)
        calls = [profiled() for _ in range(PROFILED_CALLS)]
    return [_module_waits(calls[0]), _module_copies(sorted(calls, key=_copied_us)[PROFILED_CALLS // 2])]


def _module_waits(events: Iterable[Any]) -> Finding:
    count = sum(event.count for event in events if event.key in ("aten::_local_scalar_dense", "aten::nonzero"))
    if not count:
        return well("syncs", "no value is read back")
    return fault(
        "syncs",
        f"a call reads values back {count} times (.item(), int(), bool() of a tensor, nonzero)",
        "keep them tensors: torch.where for a decision, a mask instead of nonzero",
        "on a device, the CPU waits no more for all that was asked before",
    )


def _copied_us(events: Iterable[Any]) -> float:
    return sum(float(event.self_cpu_time_total) for event in events if event.key.startswith(COPIES))


def _module_copies(events: Sequence[Any]) -> Finding:
    total, copied = sum(event.self_cpu_time_total for event in events), _copied_us(events)
    share = copied / total if total else 0.0
    count = sum(event.count for event in events if event.key.startswith(COPIES))
    evidence = f"{count} copies take {share:.0%} of a call"
    if share < MODULE_COPIED_SHARE or copied < LEAST_COPIED_US:
        return well("copies", evidence)
    return fault(
        "copies",
        evidence,
        "keep one dtype and layout; write into one tensor instead of torch.cat; drop .contiguous() and .clone() that nothing needs",
        f"up to {share:.0%} of the time",
    )
