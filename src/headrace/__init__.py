"""Headrace: a PyTorch-native LLM inference server and engine.

The offline interface is imported on first use, so that `import headrace` costs nothing and `headrace.core` never sees torch.
"""

from typing import TYPE_CHECKING, Any

from headrace.sampling_params import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from headrace.engine.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from headrace.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
