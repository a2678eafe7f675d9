"""Make the checkout's .venv with the pinned packages.   python scripts/make_environment.py core|test

Runs on a bare Python. A stamp in .venv says what is installed, so a second run costs nothing. On a machine without an NVIDIA GPU it
installs a CPU build of torch, and refuses rather than fetch gigabytes of CUDA libraries that nothing there can use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
STAMP = ENVIRONMENT / ".headrace-stamp.json"
LOCKS = {"core": ["requirements.lock"], "test": ["requirements.lock", "requirements-test.lock"]}
TORCH_PREFIX = "torch=="

REFUSAL = """\
This machine has no NVIDIA GPU, and the only torch that pip finds here is a CUDA build (it would bring {count} packages for CUDA, several GB).
Do one of these and start again:
  HEADRACE_TORCH_INDEX=URL {command}    URL of a package index with CPU builds of torch (PyTorch's install page names it)
  PIP_FIND_LINKS=FOLDER {command}       a folder with a CPU wheel of torch {version}
  HEADRACE_ALLOW_CUDA=1 {command}       take the CUDA build all the same"""


class SetupError(Exception):
    """The environment cannot be made; the message says the next step."""


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in LOCKS:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        with one_at_a_time(ROOT / ".venv.lock"):
            make(arguments[0])
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Two scripts started together share one setup."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(extent: str) -> None:
    wanted = {name: digest(ROOT / name) for name in [*LOCKS[extent], "pyproject.toml"]} | {"python": sys.version, "checkout": str(ROOT)}
    stamp = read_stamp()
    if wanted.items() <= stamp.items():
        return
    if not is_usable(stamp):
        create()
        stamp = {}
    locked = [line for name in LOCKS[extent] for line in requirements(ROOT / name)]
    torch = next(line for line in locked if line.startswith(TORCH_PREFIX))
    say(f"Installing {len(locked)} pinned packages into {ENVIRONMENT}")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(line for line in locked if line != torch) + "\n")
        file.flush()
        pip("install", "--requirement", file.name)
    install_torch(torch.removeprefix(TORCH_PREFIX))
    pip("install", "--no-deps", "--editable", str(ROOT), quiet=True)
    STAMP.write_text(json.dumps(stamp | wanted))
    say("The environment is ready.")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_stamp() -> dict[str, str]:
    try:
        return dict(json.loads(STAMP.read_text()))
    except (OSError, ValueError):
        return {}


def is_usable(stamp: dict[str, str]) -> bool:
    """Whether the environment that is there can be built on: same Python, not moved from another folder, pip works."""
    if stamp.get("checkout", str(ROOT)) != str(ROOT):
        return False
    try:
        settings = (ENVIRONMENT / "pyvenv.cfg").read_text()
    except OSError:
        return False
    if f"version = {sys.version.split()[0]}\n" not in settings:
        return False
    try:
        return subprocess.run([python(), "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def create() -> None:
    """A fresh environment in place of one that cannot be used."""
    say(f"Making {ENVIRONMENT} with Python {sys.version.split()[0]}")
    try:
        venv.create(ENVIRONMENT, clear=True, with_pip=True)
    except (subprocess.CalledProcessError, OSError) as error:
        raise SetupError(f"python -m venv fails ({error}). On Debian and Ubuntu: apt install python3-venv") from error


def requirements(path: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def install_torch(version: str) -> None:
    """torch last: everything that it needs is there already, so that only its own build is left to choose."""
    if installed := torch_installed():
        if installed.split("+")[0] == version:
            return
        say(f"Replacing torch {installed}")
    index = os.environ.get("HEADRACE_TORCH_INDEX")
    if index:
        pip("install", "--no-deps", "--index-url", index, f"torch=={version}")
    elif has_nvidia_gpu() or os.environ.get("HEADRACE_ALLOW_CUDA") == "1":
        pip("install", f"torch=={version}")
    elif pip("install", f"torch=={version}+cpu", check=False, quiet=True):  # there is a build marked so on some indices only
        count = len(nvidia_packages(version))
        if count:
            raise SetupError(REFUSAL.format(count=count, command=os.environ.get("HEADRACE_COMMAND", "scripts/serve"), version=version))
        pip("install", f"torch=={version}")


def torch_installed() -> str:
    code = "import importlib.metadata as m\ntry: print(m.version('torch'))\nexcept m.PackageNotFoundError: pass"
    return subprocess.run([python(), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def has_nvidia_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def nvidia_packages(version: str) -> list[str]:
    """What the plain build of torch would bring for CUDA, by its metadata; none of it is downloaded."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        pip("install", "--dry-run", "--no-deps", "--only-binary=:all:", "--report", report.name, f"torch=={version}", quiet=True)
        plan = json.load(report)["install"]
    needs = [need for item in plan for need in item["metadata"].get("requires_dist", [])]
    # which of them are for this machine is told by their markers, and reading those takes a library that is installed by now
    code = "import json, sys; from packaging.requirements import Requirement as R; needs = map(R, json.load(sys.stdin))\n"
    code += "print(*(need.name for need in needs if not need.marker or need.marker.evaluate({'extra': ''})))"
    names = subprocess.run([python(), "-c", code], input=json.dumps(needs), capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if name.lower().startswith(("nvidia", "cuda"))]


def python() -> str:
    return str(ENVIRONMENT / "bin" / "python")


def pip(*arguments: str, check: bool = True, quiet: bool = False) -> int:
    """pip of the environment, on stderr: what a script prints on stdout is its own."""
    command = [python(), "-m", "pip", *arguments[:1], "--disable-pip-version-check", *(["--quiet"] if quiet else []), *arguments[1:]]
    status = subprocess.run(command, stdout=2, stderr=subprocess.DEVNULL if quiet and not check else None, check=False).returncode
    if status and check:
        raise SetupError(f"`pip {' '.join(arguments)}` ended with status {status}. Check the network and pip's index settings, then start again.")
    return status


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
