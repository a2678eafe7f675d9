"""Graph breaks and recompilations of a module of the user's own, with file, line, reason and remedy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headrace.doctor import kernels
from headrace.doctor.finding import Finding, fault, well
from headrace.errors import ConfigError

# what a reason says -> what helps
REMEDIES: tuple[tuple[str, str], ...] = (
    ("generic_jump", "decide with torch.where or torch.cond, or move the decision out of the module"),
    ("data-dependent", "decide with torch.where or torch.cond, or move the decision out of the module"),
    ("Tensor.item", "keep the value a tensor; .item() and .tolist() wait for the device and leave the graph"),
    ("builtin", "move prints, files and clocks out of forward"),
    ("print", "move prints out of forward, or use torch._dynamo.config.reorderable_logging_functions"),
    ("numpy", "use torch's operator of the same name"),
    ("skip function", "register it as a custom operator (torch.library.custom_op)"),
    ("mark_dynamic", "mark the dimension with torch._dynamo.mark_dynamic, or pad it to a few static sizes"),
    ("size mismatch", "pad to a few static sizes (buckets), or mark the dimension with torch._dynamo.mark_dynamic"),
    ("stride", "make the input contiguous before it comes in"),
    ("dtype", "give every call the same dtype"),
)
DEFAULT_REMEDY = "torch._dynamo.explain(module)(*inputs) prints the code around it"


def load_factory(name: str) -> Callable[[], tuple[Any, Sequence[tuple[Any, ...]]]]:
    """`pkg.mod:factory`. Raises `ConfigError`."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{name!r} must be PACKAGE.MODULE:FACTORY, a function that returns a module and a list of argument tuples.")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name}: {error}") from error
    if not callable(factory):
        raise ConfigError(f"{name} is no function.")
    return factory  # type: ignore[no-any-return]


def module_findings(factory: Callable[[], tuple[Any, Sequence[tuple[Any, ...]]]]) -> list[Finding]:
    """`factory` gives the module and the inputs of several calls: the first is examined for breaks, copies and waits,
    the others for recompilations.
    """
    module, inputs = factory()
    if not inputs:
        raise ConfigError("The factory gives no inputs; return a module and a list of at least one tuple of arguments.")
    return [*_breaks(module, inputs[0]), *_recompiles(module, inputs), *kernels.module_findings(module, inputs[0])]


def _breaks(module: Any, arguments: tuple[Any, ...]) -> list[Finding]:
    import torch

    torch._dynamo.reset()
    explained = torch._dynamo.explain(module)(*arguments)  # type: ignore[no-untyped-call]
    breaks = [reason for reason in explained.break_reasons if reason.graph_break]
    if not breaks:
        return [well("graph-breaks", f"{explained.op_count} operators in {explained.graph_count} graph")]
    return [_break(reason) for reason in breaks]


def _break(reason: Any) -> Finding:
    place = reason.user_stack[-1] if reason.user_stack else None
    where = f"{place.filename}:{place.lineno} ({place.line})" if place is not None else "somewhere"
    return fault(
        "graph-breaks",
        f"{where}: {_first_line(reason.reason)}",
        remedy_of(reason.reason),
        "kernels across the break can be fused, and Python runs no more between them",
    )


def _recompiles(module: Any, inputs: Iterable[tuple[Any, ...]]) -> list[Finding]:
    import torch

    found = []
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number, arguments in enumerate(inputs, start=1):
            try:
                compiled(*arguments)
            except torch._dynamo.exc.RecompileError as error:
                text = str(error)
                found.append(
                    fault("recompiles", f"call {number}: {_guard(text)}", remedy_of(text), "a compilation takes seconds, in which nobody is answered")
                )
    torch._dynamo.reset()
    return found or [well("recompiles", "one compilation serves all calls")]


def _guard(text: str) -> str:
    """The guard that failed, and where the function stands."""
    lines = [line.strip(" -") for line in text.splitlines() if line.strip()]
    guards = [line for line in lines if "guard" in line.lower() or ": " in line]
    return (guards[-1] if guards else lines[0])[:300] + (f" [{lines[0][:200]}]" if lines and guards else "")


def remedy_of(reason: str) -> str:
    return next((remedy for sign, remedy in REMEDIES if sign.lower() in reason.lower()), DEFAULT_REMEDY)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
