"""Read a recipe: a TRL YAML plus a few keys of our own, merged with the command line.

Nothing downstream reads it again.

`read` needs only PyYAML, so that the recipe's `env:` block is in force before torch is imported; `parse` imports TRL.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from zero_recipes.config.command_line import decoded, named_on, refuse_no_text, without_unset
from zero_recipes.config.launch_keys import LAUNCH
from zero_recipes.config.recipe_keys import dataclasses_of_a_recipe, key_choices, key_types
from zero_recipes.config.recipe_text import RecipeFile as RecipeFile
from zero_recipes.config.recipe_text import read_recipe_file as read_recipe_file
from zero_recipes.config.settings import Settings
from zero_recipes.config.validation import key_findings, recipe_findings
from zero_recipes.config.value_limits import MAPPINGS, limit_findings
from zero_recipes.core.findings import Refusal, first_line, raise_errors, refusal

USAGE = "run_sft.py RECIPE.yaml [--key value ...] [--traceback]"


@dataclass(frozen=True)
class Recipe:
    """One recipe with its overrides, as the file and the command line say it. Nothing writes into it."""

    path: Path
    settings: Settings  # every known key, defaults included
    given: Mapping[str, Any]  # only the keys that the file or the command line names
    sha256: str  # of the file's bytes

    @property
    def name(self) -> str:
        return self.path.stem


def split_command_line(argv: list[str]) -> tuple[Path, list[str]]:
    """The recipe's path and the overrides. `--local_rank`, which the deepspeed launcher passes, goes to LOCAL_RANK;
    `--traceback` is dropped."""
    rest, index = [], 0
    while index < len(argv):
        key, _, value = argv[index].partition("=")
        if key in ("--local_rank", "--local-rank"):
            if not value:
                index += 1
                value = argv[index]
            os.environ.setdefault("LOCAL_RANK", value)
        elif key != "--traceback":  # read where the run ends
            rest.append(argv[index])
        index += 1
    if not rest or rest[0].startswith("-"):
        given = f"the first argument is {rest[0]!r}" if rest else "no argument was given"
        raise refusal("ZR115", given=given, usage=USAGE)
    return Path(rest[0]), rest[1:]


def parse_recipe(path: Path, mapping: dict[str, Any], overrides: list[str]) -> Recipe:
    """Merge file and command line through TRL's own parser; refuse what neither TRL nor we know."""
    parser = _parser()
    known = key_types()
    lines = getattr(mapping, "lines", {})
    mapping = {key: value for key, value in mapping.items() if key not in LAUNCH}  # preflight compares them
    findings = recipe_findings(str(path), mapping, lines, known, key_choices())
    if any(finding.level == "error" for finding in findings):
        raise Refusal(findings)

    refuse_no_text(overrides)
    file_values = dict(mapping)
    prompts = file_values.pop("sample_prompts", None)  # a list, a number or a path: argparse has one type per key
    parser.set_defaults_with_config(**file_values)
    valued, unset = without_unset(overrides, known)
    namespace, extra = parser.parse_known_args(valued)
    stray = [word for word in extra if word.startswith("--")]
    findings = list(
        key_findings("the command line", [word[2:].partition("=")[0].replace("-", "_") for word in stray], known)
    )
    if findings:
        raise Refusal(findings)
    if extra:
        raise refusal("ZR120", first_extra=extra[0], usage=USAGE)

    values = vars(namespace)
    named = named_on(overrides, known)
    if "sample_prompts" not in named:
        values["sample_prompts"] = prompts
    values["datasets"] = [
        dataclasses.asdict(entry) if dataclasses.is_dataclass(entry) else entry for entry in values["datasets"]
    ]  # objects, where the command line names them
    values |= dict.fromkeys(unset)
    values |= {key: decoded(key, values[key]) for key in (*MAPPINGS, "accelerator_config")}
    findings = [found for key in named & set(values) for found in limit_findings("the command line", key, values[key])]
    raise_errors(findings)
    given = {key: values[key] for key in values if key in mapping or key in named}
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Recipe(path=path, settings=Settings(values), given=MappingProxyType(given), sha256=digest)


def derive_accumulation(settings: Settings, given: Mapping[str, Any], world_size: int) -> int | None:
    """gradient_accumulation_steps from global_batch_size (sequences per optimizer step); None without that key.

    `world_size`: processes with rows of their own. Raises Refusal.
    """
    total = settings.global_batch_size
    if total is None:
        return None
    micro = settings.per_device_train_batch_size
    per_pass = world_size * micro
    if total <= 0 or total % per_pass:
        below, above = total // per_pass * per_pass, (total // per_pass + 1) * per_pass
        near = f"{below} or {above}" if below > 0 else str(above)
        raise refusal("ZR121", total=total, world_size=world_size, micro=micro, total_2=total / per_pass, near=near)
    derived = total // per_pass
    requested = given.get("gradient_accumulation_steps")
    if requested is not None and requested != derived:
        raise refusal("ZR122", total=total, requested=requested, world_size=world_size, micro=micro, derived=derived)
    return derived


def instances(settings: Settings, path: Path) -> tuple:
    """(ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig, RecipeArguments) with the values in force.

    SFTConfig starts the process group: everything that can be refused without it is refused before.
    """
    objects = []
    for cls in dataclasses_of_a_recipe():
        fields = {f.name for f in dataclasses.fields(cls) if f.init}
        try:
            values = {key: copy.deepcopy(value) for key, value in settings.as_dict().items() if key in fields}
            objects.append(cls(**values))  # copied: DatasetMixtureConfig turns the mapping's entries into objects
        except Exception as error:  # constructors of libraries: each raises what it likes
            raise refusal("ZR123", name=cls.__name__, path=path, error=first_line(error)) from error
    return tuple(objects)


def write_resolved(given: Mapping[str, Any], path: Path, header: list[str], ds_config: dict[str, Any] | None) -> None:
    """What was in force, as a recipe that runs again: the keys given and derived, the launch as a comment.

    `given`: of a RunConfig. `ds_config`: the DeepSpeed configuration without "auto"; None without DeepSpeed.
    """
    given = dict(given) | ({} if ds_config is None else {"deepspeed": ds_config})
    text = "".join(f"# {line}\n" for line in header) + yaml.safe_dump(given, sort_keys=False, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _parser():
    from trl import TrlParser

    class Parser(TrlParser):
        def error(self, message: str):
            raise refusal("ZR124", message=message, usage=USAGE)

    # abbreviations (`--max_step`) would hide a misspelt key
    return Parser(dataclass_types=dataclasses_of_a_recipe(), allow_abbrev=False, add_help=False)


def steps_by_epochs(rows: int, settings: Settings, replicas: int) -> int:
    """Optimizer steps of a run by epochs (transformers 5.23 trainer.py, `set_initial_training_values`)."""
    micro, last = settings.per_device_train_batch_size, settings.dataloader_drop_last
    batches = rows // micro // replicas if last else math.ceil(math.ceil(rows / micro) / replicas)
    return math.ceil(settings.num_train_epochs * max(math.ceil(batches / settings.gradient_accumulation_steps), 1))
