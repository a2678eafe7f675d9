"""A server of our own does not outlive us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.patience import LIMIT_S, until

SERVER = """
import http.server, sys
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""
PROGRAM = f"""
import os, sys, time
from headrace.cli.chat_client import ChatClient
from headrace.cli.local_server import free_port, server_process
port = free_port()
command = [sys.executable, "-c", {SERVER!r}, str(port)]
with server_process(command, environment=os.environ, client=ChatClient(f"http://127.0.0.1:{{port}}")) as process:
    print(process.pid, flush=True)
    time.sleep({LIMIT_S})
"""


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_sigterm_ends_the_server_too():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        server = int(program.stdout.readline())
        assert is_there(server)
        program.send_signal(signal.SIGTERM)
        assert program.wait(LIMIT_S) == 128 + signal.SIGTERM
        until(lambda: not is_there(server))
