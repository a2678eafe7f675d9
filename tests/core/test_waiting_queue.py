from headrace.core.kv_manager import BlockTable
from headrace.core.policy import queue_key, rank
from headrace.core.request import Request
from headrace.core.waiting_queue import TenantShares, WaitingQueue
from tests.core.block_world import request


def fill(*messages) -> tuple[WaitingQueue, TenantShares]:
    shares = TenantShares()
    queue = WaitingQueue(shares)
    for seq, message in enumerate(messages):
        shares.join(message.tenant)
        queue.push(
            Request(
                message=message,
                seq=seq,
                rank=rank(message, seq, "priority"),
                queue_key=queue_key(message, seq, "priority"),
                max_total_tokens=99,
                table=BlockTable(salt=None),
            )
        )
        queue.check()
    return queue, shares


def drain(queue: WaitingQueue, shares: TenantShares, charge: int = 0, passed_over: str = "") -> str:
    """Ids in order of service; each is removed and its tenant charged, but for those passed over."""
    order = ""
    for one in queue.scan():
        order += one.request_id
        if one.request_id not in passed_over:
            queue.remove(one)
            shares.charge(one.message.tenant, charge)
        queue.check()
    return order


def test_one_tenant_is_served_in_queue_order():
    assert drain(*fill(request("a", 50), request("b", 10), request("c", 30, priority=-1))) == "cba"


def test_tenants_take_turns_by_tokens():
    queue, shares = fill(*(request(name, 5, tenant="x") for name in "abc"), *(request(name, 5, tenant="y") for name in "de"))
    assert drain(queue, shares, charge=10) == "adbec"


def test_a_priority_class_goes_before_fairness():
    queue, shares = fill(request("a", 5, tenant="x"), request("b", 5, tenant="y", priority=-1), request("c", 5, tenant="y", priority=-1))
    assert drain(queue, shares, charge=10) == "bca"


def test_those_passed_over_stay_and_do_not_hold_up_others():
    queue, shares = fill(*(request(name, 5) for name in "abc"))
    assert drain(queue, shares, passed_over="a") == "abc"
    assert [one.request_id for one in queue] == ["a"]
    assert len(queue) == 1


def test_a_tenant_that_comes_back_is_not_owed_what_it_did_not_ask_for():
    shares = TenantShares()
    shares.join("x")
    shares.charge("x", 1000)
    shares.join("y")
    assert shares.served("y") == 1000
    shares.charge("y", 50)
    shares.leave("y")
    shares.join("y")
    assert shares.served("y") == 1050  # nor does it lose its debt by leaving
    for tenant in ("x", "y"):
        shares.leave(tenant)
    shares.join("x")
    assert shares.served("x") == 0


def test_a_tenant_that_comes_back_has_credit_for_a_short_burst():
    shares = TenantShares(credit=30)
    shares.join("x")
    assert shares.served("x") == 0
    shares.charge("x", 1000)
    shares.join("y")
    assert shares.served("y") == 970
    shares.charge("y", 20)
    shares.leave("y")
    shares.join("y")
    assert shares.served("y") == 990  # what was used of it is not given again
