"""Deadlines that cannot be met are said at once, in simulated time."""

from headrace.core.deadline import seconds_to_first_token
from headrace.core.step_time import StepTimeModel
from headrace.core.step_work import StepWork
from tests.core.block_world import Engine, config, request


def learned() -> StepTimeModel:
    model = StepTimeModel()
    for tokens in (1, 2, 32, 64, 48, 1, 64, 16, 3):
        model.observe(StepWork(tokens) if tokens <= 4 else StepWork(prompt_tokens=tokens), seconds=0.01 + 0.001 * tokens)
    return model


def test_the_least_time_is_that_of_the_prompt_in_steps_of_its_own():
    model = learned()
    seconds = seconds_to_first_token(160, num_cached=0, step_tokens=64, step_time=model)
    assert abs(seconds - (3 * 0.01 + 0.160)) < 0.01
    assert seconds_to_first_token(160, num_cached=96, step_tokens=64, step_time=model) < 0.5 * seconds
    assert seconds_to_first_token(160, num_cached=160, step_tokens=64, step_time=model) == 0
    assert seconds_to_first_token(4000, num_cached=0, step_tokens=4000, step_time=model) == 0  # no such step was ever seen
    assert seconds_to_first_token(160, num_cached=0, step_tokens=64, step_time=StepTimeModel()) == 0


def warm_engine(**fields: object) -> Engine:
    """Its steps take 10 ms whatever is in them."""
    engine = Engine(config(max_num_batched_tokens=64, num_blocks=400, **fields))
    for i in range(4):
        engine.add(request(f"warm{i}", 100, 4, arrival=engine.now))
        engine.run()
    return engine


def test_a_request_that_cannot_make_it_is_refused_and_others_are_not():
    engine = warm_engine()
    for name, seconds, refused in (("late", 0.05, True), ("fine", 0.12, False)):
        output = engine.add(request(name, 500, 4, arrival=engine.now, deadline=engine.now + seconds))  # eight steps of 64
        assert (output is not None) is refused
    late = engine.end("late")
    assert late.error_code == "deadline_exceeded"
    assert "80 ms" in (late.error_message or "") or "79 ms" in (late.error_message or "")
    engine.run()
    assert engine.end("fine").finish_reason == "length"
    assert "late" not in engine.world.computed


def test_what_is_cached_needs_no_time():
    engine = warm_engine()
    engine.add(request("first", range(500), 4, arrival=engine.now))
    engine.run()
    engine.add(request("again", range(500), 4, arrival=engine.now, deadline=engine.now + 0.03))
    engine.run()
    assert engine.end("again").finish_reason == "length"


def test_a_request_ends_while_it_waits_once_it_cannot_make_it_any_more():
    engine = warm_engine(max_num_seqs=1)
    engine.add(request("long", 4, 200, arrival=engine.now))
    engine.turn()
    started = engine.now
    engine.add(request("waits", 300, 4, arrival=engine.now, deadline=engine.now + 0.2))  # five steps
    while not engine.outputs["waits"]:
        engine.turn()
    assert engine.end("waits").error_code == "deadline_exceeded"
    assert started + 0.13 < engine.now < started + 0.18  # before the deadline itself
    assert "waits" not in engine.world.computed
    engine.run()
    engine.check_answers()
