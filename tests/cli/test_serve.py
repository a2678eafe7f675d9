from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.cli.serve import display_name
from headrace.config import EngineConfig, EngineInfo, ServerConfig
from headrace.engine.engine_host import scheduler_config
from headrace.models import store
from headrace.server.auth import KeyRing


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig, str]]:
    """What the server was asked to run."""
    calls: list[tuple[EngineConfig, ServerConfig, str]] = []

    def run(engine: EngineConfig, server: ServerConfig, *, model_name: str, launched: object) -> int:
        assert launched == "an engine that loads"
        calls.append((engine, server, model_name))
        return 0

    monkeypatch.setattr("headrace.engine.engine_process.launch", lambda config: nullcontext("an engine that loads"))
    fake: Any = ModuleType("headrace.server.serve")
    fake.run = run
    import headrace.server

    monkeypatch.setitem(sys.modules, "headrace.server.serve", fake)
    monkeypatch.setattr(headrace.server, "serve", fake, raising=False)
    return calls


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    return file


def test_flags_become_configs(served: list[Any], gguf: Path) -> None:
    arguments = "--max-model-len 8K --max-num-seqs 1 --max-num-queued-reqs 2 --served-model-name a b --allowed-origins http://app.example --port 0"
    assert main(["serve", str(gguf), *arguments.split()]) == 0
    [(engine, server, name)] = served
    assert (engine.model, engine.max_model_len, engine.max_num_seqs, engine.max_num_queued_reqs) == (str(gguf), 8192, 1, 2)
    assert (server.served_model_names, server.allowed_origins, server.port) == (("a", "b"), ("http://app.example",), 0)
    assert name == "tiny.Q8_0"


def test_defaults_are_the_configs_own(served: list[Any], gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    assert main(["serve", str(gguf)]) == 0
    assert served[0][:2] == (EngineConfig(model=str(gguf)), ServerConfig())


def test_model_of_the_config_file(served: list[Any], gguf: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: {gguf}\nnum-gpu-blocks-override: 12\n")
    assert main(["serve", "--config", str(file)]) == 0
    assert main(["serve", str(other), "--config", str(file)]) == 0
    assert [(engine.model, engine.num_gpu_blocks_override) for engine, _, _ in served] == [(str(gguf), 12), (str(other), 12)]


def test_weights_of_keys_reach_the_scheduler_under_the_name_of_the_tenant(served: list[Any], gguf: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a, key: sk-a, weight: 3}\n- {name: b, key: sk-b}\n")
    assert main(["serve", str(gguf), "--api-keys-file", str(keys)]) == 0
    [(config, server, _)] = served
    tenant, _ = KeyRing(limited=server.limited_keys).holder([(b"x-api-key", b"sk-a")])
    assert config.tenant_weights == ((tenant, 3.0),)
    info = EngineInfo(
        model="m",
        max_model_len=64,
        vocab_size=10,
        embedding_size=4,
        num_blocks=8,
        block_size=16,
        dtype="float32",
        device="cpu",
        threads=1,
        path="eager",
        kv_cache_dtype="float32",
        kv_bytes=1,
        weight_bytes=1,
        load_seconds=0.0,
    )
    assert scheduler_config(config, info, num_host_blocks=0).tenant_weights == config.tenant_weights


def test_default_model(served: list[Any], gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "resolve_model", lambda name: gguf if name is None else pytest.fail(name))
    assert main(["serve"]) == 0
    assert served[0][0].model == str(gguf)
    assert served[0][2] == store.DEFAULT_MODEL


def test_another_runner_takes_the_name_as_it_is(served: list[Any]) -> None:
    assert main(["serve", "anything", "--runner-factory", "some.module:make"]) == 0
    assert (served[0][0].model, served[0][0].runner_factory) == ("anything", "some.module:make")


def test_display_name(tmp_path: Path, gguf: Path) -> None:
    assert display_name("owner/model") == "owner/model"
    assert display_name(str(gguf)) == "tiny.Q8_0"
    assert display_name(str(tmp_path)) == tmp_path.name
