import logging

import pytest

from headrace.server.trace_context import continued
from tests.server.fakes import World

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize("value", [GOOD, f"00-{TRACE}-{PARENT}-00", f"cc-{TRACE}-{PARENT}-03-what-comes-later", f" {GOOD} "])
def test_a_trace_goes_on_with_a_span_of_its_own(value: str):
    one, two = continued([value]), continued([value])
    assert one is not None
    assert two is not None
    assert one.trace_id == TRACE
    assert len({one.span_id, two.span_id, PARENT}) == 3
    assert one.header() == f"00-{TRACE}-{one.span_id}-{'00' if value.endswith('00') else '01'}"


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        [GOOD, GOOD],
        [GOOD.upper()],
        [GOOD + "-more"],
        [GOOD[:-1]],
        [f"ff-{TRACE}-{PARENT}-01"],
        [f"00-{'0' * 32}-{PARENT}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"00-{TRACE}-{PARENT}-0g"],
        [f"cc-{TRACE}-{PARENT}-01.later"],
        [GOOD + "\n"],
    ],
)
def test_what_is_no_trace_context_is_ignored(values: list[str]):
    assert continued(values) is None


@pytest.mark.parametrize("world", [{"log_requests": True}], indirect=True)
async def test_answers_and_the_log_name_the_trace(world: World, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="headrace.access"):
        for status, body in ((200, {"prompt": "x", "max_tokens": 1}), (400, {"prompt": 5})):
            response = await world.post("/v1/completions", body, headers={"traceparent": GOOD})
            assert response.status_code == status
            context = response.headers["traceparent"]
            assert context.startswith(f"00-{TRACE}-")
            assert f"trace={TRACE} span={context.split('-')[2]}" in caplog.records[-1].getMessage()
        plain = await world.post("/v1/completions", {"prompt": "x"}, headers={"traceparent": "junk\x01"})
    assert plain.status_code == 200
    assert "traceparent" not in plain.headers
    assert "trace=" not in caplog.records[-1].getMessage()
