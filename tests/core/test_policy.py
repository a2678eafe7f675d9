from hypothesis import given
from hypothesis import strategies as st

from headrace.core.policy import AGING_S_PER_TOKEN, PATIENCE_S, PrefillNeed, queue_key, rank, split_prefill
from tests.core.block_world import request


def need(
    num_tokens: int, arrival: float = 0.0, *, priority: int = 0, deadline: float | None = None, aged: bool = False, served: int = 0
) -> PrefillNeed:
    return PrefillNeed(num_tokens=num_tokens, rank=(priority, arrival, 0), deadline=deadline, aged=aged, served=served)


needs = st.lists(
    st.builds(need, st.integers(1, 300), st.floats(0, 10), priority=st.integers(0, 2), deadline=st.none() | st.floats(0, 10), aged=st.booleans()),
    max_size=8,
)


@given(needs, st.integers(0, 500), st.integers(1, 100), st.booleans())
def test_grants_fit_the_budget_and_use_it(needs: list[PrefillNeed], budget: int, aged_share: int, whole: bool):
    grants = split_prefill(needs, budget, aged_share=aged_share, whole=whole)
    assert len(grants) == len(needs)
    assert all(0 <= grant <= one.num_tokens for grant, one in zip(grants, needs, strict=True))
    if whole:
        assert sum(grants) <= budget
        cut = [grant for grant, one in zip(grants, needs, strict=True) if 0 < grant < one.num_tokens]
        assert not cut or cut == [budget]
    else:
        assert sum(grants) == min(budget, sum(one.num_tokens for one in needs))


@given(needs, st.integers(8, 500), st.integers(8, 100))
def test_the_oldest_aged_need_always_advances(needs: list[PrefillNeed], budget: int, aged_share: int):
    grants = split_prefill(needs, budget, aged_share=aged_share)
    aged = [i for i in range(len(needs)) if needs[i].aged]
    if aged:
        oldest = min(aged, key=lambda i: needs[i].rank)
        assert grants[oldest] >= min(needs[oldest].num_tokens, aged_share, budget)


def test_short_prompts_go_before_long_ones():
    assert split_prefill([need(1000), need(10), need(20)], 100, aged_share=25) == [70, 10, 20]
    assert split_prefill([need(1000, aged=True), need(100, 1.0), need(90, 2.0)], 100, aged_share=25) == [25, 0, 75]


def test_priority_and_deadline_go_before_length():
    assert split_prefill([need(80), need(80, priority=-1)], 100, aged_share=25) == [20, 80]
    assert split_prefill([need(50), need(80, deadline=9.0), need(80, deadline=3.0)], 100, aged_share=25) == [0, 20, 80]


def test_whole_prompts_go_oldest_first_and_are_not_cut():
    assert split_prefill([need(60, 2.0), need(50, 1.0)], 100, aged_share=25, whole=True) == [0, 50]
    assert split_prefill([need(600)], 100, aged_share=25, whole=True) == [100]  # could never fit: computed again after preemption


def test_queue_order():
    def order(policy, *messages):
        keys = {message.request_id: queue_key(message, seq, policy) for seq, message in enumerate(messages)}
        return "".join(sorted(keys, key=keys.__getitem__))

    assert order("fcfs", request("a", 10), request("b", 10)) == "ab"
    assert order("fcfs", request("a", 500), request("b", 10)) == "ba"
    late = AGING_S_PER_TOKEN * 490
    assert order("fcfs", request("a", 500), request("b", 10, arrival=late * 0.99)) == "ba"
    assert order("fcfs", request("a", 500), request("b", 10, arrival=late * 1.01)) == "ab"
    assert order("fcfs", request("a", 10, deadline=9.0), request("b", 10, deadline=8.0), request("c", 10)) == "bac"
    assert order("fcfs", request("a", 10, deadline=PATIENCE_S * 2), request("b", 10)) == "ba"
    assert order("fcfs", request("a", 10, priority=1), request("b", 10)) == "ab"
    assert order("priority", request("a", 10, priority=1, deadline=1.0), request("b", 500)) == "ba"


def test_rank_is_age_within_priority():
    assert rank(request("a", 10, arrival=2.0), 0, "fcfs") > rank(request("b", 900, arrival=1.0), 1, "fcfs")
    assert rank(request("a", 10, priority=1), 0, "priority") > rank(request("b", 10, arrival=9.0), 1, "priority")
    assert rank(request("a", 10, priority=1), 0, "fcfs") < rank(request("b", 10, arrival=9.0), 1, "fcfs")
