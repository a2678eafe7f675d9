"""Rules of the house that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from tests.patience import LIMIT_S

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 400
# Folders that only one machine has; written so that this file does not find itself.
MACHINE_PATHS = [re.compile(pattern) for pattern in (r"/ro" r"ot/", r"/wo" r"rk/", r"/home/\w", r"/Us" r"ers/\w", r"[A-Z]:\\\\Us" r"ers")]
REGISTRY_HOSTS = re.compile(r"py" r"pi\.org|pythonho" r"sted|download\.pyt" r"orch|huggingf" r"ace\.co(?!\w)|npm" r"js\.(org|com)|deb" r"ian\.org")


def tracked(*patterns: str) -> list[Path]:
    """Files that git tracks or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def texts() -> Iterator[tuple[Path, str]]:
    for file in tracked():
        data = file.read_bytes()
        if b"\0" not in data:
            yield file.relative_to(ROOT), data.decode("utf-8")


def test_no_file_is_too_long() -> None:
    long = {str(file.relative_to(ROOT)): lines for file in tracked("*.py") if (lines := len(file.read_bytes().splitlines())) > LIMIT}
    assert not long


def test_no_paths_of_one_machine() -> None:
    found = [f"{file}: {line}" for file, text in texts() for line in text.splitlines() if any(pattern.search(line) for pattern in MACHINE_PATHS)]
    assert not found


def test_no_registry_hosts() -> None:
    found = [f"{file}: {line}" for file, text in texts() for line in text.splitlines() if REGISTRY_HOSTS.search(line)]
    assert not found


def test_nothing_is_left_for_later() -> None:
    words = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|Not" r"ImplementedError)\b")
    found = [f"{file}: {line}" for file, text in texts() if file.suffix in (".py", "") for line in text.splitlines() if words.search(line)]
    assert not found


def imports(file: Path) -> set[str]:
    """The top names of all modules that a file imports, wherever it does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).split(".")[0])
    return names


def test_core_is_the_standard_library() -> None:
    for file in sorted((ROOT / "src/headrace/core").glob("*.py")):
        assert imports(file) <= set(sys.stdlib_module_names) | {"headrace"}, file
        assert not imports(file) & {"asyncio", "time", "threading", "socket"}, file


def test_core_in_a_fresh_interpreter() -> None:
    modules = sorted(f"headrace.core.{file.stem}" for file in (ROOT / "src/headrace/core").glob("*.py") if file.stem != "__init__")
    code = f"import sys, {', '.join(modules)}\nsys.exit(str({{'torch', 'numpy', 'msgspec', 'asyncio'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.stderr.strip() == "set()"


def test_public_names() -> None:
    assert headrace.__all__ == ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]
    for name in headrace.__all__:
        assert getattr(headrace, name) is not None


def test_version_is_in_the_changelog() -> None:
    headings = re.findall(r"^## ([\w.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == headrace.__version__


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(file: str) -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines())
    pairs = [line.split("==") for line in lines if line]
    assert all(len(pair) == 2 for pair in pairs), "every line is NAME==VERSION"
    return {normal(name): version for name, version in pairs}


def test_every_dependency_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core, test = locked("requirements.lock"), locked("requirements-test.lock")
    assert not core.keys() & test.keys()
    for wanted, lock in ((project["dependencies"], core), (project["optional-dependencies"]["test"], core | test)):
        for requirement in wanted:
            name, least = re.match(r"([\w.-]+)(?:>=([\d.]+))?", requirement).groups()  # type: ignore[union-attr]
            assert normal(name) in lock, f"{name} is not locked"
            numbers = [int(part) for part in re.findall(r"\d+", lock[normal(name)])]
            assert numbers >= [int(part) for part in (least or "0").split(".")], f"{name} is locked below {least}"


def test_clients_are_locked() -> None:
    wanted = {"openai", "anthropic", "tritonclient", "langchain-openai", "litellm", "instructor", "pydantic-ai-slim", "llm"}
    assert wanted <= locked("requirements-clients.lock").keys()


@pytest.mark.parametrize("name", ["serve", "test", "test-clients", "check", "lint"])
def test_scripts_can_be_run(name: str) -> None:
    script = ROOT / "scripts" / name
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_every_folder_of_tests_mirrors_a_room() -> None:
    rooms = {folder.name for folder in (ROOT / "src/headrace").iterdir() if folder.is_dir()}
    apart = {"acceptance", "clients", "scripts", "docs", "deploy"}
    folders = {file.relative_to(ROOT / "tests").parts[0] for file in tracked("tests/*/*.py")}
    assert folders <= rooms | apart
