"""What a run is made of before there is a trainer. Whatever is wrong here refuses the run, and nothing is touched."""

import os
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from transformers import PreTrainedModel
from trl import SFTConfig

from zero_recipes.checkpoint.compatibility import refuse_other_data
from zero_recipes.checks.deepspeed_objects import resolved_ds_config
from zero_recipes.checks.predicted import planning
from zero_recipes.checks.schedule import length_findings
from zero_recipes.config.run import Run
from zero_recipes.core.findings import (
    Finding,
    downgraded,
    first_line,
    ignored_codes,
    raise_errors,
    refusal,
)
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.core.process import PhaseClock
from zero_recipes.data.load import load_tokenizer
from zero_recipes.data.prepare import Prepared, prepare_rows
from zero_recipes.engine import attention
from zero_recipes.engine.faults import (
    compiled_at_stage_3,
    fsdp_on_cpu,
    fsdp_rounded_loss,
    fused_head_of_another_form,
)
from zero_recipes.engine.group import once, once_per_node
from zero_recipes.engine.huggingface import attention_name
from zero_recipes.engine.libraries import patch_libraries
from zero_recipes.engine.speed import supervised_positions
from zero_recipes.engine.speed.cudnn_plans import allow_cudnn
from zero_recipes.metrics.schema import PredictedMetrics
from zero_recipes.model import load
from zero_recipes.model.fused_head import fused_head_fits
from zero_recipes.model.packed import packed_rows
from zero_recipes.model.positions import refuse_unknown_tokens
from zero_recipes.model.towers import adapter_of
from zero_recipes.training.card import hub
from zero_recipes.training.token_loss import share_sequences


@dataclass(frozen=True)
class Inputs:
    """What a trainer is made of beside the model: complete, and the same on every rank."""

    arguments: SFTConfig  # SFTTrainer takes the rows as they are
    peft_config: Any  # None without an adapter
    data: Prepared
    predicted: PredictedMetrics | None  # None where nothing was planned
    ds_config: dict[str, Any] | None  # as it is in force; None without DeepSpeed
    findings: list[Finding]  # warnings about the length of the run and of its rows


def prepare_inputs(run: Run, clock: PhaseClock) -> Inputs:
    """Set up the libraries for a run, and make what its trainer is given. Collective. Raises Refusal on all ranks."""
    settings = run.settings
    arguments = run.trl_arguments().training
    peft_config = adapter_of(settings, run.meta.model, has_weights=True)
    _set_up_libraries(run, arguments)
    with clock.phase("model"):
        once_per_node(partial(load.refuse_other_keys, run.config, settings), "reads the names of the model's tensors")
    _log_in(run, arguments)
    arguments.push_to_hub = False  # the Trainer would push its folder as it is, and at each save
    arguments.model_init_kwargs = None  # of load_model; SFTTrainer would warn that it ignores them
    with clock.phase("data"), planning(run) as planned:
        data = prepare_rows(settings, arguments, load_tokenizer(settings), run.strategy.replicas)
        refuse_unknown_tokens(run.config, settings, data.audit.largest_id)
        findings = downgraded(list(length_findings(run, data.audit, data.rows)), ignored_codes(settings.ignore))
        raise_errors(findings)
        predicted = planned()
    ds_config = resolved_ds_config(run, data.rows)
    return Inputs(arguments, peft_config, data, predicted, ds_config, findings)


def load_model(run: Run, inputs: Inputs, clock: PhaseClock) -> PreTrainedModel:
    """Load the model of a run, the last thing that can refuse it. Raises Refusal."""
    data = inputs.data
    refuse_other_data(run.checkpoint, run.settings, data.data_sha256, data.evaluation_sha256)
    with clock.phase("model"):
        return load.load_model(run.config, run.settings, run.meta.model)


def _set_up_libraries(run: Run, arguments: SFTConfig) -> None:
    """Set the libraries up for this run, before its model is loaded: faults worked around, work left out."""
    settings = run.settings
    packs = settings.joined_by is not None and not settings.torch_compile
    by_row = packs and attention.has_row_kernel(run.device, run.precision)
    patch_libraries(run.strategy, run.device, settings.ddp_timeout)
    supervised_positions.apply(settings.supervised_logits_only)
    allow_cudnn(run.device, settings.cudnn_attention)
    told = packed_rows(run.config, settings).told if by_row else ()
    attention.attend_by_row(by_row, told)
    fits = fused_head_fits(run.config, settings.trust_remote_code)
    fused_head_of_another_form.apply(fits is not False)
    share_sequences(arguments, run.strategy.sequence_parallel, attention_name(settings.attn_implementation))
    if "logging_nan_inf_filter" not in run.explicit:
        arguments.logging_nan_inf_filter = False  # it waits for the loss of each micro batch
    if arguments.torch_compile and run.stage == 3:
        compiled_at_stage_3.apply()
    if run.strategy.is_fsdp:
        fsdp_rounded_loss.apply(arguments)
    if run.strategy.is_fsdp and run.device == "cpu":
        fsdp_on_cpu.apply()


def _log_in(run: Run, arguments: SFTConfig) -> None:
    """Log in to what the run reports and pushes to, before the weights are loaded.

    The repository is created, and wandb's callback logs in, after that.
    """
    if "wandb" in arguments.report_to and os.environ.get("WANDB_MODE", "online") == "online":
        once(_log_in_to_wandb, "logs in")
    if run.settings.push_to_hub:
        once(library_error_as_finding("logging in (push_to_hub)")(hub(arguments.hub_token).whoami), "logs in")


def _log_in_to_wandb() -> None:
    """Raises Refusal: wandb's own callback would stop the run after the weights are loaded."""
    why = "wandb has no API key."
    try:
        is_logged_in = import_module("wandb").login()
    except Exception as error:  # its UsageError, and what its connection raises
        is_logged_in = False
        why = first_line(error)
    if not is_logged_in:
        raise refusal("ZR912", error=why)
