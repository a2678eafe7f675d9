"""How scripts make their environment, with pip and the machine's GPU played by the test."""

from __future__ import annotations

import json
import sys
import venv
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts.load_script import ROOT, load_script


class FakePip:
    """Remembers what was asked for; `+cpu` builds are there or not."""

    def __init__(self, *, cpu_build: bool = True) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.cpu_build = cpu_build

    def __call__(self, *arguments: str, check: bool = True, quiet: bool = False) -> int:
        if "--requirement" in arguments:
            arguments = (*arguments[:-1], Path(arguments[-1]).read_text())
        self.asked.append(arguments)
        return int(arguments[-1].endswith("+cpu") and not self.cpu_build)

    @property
    def torch(self) -> list[tuple[str, ...]]:
        return [arguments[1:] for arguments in self.asked if arguments[-1].startswith("torch==")]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script in an empty checkout, on a machine without a GPU and without torch."""
    module = load_script("make_environment")
    for name in ("requirements.lock", "requirements-test.lock", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "ENVIRONMENT", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "stamp.json")
    monkeypatch.setattr(module, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(module, "torch_installed", lambda: "")
    monkeypatch.setattr(module, "nvidia_packages", lambda version: ["nvidia-cudnn"])
    monkeypatch.setattr(module, "create", lambda: (tmp_path / ".venv").mkdir(exist_ok=True))
    for name in ("HEADRACE_TORCH_INDEX", "HEADRACE_ALLOW_CUDA", "HEADRACE_COMMAND"):
        monkeypatch.delenv(name, raising=False)
    return module


def use(script: ModuleType, monkeypatch: pytest.MonkeyPatch, **options: Any) -> FakePip:
    pip = FakePip(**options)
    monkeypatch.setattr(script, "pip", pip)
    return pip


def test_second_run_does_nothing(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(script, monkeypatch)
    assert script.main(["core"]) == 0
    first = len(pip.asked)
    assert first
    assert script.main(["core"]) == 0
    assert len(pip.asked) == first
    assert script.main(["test"]) == 0  # more is wanted
    assert len(pip.asked) == 2 * first
    assert script.main(["core"]) == 0  # less is wanted
    assert len(pip.asked) == 2 * first
    (script.ROOT / "requirements.lock").write_text("torch==2.13.0\n")
    assert script.main(["core"]) == 0
    assert len(pip.asked) == 3 * first


def test_everything_is_pinned(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(script, monkeypatch)
    assert script.main(["test"]) == 0
    [requirements] = [arguments[-1] for arguments in pip.asked if "--requirement" in arguments]
    assert all("==" in line for line in requirements.splitlines())
    assert "torch==" not in requirements
    assert "pytest==" in requirements


def test_cpu_build_without_a_gpu(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(script, monkeypatch)
    script.install_torch("9.9.9")
    assert pip.torch == [("torch==9.9.9+cpu",)]


def test_cuda_build_is_refused_without_a_gpu(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pip = use(script, monkeypatch, cpu_build=False)
    assert script.main(["core"]) == 1
    assert pip.torch == [("torch==2.13.0+cpu",)]
    text = capsys.readouterr().err
    assert "HEADRACE_TORCH_INDEX=URL scripts/serve" in text
    assert "Traceback" not in text
    assert not script.STAMP.exists()


def test_plain_build_where_it_brings_no_cuda(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(script, monkeypatch, cpu_build=False)
    monkeypatch.setattr(script, "nvidia_packages", lambda version: [])
    script.install_torch("9.9.9")
    assert pip.torch[-1] == ("torch==9.9.9",)


def test_wishes_of_the_user(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(script, monkeypatch, cpu_build=False)
    monkeypatch.setenv("HEADRACE_TORCH_INDEX", "file:///somewhere")
    script.install_torch("9.9.9")
    monkeypatch.delenv("HEADRACE_TORCH_INDEX")
    monkeypatch.setenv("HEADRACE_ALLOW_CUDA", "1")
    script.install_torch("9.9.9")
    monkeypatch.delenv("HEADRACE_ALLOW_CUDA")
    monkeypatch.setattr(script, "has_nvidia_gpu", lambda: True)
    script.install_torch("9.9.9")
    assert pip.torch == [("--no-deps", "--index-url", "file:///somewhere", "torch==9.9.9"), ("torch==9.9.9",), ("torch==9.9.9",)]


@pytest.mark.parametrize(("installed", "calls"), [("9.9.9", 0), ("9.9.9+cpu", 0), ("9.9.8+cpu", 1)])
def test_torch_that_is_there_is_kept(script: ModuleType, monkeypatch: pytest.MonkeyPatch, installed: str, calls: int) -> None:
    pip = use(script, monkeypatch)
    monkeypatch.setattr(script, "torch_installed", lambda: installed)
    script.install_torch("9.9.9")
    assert len(pip.asked) == calls


def test_environment_that_can_be_built_on(script: ModuleType) -> None:
    assert not script.is_usable({})
    venv.create(script.ENVIRONMENT, with_pip=False, symlinks=True)
    assert not script.is_usable({})  # pip is missing: it was left half made
    pip = script.ENVIRONMENT / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "pip"
    pip.mkdir()
    (pip / "__main__.py").write_text("")
    assert script.is_usable({})
    assert not script.is_usable({"checkout": "/another/folder"})
    settings = script.ENVIRONMENT / "pyvenv.cfg"
    settings.write_text(settings.read_text().replace("version = 3.", "version = 2."))
    assert not script.is_usable({})


def test_torn_stamp_means_start_anew(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(script, monkeypatch)
    script.ENVIRONMENT.mkdir()
    script.STAMP.write_text("{")
    assert script.main(["core"]) == 0
    assert pip.asked
    assert json.loads(script.STAMP.read_text())["checkout"] == str(script.ROOT)


def test_failing_pip_says_the_next_step(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(script, "python", lambda: "false")
    with pytest.raises(script.SetupError, match="index settings"):
        script.pip("install", "anything")
    assert script.pip("install", "anything", check=False) == 1


def test_usage(script: ModuleType) -> None:
    assert script.main([]) == 2
    assert script.main(["everything"]) == 2
