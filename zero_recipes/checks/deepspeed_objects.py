"""DeepSpeed's configuration, optimizer and schedule, made of a ds_config's values before an engine is built: what they
raise is a finding."""

import contextlib
import copy
import importlib
import inspect
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from zero_recipes.checks.filled import HIDDEN_SIZE, fill_auto
from zero_recipes.checks.schedule import steps_of
from zero_recipes.config.ds_config import ModelSize, fill_own_autos, quiet
from zero_recipes.config.run import Run
from zero_recipes.core.findings import Finding, collected, refusal
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.engine.huggingface import without_deepspeed_announcement

STEPS = 1000  # of a run that is measured in epochs: only that it is a number matters
FIRST_STEPS = 5  # of such a run's schedule, when it is tried


def resolved_ds_config(run: Run, rows: int | None = None) -> dict[str, Any] | None:
    """The DeepSpeed configuration without "auto"; None without DeepSpeed.

    `rows`: of the training split; without it the total_num_steps of a scheduler stays "auto" in a run by epochs.
    """
    if run.strategy.ds_config is None:
        return None
    filled, arguments = fill_auto(run.ds.raw, run.settings, run.world_size)
    model = SimpleNamespace(config=run.config)
    steps = steps_of(run.settings, run.strategy, rows) or "auto"
    with contextlib.suppress(ValueError):  # what contradicts the run has its findings; it is shown as written
        filled.trainer_config_finalize(arguments, model, steps)
    return filled.config


def parser_findings(run: Run) -> list[Finding]:
    """What transformers, accelerate and DeepSpeed would raise at the ds_config while the engine is built."""
    findings: list[Finding] = []
    if not run.strategy.is_deepspeed:
        return findings
    net = library_error_as_finding(f"reading {run.strategy.source}", run.settings.as_dict())
    with quiet(), collected(findings), net:
        from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
        from deepspeed.utils.logging import get_log_level_from_string

        config = _handed_over(run)
        parsed = DeepSpeedConfig(copy.deepcopy(config))
        if parsed.grad_accum_dtype is not None:
            DtypeEnum(parsed.grad_accum_dtype)  # as the engine does
        if parsed.log_level is not None:
            get_log_level_from_string(parsed.log_level)
        for name in parsed.torch_autocast_lower_precision_safe_modules or ():  # the engine looks for them
            package, _, kind = name.rpartition(".")
            getattr(importlib.import_module(package), kind)
        _bind_optimizer(config.get("optimizer"))
        _try_schedule(run, config.get("scheduler"))
    return findings


def _handed_over(run: Run) -> dict[str, Any]:
    """The mapping that DeepSpeedConfig gets. transformers raises at values that contradict the run."""
    from accelerate.utils import DeepSpeedPlugin, clear_environment

    settings = run.settings
    raw = {"zero_optimization": {}}
    raw |= fill_own_autos(run.ds.raw, settings, run.world_size, {}, lambda: ModelSize(1, 1))
    scheduler = raw.get("scheduler")
    if settings.max_steps <= 0 and isinstance(scheduler, dict):
        for key in scheduler.setdefault("params", {}):
            if "num_steps" in key:
                scheduler["params"][key] = "auto"  # nobody knows the number of steps yet
    filled, arguments = fill_auto(raw, settings, run.world_size)
    model = SimpleNamespace(config=run.config or SimpleNamespace(hidden_size=HIDDEN_SIZE))
    with without_deepspeed_announcement():
        try:
            filled.trainer_config_finalize(arguments, model, settings.max_steps if settings.max_steps > 0 else STEPS)
        except ValueError as error:
            if not filled.mismatches:
                raise
            values = [mismatch.removeprefix("- ds ").replace(" vs hf ", ", but ") for mismatch in filled.mismatches]
            listed = "\n    ".join(values)
            raise refusal("ZR911", source=run.strategy.source, values=listed) from error
    with clear_environment():  # the launcher's variables have been read
        layers = run.environment.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")
        plugin = DeepSpeedPlugin(hf_ds_config=filled, transformer_moe_cls_names=layers)
        if layers is not None and run.meta is not None and run.meta.model is not None:
            plugin.set_moe_leaf_modules(run.meta.model)
        plugin.set_mixed_precision({"fp32": "no"}.get(settings.precision, settings.precision))
    size = getattr(model.config, "hidden_size", HIDDEN_SIZE)
    micro_batch = {"train_micro_batch_size_per_gpu": settings.per_device_train_batch_size}
    values = {  # accelerate, accelerator.py, _prepare_deepspeed
        "gradient_clipping": 1.0,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        "train_batch_size": 1,
        "zero_optimization.reduce_bucket_size": size * size,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * size * size),
        "zero_optimization.stage3_param_persistence_threshold": 10 * size,
    }
    plugin.deepspeed_config_process(must_match=False, **values, **micro_batch)
    config = plugin.deepspeed_config | micro_batch
    config.pop("train_batch_size", None)  # DeepSpeed would compare it with a process group that is not there yet
    return config


def _bind_optimizer(block: Mapping[str, Any] | None) -> None:
    """Raises at names of parameters that Adam or torch's optimizers do not have."""
    import torch
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    if not block:
        return
    name = block["type"]
    parameters = dict(block.get("params") or {})
    if name.lower() in ("adam", "adamw"):
        for engines_own in ("torch_adam", "adam_w_mode", "fp32_optimizer_states"):
            parameters.pop(engines_own, None)
        inspect.signature(FusedAdam).bind([], **parameters)
    elif name.lower() not in DEEPSPEED_OPTIMIZERS:
        inspect.signature(getattr(torch.optim, name)).bind([], **parameters)


def _make_schedule(block: Mapping[str, Any] | None, rates: list[float]):
    """(a schedule, its optimizer with a group of each rate); None without a scheduler in the ds_config."""
    import torch
    from deepspeed.runtime import lr_schedules

    if block is None:
        return None
    name = block["type"]
    kind = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    optimizer = torch.optim.SGD(groups)
    return kind(optimizer, **(block.get("params") or {})), optimizer


def _try_schedule(run: Run, block: Mapping[str, Any] | None) -> None:
    """Refuses one that does not keep LoRA+'s ratio between the rates of its groups.

    Of a run in epochs nobody knows the number of steps yet: only the first ones are tried.
    """
    settings = run.settings
    rates = [settings.learning_rate]
    ratio = settings.loraplus_lr_ratio
    if ratio is not None:
        rates.append(settings.learning_rate * ratio)
    made = _make_schedule(block, rates)
    if made is None or ratio is None:
        return
    schedule, optimizer = made
    steps = min(settings.max_steps, STEPS) if settings.max_steps > 0 else FIRST_STEPS
    for step in range(1, steps + 1):
        optimizer.step()
        schedule.step()
        low, high = (group["lr"] for group in optimizer.param_groups)
        if not math.isclose(low * ratio, high, rel_tol=1e-6):
            source = run.strategy.source
            raise refusal("ZR195", type=block["type"], source=source, step=step, low=low, high=high, ratio=ratio)
