"""The flags are a promise: the list is frozen here, and every setting has exactly one."""

from __future__ import annotations

import dataclasses

from headrace.cli.options import SERVE_GROUPS
from headrace.config import EngineConfig, ServerConfig

FLAGS = """
activation-bits
allowed-origins api-key api-keys-file artifacts async-scheduling batch-dir block-size body-timeout chat-template compile compile-cache deterministic
device dtype enable-chunked-prefill enable-log-requests enable-prefix-caching gpu-memory-utilization grpc-port host kv-cache-dtype
kv-cache-memory-bytes kv-memory
max-body-size max-file-size max-model-len max-num-batched-tokens max-num-queued-reqs max-num-seqs max-restarts max-seq-len-to-capture
num-gpu-blocks-override otlp-traces-endpoint pooling port preemption-mode quantization reasoning-parser runner-factory scheduling-policy seed
served-model-name session-dir session-lease session-quota shutdown-timeout speculative-config ssl-certfile ssl-keyfile step-timeout swap-space
target-itl-ms threads tool-call-parser trust-request-chat-template web
"""

OPTIONS = [option for _, group in SERVE_GROUPS for option in group]


def test_flags_are_frozen() -> None:
    assert sorted(name for option in OPTIONS for name in option.names) == FLAGS.split()


def test_every_setting_has_one_flag() -> None:
    # weights of tenants stand in the file of keys
    for owner, apart in ((EngineConfig, {"model", "tenant_weights"}), (ServerConfig, set())):
        fields = sorted(field.name for field in dataclasses.fields(owner) if field.name not in apart)
        assert sorted(option.field for option in OPTIONS if option.owner is owner) == fields


def test_no_default_is_said_wrongly() -> None:
    for option in OPTIONS:
        assert "%" not in option.help
        assert option.default is not dataclasses.MISSING
