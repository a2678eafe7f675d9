"""What holds for every test.

Before anything imports torch: its threads must not spin for long beside the processes that tests start (see engine.engine_process).
Examples of hypothesis have no deadline, which a busy machine would break, and are the same in every run.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.patience import LIMIT_S

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


@pytest.fixture(autouse=True, scope="session")
def grammars_may_take_long() -> Iterator[None]:
    """A few seconds to try a grammar are enough for every machine that does not stand still."""
    from headrace.text import grammar_checker

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_checker, "TRY_S", LIMIT_S)
        yield
