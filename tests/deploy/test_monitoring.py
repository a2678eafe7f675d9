"""The dashboard and the alerts ask for what /metrics gives; with Prometheus on the PATH they are run against a real server."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from headrace.observe.metrics import Metrics
from tests.docs.markdown import ROOT
from tests.server.fakes import write_model
from tests.server.test_serve import Process

DASHBOARD = json.loads((ROOT / "deploy/grafana/headrace.json").read_text())
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def served() -> set[str]:
    """Names of samples."""
    metrics = Metrics(model_name="m")
    metrics.expect_paths(["/v1/completions"])
    text = metrics.render(None, state="ready")[0].decode()
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}


@pytest.mark.parametrize("query", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_every_metric_that_is_asked_for_is_served(query: str):
    asked = set(re.findall(r"headrace_\w+", query))
    assert asked
    assert asked <= served()


def test_panels_do_not_overlap_and_have_their_own_ids():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [(x, y) for place in places for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def test_every_alert_says_what_it_is():
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] in ("warning", "critical") for rule in RULES)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (package prometheus) is not on the PATH")
@pytest.mark.parametrize("words", [["check", "rules", str(ALERTS)], ["test", "rules", str(ALERTS.with_name("alerts_test.yaml"))]])
def test_promtool_agrees(words: list[str]):
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not on the PATH")
def test_a_real_prometheus_answers_every_query(tmp_path: Path):
    process = Process(write_model(tmp_path / "model", eos_every=0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config: dict[str, Any] = {
        "global": {"scrape_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "headrace", "static_configs": [{"targets": [process.url.removeprefix("http://")]}]}],
    }
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={tmp_path}/prometheus.yaml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as prometheus:
        try:
            process.wait_ready()
            results = {query: _ask(port, query, process) for query in QUERIES}
        finally:
            prometheus.terminate()
            process.kill()
    idle = {query for query in QUERIES if "spec_decode" in query}  # 0 / 0 without speculation
    assert all(results.values())
    assert all(value == value for query in set(QUERIES) - idle for value in results[query]), "not a number"


def _ask(port: int, query: str, process: Process) -> list[float]:
    """The values of a query once the server has been scraped often enough."""
    text = query.replace("$job", "headrace").replace("$__rate_interval", "30s")
    end = time.monotonic() + 60
    values: list[float] = []
    while time.monotonic() < end:
        process.complete(prompt="a prompt that is longer than a block of sixteen tokens", max_tokens=8)
        try:
            found = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": text}, trust_env=False).json()
        except httpx.TransportError:  # it is starting
            time.sleep(0.2)
            continue
        assert found["status"] == "success", found
        values = [float(sample["value"][1]) for sample in found["data"]["result"]]
        if values and (all(value == value for value in values) or "spec_decode" in query):
            return values
        time.sleep(0.5)
    return values
