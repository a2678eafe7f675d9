"""Real engine processes on the fake runner."""

import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from headrace.config import EngineConfig
from headrace.core.messages import AddRequest, TokenOutput
from headrace.engine.client import EngineClient
from headrace.engine.request_stream import merge_outputs
from headrace.sampling_params import SamplingParams
from tests.engine.byte_tokenizer import END
from tests.patience import eventually as until

_ids = itertools.count()


def fake_config(script: dict[str, Any] | None = None, **fields: Any) -> EngineConfig:
    """`script`: fields of `runner.fake.FakeScript`."""
    return EngineConfig(model=json.dumps(script or {}), runner_factory="headrace.runner.fake:make", **fields)


@asynccontextmanager
async def engine(config: EngineConfig, *, max_restarts: int = 5) -> AsyncIterator[EngineClient]:
    client = EngineClient(config, max_restarts=max_restarts)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


def add(prompt: tuple[int, ...] = (1, 2, 3), *, request_id: str | None = None, ignore_eos: bool = True, **params: Any) -> AddRequest:
    params = {"max_tokens": 8, "temperature": 0.0} | params
    return AddRequest(
        request_id=request_id or f"r{next(_ids)}",
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        arrival=time.monotonic(),
        eos_token_ids=() if ignore_eos else (END,),
    )


async def collect(client: EngineClient, request: AddRequest) -> TokenOutput:
    """The request's whole answer. Raises what its stream raises."""
    async with aclosing(client.submit(request)) as stream:
        return merge_outputs([output async for output in stream])


async def at_rest(client: EngineClient) -> None:
    """Waits until nothing is open or running; then every block must be free."""

    def resting() -> bool:
        stats = client.stats
        return stats is not None and client.num_open == stats.num_running == stats.num_waiting == stats.num_swapped == 0

    await until(resting)
    assert client.stats is not None
    assert client.stats.num_free_blocks == client.stats.num_blocks
