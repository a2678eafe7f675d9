from collections.abc import AsyncIterator

import pytest

from headrace.text.tokenizer import Tokenizer
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.server.fakes import World
from tests.server.sites import Site, opened


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def world(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> AsyncIterator[World]:
    """A server over fakes; `@pytest.mark.parametrize("world", [{...}], indirect=True)` gives it a `ServerConfig`."""
    world = World(tokenizer, **getattr(request, "param", {}))
    yield world
    await world.close()


@pytest.fixture
async def site(world: World) -> AsyncIterator[Site]:
    async with opened(world) as site:
        yield site
