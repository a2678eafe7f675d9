"""Compiled steps for real: a tiny model in fp32 through `headrace compile`, the compile cache, the background, and a machine without a compiler."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch

from headrace.config import EngineConfig
from headrace.kernels import cpu
from headrace.runner import preparation
from headrace.runner.artifacts import MANIFEST
from headrace.runner.buckets import decode_buckets
from headrace.runner.model_runner import ModelRunner
from tests.acceptance.service import FLAGS, ROOT, served, wait, without_compiler
from tests.engine.byte_tokenizer import write_byte_tokenizer
from tests.models.tiny_models import TINY, make, prompt
from tests.runner.random_service import random_service
from tests.runner.tiny_model import Hand, save_tiny_llama
from tests.scripts.load_script import load_script

PATHS = ["decode-1", "decode-2", "mixed-64"]


@dataclass(frozen=True, kw_only=True)
class World:
    model: Path
    cache: Path
    artifacts: Path
    printed: str

    def config(self, **changes: object) -> EngineConfig:
        fields = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "kv_memory": 16 << 20, "block_size": 4, "threads": 1, "dtype": "float32"}
        return EngineConfig(model=str(self.model), **{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_byte_tokenizer(directory)
    save_tiny_llama(directory, vocab_size=320, eos_token_id=257)
    return directory


@pytest.fixture(scope="module")
def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    if cpu.load() is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    out = tmp_path_factory.mktemp("out")
    command = [sys.executable, "-m", "headrace", "compile", str(model), "-o", str(out / "artifacts"), "--compile", "full", *FLAGS]
    done = subprocess.run([*command, "--compile-cache", str(out / "cache")], cwd=ROOT, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr
    assert "mixed-64" in done.stderr, "the progress bar names the package"
    return World(model=model, cache=out / "cache", artifacts=out / "artifacts", printed=done.stdout)


@contextmanager
def running(config: EngineConfig) -> Iterator[ModelRunner]:
    runner = ModelRunner(config)
    try:
        runner.start_preparation(lambda: None)
        yield runner
    finally:
        runner.close()


def settled(runner: ModelRunner) -> dict[str, str]:
    """Name and state of each path, when none is on its way."""
    wait(lambda: not {path.state for path in runner.compile_status().paths} & {"ready", "compiling"}, 300)
    return {path.name: path.state for path in runner.compile_status().paths}


@pytest.fixture(scope="module")
def expected(world: World) -> list[dict[str, list[int]]]:
    with running(world.config(compile="off")) as runner:
        return [random_service(runner, slots=2, seed=seed) for seed in range(3)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_compile_writes(world: World) -> None:
    manifest = json.loads((world.artifacts / MANIFEST).read_text())
    assert [package["file"] for package in manifest["packages"]] == [f"{name}.pt2" for name in PATHS]
    assert {"torch", "instruction set", "model", "kernels", "flags", "static length", "block size"} <= manifest["facts"].keys()
    assert sorted(file.suffix for file in world.artifacts.iterdir()) == [".json", ".pt2", ".pt2", ".pt2", ".so", ".so"]
    assert "3 packages" in world.printed
    assert "3 of them compiled now" in world.printed


@pytest.mark.slow
@pytest.mark.parametrize("source", ["artifacts", "cache"])
def test_ids_are_those_of_the_ready_path_and_nothing_is_compiled_again(world: World, expected: list[dict[str, list[int]]], source: str) -> None:
    changes = (
        {"artifacts": str(world.artifacts), "compile": "off"} if source == "artifacts" else {"compile": "full", "compile_cache": str(world.cache)}
    )
    with running(world.config(**changes)) as runner:
        assert settled(runner) == dict.fromkeys(PATHS, "compiled")
        assert [random_service(runner, slots=2, seed=seed) for seed in range(3)] == expected
        status = runner.compile_status()
    assert status.compiled_steps_total > 100
    assert (status.compilations_total, status.recompiles_total) == (0, 0)
    assert "torch._inductor.compile_fx" not in sys.modules, "this process loads packages and compiles nothing"


@pytest.mark.slow
def test_whatever_arrives_nothing_is_compiled_again(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--duration", "5", "--clients", "6", "--max-prompt", "100", "--max-token", "255"]
    status = load_script("recompiles").main([*options, "--", str(world.model), *FLAGS, "--compile", "full", "--compile-cache", str(world.cache)])
    report = json.loads(capsys.readouterr().out)
    assert report["graph breaks"] == {"decode": 0, "mixed": 0}
    assert report["paths"] == dict.fromkeys(PATHS, "compiled")
    assert report["verdicts"] == dict.fromkeys(report["verdicts"], True)
    assert status == 0


@pytest.mark.slow
def test_weights_are_lent_and_not_copied(world: World) -> None:
    with running(world.config(artifacts=str(world.artifacts), compile="off")) as runner:
        settled(runner)
        ours = {f"model.{name}": tensor for name, tensor in runner.model.named_buffers()}
        for step in runner._steps._loaded.values():
            lent = step._constants  # type: ignore[attr-defined]
            assert lent.keys() >= {"cos_0", "model.layers.0.mlp.down.data"}
            assert all(tensor.data_ptr() == ours[name].data_ptr() for name, tensor in lent.items() if name.startswith("model."))


@pytest.mark.slow
def test_a_torn_artifact_is_refused_by_name(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    shutil.copytree(world.artifacts, folder)
    (folder / "decode-2.pt2").write_bytes((folder / "decode-2.pt2").read_bytes()[:-1])
    with running(world.config(artifacts=str(folder), compile="off")) as runner:
        assert settled(runner) == {"decode-1": "compiled", "decode-2": "failed", "mixed-64": "compiled"}
        assert runner.compile_status().reason == "its artifact is refused: decode-2.pt2 is torn: its checksum is not the manifest's"


@pytest.mark.slow
def test_a_torn_cache_entry_is_refused_and_rebuilt(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(world.cache, cache)
    (entry,) = (file for file in cache.glob("*.package") if b'"bucket": "decode-1"' in file.read_bytes())
    entry.write_bytes(entry.read_bytes()[:-1] + b"!")
    monkeypatch.setattr(preparation, "AUTO_DELAY_S", 0.0)
    for compilations in (1, 0):
        with running(world.config(compile="auto", compile_cache=str(cache))) as runner:
            assert settled(runner) == dict.fromkeys(PATHS, "compiled")
            assert runner.compile_status().compilations_total == compilations
    assert caplog.text.count("the entry of decode-1 is refused: its checksum is wrong") == 1


@pytest.mark.slow
def test_a_failed_compile_leaves_the_ready_path(
    world: World, expected: list[dict[str, list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = ModelRunner(world.config(compile="full", compile_cache=str(tmp_path)))
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'error: this compiler is broken' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with caplog.at_level(logging.WARNING):
        runner.start_preparation(lambda: None)
        assert random_service(runner, slots=2) == expected[0], "it serves meanwhile"
        assert settled(runner) == dict.fromkeys(PATHS, "failed")
    status = runner.compile_status()
    assert status.state == "failed"
    assert status.reason
    assert "decode-1 stays on the ready path: " in caplog.text
    assert random_service(runner, slots=2, seed=1) == expected[1]
    runner.close()


def find_workers(process: psutil.Process) -> list[psutil.Process]:
    """Compiling processes below this one."""
    found = []
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "headrace.runner.compile_worker" in child.cmdline():
                found.append(child)
    return found


@pytest.mark.slow
def test_the_compiling_process_gives_way_and_ends_with_its_parent(world: World, tmp_path: Path) -> None:
    runner = ModelRunner(world.config(compile="full", compile_cache=str(tmp_path)))
    runner.start_preparation(lambda: None)
    wait(lambda: bool(find_workers(psutil.Process())))
    (worker,) = find_workers(psutil.Process())
    wait(lambda: worker.nice() == 19)
    runner.close()
    assert not worker.is_running()
    assert runner.compile_status().state == "compiling", "what was begun is not told as done"


@pytest.mark.slow
def test_parts_outside_of_the_kernels_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations and norms that torch computes: in compiled code they must be rounded as in eager code."""
    if cpu.load() is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    monkeypatch.setattr(preparation, "AUTO_DELAY_S", 0.0)
    monkeypatch.setattr(preparation, "planned_buckets", lambda config, all_steps: decode_buckets(1))
    class_name, changes = TINY["gemma2"]
    make(class_name, changes | {"num_hidden_layers": 2}).save_pretrained(tmp_path / "model")
    fields = {"kv_memory": 16 << 20, "block_size": 4, "threads": 1, "dtype": "float32", "max_num_seqs": 1, "max_model_len": 64}
    config = EngineConfig(model=str(tmp_path / "model"), compile_cache=str(tmp_path / "cache"), **fields)  # type: ignore[arg-type]
    seen: list[list[torch.Tensor]] = []
    for mode in ("off", "auto"):
        with running(replace(config, compile=mode)) as runner:  # type: ignore[arg-type]
            assert settled(runner) == ({} if mode == "off" else {"decode-1": "compiled"})
            runner._steps.mode = "full"  # no turns with the ready path
            seen.append(hidden_states(runner))
            compiled = runner.compile_status().compiled_steps_total
    assert compiled == len(seen[0]) - 1, "all but the prompt's step"
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def hidden_states(runner: ModelRunner) -> list[torch.Tensor]:
    """Of every step of one request."""
    states: list[torch.Tensor] = []
    forward = runner._forward
    runner._forward = lambda batch: states.append(forward(batch).clone()) or states[-1]  # type: ignore[method-assign, func-returns-value]
    hand = Hand(runner)
    hand.add("a", prompt(13))
    hand.finish(["a"], 12)
    return states


def test_without_a_compiler_the_server_answers_and_says_how(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path, "--compile", "auto", environment=without_compiler(tmp_path)) as service:
        told = service.ready()
        assert told["path"] == "eager, torch operators (no CPU kernels)"
        assert (told["compile"]["mode"], told["compile"]["state"], told["compile"]["paths"]) == ("auto", "ready", [])
        assert told["compile"]["reason"].startswith("there are no CPU kernels: there is no C++ compiler")
        assert service.complete()
        assert "path     eager, torch operators (no CPU kernels)" in service.log


@pytest.mark.slow
def test_artifacts_serve_without_a_compiler(world: World, tmp_path: Path) -> None:
    with served(world.model, tmp_path, "--artifacts", str(world.artifacts), environment=without_compiler(tmp_path)) as service:
        wait(lambda: service.states() == dict.fromkeys(PATHS, "compiled"))
        assert service.ready()["path"].startswith("eager, CPU kernels (")
        first = service.complete()
        assert [service.complete() for _ in range(3)] == [first] * 3
        assert service.metric('headrace_steps_total{path="compiled"}') > 10
        assert service.metric("headrace_recompiles_total") == 0
        assert not (tmp_path / "kernels").exists(), "nothing was built"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_of_two_servers_that_start_together_one_compiles(model: Path, tmp_path: Path) -> None:
    """Both answer meanwhile, both serve what came out, and a third one finds everything."""
    if cpu.load() is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    paths = ["decode-1", "mixed-64"]
    flags = ["--compile", "full", "--compile-cache", str(tmp_path / "cache"), "--max-num-seqs", "1"]
    homes = [tmp_path / name for name in ("a", "b", "c")]
    for home in homes:
        home.mkdir()
    with served(model, homes[0], *flags) as one, served(model, homes[1], *flags) as other:
        first = one.complete()
        assert other.complete() == first
        for service in (one, other):
            wait(lambda service=service: service.states() == dict.fromkeys(paths, "compiled"), 600)  # type: ignore[misc]
            assert all(f"{path} is served compiled from now on" in service.log for path in paths)
        assert sorted(service.metric("headrace_compilations_total") for service in (one, other)) == [0, len(paths)]
        for service in (one, other):
            before = service.metric('headrace_steps_total{path="ready"}')
            assert service.complete() == first
            assert service.metric('headrace_steps_total{path="ready"}') == before, "every step was compiled"
            assert service.metric("headrace_recompiles_total") == 0
    with served(model, homes[2], *flags) as late:
        wait(lambda: late.states() == dict.fromkeys(paths, "compiled"))
        assert late.metric("headrace_compilations_total") == 0
        assert late.complete() == first


@pytest.mark.slow
def test_a_server_ends_at_once_while_it_compiles(model: Path, tmp_path: Path) -> None:
    if cpu.load() is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    with served(model, tmp_path, "--compile", "full", "--compile-cache", str(tmp_path / "cache")) as service:
        server = psutil.Process(service.popen.pid)
        workers: list[psutil.Process] = []
        wait(lambda: bool(workers.extend(find_workers(server)) or workers))
        service.end()
        assert not any(worker.is_running() for worker in workers)
    assert service.popen.returncode == 0


@pytest.mark.slow
def test_a_config_that_differs_is_refused_by_name(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with running(replace(world.config(artifacts=str(world.artifacts), compile="off"), block_size=8)) as runner:
        assert settled(runner) == dict.fromkeys(PATHS, "failed")
        assert runner.compile_status().reason == "its artifact is refused: its block size is 8 here and 4 there"
    assert "decode-1 is refused: its block size is 8 here and 4 there" in caplog.text
