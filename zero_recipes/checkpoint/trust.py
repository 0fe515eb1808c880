"""A checkpoint of a stranger: its pickles are data, or it is refused."""

from __future__ import annotations

from pathlib import Path

from zero_recipes.compat.safe_loading import may_run_code
from zero_recipes.core.errors import Refusal


def refuse_code(checkpoint: Path, found: str | None) -> None:
    """Refuse a checkpoint with a pickle that is more than data. `found`: which, and what it asks for; None: no such."""
    if found is not None:
        raise Refusal(
            "ZR780",
            f"{checkpoint} holds {found}",
            "A pickle can run any program while it is read. Tensors, numbers and the classes that DeepSpeed, numpy and "
            "transformers put into a checkpoint are read; nothing of this file has been.",
            "If you trust whoever wrote it: --trust_checkpoint true. Else delete it.",
        )


def code_in(checkpoint: Path) -> str | None:
    """The first file of a checkpoint that would run something, and what; not one that is merely damaged."""
    for path in sorted(checkpoint.rglob("*")):
        why = may_run_code(path) if path.is_file() else None
        if why is not None:
            return f"{path.relative_to(checkpoint)}, which cannot be read as plain data: {why}"
    return None
