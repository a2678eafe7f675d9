"""kill -9 in the middle of a batch: no line is lost, none is answered twice."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.patience import LIMIT_S
from tests.server.fakes import write_model
from tests.server.test_serve import Process


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.kill()


@pytest.mark.slow
def test_three_kills_in_a_batch_of_two_hundred_lines(tmp_path: Path, processes: list[Process]):
    openai = pytest.importorskip("openai")
    model = write_model(tmp_path / "model", eos_every=0, low=97, high=123, step_seconds=0.002)
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"number {i}", "max_tokens": 20, "temperature": 0}}
        for i in range(200)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    batch_id, seen = "", 0
    for goal in (30, 80, 130, None):
        process = Process(model, "--batch-dir", str(tmp_path / "batches"))
        processes.append(process)
        process.wait_ready()
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", http_client=httpx.Client(timeout=LIMIT_S, trust_env=False)) as client:
            if not batch_id:
                file = client.files.create(file=("in.jsonl", content), purpose="batch")
                batch_id = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id
            batch = client.batches.retrieve(batch_id)
            assert batch.request_counts.completed >= seen
            while batch.status != "completed" if goal is None else batch.request_counts.completed < goal:
                time.sleep(0.02)
                batch = client.batches.retrieve(batch_id)
            seen = batch.request_counts.completed
            if goal is not None:
                assert seen < 200
                process.kill()
                continue
            results = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (200, 200, 0)
    assert [result["custom_id"] for result in results] == [f"c{i}" for i in range(200)]
    assert batch.error_file_id is None
    for i in (0, 99, 199):
        assert results[i]["response"]["body"]["choices"] == process.complete(**lines[i]["body"], ignore_eos=None).json()["choices"]
    process.popen.send_signal(signal.SIGTERM)
    assert process.ended() == 0
    assert "Traceback" not in process.output()


def test_a_drain_does_not_wait_for_a_batch(tmp_path: Path, processes: list[Process]):
    model = write_model(tmp_path / "model", eos_every=0, step_seconds=0.01)
    process = Process(model, "--batch-dir", str(tmp_path / "batches"))
    processes.append(process)
    process.wait_ready()
    with httpx.Client(base_url=process.url, timeout=LIMIT_S, trust_env=False) as http:
        lines = [{"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 400}} for i in range(50)]
        content = "\n".join(json.dumps(line) for line in lines).encode()
        file = http.post("/v1/files", files={"file": ("in", content)}, data={"purpose": "batch"}).json()
        fields = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        assert http.post("/v1/batches", json=fields).status_code == 200
    process.wait_running(8)
    process.popen.send_signal(signal.SIGTERM)
    assert process.ended() == 0


def test_a_folder_in_use_ends_the_start(tmp_path: Path, processes: list[Process]):
    model = write_model(tmp_path / "model")
    for _ in range(2):
        processes.append(Process(model, "--batch-dir", str(tmp_path / "batches")))
        if len(processes) == 1:
            processes[0].wait_ready()
    assert processes[1].ended() == 1
    assert "--batch-dir" in processes[1].output()
