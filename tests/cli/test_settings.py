from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from headrace.cli.main import build_parser
from headrace.cli.settings import engine_options, merge, read_config_file, server_config
from headrace.config import EngineConfig
from headrace.errors import ConfigError


def flags(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["serve", *arguments])


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    return str(file)


def test_flag_wins_over_file_and_file_over_default(tmp_path: Path) -> None:
    file = read_config_file(written(tmp_path, "max-num-seqs: 3\nblock_size: 32\nport: 9000\nenable-prefix-caching: false\n"))
    settings = merge(flags("--max-num-seqs", "5", "--port", "9001"), file)
    assert engine_options(settings) == {
        "max_num_seqs": 5,
        "block_size": 32,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": EngineConfig(model="").max_num_batched_tokens,
    }
    assert server_config(settings).port == 9001


def test_values_of_the_file_read_like_flags(tmp_path: Path) -> None:
    text = """
model: owner/model
max-model-len: 8k
kv-memory: 512MiB
swap-space: 4
served-model-name: [a, b]
api-key: secret
allowed-origins: ["https://a.example", "https://b.example"]
seed:
"""
    file = read_config_file(written(tmp_path, text))
    assert file["model"] == "owner/model"
    engine = engine_options(file)
    assert (engine["max_model_len"], engine["kv_memory"], engine["swap_space"]) == (8000, 512 << 20, 4 << 30)
    assert "seed" not in engine
    server = server_config(file)
    assert server.served_model_names == ("a", "b")
    assert server.api_keys == ("secret",)
    assert server.allowed_origins == ("https://a.example", "https://b.example")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max-num-sequences: 3", "unknown key max-num-sequences.*max-num-seqs"),
        ("colour: red", "unknown key colour"),
        ("port: high", "port.*'high'"),
        ("port: [1, 2]", "port.*one value"),
        ("port: true", "port.*switches"),
        ("enable-prefix-caching: maybe", "enable-prefix-caching.*true or false"),
        ("scheduling-policy: lifo", "scheduling-policy.*fcfs"),
        ("max-num-seqs: 3\nmax_num_seqs: 4", "max-num-seqs twice"),
        ("kv-memory: 1GiB\nkv-cache-memory-bytes: 5", "kv-memory twice"),
        ("- port", "must hold flags as keys"),
        ("port: {", "not YAML"),
    ],
)
def test_bad_files_name_the_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        read_config_file(written(tmp_path, text))
    assert "--config" in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        read_config_file(str(tmp_path / "none.yaml"))
    assert read_config_file(written(tmp_path, "# nothing\n")) == {}


def test_key_of_the_environment_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "from-environment")
    assert server_config(merge(flags(), {})).api_keys == ("from-environment",)
    assert server_config(merge(flags(), {"api-key": ("from-file",)})).api_keys == ("from-file",)
    assert server_config(merge(flags("--api-key", "a", "--api-key", "b"), {"api-key": ("from-file",)})).api_keys == ("a", "b")
    monkeypatch.setenv("HEADRACE_API_KEY", "")
    assert server_config(merge(flags(), {})).api_keys == ()


def test_token_budget_grows_with_the_rows() -> None:
    assert engine_options(merge(flags("--max-num-seqs", "4096"), {}))["max_num_batched_tokens"] == 4096
    assert engine_options(merge(flags("--max-num-seqs", "4096", "--max-num-batched-tokens", "64"), {}))["max_num_batched_tokens"] == 64
    assert engine_options(merge(flags(), {})) == {}


def test_switches() -> None:
    settings = merge(flags("--no-enable-prefix-caching", "--deterministic"), {"enable-prefix-caching": True})
    assert engine_options(settings) == {"enable_prefix_caching": False, "deterministic": True}


def test_tls_needs_both_files(tmp_path: Path) -> None:
    file = tmp_path / "cert.pem"
    file.write_text("")
    with pytest.raises(ConfigError, match="together"):
        server_config(merge(flags("--ssl-certfile", str(file)), {}))
    with pytest.raises(ConfigError, match=r"--ssl-keyfile: there is no file .*none\.pem"):
        server_config(merge(flags("--ssl-certfile", str(file), "--ssl-keyfile", str(tmp_path / "none.pem")), {}))


def test_empty_key_is_no_key() -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        server_config(merge(flags("--api-key", ""), {}))
