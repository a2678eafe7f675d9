"""Graph breaks and recompilations of small modules, with the line that causes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.doctor.module import load_factory, module_findings
from headrace.errors import ConfigError


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x


class Prints(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        print("a forward")
        return y + 1


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def decides() -> Any:
    return Decides(), [(torch.ones(3),)]


def prints() -> Any:
    return Prints(), [(torch.ones(3),)]


def grows() -> Any:
    return Plain(), [(torch.ones(3),), (torch.ones(4),)]


def changes_type() -> Any:
    return Plain(), [(torch.ones(3),), (torch.ones(3, dtype=torch.float64),)]


def healthy() -> Any:
    return Plain(), [(torch.ones(3),), (torch.zeros(3),)]


@pytest.mark.parametrize(
    ("factory", "check", "line", "remedy"),
    [
        (decides, "graph-breaks", "if x.sum() > 0:", "torch.where"),
        (prints, "graph-breaks", 'print("a forward")', "print"),
        (grows, "recompiles", "size mismatch", "static sizes"),
        (changes_type, "recompiles", "dtype mismatch", "same dtype"),
    ],
)
def test_a_planted_fault_is_found_with_its_place(factory: Callable[[], Any], check: str, line: str, remedy: str):
    found = {finding.check: finding for finding in module_findings(factory) if not finding.ok}
    if factory is decides:
        assert "1 times" in found.pop("syncs").evidence, "a decision reads a value back"
    assert list(found) == [check]
    finding = found[check]
    assert line in finding.evidence
    assert __file__ in finding.evidence
    assert remedy in (finding.remedy or "")


def test_the_line_is_the_right_one():
    finding = next(finding for finding in module_findings(decides) if not finding.ok)
    lines, first = inspect.getsourcelines(Decides)
    number = first + next(index for index, text in enumerate(lines) if "if x.sum()" in text)
    assert f"{__file__}:{number} " in finding.evidence


def test_a_module_without_faults():
    found = [(finding.check, finding.ok) for finding in module_findings(healthy)]
    assert found == [("graph-breaks", True), ("recompiles", True), ("syncs", True), ("copies", True)]


@pytest.mark.parametrize("name", ["nothing", ":f", "a:", "no_such_package_at_all:f", "json:no_such_name", "json:__name__"])
def test_what_is_no_factory_is_refused(name: str):
    with pytest.raises(ConfigError):
        load_factory(name)
    assert load_factory("json:loads")


def test_a_factory_without_inputs_is_refused():
    with pytest.raises(ConfigError, match="no inputs"):
        module_findings(lambda: (Plain(), []))
