"""Nobody starves: bounds on waiting, measured in steps, and shares between tenants."""

from __future__ import annotations

from headrace.core.policy import AGED_SHARE, AGING_S_PER_TOKEN
from tests.core.block_world import Engine, config, request


def test_short_prompts_do_not_wait_for_long_ones_that_arrive_with_them():
    """28 short prompts and 4 that are 32 times as long at once: the short ones all have their first token after one step."""
    engine = Engine(config(max_model_len=1024, num_blocks=200, block_size=16, max_num_seqs=64, max_num_batched_tokens=512))
    for i in range(32):
        engine.add(request(f"long{i}" if i % 8 == 0 else f"short{i}", 512 if i % 8 == 0 else 16, 4))
    engine.turn(ahead=False)
    first = engine.plans[0]
    assert {row.request_id for row in first.rows if row.sample} == {f"short{i}" for i in range(32) if i % 8}
    assert first.num_tokens == 512  # the long ones get what is left
    engine.run()
    assert all(engine.end(request_id).finish_reason == "length" for request_id in engine.messages)


def test_short_prompts_overtake_a_long_one_that_runs_already():
    engine = Engine(config(max_num_batched_tokens=64, num_blocks=400, max_num_seqs=32))
    engine.add(request("long", 400, 2))
    engine.turn(ahead=False)
    for i in range(4):
        engine.add(request(f"short{i}", 12, 2, arrival=engine.now))
    engine.turn(ahead=False)
    assert {row.request_id for row in engine.plans[-1].rows if row.sample} == {f"short{i}" for i in range(4)}
    (long_row,) = [row for row in engine.plans[-1].rows if row.request_id == "long"]
    assert long_row.num_tokens == 16
    engine.run()


def test_a_long_prompt_advances_in_each_step_under_a_flood_of_short_ones():
    budget = 64
    engine = Engine(config(max_num_batched_tokens=budget, num_blocks=600, max_num_seqs=32))
    engine.add(request("long", 480, 1))
    for step in range(1, 200):
        for i in range(5):  # more than a whole budget of short prompts in each step
            engine.add(request(f"short{step}.{i}", 16, 1, arrival=engine.now))
        engine.turn(ahead=False)
        if "long" in engine.first_token_step:
            break
        assert step == 1 or any(row.request_id == "long" for row in engine.plans[-1].rows)
    assert engine.first_token_step["long"] <= 1 + 480 // (budget // AGED_SHARE)
    for request_id in list(engine.messages):
        engine.abort(request_id)
    engine.run()


def test_decodes_have_a_row_in_each_step_while_prompts_flood_in():
    engine = Engine(config(max_num_batched_tokens=64, num_blocks=600, max_num_seqs=16))
    engine.add(request("running", 8, 60))
    engine.turn(ahead=False)
    for step in range(59):
        engine.add(request(f"p{step}", 60, 1, arrival=engine.now))
        engine.turn(ahead=False)
        assert engine.plans[-1].rows[0].request_id == "running"
        assert engine.plans[-1].num_tokens <= engine.config.max_num_batched_tokens
    engine.run()


def test_a_long_prompt_leaves_the_queue_after_a_bounded_time_though_slots_are_scarce():
    """One slot and a flood of short prompts: those that arrive later than the aging time allows do not overtake the long one."""
    engine = Engine(config(max_num_seqs=1, num_blocks=300, max_num_queued_reqs=10_000))
    engine.add(request("first", 4, 1))
    engine.add(request("long", 400, 1))
    for step in range(600):
        for i in range(2):
            engine.add(request(f"short{step}.{i}", 4, 1, arrival=engine.now))
        engine.turn(ahead=False)
        if "long" in engine.first_token_step:
            break
    started = next(index for index, plan in enumerate(engine.plans) if plan.rows[0].request_id == "long")
    may_overtake = AGING_S_PER_TOKEN * (400 - 4) / 0.01  # steps of 10 ms, two arrivals in each
    assert 0 < started <= 2 * may_overtake + 4
    for request_id in list(engine.messages):
        engine.abort(request_id)
    engine.run()


def jain(shares: list[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def test_tenants_get_equal_tokens_whatever_they_ask_for():
    """One tenant floods the queue with long requests, one with short ones, one comes late; while all wait, all get the same."""
    engine = Engine(config(max_num_seqs=4, block_size=16, num_blocks=60, max_num_queued_reqs=10_000))
    shapes = {"flood": (60, 20), "short": (6, 4), "late": (20, 10)}
    owner: dict[str, str] = {}

    def keep_waiting(tenant: str, count: int) -> None:
        while sum(owner[request_id] == tenant and not engine.outputs[request_id] for request_id in owner) < count:
            request_id = f"{tenant}{len(owner)}"
            owner[request_id] = tenant
            engine.add(request(request_id, *shapes[tenant], arrival=engine.now, tenant=tenant))

    def tokens(plans) -> dict[str, int]:
        counts = dict.fromkeys(shapes, 0)
        for plan in plans:
            for row in plan.rows:
                counts[owner[row.request_id]] += row.num_tokens
        return counts

    keep_waiting("flood", 40)
    for _ in range(200):
        keep_waiting("flood", 40)
        keep_waiting("short", 12)
        engine.turn()
    two = tokens(engine.plans)
    assert jain([two["flood"], two["short"]]) >= 0.95
    start = len(engine.plans)
    for _ in range(300):
        keep_waiting("flood", 40)
        keep_waiting("short", 12)
        keep_waiting("late", 12)
        engine.turn()
    assert jain(list(tokens(engine.plans[start:]).values())) >= 0.95
    for request_id in list(engine.messages):
        engine.abort(request_id)
    engine.run()


def test_tokens_are_shared_by_weight():
    engine = Engine(config(max_num_seqs=8, block_size=16, num_blocks=200, max_num_queued_reqs=10_000, tenant_weights=(("triple", 3.0),)))
    for i in range(200):
        for tenant in ("triple", "single"):
            engine.add(request(f"{tenant}{i}", 20, 20, tenant=tenant))
    for _ in range(150):
        engine.turn()
    counts = [sum(row.num_tokens for plan in engine.plans for row in plan.rows if row.request_id.startswith(name)) for name in ("triple", "single")]
    assert jain([counts[0] / 3, counts[1]]) >= 0.95
    for request_id in list(engine.messages):
        engine.abort(request_id)
    engine.run()


def test_generated_tokens_count_for_fairness():
    engine = Engine(config(max_num_seqs=4, block_size=16, num_blocks=60, max_num_queued_reqs=10_000))
    for i in range(200):
        engine.add(request(f"talker{i}", 4, 40, tenant="talker"))
        engine.add(request(f"short{i}", 4, 4, tenant="short"))
    for _ in range(150):
        engine.turn()
    counts = [sum(row.num_tokens for plan in engine.plans for row in plan.rows if row.request_id.startswith(name)) for name in ("talker", "short")]
    assert jain(counts) >= 0.95
    for request_id in list(engine.messages):
        engine.abort(request_id)
    engine.run()


def test_a_lone_tenant_is_served_as_if_there_were_no_tenants():
    def order(tenant: str) -> list[tuple[str, ...]]:
        engine = Engine(config(max_num_seqs=2))
        for i in range(12):
            engine.add(request(f"r{i}", 5 + 7 * i % 20, 3, tenant=tenant))
        engine.run()
        return [tuple(row.request_id for row in plan.rows) for plan in engine.plans]

    assert order("") == order("key")
