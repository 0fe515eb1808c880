"""All checks of one run, in order: `run_sft.py` refuses on their errors, `zero-recipes check` prints every finding."""

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from huggingface_hub import constants

from zero_recipes.checkpoint.compatibility import fit_findings
from zero_recipes.checkpoint.output_dir import inputs_of, refuse_long_name, refuse_occupied
from zero_recipes.checkpoint.resume import batch_kept, checkpoint_to_resume, requested_batch, requested_in
from zero_recipes.checks.adapter_rules import adapter_findings
from zero_recipes.checks.deepspeed_rules import deepspeed_findings
from zero_recipes.checks.machine import driver_findings, gpu_findings, machine_findings, offline_where_unreachable
from zero_recipes.checks.rehearsal import fill_auto, parser_findings, trainer_findings
from zero_recipes.checks.rules import rule_findings
from zero_recipes.checks.schedule import schedule_findings, steps_of
from zero_recipes.config.accelerate import launcher_findings
from zero_recipes.config.keys import ignore_findings
from zero_recipes.config.read import read_recipe
from zero_recipes.config.recipe import Recipe, RecipeFile
from zero_recipes.config.run import Run, choose_device, refuse_uneven_gpus, settings_in_force
from zero_recipes.config.settings import derive_accumulation
from zero_recipes.config.strategy import Strategy, resolve_strategy
from zero_recipes.core.findings import Finding, collected, downgraded, ignored_codes
from zero_recipes.core.folder_lock import refuse_in_use
from zero_recipes.core.gpus import Gpu
from zero_recipes.core.host import Host
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.data.load import refuse_data_at_hand, tokenizer_findings
from zero_recipes.metrics.scores import load_metrics, metric_findings
from zero_recipes.model import load_config, size_of

DATA_KEYS = {"dataset_name", "datasets"}


@library_error_as_finding("checking the recipe")
def preflight(
    path: Path,
    mapping: RecipeFile,
    overrides: list[str],
    environment: Mapping[str, str],
    rehearsal: bool = False,
    gpu: Gpu | None = None,
) -> tuple[Run | None, list[Finding]]:
    """(the run, or None where it cannot be put together; all findings).

    `environment`: the launcher's.
    `rehearsal`: nothing will start here and now (zero-recipes check).
    `gpu`: nor on this machine, but on such cards.
    """
    checks = Preflight(environment, rehearsal, gpu)
    recipe = checks.read(path, mapping, overrides)
    if recipe is None:
        return None, checks.findings
    run = checks.decide(recipe)
    return run, downgraded(checks.findings, ignored_codes(recipe.settings.ignore))


class Preflight:
    """What is refused is left out, and the rest goes on: all findings come at once."""

    def __init__(self, environment: Mapping[str, str], rehearsal: bool, gpu: Gpu | None):
        self.environment = environment
        self.rehearsal = rehearsal
        self.gpu = gpu
        self.findings: list[Finding] = []
        self.wrong_keys: frozenset[str] = frozenset()  # of the recipe, that have an error

    def attempt(self, check: Callable, *arguments: Any) -> Any:
        """None where `check` refuses; its findings are added."""
        with collected(self.findings):
            return check(*arguments)

    def read(self, path: Path, mapping: RecipeFile, overrides: list[str]) -> Recipe | None:
        """The recipe without the keys that have an error; None where nothing in its folder can be looked up."""
        recipe, findings, self.wrong_keys = read_recipe(path, mapping, overrides, self.environment)
        self.findings += findings
        before = len(self.findings)
        self.attempt(refuse_long_name, recipe.output_dir)
        return recipe if len(self.findings) == before else None

    def decide(self, recipe: Recipe) -> Run | None:
        elsewhere = self.gpu is not None
        asked = recipe.settings
        self.findings += ignore_findings(asked.ignore)
        self.findings += offline_where_unreachable(asked)
        device = choose_device(asked.use_cpu or elsewhere)
        if elsewhere and not asked.use_cpu:
            device = "cuda"
        self.findings += driver_findings(asked.use_cpu or elsewhere, Host())
        self.findings += launcher_findings(self.environment, asked.precision)
        placed = asked.replace(use_cpu=device == "cpu")
        strategy = self.attempt(resolve_strategy, placed, self.environment, size_of)
        settings, explicit = self.settings_of(recipe, strategy, device)
        config = self.attempt(load_config, settings)
        if self.rehearsal and config is not None:  # a run reads it before its weights
            with collected(self.findings):
                self.findings += tokenizer_findings(settings, not constants.is_offline_mode())
        run = None
        if strategy is not None:
            run = Run(recipe, settings, explicit, strategy, device, self.environment, config)
            self.check_rules(run)
        self.check_objects(settings, strategy, config, device, recipe.path)
        self.findings += metric_findings(self.attempt(load_metrics, settings) or {})
        checkpoint = self.check_folder(recipe, settings)
        if run is None:
            return None
        if checkpoint is not None:
            self.findings += fit_findings(checkpoint, settings, strategy, config)
        if not elsewhere:
            self.check_machine(run)
        return run.resuming_from(checkpoint)

    def settings_of(self, recipe: Recipe, strategy: Strategy | None, device: str):
        """(every key in force, those named or derived). A checkpoint to go on from keeps its batch."""
        requested = requested_in(recipe.output_dir, recipe.settings)
        kept: dict[str, int] = {}
        accumulation = None
        if strategy is not None:
            batch = requested_batch(recipe.settings)
            kept = self.attempt(batch_kept, recipe.output_dir, requested, batch, strategy.world_size) or {}
            if not kept:
                accumulation = self.attempt(derive_accumulation, recipe.settings, recipe.explicit, strategy.replicas)
        settings, explicit = settings_in_force(recipe, strategy, device, accumulation)
        settings = settings.replace(resume_from_checkpoint=requested, **kept)
        if settings.disable_tqdm is None:  # a moving bar on a terminal, one line per `logging_steps` elsewhere
            settings = settings.replace(disable_tqdm=not sys.stderr.isatty())
        return settings, MappingProxyType({**explicit, **kept})

    def check_rules(self, run: Run) -> None:
        if self.gpu is None:
            self.attempt(refuse_uneven_gpus, run.strategy, run.device, self.environment)
        self.findings += rule_findings(run)
        self.findings += adapter_findings(run)
        self.findings += deepspeed_findings(run)
        if run.settings.max_steps > 0:  # else the rows decide
            self.findings += schedule_findings(run.settings, run.strategy, run.settings.max_steps)
        if run.strategy.is_deepspeed:
            self.findings += parser_findings(run)

    def check_objects(self, settings, strategy: Strategy | None, config, device: str, path: Path) -> None:
        if self.gpu is not None:
            if device == "cuda":
                self.findings += gpu_findings(settings, self.gpu)
            # TF32 and flash attention are judged by the card, not by this machine
            settings = settings.replace(tf32=None, attn_implementation="sdpa")
        ds_config: Mapping[str, Any] = {}
        if strategy is not None and strategy.is_deepspeed:
            ds_config = strategy.ds_config.raw
        self.findings += trainer_findings(settings, config, ds_config, str(path))

    def check_folder(self, recipe: Recipe, settings) -> str | None:
        """The checkpoint to go on from. Nothing is touched."""
        if not self.wrong_keys & DATA_KEYS:
            asks_hub = self.rehearsal and not constants.is_offline_mode()
            self.attempt(refuse_data_at_hand, settings, asks_hub)
        output_dir = Path(settings.output_dir)
        requested = settings.resume_from_checkpoint
        self.attempt(refuse_in_use, output_dir)
        inputs = inputs_of(recipe.settings, recipe.path, self.environment)
        self.attempt(refuse_occupied, output_dir, requested, settings.overwrite, inputs)
        return self.attempt(checkpoint_to_resume, output_dir, requested, settings.overwrite)

    def check_machine(self, run: Run) -> None:
        place: str | bool = False
        if self.rehearsal:
            lacks_gpu = run.device == "cpu" and not run.recipe.settings.use_cpu
            place = "elsewhere" if lacks_gpu else "here"
        self.findings += machine_findings(run, Host(), place)


def resolved_ds_config(run: Run, rows: int | None = None) -> dict[str, Any] | None:
    """The DeepSpeed configuration without "auto"; None without DeepSpeed.

    `rows`: of the training split; without it the total_num_steps of a scheduler stays "auto" in a run by epochs.
    """
    if run.strategy.ds_config is None:
        return None
    settings = run.settings
    filled, arguments = fill_auto(run.ds.raw, settings, run.world_size)
    model = SimpleNamespace(config=run.config)
    steps = steps_of(settings, run.strategy, rows) or "auto"
    with contextlib.suppress(ValueError):  # what contradicts the run has its findings; it is shown as written
        filled.trainer_config_finalize(arguments, model, steps)
    return filled.config
