"""All checks of one run, in order: `run_sft.py` refuses on their errors, `zero-recipes check` prints every finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from huggingface_hub import constants

from zero_recipes.checkpoint.compatibility import fit_findings
from zero_recipes.checkpoint.output_dir import refuse_occupied
from zero_recipes.checkpoint.resume import checkpoint_to_resume
from zero_recipes.checks import combination_findings, ds_config_findings, recipe_findings
from zero_recipes.checks.cache import on_hub
from zero_recipes.checks.ds_config import fill_auto
from zero_recipes.checks.this_machine import machine_findings
from zero_recipes.checks.versions import installed_versions, version_findings
from zero_recipes.compat.registry import parts_in_use, private_part_findings
from zero_recipes.compat.warnings import choose_progress
from zero_recipes.config import recipe as recipes
from zero_recipes.config import run as launch
from zero_recipes.config import strategy
from zero_recipes.config.accelerate import launcher_findings
from zero_recipes.config.recipe import RecipeFile, steps_by_epochs
from zero_recipes.core.errors import Finding, Refusal
from zero_recipes.core.host_limits import Host
from zero_recipes.models.load import load_config, refuse_missing_attention


def preflight(path, mapping: RecipeFile, overrides: list[str], environment: Mapping[str, str], rehearsal=False):
    """(the run, or None where it cannot be put together; all findings).

    `environment` is the launcher's: os.environ in a run. A key with a finding is left out, and the rest goes on, so
    that all findings come at once. `rehearsal`: nothing will start here and now (zero-recipes check).
    """
    findings = list(version_findings(installed_versions()))
    if findings:
        return None, findings  # what follows is written for the versions above the floor
    findings = recipe_findings(str(path), mapping, mapping.lines, recipes.key_types(), recipes.key_choices())
    wrong = {finding.key for finding in findings if finding.level == "error"}
    sound = RecipeFile({key: value for key, value in mapping.items() if key not in wrong})
    sound.lines = mapping.lines
    recipe = _attempt(findings, recipes.parse, path, sound, overrides)
    if recipe is None:
        return None, findings
    choose_progress(recipe)
    asks_for_cpu = recipe.values["use_cpu"]
    device = launch.choose_device(recipe)
    findings += launcher_findings(environment)
    in_force = _attempt(findings, strategy.resolve, recipe, environment)
    if in_force is not None:
        _attempt(findings, recipes.derive_accumulation, recipe, in_force.replicas)
        _attempt(findings, launch.refuse_data_parallel, in_force, device, environment)
        _attempt(findings, launch.refuse_shared_gpus, in_force, device, environment)
        if in_force.is_deepspeed:
            findings += ds_config_findings(
                in_force.ds_config, in_force.source, recipe.values, in_force.world_size, device
            )
        findings += combination_findings(recipe.values, in_force, device, environment)
    named = SimpleNamespace(**recipe.values)
    if not (constants.is_offline_mode() and on_hub(named.model_name_or_path)):  # what the cache lacks is said below
        _attempt(findings, load_config, named, named)
    _attempt(findings, refuse_missing_attention, recipe.values["attn_implementation"], device)
    if in_force is not None:
        findings += private_part_findings(parts_in_use(in_force, recipe.values, device))
    output_dir = launch.choose_output_dir(recipe)
    resume = recipe.values["resume_from_checkpoint"]
    overwrite = recipe.values["overwrite"]
    _attempt(findings, refuse_occupied, output_dir, resume, overwrite)
    checkpoint = _attempt(findings, checkpoint_to_resume, output_dir, resume, overwrite)
    recipe.values["resume_from_checkpoint"] = checkpoint
    if checkpoint is not None and in_force is not None:
        findings += fit_findings(checkpoint, recipe.values, in_force)
    run = None if in_force is None else launch.Run(recipe, in_force, device, output_dir)
    if run is not None:
        elsewhere = device == "cpu" and not asks_for_cpu
        findings += machine_findings(run, environment, Host(), rehearsal and ("elsewhere" if elsewhere else "here"))
    return run, findings


def _attempt(findings: list[Finding], check: Callable, *arguments: Any) -> Any:
    try:
        return check(*arguments)
    except Refusal as refusal:
        findings += refusal.findings
        return None


def resolved_ds_config(run: launch.Run, rows: int | None = None) -> dict[str, Any]:
    """The DeepSpeed configuration as transformers will fill it in: no "auto" that it knows how to replace is left.

    `rows`: of the training split; without it the total_num_steps of a scheduler stays "auto" in a run by epochs.
    """
    values, world_size = run.recipe.values, run.strategy.world_size
    filled, arguments = fill_auto(run.strategy.ds_config, values, world_size)
    model = SimpleNamespace(config=load_config(arguments, arguments))
    steps = values["max_steps"]
    if steps <= 0:
        steps = "auto" if rows is None else steps_by_epochs(rows, values, run.strategy.replicas)
    filled.trainer_config_finalize(arguments, model, steps)
    return filled.config
