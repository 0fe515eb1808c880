"""`zero-recipes verify`: is a saved model, adapter or checkpoint whole?"""

import json
from pathlib import Path

import yaml

from zero_recipes.checkpoint import save
from zero_recipes.checkpoint.resume import code_in
from zero_recipes.core.files import TOKENIZER_FILES, load_yaml
from zero_recipes.core.findings import ending

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
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _read_tokenizer(folder: Path, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # the library's parsers raise what they like; tokenizers a bare Exception
        raise save.NotWhole(ending("no_tokenizer", folder=folder, error=error)) from error


def _added_to_checkpoint(folder: Path) -> str | None:
    added = save.added_to_checkpoint(folder)
    if added:
        return ending("added_to_checkpoint", folder=folder, names=", ".join(added[:3]))
    return None


def _changed_since_saved(folder: Path, records: bool) -> str | None:
    """What differs from checksums.json, or None."""
    path = folder / save.CHECKSUMS
    if not path.is_file():
        return _without_checksums(folder)
    try:
        known = save.read_checksums(folder)
        wrong = save.first_changed(folder, known["files"], "sha256")
        if wrong is not None:
            return ending("changed", folder=folder, wrong=wrong)
        added = sorted(set(save.loaded_files(folder)) - known["files"].keys())
        if added:
            return ending("added", folder=folder, names=", ".join(added[:3]))
        wrong = save.first_changed(folder, known["records"], "sha256") if records else None
    except (OSError, ValueError, TypeError) as error:
        return ending("checksums", path=path, error=error)
    if wrong is None:
        return None
    return ending("record_changed", folder=folder, wrong=wrong)


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
        return ending("no_checksums", path=resolved)
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        return ending("checksums", path=resolved, error=error)
    return ending("no_checksums", path=folder / save.CHECKSUMS)


def _run_of(folder: Path) -> str | None:
    """The recipe's hash in metrics.json. A trainer without a recipe writes neither a recipe nor checksums."""
    try:
        return json.loads((folder / "metrics.json").read_text())["recipe_sha256"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
