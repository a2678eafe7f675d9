from collections.abc import AsyncIterator

import pytest

from tests.server.fakes import World
from tests.server.open_inference.port import Port


@pytest.fixture
async def port(world: World) -> AsyncIterator[Port]:
    port = Port(world)
    await port.open()
    yield port
    await port.close()
