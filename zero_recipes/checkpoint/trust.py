"""A checkpoint of a stranger: its pickles are data, or it is refused."""

from __future__ import annotations

from pathlib import Path

from zero_recipes.core.findings import refusal
from zero_recipes.libs.safe_loading import may_run_code


def refuse_code(checkpoint: Path, found: str | None) -> None:
    """Refuse a checkpoint with a pickle that is more than data. `found`: which, and what it asks for; None: no such."""
    if found is not None:
        raise refusal("ZR780", checkpoint=checkpoint, found=found)


def code_in(checkpoint: Path) -> str | None:
    """The first file of a checkpoint that would run something, and what; not one that is merely damaged."""
    for path in sorted(checkpoint.rglob("*")):
        why = may_run_code(path) if path.is_file() else None
        if why is not None:
            return f"{path.relative_to(checkpoint)}, which cannot be read as plain data: {why}"
    return None
