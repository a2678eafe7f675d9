"""Imports of torch that wait until somebody uses them.

`import torch` runs nine hundred modules: those for export, quantisation, distributions, distributed training, rules for tensors without
memory. An engine uses none of these, but pays for them with half a second at its start and with memory for good. The parts named here stand
in `sys.modules` from the start, as ever; their code runs when an attribute of theirs is asked for that is not there yet, or when a module
inside them is imported. So nothing is missing, and what is used later comes later.
"""

from __future__ import annotations

import importlib.machinery
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

# Parts that `import torch` runs and an engine does not need. A version of torch that has no such module never asks for it.
UNUSED_PARTS = frozenset(
    f"torch.{name}"
    for name in (
        *("_decomp", "_meta_registrations", "_prims", "_refs", "ao", "distributions", "export", "fft", "linalg", "masked", "onnx", "optim"),
        *("nn.intrinsic", "nn.qat", "nn.quantizable", "nn.quantized", "profiler", "quantization", "sparse", "special", "utils.data"),
    )
)


class DeferredModule(ModuleType):
    """A module whose code has not run."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__all__":  # those who look through all modules ask for these
            raise AttributeError(name)
        run(self)
        return getattr(self, name)


class DeferringFinder(MetaPathFinder):
    """Finds what others find, and has the modules in `names` wait."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        parent = sys.modules.get(name.rpartition(".")[0])
        if isinstance(parent, DeferredModule):
            run(parent)
        if name not in self._names:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader)
        return spec


class _DeferringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Not yet: see `run`."""


_running = threading.RLock()


def run(module: ModuleType) -> None:
    """Runs the module's code, unless it has run or another call of this thread is at it."""
    with _running:
        if type(module) is not DeferredModule:
            return
        module.__class__ = ModuleType
        spec = module.__spec__
        assert spec is not None
        assert isinstance(spec.loader, _DeferringLoader)
        spec.loader = module.__loader__ = spec.loader.loader
        spec.loader.exec_module(module)


def defer_unused_parts() -> None:
    """To be called before torch is imported; later it does nothing."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, DeferringFinder(UNUSED_PARTS))
