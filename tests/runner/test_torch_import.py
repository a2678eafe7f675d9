"""Parts of torch wait until somebody uses them, and then they are whole."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.runner.torch_import import DeferredModule, DeferringFinder
from tests.patience import LIMIT_S


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`harbour`, whose `quay` waits: it has a submodule and something to see whether it has run."""
    root = tmp_path / "harbour"
    (root / "quay").mkdir(parents=True)
    (root / "__init__.py").write_text("runs = []\nfrom harbour import quay\nimport harbour.quay\n")
    (root / "quay" / "__init__.py").write_text("import harbour\nharbour.runs.append('quay')\n__all__ = ['CRANES']\nCRANES = 3\n")
    (root / "quay" / "shed.py").write_text("from harbour.quay import CRANES\nDOORS = CRANES + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [DeferringFinder(frozenset({"harbour.quay", "harbour.no_such"})), *sys.meta_path])
    yield "harbour"
    for name in [name for name in sys.modules if name.startswith("harbour")]:
        del sys.modules[name]


def test_its_code_waits_and_then_runs_once(package: str) -> None:
    harbour = importlib.import_module(package)
    quay = sys.modules["harbour.quay"]
    assert harbour.quay is quay
    assert isinstance(quay, DeferredModule)
    assert not hasattr(quay, "__wrapped__")  # as `inspect` asks all modules
    assert harbour.runs == []
    assert quay.CRANES == 3
    assert (harbour.runs, type(quay).__name__) == (["quay"], "module")
    assert importlib.import_module("harbour.quay") is quay
    assert importlib.reload(quay).CRANES == 3
    with pytest.raises(AttributeError, match="BOATS"):
        _ = quay.BOATS


def test_a_module_inside_it_runs_it_first(package: str) -> None:
    harbour = importlib.import_module(package)
    assert importlib.import_module("harbour.quay.shed").DOORS == 4
    assert harbour.runs == ["quay"]


def test_all_names_at_once_run_it(package: str) -> None:
    names: dict[str, object] = {}
    exec("from harbour.quay import *", names)
    assert names["CRANES"] == 3


def test_a_part_that_is_not_there_is_still_an_import_error(package: str) -> None:
    importlib.import_module(package)
    with pytest.raises(ModuleNotFoundError, match=r"harbour\.no_such"):
        importlib.import_module("harbour.no_such")


def test_an_engine_runs_none_of_the_unused_parts() -> None:
    """Each of them that runs again costs every server memory for good and a part of its start. Nothing is lost to those who use them."""
    code = """
import sys
from headrace.runner.torch_import import UNUSED_PARTS, DeferredModule, defer_unused_parts
defer_unused_parts()
import headrace.engine.engine_host, headrace.runner.model_runner
import torch
ran = sorted(name for name in UNUSED_PARTS if name in sys.modules and not isinstance(sys.modules[name], DeferredModule))
assert not ran, ran
assert any(isinstance(sys.modules.get(name), DeferredModule) for name in UNUSED_PARTS)
heavy = {"torch._dynamo.eval_frame", "torch._inductor.compile_fx", "sympy", "transformers", "pydantic", "starlette", "llguidance", "tokenizers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert torch.empty(2, 3, device="meta").shape == (2, 3)
assert torch.distributions.Normal(0.0, 1.0).log_prob(torch.zeros(())) < 0
assert torch.linalg.norm(torch.ones(4)) == 2
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
