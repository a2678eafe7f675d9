"""The verb against servers whose delays are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from tests.bench.scripted_server import scripted_server


def bench(*words: str) -> int:
    return main(["bench", *words])


def test_a_run_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with scripted_server(first_s=0.03, gap_s=0.005) as server:
        words = ["--num-prompts", "6", "--random-output-len", "4", "--request-rate", "50", "--result-dir", str(tmp_path), "--goodput", "ttft:60000"]
        assert bench("serve", "--base-url", server.url, *words, "--save-detailed", "--result-filename", "r.json") == 0
    out = capsys.readouterr().out
    assert "Successful requests" in out
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["completed"], found["total_output_tokens"], found["model_id"], found["request_rate"]) == (6, 24, "scripted", 50.0)
    assert found["request_goodput"] == found["request_throughput"]
    assert found["median_ttft_ms"] >= 30
    assert [len(gaps) for gaps in found["itls"]] == [3] * 6
    assert len(server.asked) == 7, "one before the run"
    assert all(body["ignore_eos"] is True and body["temperature"] == 0.0 for body in server.asked)


def test_several_rates_end_in_the_knee(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with scripted_server(first_s=0.01, gap_s=0.001) as server:
        words = ["--num-prompts", "3", "--random-output-len", "2", "--request-rate", "5,20", "--no-ignore-eos"]
        assert bench("serve", "--base-url", server.url, *words, "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json") == 0
    assert "It keeps up with" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r-2.json", "r.json"]
    assert "itls" not in json.loads((tmp_path / "r.json").read_text())
    assert all("ignore_eos" not in body for body in server.asked)


def test_failures_are_told_by_the_exit_status(capsys: pytest.CaptureFixture[str]):
    with scripted_server(fault="status") as server:
        assert bench("serve", "--base-url", server.url) == 1
        assert "the request before the run failed: status 429" in capsys.readouterr().err
        assert bench("serve", "--base-url", server.url, "--num-warmups", "0", "--num-prompts", "2") == 1
        out = capsys.readouterr().out
        assert "failed: status 429" in out
    assert bench("serve", "--base-url", "http://127.0.0.1:1") == 1


def test_two_servers_in_turn(capsys: pytest.CaptureFixture[str]):
    with scripted_server(first_s=0.08, gap_s=0.02) as slow, scripted_server(first_s=0.01, gap_s=0.001) as fast:
        words = ["--num-prompts", "2", "--random-output-len", "5", "--repeats", "2", "--num-warmups", "0"]
        assert bench("compare", slow.url, fast.url, *words) == 0
        assert len(slow.asked) == len(fast.asked) == 4
    lines = capsys.readouterr().out.splitlines()
    (ttft,) = [line for line in lines if line.startswith("TTFT P50")]
    assert float(ttft.split()[-2]) > 1.0


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--request-rate", "1,inf"], "inf"),
        (["--request-rate", "0"], "--request-rate"),
        (["--goodput", "speed:3"], "METRIC:MILLISECONDS"),
        (["--metric-percentiles", "101"], "0 to 100"),
        (["--extra-body", "[]"], "JSON object"),
        (["--extra-body", "{"], "--extra-body"),
    ],
)
def test_a_wrong_flag_is_named(words: list[str], fault: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        bench("serve", *words)
    assert ended.value.code == 2
    assert fault in capsys.readouterr().err


def test_a_rate_that_grows_needs_both_its_ends(capsys: pytest.CaptureFixture[str]):
    assert bench("serve", "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1") != 0
    assert "--ramp-up-end-rps" in capsys.readouterr().err


def test_a_trace_says_what_is_sent_and_when(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = [{"arrival": 5.0 + i / 5, "prompt_tokens": 10 + i, "output_tokens": 2 + i, "prefix": "p", "prefix_tokens": 8} for i in range(3)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with scripted_server(first_s=0.0, gap_s=0.0) as server:
        words = ["--trace", str(tmp_path / "t.jsonl"), "--speed", "2", "--num-warmups", "0", "--save-result", "--result-dir", str(tmp_path)]
        assert bench("serve", "--base-url", server.url, *words, "--result-filename", "r.json") == 0
        assert bench("serve", "--base-url", server.url, *words, "--request-rate", "3") == 2
        assert bench("serve", "--base-url", server.url, "--speed", "2") == 2
        tenants = tmp_path / "tenants.jsonl"
        tenants.write_text(json.dumps({"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "tenant": "a"}))
        assert bench("serve", "--base-url", server.url, "--trace", str(tenants)) == 2
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["trace"], found["request_rate"], found["total_output_tokens"]) == ("t.jsonl", pytest.approx(15.0), 9)
    assert [len(body["prompt"].split()) for body in server.asked] == [10, 11, 12]
    assert len({tuple(body["prompt"].split()[:8]) for body in server.asked}) == 1
    assert found["duration"] >= 0.2
    err = capsys.readouterr().err
    assert "leave --request-rate out" in err
    assert "take the field tenant out" in err
