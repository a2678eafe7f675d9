from __future__ import annotations

import pytest

from tests.scripts.load_script import load_script

plan_speed = load_script("plan_speed")


def test_it_tells_what_a_token_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_speed.main(["burst:prompt=10,output=4,requests=6"]) == 0
    out = capsys.readouterr().out
    assert "each of 24 output tokens, 6.0 a step" in out
