"""Scripts are no package: a test loads one by its file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    if str(ROOT / "scripts") not in sys.path:  # where scripts find what they share
        sys.path.append(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(f"headrace_scripts.{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
