"""What the HTTP process holds from its start on, whether or not anybody uses it: each module here costs every server memory and time."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import LIMIT_S

# for embeddings and long bodies, for forms of answers, for --config, for --grpc-port, for --otlp-traces-endpoint, for other verbs
NOT_AT_THE_START = ("torch", "numpy", "llguidance", "yaml", "grpc", "opentelemetry", "headrace.plan", "headrace.bench", "headrace.doctor")


def test_a_server_starts_without_what_few_requests_need() -> None:
    code = f"""
import sys
from headrace.cli.main import build_parser
build_parser("serve").parse_args(["serve"])
import headrace.models.store, headrace.server.serve
from headrace.models.gguf import GGUFFile
print([name for name in {NOT_AT_THE_START!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
