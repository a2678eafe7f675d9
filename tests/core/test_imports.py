import subprocess
import sys

PROBE = """
import pkgutil, sys
import headrace.core
for module in pkgutil.iter_modules(headrace.core.__path__, "headrace.core."):
    __import__(module.name)
assert "headrace.core.scheduler" in sys.modules
print(sorted({"torch", "numpy", "asyncio", "msgspec"} & set(sys.modules)))
"""


def test_core_loads_the_standard_library_only():
    found = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
