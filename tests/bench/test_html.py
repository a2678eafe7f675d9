"""Reports are whole by themselves, say what was measured, and let nothing through that is not theirs."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from headrace.bench.figures import samples
from headrace.bench.html import COLOURS, Bar, bars, curves, nice_top, stacked_bars
from headrace.bench.html_reports import compare_page, ladder_page, serve_page
from headrace.bench.ladder import with_ratios
from tests.bench.results import PROVENANCE, run_of, rung, served

VOID = {"meta", "circle", "path", "br"}  # the parser tells of those closed in themselves apart


class Page(HTMLParser):
    """Checks that elements close in order; keeps text and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


def ladder_result(**changes: Any) -> dict[str, Any]:
    measured = with_ratios(
        [
            rung("naive", None, throughput=0.5, shared_ms=4000.0),
            rung("dynamic", "naive", throughput=1.5, shared_ms=500.0),
            rung("other", "dynamic", throughput=1.2, shared_ms=None, work=False),
        ]
    )
    return PROVENANCE | {"model": "m", "load": "64 requests", "caveats": ["Mind the <gap>."], "rungs": measured} | changes


PAGES = {
    "ladder": lambda: ladder_page(ladder_result()),
    "sweep": lambda: serve_page([(r, 4, 4 / r, served(r, throughput=t)) for r, t in ((1.0, 0.9), (2.0, 1.6), (8.0, 1.7))], [{}] * 3),
    "one": lambda: serve_page([(4.0, 4, 1.0, served(4.0, work=True))], [samples(run_of().records)]),
    "compare": lambda: compare_page([[served(4.0, throughput=2.0)] * 2, [served(4.0, url="http://b", throughput=1.0)] * 2]),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_nothing_from_elsewhere(name: str):
    page = PAGES[name]()
    parsed = Page(page)
    assert not [value for _, attribute, value in parsed.attributes if attribute in ("src", "href", "srcset", "onload", "onclick")]
    assert "url(" not in page
    assert "@import" not in page
    assert "<script" not in page
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_where_its_figures_come_from(name: str):
    text = Page(PAGES[name]()).text
    for fact in (PROVENANCE["machine"], PROVENANCE["command"], "headrace 1, torch 2, python 3", "2026-01-02 03:04 UTC"):
        assert fact in text, fact
    assert "What to keep in mind" in text


def test_what_the_ladder_says():
    page = ladder_page(ladder_result())
    text = Page(page).text
    assert "Rung 2 (the <dynamic>) serves 1.50 requests a second, 3.0 times what rung 1 (the <naive>) does on this machine." in text
    assert "3.00 x rung 1" in text
    assert "8.0 x sooner than rung 1" in text
    assert "useful 75.0%, padding 25.0%" in text
    assert text.count("not known") == 2, "work and shared context of the last"
    assert "Mind the <gap>." in text
    assert all(f"python -m {name}" in text for name in ("naive", "dynamic", "other"))


def test_what_a_sweep_says():
    page = PAGES["sweep"]()
    assert "It keeps up with up to 2 requests a second." in page
    assert page.count("<svg") == 4
    assert page.count('<path class="curve"') == 2 + 3 * 3


def test_one_rate_has_its_distribution_and_the_split_of_time():
    text = Page(PAGES["one"]()).text
    assert "percent of all stay below" in text
    assert "useful 30.0%, padding 10.0%, idle 60.0%" in text
    failed = Page(serve_page([(4.0, 5, 1.0, served(4.0, error="no"))], [samples(run_of().records)])).text
    assert "1 requests failed at 4.0/s" in failed


def test_what_a_comparison_says():
    assert "http://a serves 2.00 times as many requests a second as http://b (median of 2 rounds)." in PAGES["compare"]()


def test_bars_share_one_scale_from_zero():
    page = bars([Bar(label="a", value=2.0, text="2"), Bar(label="b", value=1.0, text="1"), Bar(label="c", value=None, text="not known")])
    widths = [float(width) for width in re.findall(r"<i style=\"width:([\d.]+)%", page)]
    assert widths[0] == 2 * widths[1]
    assert len(widths) == 2
    assert "NaN" not in bars([Bar(label="a", value=0.0, text="0")])


def test_stacks_fill_their_row():
    page = stacked_bars([("a", {"useful": 3.0, "padding": 1.0, "host": 0.0})], {"useful": "u", "padding": "p", "host": "h"})
    assert [float(width) for width in re.findall(r"width:([\d.]+)%", page)] == [75.0, 25.0]
    assert "h</li>" not in page, "what is nowhere needs no key"


def test_curves_lie_within_their_axes():
    page = curves({"P50": [(1, 10), (8, 700)], "P99": [(1, 20), (8, 710)]}, x_label="rate", y_label="ms", mark=(4, "here"))
    points = [tuple(map(float, point)) for point in re.findall(r'circle cx="([\d.]+)" cy="([\d.]+)"', page)]
    assert len(points) == 4
    assert all(64 <= x <= 610 and 16 <= y <= 256 for x, y in points)
    names = [float(y) for y in re.findall(r'class="end" x="[\d.]+" y="([\d.]+)"', page)]
    assert abs(names[0] - names[1]) >= 15, "names do not lie on each other"


@pytest.mark.parametrize(("value", "top"), [(0.0, 1.0), (1.0, 1.0), (1.1, 2.0), (3.0, 4.0), (5.0, 8.0), (9.0, 10.0), (710.0, 800.0), (0.03, 0.04)])
def test_axes_end_at_round_numbers(value: float, top: float):
    assert nice_top(value) == pytest.approx(top)


def test_kinds_of_work_have_colours():
    from headrace.observe.work import KINDS

    assert set(KINDS) <= set(COLOURS)
