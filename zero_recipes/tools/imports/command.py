"""`zero-recipes import FILE`: another trainer's file as a recipe.

Tables in config/imports map its keys and name its defaults. What no table can say is code in this package.

Each key is carried, or named with what it means that the recipe lacks it: in a comment at its place, and where the
weights would differ also in the recipe's list `open_points`, which `check` and a run repeat.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.core.findings import finding, raise_errors, refusal
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.tools.imports.axolotl import ONLY_LINEAR, put_axolotl
from zero_recipes.tools.imports.draft import Draft
from zero_recipes.tools.imports.llama_factory import put_llama_factory
from zero_recipes.tools.imports.models import same_keys, table, typed
from zero_recipes.tools.imports.rows import pattern_row, translate
from zero_recipes.tools.new_files import write_new

TRAINERS = {"axolotl": put_axolotl, "LLaMA-Factory": put_llama_factory}
NO_EVALUATION = "there are no evaluation rows: set test_split_size, and eval_strategy again"


def import_(arguments: argparse.Namespace) -> int:
    """Write another trainer's file as a recipe, and print what has no counterpart. Returns the exit code.

    Raises Refusal where nothing could run, or a file exists.
    """
    recipe = arguments.output or Path(f"{arguments.file.stem}.recipe.yaml")
    with library_error_as_finding(f"importing {arguments.file}"):
        draft = translated(arguments.file, recipe)
        texts = {recipe: draft.text()} | draft.files
    refused = []
    for key, effect in draft.remarks["refuses"].items():
        refused.append(finding("ZR894", key=key, effect=effect, file=draft.path, source=draft.source))
    raise_errors(refused)
    print(*draft.told(), sep="\n")
    write_new(texts)
    print(f"zero-recipes check {recipe} --data")
    file = draft.value("accelerate_config")
    if file:
        print(f"zero-recipes train {recipe} --config_file {file}")
    return 0


def translated(path: Path, recipe: Path) -> Draft:
    """Translate another trainer's file into a draft. Raises Refusal for an unknown trainer, and for a wrong type."""
    source, theirs = _read(path)
    known = table(source)
    file = typed(source, _flat(theirs, known["nested"]), path)
    draft = Draft(path, recipe, source, file.keys_set(), list(theirs))
    draft.put(None, f"always in {source}", **known["always"])
    TRAINERS[source](draft, file)
    for key in known["keys"]:
        if "*" not in key:
            translate(draft, key)
    same = same_keys(source)
    for key in sorted(draft.theirs.keys() - known["keys"]):
        if key in same and pattern_row(draft, key) is None:
            draft.put(key, key, **{key: draft.theirs[key]})
        else:
            translate(draft, key)

    if not draft.value("test_split_size"):
        _leave_out_evaluation(draft)
    if draft.value("load_best_model_at_end") and draft.value("eval_steps"):
        line = draft.recipe["eval_steps"]
        draft.put(line.key, "any evaluation may be the best", save_steps=line.value)
    names = draft.value("lora_target_modules", [])
    if len(names) > 1 and "all-linear" in names:  # PEFT knows it alone, and TRL has no adapter on the LM head
        draft.changes(draft.key_behind("lora_target_modules"), ONLY_LINEAR)
    optim_args = draft.value("optim_args")
    if isinstance(optim_args, dict):
        words = [f"{key}={value}" for key, value in optim_args.items()]
        draft.put("optim_args", "the optimizer's keys", optim_args=", ".join(words))
    if not draft.value("datasets") and not {"datasets", "dataset"} & draft.open_points.keys():
        draft.changes("datasets", "the file names none")
    return draft


def _leave_out_evaluation(draft: Draft) -> None:
    """Without evaluation rows nothing is evaluated, and no model is the best."""
    if draft.value("eval_strategy", "no") not in ("no", False):
        draft.changes(draft.key_behind("eval_strategy"), NO_EVALUATION)
        draft.put(None, "no evaluation rows", eval_strategy="no")
        draft.recipe.pop("eval_steps", None)
    for name in ("load_best_model_at_end", "early_stopping_patience"):
        if draft.value(name):
            draft.changes(draft.key_behind(name), NO_EVALUATION)
            del draft.recipe[name]


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """(trainer, its keys without those that are empty)."""
    with library_error_as_finding(f"reading {path}"):
        theirs = yaml.safe_load(path.read_text(encoding="utf-8"))
    for source in TRAINERS:
        if isinstance(theirs, dict) and not theirs.keys().isdisjoint(table(source)["signs"]):
            return source, {str(key): value for key, value in theirs.items() if value != ""}
    raise refusal("ZR893", path=path)


def _flat(theirs: Mapping[str, Any], nested: Sequence[str]) -> dict[str, Any]:
    """Keys of `nested` blocks become "block.key", after the others."""
    flat = {}
    blocks = {}
    for key, value in theirs.items():
        if isinstance(value, dict) and key in nested:
            blocks |= {f"{key}.{name}": inner for name, inner in value.items() if inner != ""}
        else:
            flat[key] = value
    return flat | blocks
