"""The parts of the hostile client that need no server."""

from __future__ import annotations

import json

import pytest

from tests.scripts.load_script import load_script

hostile = load_script("hostile")
own_server = load_script("own_server")


def test_gaps_are_those_of_one_stream_and_of_the_time_asked_for():
    stream = hostile.Stream("http://127.0.0.1:1", "tiny")
    stream._times = [0.0, 1.0, 1.5, 4.0, 0.0, 9.0, 9.25]
    assert stream.gaps(0.0) == [0.5, 2.5, 0.25]
    assert stream.gaps(3.0) == [2.5, 0.25]  # a gap that had begun by then counts


def test_bodies_are_what_their_titles_say():
    bodies = hostile.hostile_bodies('a "name"')
    assert len({body for _, body in bodies.values()}) == len(bodies)
    for title, size in (("20 MB prompt", 20e6), ("20 MB chat", 20e6), ("20 MB of escapes", 20e6), ("20 MB of token ids", 20e6), ("40 MB body", 40e6)):
        assert size <= len(bodies[title][1]) < 1.1 * size, title
    for title in ("unknown field", "200,000 token ids", "20 MB chat", "a million prompts"):
        assert json.loads(bodies[title][1])["model"] == 'a "name"'
    cases = hostile.Cases("http://127.0.0.1:1", "tiny")
    schemas = [fields for title, (fields, _) in cases._grammars().items() if "10 MB" in title]
    assert len(schemas) == 2
    assert all(9e6 < len(json.dumps(fields)) < 15e6 for fields in schemas)


def test_metrics_are_summed():
    text = '# HELP a b\na{x="1"} 2.0\na{x="2"} 3\nb 4e1\n'
    assert own_server.read_metrics(text) == {"a": 5.0, "b": 40.0}


def test_a_server_that_does_not_start():
    with pytest.raises(SystemExit, match="There is no model at /no/such"), own_server.own_server(["/no/such.gguf"]):
        pass
