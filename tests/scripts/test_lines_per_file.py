from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.scripts.load_script import load_script


def test_counts_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("lines_per_file")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "short.py").write_text("x = 1\n" * script.LIMIT)
    (tmp_path / "src" / "words.txt").write_text("x\n" * 1000)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert script.lines_per_file(tmp_path) == {"src/short.py": script.LIMIT}
    monkeypatch.setattr(script, "__file__", str(tmp_path / "scripts" / "lines_per_file.py"))
    assert script.main() == 0
    (tmp_path / "src" / "long.py").write_text("x = 1\n" * (script.LIMIT + 1))
    assert script.main() == 1
    assert f"{script.LIMIT + 1:5}  src/long.py   over {script.LIMIT}" in capsys.readouterr().out
