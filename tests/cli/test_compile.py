"""`headrace compile` that is ended before it is done leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.patience import LIMIT_S, until
from tests.runner.tiny_packed import kernels_or_skip, write_tiny


def group_members(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # it has ended meanwhile
        if int(its_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize(
    ("number", "status", "compiles"),
    [(signal.SIGTERM, 143, True), (signal.SIGINT, 130, False), (signal.SIGKILL, -9, False)],
)
def test_an_end_in_the_middle_leaves_no_files_and_no_processes(tmp_path: Path, number: signal.Signals, status: int, compiles: bool) -> None:
    """`compiles`: its compilers have begun to write; else their process has just been started."""
    kernels_or_skip()
    model, temporary = write_tiny(tmp_path / "tiny.gguf"), tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "headrace", "compile", str(model), "-o", str(tmp_path / "out"), "--compile-cache", str(tmp_path / "cache")]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        [*command, "--max-num-seqs", "2"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # else what a shell started in the background hands it on ignored
    ) as process:
        begun = "headrace-compile-*" + ("/inductor/*" if compiles else "")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(lambda: process.poll() is not None or (any(temporary.glob(begun)) and children.read_text()))
        assert process.poll() is None
        (worker,) = map(int, children.read_text().split())
        process.send_signal(number)
        assert process.wait(LIMIT_S) == status
    until(lambda: not group_members(worker))
    until(lambda: not list(temporary.iterdir()))
    assert not (tmp_path / "out").exists()
