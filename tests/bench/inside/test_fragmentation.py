"""Memories by requests whose places can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench.inside.fragmentation import Blocks, Regions, Request, Slots, layouts, requests_of, simulate, table
from headrace.cli.main import main


def request(prompt: int, answer: int, limit: int | None = None) -> Request:
    return Request(prompt=prompt, answer=answer, limit=limit or answer)


def test_slots_are_as_long_as_the_longest():
    found = simulate(Slots(100, longest=50), [request(9, 1)] * 4)
    assert (found["most_running"], found["mean_running"]) == (2, 2.0)
    assert found["unused_of_reserved"] == found["unused_of_all"] == pytest.approx(1 - 10 / 50)
    assert found["finished_per_100_steps"] == 200.0


def test_regions_are_reserved_up_to_the_limit_and_in_one_piece():
    found = simulate(Regions(100), [request(9, 1, limit=11)] * 10)
    assert (found["most_running"], found["unused_of_reserved"]) == (5, pytest.approx(1 - 10 / 20))
    memory = Regions(100)
    places = [memory.take(request(20, 5)) for _ in range(4)]
    assert places == [(0, 25), (25, 50), (50, 75), (75, 100)]
    memory.free(places[0])
    memory.free(places[2])
    assert memory.reserved == 50
    assert memory.take(request(30, 5)) is None, "half is free, but not in one piece"
    assert memory.take(request(20, 5)) == (0, 25)


def test_blocks_are_taken_as_they_are_filled():
    found = simulate(Blocks(96, block_size=8), [request(7, 1)] * 3)
    assert (found["unused_of_reserved"], found["most_running"], found["preemptions"]) == (0.0, 3, 0)
    found = simulate(Blocks(96, block_size=8), [request(8, 1)] * 3)
    assert found["unused_of_reserved"] == pytest.approx(1 - 9 / 16)


def test_the_youngest_gives_way_where_blocks_run_out_and_is_served_later():
    found = simulate(Blocks(6 * 4, block_size=4), [request(4, 12)] * 4)
    # at length 9 the third gives way, at 13 the second, which comes back at once; with the first's end in step 12 nobody waits any more
    assert (found["most_running"], found["preemptions"]) == (3, 2)
    assert found["finished_per_100_steps"] == pytest.approx(100 / 13)


@pytest.mark.parametrize("memory", [Slots(40, longest=50), Regions(40), Blocks(40, block_size=4)])
def test_what_never_fits_is_said(memory):
    with pytest.raises(ValueError, match="never fits into 40"):
        simulate(memory, [request(30, 20)] * 2)


def test_memories_differ_where_lengths_do():
    """The same work; nothing is lost, and blocks hold the most."""
    requests = requests_of("mixed", 150, longest=1024, seed=1)
    assert all(one.prompt + one.limit <= 1024 and 1 <= one.answer <= one.limit for one in requests)
    assert len(set(requests_of("uniform", 9, longest=1024))) == 1
    found = {name: simulate(make(), requests) for name, make in layouts(4096, longest=1024, block_sizes=(16, 128))}
    unused = [found[name]["unused_of_reserved"] for name in ("slots of 1024", "regions", "blocks of 128", "blocks of 16")]
    assert unused == sorted(unused, reverse=True)
    running = [found[name]["mean_running"] for name in ("slots of 1024", "regions", "blocks of 16")]
    assert running == sorted(running)
    assert len(table([{"lengths": "mixed", "memory": name} | values for name, values in found.items()]).splitlines()) == 5


def test_the_verb_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--kv-tokens", "4096", "--max-model-len", "512", "--block-sizes", "16", "--requests", "40", "--json", str(tmp_path / "f.json")]
    assert main(["bench", "fragmentation", *words]) == 0
    assert "blocks of 16" in capsys.readouterr().out
    found = json.loads((tmp_path / "f.json").read_text())
    assert [(one["lengths"], one["memory"]) for one in found["results"]] == [
        (lengths, memory) for lengths in ("mixed", "uniform") for memory in ("slots of 512", "regions", "blocks of 16")
    ]
    assert main(["bench", "fragmentation", "--max-model-len", "100"]) == 2
    assert "--max-model-len must be from 384" in capsys.readouterr().err
    assert main(["bench", "fragmentation", "--block-sizes", "0"]) == 2
