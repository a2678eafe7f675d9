"""Before anything imports torch: its threads must not spin for long beside the processes that tests start (see engine.engine_process)."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
