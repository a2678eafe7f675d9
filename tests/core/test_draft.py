from headrace.core.draft import PlannedStep
from headrace.core.messages import StepPlan


def test_wrong_blocks_spread_in_the_order_in_which_a_plan_moves_them():
    plan = StepPlan(step_id=1, rows=(), swap_out=((1, 10), (2, 11)), swap_in=((10, 3), (12, 4)), copies=((3, 5), (4, 6)))
    step = PlannedStep(plan=plan, requests=(), written=())
    device, host = {1}, set()
    step.spread(device, host)
    assert (device, host) == ({1, 3, 5}, {10})
