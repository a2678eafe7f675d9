"""Copies and waits: of recorded traces, and of modules that are run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.core.messages import Kernel
from headrace.doctor.finding import Finding
from headrace.doctor.kernels import module_findings, server_findings
from headrace.engine.trace import Trace
from headrace.engine.wire import StepTrace
from headrace.server.perfetto import trace_object


def traced(*kernels: tuple[str, str, float], steps: int = 2) -> dict[str, Any]:
    """Steps of 10 ms; kernels: name, device, seconds."""
    trace = Trace(begin=0.0, end=1.0)
    for number in range(steps):
        begin = 0.1 * number
        trace.add_step(StepTrace(number, begin, begin, begin, begin + 0.01, begin + 0.01, 0.01, "ready", 0, ()))
    trace.kernels = tuple(Kernel(name=name, device=device, track=1, begin=0.0, end=seconds) for name, device, seconds in kernels)
    return trace_object(trace, model="m")


def faults(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.evidence for finding in findings if not finding.ok}


def test_a_healthy_server_is_left_alone():
    assert faults(server_findings(traced())) == {}
    assert faults(server_findings(traced(steps=0))) == {}
    plain = [("aten::mm", "cpu", 0.015), ("aten::copy_", "cpu", 0.001), ("aten::to", "cpu", 0.009)]
    plain += [("aten::_local_scalar_dense", "cpu", 1e-6)] * 40
    assert faults(server_findings(traced(*plain))) == {}, "on a CPU nothing is waited for, and what calls a copy is not counted beside it"
    assert faults(server_findings(traced(("decode", "cuda:0", 0.01), *[("cudaStreamSynchronize", "cpu", 0.001)] * 4))) == {}


def test_copies_of_a_server():
    found = faults(server_findings(traced(("aten::copy_", "cpu", 0.003), ("Memcpy HtoD", "cuda:0", 0.001))))
    assert found == {"copies": "1 copies a step take 20% of it"}


def test_waits_of_a_server():
    found = faults(server_findings(traced(("decode", "cuda:0", 0.01), *[("cudaStreamSynchronize", "cpu", 0.001)] * 10)))
    assert found == {"syncs": "the CPU waits 5.0 times a step for the device, 50% of the time"}


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.sum())


class Copies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.cat([x, x])[: len(x)].clone()
        return x


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.T).softmax(-1)


@pytest.mark.parametrize(("module", "wrong"), [(Plain(), set()), (Reads(), {"syncs"}), (Copies(), {"copies"})])
def test_modules(module: nn.Module, wrong: set[str]):
    findings = module_findings(module, (torch.ones(400, 400),))
    assert set(faults(findings)) == wrong
    assert all(finding.remedy and finding.gain for finding in findings if not finding.ok)
