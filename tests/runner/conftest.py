from collections.abc import Iterator

import pytest

from headrace.runner import grammar_masks
from tests.patience import LIMIT_S


@pytest.fixture(autouse=True, scope="session")
def masks_may_take_long() -> Iterator[None]:
    """A second for a mask is enough for every machine that does not stand still."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_masks, "MAX_WAIT_S", LIMIT_S)
        yield
