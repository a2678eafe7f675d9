from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest

from tests.scripts.load_script import load_script

dashboard_panels = load_script("dashboard_panels")
PANEL = {"title": "Tokens", "type": "timeseries", "targets": [{"expr": 'rate(a{job=~"$job"}[$__rate_interval])', "legendFormat": "{{kind}} tokens"}]}


def test_what_is_asked_and_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def get(url: str, path: str) -> object:
        asked.append(parse_qs(urlsplit(path).query)["query"][0])
        values = [[100.0, "1.5"], [102.0, "NaN"], [104.0, "0"]]
        return {
            "status": "success",
            "data": {"result": [{"metric": {"kind": "useful"}, "values": values}, {"metric": {}, "values": [[100.0, "NaN"]]}]},
        }

    monkeypatch.setattr(dashboard_panels, "get", get)
    found = dashboard_panels.answers("http://x", PANEL, 100.0, 104.0)
    assert asked == ['rate(a{job=~"headrace"}[15s])']
    assert found == {"useful tokens": [(0.0, 1.5), (4.0, 0.0)]}, "what is no number is left out"


def test_a_query_that_is_refused_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_panels, "get", lambda url, path: {"status": "error", "error": "parse error"})
    with pytest.raises(SystemExit, match="parse error"):
        dashboard_panels.answers("http://x", PANEL, 0.0, 1.0)


def test_every_series_is_drawn_or_named() -> None:
    series = {f"kind {i}": [(0.0, float(i)), (1.0, float(i))] for i in range(6)}
    section = dashboard_panels.drawn(PANEL, series)
    assert section.count("<svg") == 2
    assert all(name in section for name in series)
    assert "Zero all the time: kind 0." in section
    assert "0 / 0" in dashboard_panels.drawn(PANEL, {})
