"""The table of path states, transition by transition."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import PathState
from headrace.runner.paths import TRANSITIONS, Event, IllegalTransition, Path, Paths

STATES, EVENTS = get_args(PathState), get_args(Event)
EXPECTED = {
    ("ready", "compile", "compiling"),
    ("ready", "load", "compiled"),
    ("ready", "fail", "failed"),
    ("ready", "retire", "retired"),
    ("compiling", "load", "compiled"),
    ("compiling", "fail", "failed"),
    ("compiling", "retire", "retired"),
    ("compiled", "retire", "retired"),
    ("compiled", "fail", "failed"),
}


def reason_for(event: str) -> str | None:
    return "why" if event in ("fail", "retire") else None


def test_the_table_is_what_was_agreed() -> None:
    assert {(state, event, after) for (state, event), after in TRANSITIONS.items()} == EXPECTED


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES)
def test_every_transition(state: PathState, event: Event) -> None:
    path = Path(name="decode-4", state=state)
    after = next((after for before, what, after in EXPECTED if (before, what) == (state, event)), None)
    if after is None:
        with pytest.raises(IllegalTransition, match=f"path decode-4: no '{event}' in state '{state}'"):
            path.move(event, reason_for(event))
        assert path.state == state
        return
    path.move(event, reason_for(event))
    assert (path.state, path.reason) == (after, reason_for(event))


def test_a_reason_goes_with_an_end_and_only_there() -> None:
    for event, reason in (("fail", None), ("retire", None), ("compile", "why"), ("load", "why")):
        with pytest.raises(AssertionError):
            Path(name="decode-1").move(event, reason)  # type: ignore[arg-type]


def test_what_all_paths_are_together() -> None:
    paths = Paths(["a", "b", "c"])
    assert (paths.state, paths.reason, paths.names("ready")) == ("ready", None, ["a", "b", "c"])
    paths["a"].move("compile")
    paths["b"].move("load")
    assert paths.state == "compiling"
    paths["a"].move("fail", "no compiler")
    assert (paths.state, paths.reason) == ("compiled", "no compiler")
    paths["b"].move("retire", "slower")
    assert (paths.state, paths.reason) == ("failed", "no compiler")
    assert [(status.name, status.state, status.reason) for status in paths.statuses()] == [
        ("a", "failed", "no compiler"),
        ("b", "retired", "slower"),
        ("c", "ready", None),
    ]
    paths.check()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(EVENTS)), max_size=12))
def test_no_walk_breaks_the_rules(walk: list[tuple[str, Event]]) -> None:
    paths = Paths("ab")
    for name, event in walk:
        before = paths[name].state
        try:
            paths[name].move(event, reason_for(event))
        except IllegalTransition:
            assert paths[name].state == before
        paths.check()
        assert paths.state in STATES
    assert all(path.state == "ready" or path.state in {after for _, _, after in EXPECTED} for path in paths)
