#!/usr/bin/env python3
"""The panels of `deploy/grafana/headrace.json` as one HTML page, drawn without Grafana from what a real Prometheus answers to their queries.

    python scripts/dashboard_panels.py dashboard.html
    python scripts/dashboard_panels.py dashboard.html --seconds 120 -- --max-num-seqs 16

A server of its own is scraped every second by a Prometheus of its own (`prometheus` on the PATH) while it gets the load (`--trace`); then each query
is asked for that time. So it shows what the dashboard asks and what comes back, not how Grafana looks. The exit status is 1 where a request fails or
Prometheus has no answer at all. What stands after `--` are flags of `headrace serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml
from own_server import own_server
from plain_http import first_model, get

from headrace.bench import html
from headrace.bench.load import run_load
from headrace.bench.sse_client import Target
from headrace.bench.traces import bench_request, load_trace
from headrace.cli.benches.provenance import provenance

DASHBOARD = Path(__file__).resolve().parent.parent / "deploy/grafana/headrace.json"
TRACE = "poisson:rate=2.5,prompt=96,output=40,requests=1000,sigma=0.6,prefix=64"
INTERVAL = "15s"  # what stands for Grafana's $__rate_interval
UNITS = {"percentunit": "share", "s": "seconds", "ops": "a second"}
GRID = "display:grid;grid-template-columns:repeat(auto-fit,minmax(24rem,1fr));gap:0 2rem"
Series = dict[str, list[tuple[float, float]]]


@contextlib.contextmanager
def prometheus(target: str) -> Iterator[str]:
    """One that scrapes `target` (host:port); where it answers."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [{"job_name": "headrace", "static_configs": [{"targets": [target]}]}]}
        path = Path(name) / "prometheus.yaml"
        path.write_text(yaml.safe_dump(config))
        command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={name}/data", f"--web.listen-address={address}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                yield f"http://{address}"
            finally:
                process.terminate()
                process.wait()


def answers(url: str, panel: Mapping[str, Any], begin: float, end: float) -> Series:
    """Of all its queries, by what the legend says; seconds since `begin`. Raises SystemExit where Prometheus refuses one."""
    found: Series = {}
    for target in panel["targets"]:
        query = target["expr"].replace("$job", "headrace").replace("$__rate_interval", INTERVAL)
        asked = urlencode({"query": query, "start": begin, "end": end, "step": 2})
        answer = get(url, f"/api/v1/query_range?{asked}")
        if answer["status"] != "success":
            raise SystemExit(f"{panel['title']}: {answer}")
        for series in answer["data"]["result"]:
            name = legend(target.get("legendFormat", ""), series["metric"])
            points = [(float(at) - begin, float(value)) for at, value in series["values"]]
            if known := [(x, y) for x, y in points if math.isfinite(y)]:
                found[name] = known
    return found


def legend(form: str, labels: Mapping[str, str]) -> str:
    for name, value in labels.items():
        form = form.replace("{{" + name + "}}", value)
    return form


def drawn(panel: Mapping[str, Any], series: Series) -> str:
    unit = UNITS.get(panel.get("fieldConfig", {}).get("defaults", {}).get("unit", ""), "")
    if not series:
        return html.section(panel["title"], "", "No value in this time: 0 / 0, as where nothing of the kind has happened.")
    if panel["type"] == "stat":
        return html.section(
            panel["title"], html.bars([html.Bar(label=name, value=at[-1][1], text=f"{at[-1][1]:.3g}") for name, at in series.items()]), unit
        )
    used = {name: points for name, points in series.items() if any(y for _, y in points)}
    none = sorted(series.keys() - used.keys())
    note = f"Zero all the time: {', '.join(none)}." if none else ""
    if not used:
        return html.section(panel["title"], "", note)
    parts = sorted(used.items(), key=lambda item: -max(y for _, y in item[1]))
    groups = [dict(parts[i : i + len(html.SERIES)]) for i in range(0, len(parts), len(html.SERIES))]
    return html.section(panel["title"], "".join(html.curves(group, x_label="seconds", y_label=unit or "count") for group in groups), note)


def page(panels: Sequence[Mapping[str, Any]], found: Sequence[Series], load: str) -> str:
    facts = provenance() | {"load": load}
    return html.document(
        "The dashboard's panels",
        lead="What Prometheus answers to the dashboard's queries while a server is under load. Drawn by Headrace, not by Grafana.",
        sections=[f'<div style="{GRID}">{"".join(drawn(panel, series) for panel, series in zip(panels, found, strict=True))}</div>'],
        facts=facts,
        caveats=[f"Rates are over {INTERVAL}; Grafana chooses that itself."],
    )


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    own, serve = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=90.0, help="of load (default: 90)")
    parser.add_argument("--trace", default=TRACE, help="the load (default: %(default)s)")
    args = parser.parse_args(own)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    trace = load_trace(args.trace)
    chosen = [request for request in trace.requests if request.arrival < args.seconds]
    with own_server(serve) as server, prometheus(server.url.removeprefix("http://")) as url:
        model = first_model(server.url)
        requests = [bench_request(request, number) for number, request in enumerate(chosen)]
        begin = time.time()
        run = asyncio.run(run_load(Target(server.url), requests, [request.arrival for request in chosen], model=model, extra={"ignore_eos": True}))
        time.sleep(2.0)  # the last scrape
        found = [answers(url, panel, begin, time.time()) for panel in panels]
    failed = sum(not record.ok for record in run.records)
    args.output.write_text(page(panels, found, f"{args.trace}: {len(chosen)} requests in {run.seconds:.0f} s, {failed} failed"), encoding="utf-8")
    empty = [panel["title"] for panel, series in zip(panels, found, strict=True) if not series]
    print(f"written: {args.output}; {len(panels) - len(empty)} of {len(panels)} panels have values" + (f", not: {', '.join(empty)}" if empty else ""))
    return int(failed > 0 or not any(found))


if __name__ == "__main__":
    raise SystemExit(main())
