"""One HTML file that needs nothing else: a page with facts, plots and tables, in the light and the dark.

Bars are boxes, so that their words stay readable on a phone; curves are inline SVG. Whatever comes from outside is escaped here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

# light and dark of each colour; those of kinds of work first
COLOURS: Mapping[str, tuple[str, str]] = {
    "useful": ("#0b7f8a", "#3fb4bf"),
    "padding": ("#c46a1b", "#e39a52"),
    "recompute": ("#a3231d", "#ff8a80"),
    "speculation": ("#7a3fa0", "#c99be6"),
    "discarded": ("#8a5a3c", "#c8a084"),
    "compile": ("#8f7a00", "#d9c64a"),
    "host": ("#3d5fa8", "#8fabe8"),
    "waiting": ("#7b8a86", "#8a9a95"),
    "idle": ("#b9c5c1", "#4a5b57"),
    "one": ("#0b7f8a", "#3fb4bf"),
    "two": ("#c46a1b", "#e39a52"),
    "three": ("#7a3fa0", "#c99be6"),
}
SERIES = ("one", "two", "three")


def document(title: str, *, lead: str, sections: Iterable[str], facts: Mapping[str, object], caveats: Sequence[str]) -> str:
    """The whole file. `lead`: what was found, in a sentence or two; `facts`: machine, versions, command; `caveats`: what the figures can't say."""
    names = [f"--{name}: {light};" for name, (light, _) in COLOURS.items()], [f"--{name}: {dark};" for name, (_, dark) in COLOURS.items()]
    colours = f":root {{ {' '.join(names[0])} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {' '.join(names[1])} }} }}\n"
    style = colours + resources.files("headrace.bench").joinpath("report.css").read_text(encoding="utf-8")
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{_fact(name, value)}</dd>" for name, value in facts.items() if value is not None)
    last = section("Where these figures come from", f'<dl class="facts">{rows}</dl>')
    if caveats:
        last = section("What to keep in mind", f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in caveats)}</ul>") + last
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<title>{escape(title)}</title><style>{style}</style></head>\n<body><main><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>\n'
        + "\n".join([*sections, last])
        + "\n</main></body></html>\n"
    )


def _fact(name: str, value: object) -> str:
    text = escape(str(value))
    return f"<code>{text}</code>" if name == "command" else text


def section(heading: str, body: str, note: str = "") -> str:
    return f"<section><h2>{escape(heading)}</h2>{f'<p class=note>{escape(note)}</p>' if note else ''}{body}</section>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    label: str
    value: float | None  # None: not known
    text: str  # the value in words
    extra: str = ""  # beside it, softer


def bars(rows: Sequence[Bar], *, colour: str = "one") -> str:
    """One bar a row, from zero, on one scale."""
    most = max((row.value for row in rows if row.value is not None), default=0.0)
    return _rows((row.label, _bar(row, most, colour)) for row in rows)


def grouped_bars(rows: Sequence[tuple[str, Sequence[Bar]]], names: Sequence[str]) -> str:
    """Several bars a row, one for each of `names`, all on one scale."""
    most = max((bar.value for _, group in rows for bar in group if bar.value is not None), default=0.0)
    groups = (
        (label, f'<div class="group">{"".join(_bar(bar, most, c) for bar, c in zip(group, SERIES, strict=False))}</div>') for label, group in rows
    )
    return _rows(groups) + _key(list(zip(SERIES, names, strict=False)))


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float] | None]], words: Mapping[str, str]) -> str:
    """What each row's whole is made of: parts by the name of a colour. `words`: what the parts mean, for those that are there."""
    there = [name for name in words if any(parts and parts.get(name, 0.0) > 0.0 for _, parts in rows)]

    def stack(parts: Mapping[str, float] | None) -> str:
        total = sum(parts.values()) if parts else 0.0
        if not parts or not total:
            return '<span class="axis">not known</span>'
        shares = [(name, parts.get(name, 0.0) / total) for name in there]
        title = escape(", ".join(f"{name} {share:.1%}" for name, share in shares if share >= 0.0005))
        cells = "".join(f'<i style="width:{100 * share:.2f}%;background:var(--{name})"></i>' for name, share in shares)
        stack = f'<div class="stack" role="img" aria-label="{title}" title="{title}">{cells}</div>'
        return f'{stack}<span class="axis">{title}</span>'

    return _rows((label, stack(parts)) for label, parts in rows) + _key([(name, f"{name}: {words[name]}") for name in there])


def _bar(bar: Bar, most: float, colour: str) -> str:
    extra = f"<small>{escape(bar.extra)}</small>" if bar.extra else ""
    if bar.value is None:
        return f'<div class="bar"><small>{escape(bar.text)}</small>{extra}</div>'
    width = 62 * bar.value / most if most else 0.0  # the rest is for the words
    return f'<div class="bar"><i style="width:{width:.2f}%;background:var(--{colour})"></i><b>{escape(bar.text)}</b>{extra}</div>'


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    return f'<dl class="rows">{"".join(f"<dt>{escape(label)}</dt><dd>{body}</dd>" for label, body in rows)}</dl>'


def _key(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><i style="background:var(--{colour})"></i>{escape(text)}</li>' for colour, text in entries)
    return f'<ul class="key">{items}</ul>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first cell of a row is its name."""
    columns = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in head)
    lines = "".join(f"<tr><th scope=row>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table></div>'


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 300, 64, 44, 16, 110


def curves(series: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str, mark: tuple[float, str] | None = None) -> str:
    """Curves over x, both axes from zero; at most three. `mark`: an x and what is there."""
    points = list(itertools.chain.from_iterable(series.values()))
    x_top, y_top = nice_top(max(x for x, _ in points)), nice_top(max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / x_top * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - y / y_top * (_HEIGHT - _BOTTOM - _TOP)

    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{escape(x_label)}</text>']
    for step in range(5):
        x, y = place(x_top * step / 4, y_top * step / 4)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{y_top * step / 4:g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{x_top * step / 4:g}</text>')
    if mark is not None:
        x, _ = place(mark[0], 0)
        parts.append(f'<path class="grid" stroke-dasharray="4 3" d="M{x:.1f} {_TOP}V{bottom}"/>')
        side, anchor = (-5, "end") if x > _WIDTH / 2 else (5, "start")  # names of curves stand at the right
        parts.append(f'<text x="{x + side:.1f}" y="{bottom - 6}" text-anchor="{anchor}">{escape(mark[1])}</text>')
    ends = []
    for colour, (name, curve) in zip(SERIES, series.items(), strict=False):
        way = [place(x, y) for x, y in curve]
        parts.append(f'<path class="curve" style="stroke:var(--{colour})" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in way)}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" style="fill:var(--{colour})"/>' for x, y in (way if len(way) <= 20 else [])]
        ends.append((way[-1][1], way[-1][0], colour, name))
    below = 0.0
    ends.reverse()
    for y, x, colour, name in sorted(ends, key=lambda end: round(end[0])):  # the last one on top where they meet
        below = max(y, below + 15)  # names must not lie on each other
        parts.append(f'<text class="end" x="{x + 8:.1f}" y="{below + 4:.1f}" style="fill:var(--{colour})">{escape(name)}</text>')
    label = f"{y_label} against {x_label}" + "".join(f", {name}" for name in series if name)
    return (
        f'<figure style="margin:0"><figcaption>{escape(y_label)}</figcaption><div class="wide"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg></div></figure>'
    )


def nice_top(value: float) -> float:
    """The end of an axis: the smallest of 1, 2, 4, 8 times a power of ten that is not below the value."""
    if value <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value * (1 - 1e-9))
