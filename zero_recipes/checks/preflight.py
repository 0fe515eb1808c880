"""All checks of a run: `run_sft.py` refuses on their errors, `zero-recipes check` prints every finding."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from huggingface_hub import constants

from zero_recipes.checkpoint.compatibility import fit_findings
from zero_recipes.checkpoint.output_dir import refuse_taken
from zero_recipes.checks import deepspeed_objects, trl_objects
from zero_recipes.checks.adapter_rules import adapter_findings
from zero_recipes.checks.composite_rules import composite_findings
from zero_recipes.checks.deepspeed_rules import deepspeed_findings
from zero_recipes.checks.machine import driver_findings, gpu_findings, machine_findings
from zero_recipes.checks.resolve import Resolved, resolve
from zero_recipes.checks.rules import rule_findings
from zero_recipes.checks.schedule import schedule_findings
from zero_recipes.config.accelerate import launcher_findings
from zero_recipes.config.keys import ignore_findings
from zero_recipes.config.recipe import RecipeFile
from zero_recipes.config.run import Run, refuse_uneven_gpus
from zero_recipes.core.findings import Finding, collected, downgraded, ignored_codes
from zero_recipes.core.folder_lock import refuse_in_use
from zero_recipes.core.gpus import Gpu
from zero_recipes.core.host import Host
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.data.load import refuse_data_at_hand, tokenizer_findings
from zero_recipes.data.samples import refuse_absent_prompts
from zero_recipes.metrics.scores import load_metrics, metric_findings

DATA_KEYS = {"dataset_name", "datasets"}
Findings = Iterable[Finding]


def preflight(
    path: Path,
    mapping: RecipeFile,
    overrides: list[str],
    environment: Mapping[str, str],
    starts_now: bool = True,
    gpu: Gpu | None = None,
) -> tuple[Run | None, list[Finding]]:
    """Resolve a run, and check it. Arguments as `resolve` has them.

    Returns (the run, all findings). The run is None where a part of it could not be decided, which has its error.
    """
    resolved = resolve(path, mapping, overrides, environment, starts_now, gpu)
    findings = check(resolved)
    run = resolved.run
    return (run if run is not None and run.is_decided else None), findings


@library_error_as_finding("checking the recipe")
def check(resolved: Resolved) -> list[Finding]:
    """All findings about a run at once, with those of `resolve`. Nothing on disk is touched."""
    findings = list(resolved.findings)
    run = resolved.run
    if run is None:
        return findings
    checks = [*OF_EVERY_RUN]
    if resolved.wrong_keys & DATA_KEYS:
        checks.remove(data_at_hand)
    if run.is_decided:
        checks += OF_ITS_STRATEGY
    for find in checks:
        with collected(findings):
            findings += find(run)
    return downgraded(findings, ignored_codes(run.recipe.settings.ignore))


def ignored(run: Run) -> Findings:
    """What is wrong with the codes that the recipe ignores."""
    return ignore_findings(run.recipe.settings.ignore)


def driver(run: Run) -> Findings:
    """A GPU that cannot be used, by the driver's or torch's fault."""
    return driver_findings(run.recipe.settings.use_cpu or run.gpu is not None, Host())


def launcher(run: Run) -> Findings:
    """What the launcher's own settings contradict."""
    return launcher_findings(run.environment, run.recipe.settings.precision)


def tokenizer(run: Run) -> Findings:
    """A tokenizer that is missing or wrong. A run that starts now reads it itself, before its weights."""
    if run.starts_now or run.meta is None:
        return []
    return tokenizer_findings(run.settings, not constants.is_offline_mode())


def card(run: Run) -> Findings:
    """What the cards of another machine cannot do."""
    if run.gpu is None or run.device != "cuda":
        return []
    return gpu_findings(run.settings, run.gpu)


def metrics(run: Run) -> Findings:
    """Metrics that cannot be loaded, or fail on an empty answer."""
    return metric_findings(load_metrics(run.settings))


def prompts(run: Run) -> Findings:
    """Refuse a file of prompts that is not there."""
    refuse_absent_prompts(run.settings.sample_prompts)
    return []


def data_at_hand(run: Run) -> Findings:
    """Refuse rows that are at hand and cannot be read."""
    refuse_data_at_hand(run.settings, not run.starts_now and not constants.is_offline_mode())
    return []


def folder_in_use(run: Run) -> Findings:
    """Refuse a folder into which another process writes."""
    refuse_in_use(run.output_dir)
    return []


def folder_occupied(run: Run) -> Findings:
    """Refuse a folder with what another run has saved, or this one reads."""
    refuse_taken(run)
    return []


def gpus(run: Run) -> Findings:
    """Refuse several GPUs for one process, or several processes for one GPU."""
    if run.gpu is None:
        refuse_uneven_gpus(run.strategy, run.device, run.environment)
    return []


def schedule(run: Run) -> Findings:
    """A learning rate that never reaches its peak. In a run by epochs the rows decide."""
    steps = run.settings.max_steps
    return schedule_findings(run.settings, run.strategy, steps) if steps > 0 else []


def checkpoint(run: Run) -> Findings:
    """A checkpoint that does not fit the run."""
    if run.checkpoint is None:
        return []
    return fit_findings(run.checkpoint, run.settings, run.strategy, run.config)


def machine(run: Run) -> Findings:
    """What this machine lacks: memory, disk, compilers, drivers."""
    return [] if run.gpu is not None else machine_findings(run, Host())


# in the order in which their findings are printed
OF_EVERY_RUN: tuple[Callable[[Run], Findings], ...] = (
    ignored,
    driver,
    launcher,
    tokenizer,
    card,
    trl_objects.trainer_findings,
    metrics,
    prompts,
    data_at_hand,
    folder_in_use,
    folder_occupied,
)
OF_ITS_STRATEGY: tuple[Callable[[Run], Findings], ...] = (
    gpus,
    rule_findings,
    adapter_findings,
    composite_findings,
    deepspeed_findings,
    schedule,
    deepspeed_objects.parser_findings,
    checkpoint,
    machine,
)
