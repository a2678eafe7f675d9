"""The table of `scripts/attention_speed.py`."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import cpu
from tests.scripts.load_script import load_script

attention_speed = load_script("attention_speed")


def test_each_kind_of_work_has_its_line(monkeypatch, capsys):
    if cpu.load() is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    monkeypatch.setattr(attention_speed, "WORK", {"a prompt of 5": (5, 5), "one token at 40": (1, 40)})
    attention_speed.main(["--rounds", "1", "--threads", str(torch.get_num_threads()), "--head-dim", "16"])
    head, titles, prompt, token = capsys.readouterr().out.splitlines()
    assert "float16 cache" in head
    assert "bfloat16" in titles
    for line, name in ((prompt, "a prompt of 5"), (token, "one token at 40")):
        assert line.startswith(name)
        assert line.count("(") == 2
