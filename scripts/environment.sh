# Sourced by the other scripts: goes to the checkout and makes its .venv.   use_environment core|test
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Headrace needs Python 3.11 or newer, and there is none on PATH. Install one, or name it: PYTHON=/path/to/python3 $0" >&2
    return 1
}

use_environment() {
    local python
    python=$(find_python)
    "$python" scripts/make_environment.py "$1"
}
