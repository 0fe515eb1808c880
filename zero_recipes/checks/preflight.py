"""All checks of one run, in order: `run_sft.py` refuses on their errors, `zero-recipes check` prints every finding."""

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from huggingface_hub import constants

from zero_recipes.checkpoint.compatibility import fit_findings
from zero_recipes.checkpoint.output_dir import inputs_of, refuse_in_use, refuse_occupied
from zero_recipes.checkpoint.resume import batch_kept, checkpoint_to_resume, requested_batch, requested_in
from zero_recipes.checks.deepspeed_rules import deepspeed_findings
from zero_recipes.checks.machine import driver_findings, gpu_findings, machine_findings, offline_where_unreachable
from zero_recipes.checks.rehearsal import fill_auto, parser_findings, trainer_findings
from zero_recipes.checks.rules import Candidate, rule_findings
from zero_recipes.config import keys
from zero_recipes.config import recipe as recipes
from zero_recipes.config import strategy as strategies
from zero_recipes.config.accelerate import launch_key_findings, launch_of, launcher_findings
from zero_recipes.config.keys import ignore_findings, recipe_findings
from zero_recipes.config.recipe import RecipeFile, RunConfig, steps_by_epochs
from zero_recipes.core.findings import Finding, collected, downgraded, ignored_codes, library_error_as_finding
from zero_recipes.core.host import Host
from zero_recipes.data.load import refuse_data_at_hand
from zero_recipes.model import load_config, size_of


@library_error_as_finding("checking the recipe")
def preflight(
    path, mapping: RecipeFile, overrides: list[str], environment: Mapping[str, str], rehearsal=False, gpu=None
):
    """(the run, or None where it cannot be put together; all findings). `environment` is the launcher's: os.environ in
    a run. A key with a finding is left out, and the rest goes on, so that all findings come at once; errors that the
    recipe ignores come as warnings. `rehearsal`: nothing will start here and now (zero-recipes check). `gpu`: nor on
    this machine but on such cards."""
    known = keys.key_types()
    findings = list(launch_key_findings(path, mapping, environment))
    own = {key: value for key, value in mapping.items() if key not in launch_of(mapping)}
    findings += recipe_findings(str(path), own, mapping.lines)
    wrong = {finding.key for finding in findings if finding.level == "error"}
    sound = RecipeFile({key: value for key, value in mapping.items() if key in known and key not in wrong})
    sound.lines = mapping.lines
    recipe = _attempt(findings, recipes.parse_recipe, path, sound, overrides)
    if recipe is None:
        return None, findings
    findings += ignore_findings(recipe.settings.ignore)
    ignored = ignored_codes(recipe.settings.ignore)
    findings += offline_where_unreachable(recipe.settings)
    device = recipes.choose_device(recipe.settings.use_cpu or gpu is not None)
    device = "cuda" if gpu and not recipe.settings.use_cpu else device
    findings += driver_findings(recipe.settings.use_cpu or gpu is not None, Host())
    findings += launcher_findings(environment, recipe.settings.precision)
    placed = recipe.settings.replace(use_cpu=device == "cpu")
    strategy = _attempt(findings, strategies.resolve_strategy, placed, environment, size_of)
    accumulation, requested = None, requested_in(recipe.output_dir, recipe.settings)
    kept: dict[str, int] = {}
    if strategy is not None:
        resumed = (recipe.output_dir, requested, requested_batch(recipe.settings), strategy.world_size)
        kept = _attempt(findings, batch_kept, *resumed) or {}
    if strategy is not None and not kept:
        batch = (recipe.settings, recipe.explicit, strategy.replicas)
        accumulation = _attempt(findings, recipes.derive_accumulation, *batch)
    settings, explicit = recipes.settings_in_force(recipe, strategy, device, accumulation)
    settings, explicit = settings.replace(resume_from_checkpoint=requested, **kept), explicit | kept
    if settings.disable_tqdm is None:  # a moving bar on a terminal, one line per `logging_steps` elsewhere
        settings = settings.replace(disable_tqdm=not sys.stderr.isatty())
    output_dir = Path(settings.output_dir)
    config = _attempt(findings, load_config, settings)
    if strategy is not None:
        candidate = Candidate(settings, strategy, device, environment, config)
        if gpu is None:
            _attempt(findings, recipes.refuse_uneven_gpus, strategy, device, environment)
        findings += [*rule_findings(candidate), *deepspeed_findings(candidate)]
        findings += parser_findings(candidate) if strategy.is_deepspeed else []
    ds_config = strategy.ds_config.raw if strategy is not None and strategy.is_deepspeed else {}
    # TF32 and flash attention are judged by the card, not by this machine
    rehearsed = settings.replace(tf32=None, attn_implementation="sdpa") if gpu else settings
    findings += gpu_findings(settings, gpu) if gpu and device == "cuda" else []
    findings += trainer_findings(rehearsed, config, ds_config, str(path))
    if not wrong & {"dataset_name", "datasets"}:
        _attempt(findings, refuse_data_at_hand, settings, bool(rehearsal) and not constants.is_offline_mode())
    _attempt(findings, refuse_in_use, output_dir)
    inputs = inputs_of(recipe.settings, recipe.path, environment)
    _attempt(findings, refuse_occupied, output_dir, settings.resume_from_checkpoint, settings.overwrite, inputs)
    resume = (output_dir, settings.resume_from_checkpoint, settings.overwrite)
    checkpoint = _attempt(findings, checkpoint_to_resume, *resume)
    settings = settings.replace(resume_from_checkpoint=checkpoint)
    if strategy is None:
        return None, downgraded(findings, ignored)
    if checkpoint is not None:
        findings += fit_findings(checkpoint, settings, strategy)
    run = RunConfig(recipe, settings, MappingProxyType(explicit), strategy, device, output_dir)
    elsewhere = device == "cpu" and not recipe.settings.use_cpu
    if gpu is None:
        place = rehearsal and ("elsewhere" if elsewhere else "here")
        findings += machine_findings(run, config, environment, Host(), place)
    return run, downgraded(findings, ignored)


def _attempt(findings: list[Finding], check: Callable, *arguments: Any) -> Any:
    """What `check` returns; None where it refuses, whose findings are added."""
    with collected(findings):
        return check(*arguments)


def resolved_ds_config(run: RunConfig, rows: int | None = None) -> dict[str, Any] | None:
    """The DeepSpeed configuration with each "auto" that transformers fills in; None without DeepSpeed. `rows`: of the
    training split; without it the total_num_steps of a scheduler stays "auto" in a run by epochs."""
    if run.strategy.ds_config is None:
        return None
    settings, world_size = run.settings, run.strategy.world_size
    filled, arguments = fill_auto(run.strategy.ds_config.raw, settings, world_size)
    model = SimpleNamespace(config=load_config(arguments))
    steps = settings.max_steps
    if steps <= 0:
        steps = "auto" if rows is None else steps_by_epochs(rows, settings, run.strategy.replicas)
    with contextlib.suppress(ValueError):  # what contradicts the run has its findings; it is shown as written
        filled.trainer_config_finalize(arguments, model, steps)
    return filled.config
