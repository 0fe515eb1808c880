"""`zero-recipes verify`: is a saved model, adapter or checkpoint whole?"""

import json
from pathlib import Path

import yaml

from zero_recipes.checkpoint import save
from zero_recipes.checkpoint.resume import code_in
from zero_recipes.core.files import NAMES
from zero_recipes.core.findings import ending


def verify(folder: Path, deep: bool = False, trust_remote_code: bool = False) -> dict[str, int]:
    """Compare a saved model or adapter with its class and checksums.

    A checkpoint's files must match its manifest and run no code.
    `deep`: no NaN, no Inf, no matrix of zeros.
    Returns the numbers of "tensors" and "parameters", and the "bytes" of the files with weights.
    Raises NotWhole.
    """
    fault = None if save.is_foreign(folder) else save.checkpoint_fault(folder)
    if fault is None:
        fault = save.content_fault(folder) or _changed_since_saved(folder)
    if fault is None and (folder / save.STATE).is_file():
        code = code_in(folder)
        if code is not None:
            fault = ending("pickle", folder=folder, code=code)
    if fault is not None:
        raise save.NotWhole(fault)
    entries = save.compare_with_class(folder, trust_remote_code)
    if not (folder / save.ADAPTER).is_file() and has_tokenizer(folder):
        _read_tokenizer(folder, trust_remote_code)
    if deep:
        save.refuse_bad_numbers(entries, zeros=True)
    files = {entry.file for entry in entries.values()}
    return {
        "tensors": len(entries),
        "parameters": sum(entry.elements for entry in entries.values()),
        "bytes": sum(path.stat().st_size for path in files),
    }


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in NAMES["tokenizer"])


def _read_tokenizer(folder: Path, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # the library's parsers raise what they like; tokenizers a bare Exception
        raise save.NotWhole(ending("no_tokenizer", folder=folder, error=error)) from error


def _changed_since_saved(folder: Path) -> str | None:
    """What differs from checksums.json, or None."""
    path = folder / save.CHECKSUMS
    if not path.is_file():
        resolved = folder / "recipe.resolved.yaml"
        if not resolved.is_file() or not any(folder.glob("*.safetensors")):
            return None
        if yaml.safe_load(resolved.read_text()).get("skip_checksums"):
            return None
        return ending("no_checksums", path=path)
    try:
        files = dict(json.loads(path.read_text())["files"])
        wrong = save.first_changed(folder, files, "sha256")
        added = sorted(set(save.saved_files(folder)) - files.keys())
        if added:
            return ending("added", folder=folder, names=", ".join(added[:3]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        return ending("checksums", path=path, error=error)
    if wrong is None:
        return None
    return ending("changed", folder=folder, wrong=wrong, path=path)
