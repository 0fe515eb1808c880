"""Measured fine-tuning with DeepSpeed ZeRO. Import these two classes in your own program (docs/your_own.md)."""

from importlib import import_module
from typing import Any

_MODULES = {"StageMetricsCallback": "zero_recipes.metrics.callback", "ZeroSFTTrainer": "zero_recipes.training.trainer"}
__all__ = ["StageMetricsCallback", "ZeroSFTTrainer"]


def __getattr__(name: str) -> Any:
    """Import a class on first use, so that `import zero_recipes` does not load model libraries."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
