import pytest

from headrace.core.kv_manager import BlockTable
from headrace.core.request import TRANSITIONS, Request, RequestState
from tests.core.block_world import request

State = RequestState


def make(num_prompt: int = 5, max_total: int = 10) -> Request:
    return Request(
        message=request("r", num_prompt),
        seq=0,
        rank=(0, 0.0, 0),
        queue_key=(0, 0.0, 0),
        max_total_tokens=max_total,
        table=BlockTable(salt=None),
    )


@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("after", State)
def test_only_the_transitions_of_the_table_are_allowed(before: State, after: State):
    one = make()
    one.state = before
    if after in TRANSITIONS[before]:
        one.move_to(after)
        assert one.state is after
    else:
        with pytest.raises(AssertionError, match="cannot go"):
            one.move_to(after)


def test_every_state_can_end_and_the_end_is_final():
    assert all(State.FINISHED in after for before, after in TRANSITIONS.items() if before is not State.FINISHED)
    assert not TRANSITIONS[State.FINISHED]


def test_what_remains_to_compute():
    one = make(num_prompt=5, max_total=7)
    assert one.num_remaining == 5
    one.num_computed, one.num_pending = 5, 1
    assert one.num_remaining == 1  # the first token, known or not, is computed for the second
    one.num_computed, one.num_pending = 6, 2
    assert one.num_remaining == 0  # the second is the last one allowed: nothing follows it
    scored = make(num_prompt=5, max_total=5)
    assert not scored.samples
    assert scored.num_remaining == 5
