"""Fine-tuning under DeepSpeed's ZeRO stages, measured. Two names are for programs of your own (docs/your_own.md)."""

from importlib import import_module
from typing import Any

_MODULES = {"StageMetricsCallback": "zero_recipes.metrics.callback", "ZeroSFTTrainer": "zero_recipes.training.trainer"}
__all__ = ["StageMetricsCallback", "ZeroSFTTrainer"]


def __getattr__(name: str) -> Any:
    """Imported when it is named: `import zero_recipes` alone loads no model library."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
