"""Files of a checkpoint that run code when they are loaded: DeepSpeed and transformers load pickles."""

import json
import os
from pathlib import Path

from zero_recipes.checkpoint import save
from zero_recipes.core.findings import Refusal, refusal
from zero_recipes.engine.faults.pickled_code import not_plain


def refuse_code(checkpoint: Path, share: int = 0, of: int = 1) -> None:
    """Refuse code in a checkpoint, and in the best one that it names, which a run loads at its end.

    Each of `of` processes reads its `share` of the files. Raises Refusal.
    """
    folder = checkpoint.resolve()
    _refuse_code_in(folder, checkpoint, share, of)
    best = _best_of(folder)
    if best != folder:
        _refuse_code_in(best, checkpoint, share, of)


def _refuse_code_in(folder: Path, checkpoint: Path, share: int, of: int) -> None:
    save.refuse_not_whole(folder, save.document_fault(folder))  # `latest` may name a folder elsewhere
    found = code_in(folder, share, of)
    if found is not None:
        raise code_refusal(checkpoint, found)


def _best_of(checkpoint: Path) -> Path:
    """The best checkpoint by the trainer's state, or `checkpoint` itself."""
    state = checkpoint / save.STATE
    best = None
    if state.is_file():  # there is none in a folder of weights alone
        best = json.loads(state.read_text()).get("best_model_checkpoint")
    return Path(best or checkpoint).resolve()


def code_refusal(checkpoint: Path, found: str | None) -> Refusal:
    """The Refusal of a checkpoint with code in it. `found`: by `code_in`."""
    return refusal("ZR780", checkpoint=checkpoint, found=found)


def code_in(folder: Path, share: int = 0, of: int = 1) -> str | None:
    """The first file in a folder that cannot be read without running code, and why. None where all can."""
    for path in _files_below(folder)[share::of]:
        why = not_plain(path)
        if why is not None:
            return f"{path.relative_to(folder)}, which cannot be read as plain data: {why}"
    return None


def _files_below(folder: Path) -> list[Path]:
    """All files, also through links to folders, which `Path.rglob` does not follow but a load does."""
    files = []
    seen = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link to a folder around it
            folders.clear()
            continue
        seen.add(real)
        files += [Path(place, name) for name in names]
    return sorted(path for path in files if path.is_file())
