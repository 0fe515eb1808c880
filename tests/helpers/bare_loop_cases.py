"""Cases of tests/helpers/group.py: docs/bare_loop.py."""

import importlib.util
from pathlib import Path

LOOP = Path(__file__).resolve().parents[2] / "docs" / "bare_loop.py"


def bare_loop(stage: int, steps: int, bf16: bool) -> list[float]:
    """Its losses, trained by the file itself."""
    spec = importlib.util.spec_from_file_location("bare_loop", LOOP)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train(stage, steps, bf16)
