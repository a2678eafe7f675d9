import asyncio
import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from headrace.errors import BodyTimeout, BodyTooLarge, InvalidRequest, QueueFull
from headrace.server import body as body_module
from headrace.server.body import MAX_JSON_VALUES, SCAN_BYTES, BodyBudget, ClientGone, count_json_values, decode_object, read_body
from tests.patience import LIMIT_S

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\,[]{}: é\n', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='k"\\,', max_size=3), inner, max_size=4),
    max_leaves=20,
)


def count(value: object) -> int:
    """Scalars, lists and objects in a JSON value, keys too."""
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    if isinstance(value, dict):
        return 1 + sum(1 + count(item) for item in value.values())
    return 1


@given(json_values, st.integers(1, 9), st.booleans())
def test_count_is_a_tight_upper_bound_however_the_text_is_cut(value, piece, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "SCAN_BYTES", 2 * piece)
        counted = count_json_values(text, stop_above=10**9)
    assert count(value) <= counted <= 2 * count(value)


def test_count_stops_early():
    text = b"[" + b"{}," * 1_000_000
    assert 10 < count_json_values(text, stop_above=10) <= SCAN_BYTES < len(text)


def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(monkeypatch):
    text = b'{"messages": [' + b"{}," * 1_000_000 + b"{}]}"
    decoded = []
    monkeypatch.setattr(body_module.msgspec.json, "decode", decoded.append)
    with pytest.raises(InvalidRequest, match=str(MAX_JSON_VALUES)):
        decode_object(text)
    assert not decoded


def test_a_large_text_full_of_commas_is_no_list():
    text = "a,[{:" * 1_000_000
    assert decode_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"[]", b"null", b"7", b'"x"', b"{", b"{} {}", b"{'a': 1}", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\\ud800"}', b'{"a": "\xff"}'),
        b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(text):
    with pytest.raises(InvalidRequest):
        decode_object(text)


def receiving(*messages: dict[str, object]):
    waiting = list(messages)

    async def receive() -> dict[str, object]:
        if waiting:
            return waiting.pop(0)
        raise AssertionError("read past the end")

    return receive


def chunk(data: bytes, more: bool = True) -> dict[str, object]:
    return {"type": "http.request", "body": data, "more_body": more}


async def read(receive, limit: int = 10, timeout: float = LIMIT_S, total: int = 1000, **headers: str) -> bytes:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    with BodyBudget(total).lease() as lease:
        return await read_body(receive, Headers(names), max_bytes=limit, timeout=timeout, lease=lease)


async def test_a_body_in_chunks_is_put_together():
    assert await read(receiving(chunk(b"abc"), chunk(b""), chunk(b"de", more=False))) == b"abcde"


async def test_a_body_over_the_limit_is_read_to_its_end_and_refused():
    with pytest.raises(BodyTooLarge, match="10"):
        await read(receiving(chunk(b"a" * 8), chunk(b"b" * 8), chunk(b"", more=False)))


async def test_a_body_far_over_the_limit_is_refused_unread():
    with pytest.raises(BodyTooLarge):
        await read(receiving(), content_length="41")
    with pytest.raises(BodyTooLarge):
        await read(receiving(), content_length="11", expect="100-continue")
    with pytest.raises(BodyTooLarge):
        await read(receiving(chunk(b"a" * 41)))


async def test_a_lying_content_length_changes_nothing():
    for length in ("3", "0", "-1", "x", "²"):
        assert await read(receiving(chunk(b"abcde", more=False)), content_length=length) == b"abcde"


async def test_a_client_that_hangs_up_is_noticed():
    with pytest.raises(ClientGone):
        await read(receiving(chunk(b"a"), {"type": "http.disconnect"}))


async def test_a_slow_body_times_out():
    async def receive() -> dict[str, object]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(BodyTimeout, match=r"0\.01"):
        await read(receive, timeout=0.01)


async def test_compressed_bodies_are_refused_by_name():
    with pytest.raises(InvalidRequest) as error:
        await read(receiving(), content_encoding="gzip")
    assert error.value.param == "Content-Encoding"


async def test_the_budget_of_all_bodies_is_kept_and_given_back():
    budget = BodyBudget(10)
    with budget.lease() as one:
        one.charge(8)
        with budget.lease() as two:
            two.charge(2)
            with pytest.raises(QueueFull):
                two.charge(1)
            assert budget.used == 10
        assert budget.used == 8
    assert budget.used == 0


def test_scan_of_a_large_body_lets_other_threads_run():
    """Each piece is scanned in a few milliseconds, between which the interpreter lock changes hands."""
    piece = np.random.default_rng(0).integers(32, 127, body_module.SCAN_BYTES, dtype=np.uint8).tobytes()
    started = time.thread_time()
    count_json_values(piece, stop_above=10**9)
    assert time.thread_time() - started < 0.2
