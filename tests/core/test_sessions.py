"""Which sessions are remembered, how much one may lease, and what comes back of them."""

from headrace.core.block_pool import BlockPool
from headrace.core.kv_manager import SESSION_SHARE, KVManager
from headrace.core.prefix import blake2b_digest, make_node
from headrace.core.sessions import Session, Sessions

SIZE = 2


def session(name: str, length: int, lease_until: float = 10.0) -> Session:
    chain = []
    for index in range(length):
        chain.append(make_node(chain[-1] if chain else None, None, (index, index), blake2b_digest))
    return Session(session_id=name, tenant="", salt=None, lease_until=lease_until, chain=tuple(chain))


def turn(kv: KVManager, tokens: list[int], name: str | None, now: float = 0.0) -> int:
    kv.begin_plan(now)
    table = kv.new_table(session_id=name)
    taken = kv.take(table, tokens, read_cache=True, reserve=0)
    assert taken is not None
    kv.register(table, tokens, len(tokens))
    kv.end_plan()
    kv.free(table)
    kv.check([])
    return taken[0]


def test_the_latest_sessions_are_remembered_up_to_a_number_of_blocks():
    sessions = Sessions(6)
    for name, length in (("a", 2), ("b", 3), ("a", 3)):
        sessions.note(session(name, length))
    assert [item.session_id for item in sessions.live(0.0)] == ["a", "b"]
    sessions.note(session("c", 1, lease_until=20.0))
    assert [item.session_id for item in sessions.live(0.0)] == ["c", "a"], "b was used longest ago"
    assert [item.session_id for item in sessions.live(10.0)] == ["c"]
    assert sessions.live(0.0)[1].token_ids == (0, 0, 1, 1, 2, 2)
    sessions.note(session("big", 7))
    assert sessions.live(0.0) == []
    sessions.check()


def test_one_session_leases_a_share_of_the_pool_and_leaves_others_their_lease():
    kv = KVManager(num_blocks=16, block_size=SIZE, session_lease_s=10.0)
    turn(kv, [1, 1, 2, 2], "small")
    turn(kv, list(range(100, 120)), "long")
    assert kv.pool.num_leased == 2 + 16 // SESSION_SHARE
    for index in range(20):
        turn(kv, [200 + index, 0, 1, 1], None)
    assert turn(kv, [1, 1, 2, 2, 3], "small") == 4
    assert turn(kv, list(range(100, 120)), "long") == 16 // SESSION_SHARE * SIZE, "the beginning of the long one is leased"


def test_what_is_restored_is_found_and_leased_for_the_rest_of_its_time():
    kv = KVManager(num_blocks=8, block_size=SIZE, session_lease_s=10.0)
    kv.begin_plan(0.0)
    table = kv.new_table(session_id="s", tenant="t")
    new = kv.restore(table, [1, 2, 3, 4, 5])
    assert len(new) == 2
    kv.register(table, [1, 2, 3, 4, 5], 4)
    kv.free(table, lease_s=3.0)
    kv.check([])
    (found,) = kv.sessions.live(2.9)
    assert (found.session_id, found.tenant, found.token_ids, found.lease_until) == ("s", "t", (1, 2, 3, 4), 3.0)
    assert kv.pool.num_leased == 2
    kv.begin_plan(3.0)
    assert kv.pool.num_leased == 0
    kv.end_plan()
    assert turn(kv, [1, 2, 3, 4, 5], None, now=3.0) == 4


def test_restoring_evicts_nothing():
    kv = KVManager(num_blocks=4, block_size=SIZE)
    turn(kv, [7, 7, 8, 8, 9, 9], None)
    kv.begin_plan(0.0)
    table = kv.new_table(session_id="s")
    assert len(kv.restore(table, [1, 2, 3, 4])) == 1
    kv.register(table, [1, 2, 3, 4], 2)
    kv.free(table, lease_s=1.0)
    kv.end_plan()
    assert turn(kv, [7, 7, 8, 8, 9, 9], None) == 5
    assert BlockPool(3).num_blank == 3
    off = KVManager(num_blocks=4, block_size=SIZE, enable_prefix_caching=False)
    assert off.restore(off.new_table(session_id="s"), [1, 2, 3, 4]) == []
