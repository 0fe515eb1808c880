"""`zero-recipes verify`: is a saved model, adapter or checkpoint whole?"""

import json
from pathlib import Path

import yaml

from zero_recipes.checkpoint import checksums, save, saved_model
from zero_recipes.checkpoint.pickles import code_in
from zero_recipes.core.files import TOKENIZER_FILES, load_yaml
from zero_recipes.core.findings import first_line

RECIPE = "recipe.resolved.yaml"


def verify(folder: Path, deep: bool = False, trust_remote_code: bool = False, records: bool = True) -> dict[str, int]:
    """Compare a saved model or adapter with its class and checksums.

    A checkpoint's files must be those of its manifest and run no code.
    `deep`: no NaN, no Inf, no matrix of zeros.
    `records`: also what a run writes beside its model, such as metrics.json.
    Returns the numbers of "tensors" and "parameters", and the "bytes" of the files with weights.
    Raises NotWhole.
    """
    fault = None if save.is_foreign(folder) else save.checkpoint_fault(folder)
    if fault is None:
        fault = save.content_fault(folder) or _added_to_checkpoint(folder) or _changed_since_saved(folder, records)
    if fault is None and (folder / save.STATE).is_file():
        code = code_in(folder)
        if code is not None:
            fault = f"{folder} holds {code}. Loading a pickle can run any program, so it was not loaded."
    if fault is not None:
        raise saved_model.NotWhole(fault)
    entries = saved_model.compare_with_class(folder, trust_remote_code)
    if not (folder / saved_model.ADAPTER).is_file() and has_tokenizer(folder):
        _read_tokenizer(folder, trust_remote_code)
    if deep:
        saved_model.refuse_bad_numbers(entries, zeros=True)
    files = {entry.file for entry in entries.values()}
    return {
        "tensors": len(entries),
        "parameters": sum(entry.elements for entry in entries.values()),
        "bytes": sum(path.stat().st_size for path in files),
    }


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer of its own."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _read_tokenizer(folder: Path, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # the library's parsers raise what they like; tokenizers a bare Exception
        why = f"its tokenizer cannot be read: {first_line(error)}"
        raise saved_model.NotWhole(f"{folder} is not complete: {why}") from error


def _added_to_checkpoint(folder: Path) -> str | None:
    added = save.added_to_checkpoint(folder)
    if added:
        return f"{folder} was changed after saving: it also holds {', '.join(added[:3])}."
    return None


def _changed_since_saved(folder: Path, records: bool) -> str | None:
    """What differs from checksums.json, or None."""
    path = folder / checksums.CHECKSUMS
    if not path.is_file():
        return _without_checksums(folder)
    try:
        known = checksums.read_checksums(folder)
        wrong = checksums.first_changed(folder, known["files"], "sha256")
        if wrong is not None:
            why = f"{wrong} is missing or was changed (SHA-256)"
            return f"{folder} is damaged: {why}. Save or copy it again."
        added = sorted(set(checksums.loaded_files(folder)) - known["files"].keys())
        if added:
            return f"{folder} was changed after saving: it would also load {', '.join(added[:3])}."
        wrong = checksums.first_changed(folder, known["records"], "sha256") if records else None
    except (OSError, ValueError, TypeError) as error:
        return _unreadable(path, error)
    if wrong is None:
        return None
    changed = f"{wrong} of {folder} is missing or was changed after the run (SHA-256)"
    return f"{changed}. The model is what was saved."


def _without_checksums(folder: Path) -> str | None:
    """Why a model lacks what its run wrote. None of a model that no run wrote, or one with skip_checksums."""
    if not any(folder.glob("*.safetensors")):
        return None
    resolved = folder / RECIPE
    try:
        if load_yaml(resolved.read_text()).get("skip_checksums"):
            return None
    except FileNotFoundError:
        if _run_of(folder) is None:
            return None
        return _missing(resolved)
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        return _unreadable(resolved, error)
    return _missing(folder / checksums.CHECKSUMS)


def _missing(path: Path) -> str:
    return f"{path} is missing, although the run wrote it."


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path} cannot be read: {first_line(error)}"


def _run_of(folder: Path) -> str | None:
    """The recipe's hash in metrics.json. A trainer without a recipe writes neither a recipe nor checksums."""
    try:
        return json.loads((folder / "metrics.json").read_text())["recipe_sha256"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
