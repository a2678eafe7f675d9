"""Compiled steps for real: a tiny model in fp32 through `headrace compile`, the compile cache, the background, and a machine without a compiler."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil
import pytest

from headrace.config import EngineConfig
from headrace.kernels import cpu
from headrace.runner import preparation
from headrace.runner.artifacts import MANIFEST
from headrace.runner.model_runner import ModelRunner
from headrace.runner.trial import Trials
from tests.engine.byte_tokenizer import write_byte_tokenizer
from tests.patience import LIMIT_S, until
from tests.ports import free_port
from tests.runner.random_service import random_service
from tests.runner.tiny_model import save_tiny_llama

ROOT = Path(__file__).parents[2]
FLAGS = ["--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--kv-memory", "16MiB", "--block-size", "4", "--threads", "1"]
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
    until(lambda: not {path.state for path in runner.compile_status().paths} & {"ready", "compiling"}, 300)
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
def test_ids_are_those_of_the_ready_path_and_nothing_is_compiled_again(
    world: World, expected: list[dict[str, list[int]]], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = (
        {"artifacts": str(world.artifacts), "compile": "off"} if source == "artifacts" else {"compile": "full", "compile_cache": str(world.cache)}
    )
    monkeypatch.setattr(Trials, "takes_compiled", lambda trials, kind: True)  # whatever the times were
    with running(world.config(**changes)) as runner:
        assert settled(runner) == dict.fromkeys(PATHS, "compiled")
        assert [random_service(runner, slots=2, seed=seed) for seed in range(3)] == expected
        status = runner.compile_status()
    assert status.compiled_steps_total > 100
    assert (status.compilations_total, status.recompiles_total) == (0, 0)
    assert "torch._inductor.compile_fx" not in sys.modules, "this process loads packages and compiles nothing"


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
    for file in cache.glob("*.package"):
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    monkeypatch.setattr(preparation, "AUTO_DELAY_S", 0.0)
    config = world.config(compile="auto", max_num_seqs=1, compile_cache=str(cache))
    for compilations in (1, 0):
        with running(config) as runner:
            assert settled(runner) == {"decode-1": "compiled"}
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


@pytest.mark.slow
def test_the_compiling_process_gives_way_and_ends_with_its_parent(world: World, tmp_path: Path) -> None:
    def children() -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if "headrace.runner.compile_worker" in " ".join(child.cmdline())]

    runner = ModelRunner(world.config(compile="full", compile_cache=str(tmp_path)))
    runner.start_preparation(lambda: None)
    until(lambda: bool(children()))
    (worker,) = children()
    until(lambda: worker.nice() == 19)
    runner.close()
    assert not worker.is_running()
    assert runner.compile_status().state == "compiling", "what was begun is not told as done"


class Service:
    """`headrace serve` where there is no compiler: an empty PATH and an empty kernel cache."""

    def __init__(self, model: Path, home: Path, *flags: str) -> None:
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", home / "log.txt"
        (home / "bin").mkdir()
        environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": str(home / "bin"), "HEADRACE_HOME": str(home)}
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "headrace", "serve", str(model), "--port", str(port), *FLAGS, *flags]
            self.popen = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def ready(self) -> dict[str, object] | None:
        """The body of /ready, once it is 200."""
        assert self.popen.poll() is None, self.log.read_text()
        try:
            response = httpx.get(f"{self.url}/ready", timeout=LIMIT_S, trust_env=False)
        except httpx.HTTPError:
            return None
        return response.json() if response.status_code == 200 else None

    def complete(self) -> str:
        body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=LIMIT_S, trust_env=False)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=LIMIT_S, trust_env=False).text
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))

    def end(self) -> None:
        self.popen.send_signal(signal.SIGTERM)
        self.popen.wait(LIMIT_S)


@contextmanager
def served(model: Path, home: Path, *flags: str) -> Iterator[Service]:
    service = Service(model, home, *flags)
    try:
        until(lambda: service.ready() is not None, 120)
        yield service
    finally:
        service.end()


def test_without_a_compiler_the_server_answers_and_says_how(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path, "--compile", "auto") as service:
        body = service.ready()
        assert body is not None
        assert body["path"] == "eager, torch operators (no CPU kernels)"
        told = body["compile"]
        assert isinstance(told, dict)
        assert (told["mode"], told["state"], told["paths"]) == ("auto", "ready", [])
        assert str(told["reason"]).startswith("there are no CPU kernels: there is no C++ compiler")
        assert service.complete()
        assert "path     eager, torch operators (no CPU kernels)" in service.log.read_text()


@pytest.mark.slow
def test_artifacts_serve_without_a_compiler(world: World, tmp_path: Path) -> None:
    with served(world.model, tmp_path, "--artifacts", str(world.artifacts), "--compile", "off") as service:
        until(lambda: service.ready()["compile"]["state"] == "compiled")  # type: ignore[index]
        body = service.ready()
        assert body is not None
        assert str(body["path"]).startswith("eager, CPU kernels (")
        assert {path["name"]: path["state"] for path in body["compile"]["paths"]} == dict.fromkeys(PATHS, "compiled")  # type: ignore[index]
        first = service.complete()
        assert [service.complete() for _ in range(3)] == [first] * 3
        assert service.metric('headrace_steps_total{path="compiled"}') > 20
        assert service.metric("headrace_recompiles_total") == 0
        assert not (tmp_path / "kernels").exists(), "nothing was built"


@pytest.mark.slow
def test_a_config_that_differs_is_refused_by_name(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with running(replace(world.config(artifacts=str(world.artifacts), compile="off"), block_size=8)) as runner:
        assert settled(runner) == dict.fromkeys(PATHS, "failed")
        assert runner.compile_status().reason == "its artifact is refused: its block size is 8 here and 4 there"
    assert "decode-1 is refused: its block size is 8 here and 4 there" in caplog.text
