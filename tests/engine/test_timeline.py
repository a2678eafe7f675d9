"""What a traced request is told of its way through the engine."""

from dataclasses import replace

from headrace.core.messages import AddRequest, Row, StepPlan, TokenOutput
from headrace.engine.timeline import MAX_CHUNKS, Timelines
from headrace.engine.wire import Chunk, Timeline
from headrace.sampling_params import SamplingParams
from tests.engine.fake_engine import add, collect, engine, fake_config
from tests.patience import eventually


def request(request_id: str, length: int) -> AddRequest:
    return AddRequest(request_id=request_id, prompt_token_ids=(1,) * length, params=SamplingParams(), arrival=0.0, traced=True)


def row(request_id: str, start: int, count: int, *, sample: bool = False, guesses: int = 0) -> Row:
    return Row(
        request_id=request_id,
        slot=0,
        start=start,
        num_tokens=count,
        token_ids=(1,) * count,
        block_offset=0,
        new_block_ids=(),
        sample=sample,
        num_speculated=guesses,
    )


def plan(*rows: Row) -> StepPlan:
    return StepPlan(step_id=1, rows=rows)


def test_chunks_and_decode_steps():
    timelines = Timelines()
    timelines.add_request(request("a", 5))
    timelines.add_request(replace(request("b", 5), traced=False))
    timelines.add_step(plan(row("a", 0, 4), row("b", 0, 5, sample=True)), 1.0, 2.0)
    timelines.add_step(plan(row("a", 4, 1, sample=True)), 2.0, 3.0)  # one token, but of the prompt
    timelines.add_step(plan(row("b", 5, 1, sample=True)), 3.0, 4.0)
    timelines.add_step(plan(row("a", 5, 3, sample=True, guesses=2)), 4.0, 5.0)
    timelines.add_step(plan(row("a", 6, 1, sample=True)), 5.0, 6.0)
    assert timelines.take([TokenOutput(request_id="a"), TokenOutput(request_id="b", finish_reason="stop")]) == []
    (told,) = timelines.take([TokenOutput(request_id="a", finish_reason="stop", num_preemptions=1)])
    assert told == Timeline("a", (Chunk(1.0, 2.0, 0, 4), Chunk(2.0, 3.0, 4, 1)), 2, 4.0, 6.0, 2, 1)
    assert timelines.take([TokenOutput(request_id="a", finish_reason="stop")]) == []


def test_chunks_are_bounded():
    timelines = Timelines()
    timelines.add_request(request("a", 1000))
    for position in range(MAX_CHUNKS + 9):
        timelines.add_step(plan(row("a", position, 1)), position, position + 1)
    (told,) = timelines.take([TokenOutput(request_id="a", finish_reason="abort")])
    assert (len(told.chunks), told.num_chunks, told.decode_begin) == (MAX_CHUNKS, MAX_CHUNKS + 9, None)


class Told:
    def __init__(self) -> None:
        self.timelines: list[Timeline] = []

    def detokenised(self, begin: float, end: float) -> None:
        raise AssertionError

    def computed(self, timeline: Timeline) -> None:
        self.timelines.append(timeline)


async def test_over_the_wire_also_of_one_that_was_given_up():
    async with engine(fake_config({"step_seconds": 0.002})) as client:
        ended, aborted = Told(), Told()
        async for _ in client.submit(replace(add(max_tokens=3), request_id="a", traced=True), ended):
            pass
        (told,) = ended.timelines
        assert [(chunk.start, chunk.num_tokens) for chunk in told.chunks] == [(0, 3)]
        assert told.num_decode_steps == 2
        assert told.decode_begin is not None
        assert told.decode_end is not None
        assert told.chunks[0].started < told.chunks[0].ended <= told.decode_begin < told.decode_end
        stream = client.submit(replace(add(max_tokens=500), request_id="b", traced=True), aborted)
        await anext(stream)
        await stream.aclose()
        await eventually(lambda: aborted.timelines)
        assert aborted.timelines[0].num_chunks == 1
        assert not client._watchers
        await collect(client, add())
        assert len(ended.timelines) == 1
