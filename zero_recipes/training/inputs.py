"""What a run is made of before there is a trainer. Whatever is wrong here refuses the run, and nothing is touched."""

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from trl import SFTConfig

from zero_recipes import model as models
from zero_recipes.checkpoint.compatibility import refuse_other_data
from zero_recipes.checks.predicted import planning
from zero_recipes.checks.preflight import resolved_ds_config
from zero_recipes.checks.rules import told_where_rows_begin
from zero_recipes.checks.schedule import length_findings
from zero_recipes.config.run import Run
from zero_recipes.core.findings import Finding, downgraded, ignored_codes, raise_errors
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.core.process import PhaseClock
from zero_recipes.data.load import load_tokenizer
from zero_recipes.data.prepare import Prepared, prepare_rows
from zero_recipes.engine import attention, fsdp, patches
from zero_recipes.engine.cpu_products import multiply_in_fp32
from zero_recipes.engine.fp32_parameters import keep_parameters_in_fp32
from zero_recipes.engine.group import once
from zero_recipes.engine.huggingface import attention_name
from zero_recipes.metrics.schema import PredictedMetrics
from zero_recipes.training.card import hub
from zero_recipes.training.token_loss import share_sequences


@dataclass(frozen=True)
class Inputs:
    """Complete, and the same on every rank."""

    arguments: SFTConfig  # SFTTrainer takes the rows as they are
    peft_config: Any  # None without an adapter
    config: PreTrainedConfig  # of the model
    data: Prepared
    predicted: PredictedMetrics | None  # None where nothing was planned
    ds_config: dict[str, Any] | None  # as it is in force; None without DeepSpeed
    findings: list[Finding]  # warnings about the length of the run and of its rows


def prepare_inputs(run: Run, clock: PhaseClock) -> Inputs:
    """The libraries are set up for this run. Collective. Raises Refusal on all ranks."""
    settings = run.settings
    arguments = run.trl_arguments().training
    peft_config = models.adapter_config(settings, has_weights=True)
    _set_up_libraries(run, arguments)
    with clock.phase("model"):
        config = models.load_config(settings)
        models.refuse_other_keys(config, settings)
    _log_in(run, arguments)
    arguments.push_to_hub = False  # the Trainer would push its folder as it is, and at each save
    arguments.model_init_kwargs = None  # of load_model; SFTTrainer would warn that it ignores them
    with clock.phase("data"), planning(run) as planned:
        data = prepare_rows(settings, arguments, load_tokenizer(settings), run.strategy.replicas)
        models.refuse_unknown_tokens(config, settings, data.audit.largest_id)
        findings = downgraded(list(length_findings(run, data.audit, data.rows)), ignored_codes(settings.ignore))
        raise_errors(findings)
        predicted = planned()
    ds_config = resolved_ds_config(run, data.rows)
    return Inputs(arguments, peft_config, config, data, predicted, ds_config, findings)


def load_model(run: Run, inputs: Inputs, clock: PhaseClock) -> PreTrainedModel:
    """The last that can refuse."""
    data = inputs.data
    refuse_other_data(run.checkpoint, run.settings, data.data_sha256, data.evaluation_sha256)
    with clock.phase("model"):
        return models.load_model(inputs.config, run.settings)


def _set_up_libraries(run: Run, arguments: SFTConfig) -> None:
    settings = run.settings
    if "logging_nan_inf_filter" not in run.explicit:
        arguments.logging_nan_inf_filter = False  # it waits for the loss of each micro batch
    patches.patch_libraries(run.strategy, settings.ddp_timeout)
    if run.strategy.is_deepspeed:
        keep_parameters_in_fp32()
    patches.score_supervised_positions_only(settings.supervised_logits_only)
    if arguments.torch_compile and run.stage == 3:
        patches.compile_by_layers()
    attention.allow_cudnn(run.device, settings.cudnn_attention)
    packs = settings.joined_by is not None and not settings.torch_compile
    by_row = packs and attention.has_row_kernel(run.device, run.precision)
    attention.attend_by_row(by_row, told_where_rows_begin())
    if run.device == "cpu":
        multiply_in_fp32()
    if run.strategy.is_fsdp:
        fsdp.fix_arguments(arguments, run.device)
    share_sequences(arguments, run.strategy.sequence_parallel, attention_name(settings.attn_implementation))


def _log_in(run: Run, arguments: SFTConfig) -> None:
    """Before the weights are loaded: the repository is created, and wandb's callback logs in, after that."""
    if "wandb" in arguments.report_to and os.environ.get("WANDB_MODE", "online") == "online":
        once(library_error_as_finding("logging in (report_to: wandb)")(import_module("wandb").login), "logs in")
    if run.settings.push_to_hub:
        once(library_error_as_finding("logging in (push_to_hub)")(hub(arguments.hub_token).whoami), "logs in")
