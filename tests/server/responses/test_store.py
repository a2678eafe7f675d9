from typing import Any

import pytest

from headrace.server.responses.store import ResponseStore

ITEMS = [{"type": "message"}]


def response(number: int, text: str = "") -> dict[str, Any]:
    return {"id": f"resp_{number}", "text": text}


@pytest.fixture
def store() -> ResponseStore:
    return ResponseStore(max_responses=3, max_bytes=1000)


def ids(store: ResponseStore) -> list[int]:
    return [number for number in range(20) if store.get("", f"resp_{number}") is not None]


def test_what_is_put_comes_back_unchanged(store: ResponseStore):
    given = response(1, "x")
    store.put("", given, ITEMS)
    given["text"] = "changed"
    stored = store.get("", "resp_1")
    assert stored is not None
    assert (stored.response, stored.input_items) == (response(1, "x"), ITEMS)
    stored.response["text"] = "changed"
    assert stored.response == response(1, "x")
    assert store.get("another", "resp_1") is None
    store.check()


def test_the_least_recently_used_go_first(store: ResponseStore):
    for number in range(3):
        store.put("", response(number), ITEMS)
    assert store.get("", "resp_0") is not None
    store.put("", response(3), ITEMS)
    store.check()
    assert ids(store) == [0, 2, 3]


def test_bytes_are_bounded_and_newer_states_replace_older_ones(store: ResponseStore):
    store.put("", response(0, "x" * 400), ITEMS)
    store.put("", response(1, "x" * 300), ITEMS)
    store.put("", response(1, "x" * 350), ITEMS)
    store.check()
    assert ids(store) == [0, 1]
    store.put("", response(2, "x" * 500), ITEMS)
    store.check()
    assert ids(store) == [1, 2]
    store.put("", response(2, "x" * 2000), ITEMS)  # larger than all of the room: it is not kept, nor is its older state
    store.check()
    assert ids(store) == [1]


def test_deleting_gives_the_bytes_back(store: ResponseStore):
    store.put("a", response(0, "x" * 900), ITEMS)
    assert not store.delete("b", "resp_0")
    assert store.delete("a", "resp_0")
    assert not store.delete("a", "resp_0")
    assert (len(store), store.num_bytes) == (0, 0)
