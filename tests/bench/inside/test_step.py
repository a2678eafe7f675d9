"""Steps of a tiny model, whose shapes are looked at by a runner in front of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.inside import step
from headrace.bench.inside.step import Shape, blank, grid, measure, misfit, table
from headrace.cli.main import main
from headrace.config import EngineConfig
from headrace.core.messages import StepPlan, StepResult
from headrace.runner.model_runner import ModelRunner
from tests.runner.tiny_model import save_tiny_llama

TINY: dict[str, Any] = {"dtype": "float32", "kv_memory": 1 << 18, "block_size": 4, "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return str(path)


class Watched:
    """A runner that notes the shape of every step with rows."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.block_size = runner, runner.block_size
        self.shapes: list[tuple[int, list[int], list[int]]] = []  # rows that sample; contexts of the decoding rows; start and length of the chunk

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.rows:
            chunk = [number for row in plan.rows if not row.sample for number in (row.start, row.num_tokens)]
            self.shapes.append((sum(row.sample for row in plan.rows), [row.start for row in plan.rows if row.sample], chunk))
        return self.runner.execute(plan)


def test_steps_have_the_shape_that_they_are_named_after(model: str):
    config = EngineConfig(model=model, max_num_seqs=4, max_num_batched_tokens=64, **TINY)
    runner = ModelRunner(config)
    shapes = grid((0, 3), (0, 9), (0, 20))
    assert set(shapes) == {
        Shape(rows=0, context=0, prompt_tokens=20),
        Shape(rows=0, context=9, prompt_tokens=20),
        Shape(rows=3, context=9, prompt_tokens=0),
        Shape(rows=3, context=9, prompt_tokens=20),
    }
    assert all(misfit(shape, config, runner.info(0.0)) is None for shape in shapes)
    for pair in runner.caches:
        for cache in pair:
            cache.fill_(float("nan"))
    blank(runner.caches, shapes, runner.block_size)
    watched = Watched(runner)
    visits: list[int] = []
    points = measure(watched, shapes, rounds=2, on_visit=lambda: visits.append(1))  # type: ignore[arg-type]
    runner.close()
    assert len(visits) == 2 * len(shapes)
    assert [Shape(**{name: point[name] for name in ("rows", "context", "prompt_tokens")}) for point in points] == shapes
    for offset in range(0, len(watched.shapes), 1 + step.STEPS):  # one that enters the blocks, and the measured ones
        for number, (rows, contexts, chunk) in enumerate(watched.shapes[offset + 1 : offset + 1 + step.STEPS]):
            context = chunk[0] if chunk else 9
            assert Shape(rows=rows, context=context, prompt_tokens=chunk[1] if chunk else 0) in shapes
            assert contexts == [9 + number] * rows
    for point in points:
        assert len(point["runner_ms"]) == 2 * step.STEPS
        assert set(point["ms"]) == set(step.PARTS)
        assert min(point["ms"].values()) >= 0.0
        assert min(point["ms"]["model"], *point["runner_ms"]) > 0.0
        assert (point["ms"]["sample"] > 0.0) == (point["rows"] > 0)
    (mixed,) = [point for point in points if point["rows"] and point["prompt_tokens"]]
    assert (mixed["tokens"], mixed["attended"], mixed["sampled"]) == (23, 3 * 10 + 20 * 29, 3)
    assert len(table(points).splitlines()) == 1 + len(points)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(rows=4, context=8, prompt_tokens=0), "--max-num-seqs 5"),
        (Shape(rows=0, context=0, prompt_tokens=65), "--max-num-batched-tokens 65"),
        (Shape(rows=1, context=255, prompt_tokens=0), "--max-model-len 256"),
        (Shape(rows=3, context=200, prompt_tokens=0), "--kv-memory"),
    ],
)
def test_a_shape_that_does_not_fit_says_why(model: str, shape: Shape, words: str):
    config = EngineConfig(model=model, max_num_seqs=4, max_num_batched_tokens=64, num_gpu_blocks_override=100, **TINY)
    runner = ModelRunner(config)
    reason = misfit(shape, config, runner.info(0.0))
    runner.close()
    assert reason is not None
    assert words in reason


def test_the_verb_and_its_file(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--dtype", "float32", "--kv-memory", "256KiB", "--block-size", "4", "--threads", "1", "--rounds", "1"]
    grid_flags = ["--rows", "0,2", "--contexts", "8,300", "--prompt-tokens", "0,16"]
    assert main(["bench", "step", model, *flags, *grid_flags, "--json", str(tmp_path / "step.json")]) == 0
    assert "left out: 2 rows at context 300" in capsys.readouterr().out
    found = json.loads((tmp_path / "step.json").read_text())
    assert (found["format"], found["model"], found["engine"]["block_size"]) == ("headrace-step-1", model, 4)
    assert [(point["rows"], point["context"], point["prompt_tokens"]) for point in found["points"]] == [(0, 8, 16), (2, 8, 0), (2, 8, 16)]
    assert {entry["context"] for entry in found["skipped"]} == {300}
    assert set(found) >= {"date", "command", "machine", "headrace_version", "torch_version"}


def test_a_grid_without_a_step_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "step", "--rows", "0,4", "--contexts", "0", "--prompt-tokens", "0"]) == 2
    assert "make no step" in capsys.readouterr().err
