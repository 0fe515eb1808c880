"""The libraries' own objects, made of a recipe's values before anything is loaded: what they raise is a finding.

TRL's arguments, PEFT's and bitsandbytes' configurations, the model without memory, TRL's trainer around it on two
made-up rows, the optimizer, the schedule, the data loader, accelerate's plugin and DeepSpeed's parsed configuration:
all on the CPU, in one process, without a process group.
"""

import contextlib
import copy
import importlib
import inspect
import math
import tempfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from zero_recipes.checks.rules import bare_model
from zero_recipes.config import recipe as recipes
from zero_recipes.config.ds_config import fill_own_autos, quiet
from zero_recipes.config.recipe import Settings
from zero_recipes.config.run import Run
from zero_recipes.core.findings import Finding, collected, library_error_as_finding
from zero_recipes.engine.huggingface import rows_are_cut, single_process_env, without_deepspeed_announcement
from zero_recipes.model import adapter_config, rehearse_model

STEPS = 1000  # of a schedule whose run is measured in epochs: only that it is a number matters
HIDDEN_SIZE = 64  # of a model whose configuration is not at hand: likewise
# checked with what they need (launch, device, data), or without force while nothing is written
ELSEWHERE = {
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "ddp_backend"), None),
    **dict.fromkeys(("chat_template_path", "eos_token", "pad_token", "completion_only_loss", "dataset_num_proc"), None),
    **dict.fromkeys(("assistant_only_loss", "activation_offloading", "push_to_hub", "full_determinism"), False),
    **dict.fromkeys(("enable_jit_checkpoint", "use_liger_kernel"), False),
    **{"use_cpu": True, "skip_memory_metrics": True, "disable_tqdm": True},
}


def trainer_findings(settings: Settings, config, ds_config: Mapping[str, Any], place: str) -> list[Finding]:
    """What TRL, transformers, PEFT, bitsandbytes and torch raise at the recipe's values. `settings`: the keys in force;
    `config`: the model's, or None; `ds_config`: empty without DeepSpeed; `place`: the recipe's path."""
    findings: list[Finding] = []
    with single_process_env(), tempfile.TemporaryDirectory() as folder, collected(findings):
        rehearsed = settings.replace(**ELSEWHERE, output_dir=folder)
        _, args, model_args, _ = recipes.trl_arguments(rehearsed, place)
        trainer = _trainer(settings, config, args, model_args)
        if trainer is not None:
            _rehearse_steps(findings, settings, ds_config, args, trainer)
    return findings


def _trainer(settings: Settings, config, args, model_args):
    """TRL's trainer around the model without memory; None where its configuration is not here. Raises Refusal."""
    from trl import SFTConfig, SFTTrainer, get_quantization_config

    with library_error_as_finding("reading the keys of LoRA and quantization", settings.as_dict()):
        peft_config = adapter_config(settings)
        get_quantization_config(model_args)
    if config is None:
        return None
    with library_error_as_finding("building the model without memory", settings.as_dict()):
        model = rehearse_model(config, settings)
    args.bf16 = args.fp16 = args.bf16_full_eval = args.fp16_full_eval = False  # the device's, not the CPU's
    args.mixed_precision, args.model_init_kwargs = "no", None
    args.__class__ = type("ArgumentsInPlace", (SFTConfig,), {"place_model_on_device": False})  # it has no memory
    rows, tokenizer = _made_up()
    streams = settings.dataset_streaming or settings.streaming
    train = rows.to_iterable_dataset() if streams else rows
    prepared = not streams and not (settings.dataset_kwargs or {}).get("skip_prepare_dataset")
    cut = rows_are_cut(args) if prepared else contextlib.nullcontext()
    with library_error_as_finding("building TRL's trainer", settings.as_dict()), cut:
        evaluation = rows if settings.evaluates else None
        return SFTTrainer(model, args, None, train, evaluation, tokenizer, peft_config=peft_config)


def _made_up():
    """Two rows, and a tokenizer that made them."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"word": 0, "end": 1, "pad": 2}, unk_token="word"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token="pad")
    return Dataset.from_list([{"input_ids": [0, 0, 1], "labels": [0, 0, 1]}] * 2), tokenizer


def _rehearse_steps(findings: list[Finding], settings: Settings, ds_config: Mapping, args, trainer) -> None:
    """What the run makes of the trainer afterwards; each is a finding of its own."""
    import torch
    from torch.utils.checkpoint import checkpoint

    keys = settings.as_dict()
    if "optimizer" not in ds_config:
        with collected(findings), library_error_as_finding(f"making the optimizer (optim: {settings.optim})", keys):
            trainer.optimizer = _optimizer(trainer)
    if "scheduler" not in ds_config and trainer.optimizer is not None:
        doing = f"making the schedule (lr_scheduler_type: {settings.lr_scheduler_type})"
        with collected(findings), library_error_as_finding(doing, keys):
            trainer.create_scheduler(settings.max_steps if settings.max_steps > 0 else STEPS)
    with collected(findings), library_error_as_finding("making the data loader", keys):
        trainer.get_train_dataloader()
    if layers := (settings.fsdp_config or {}).get("transformer_layer_cls_to_wrap"):
        from accelerate import FullyShardedDataParallelPlugin

        wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": layers}
        with collected(findings), library_error_as_finding("finding the layers that fsdp_config names", keys):
            FullyShardedDataParallelPlugin(fsdp_version=2, **wrap).set_auto_wrap_policy(trainer.model)
    if args.torch_compile:
        with collected(findings), library_error_as_finding("setting torch.compile up", keys):
            torch.compile(torch.sin, backend=args.torch_compile_backend, mode=args.torch_compile_mode)  # never called
    if args.activation_checkpointing:
        keywords = {"use_reentrant": False} | (args.activation_checkpointing_kwargs or {})
        keywords.pop("selective", None)  # TRL's own, which it takes out
        with collected(findings), library_error_as_finding("recomputing activations", keys):
            checkpoint(torch.sin, torch.ones(2, requires_grad=True), **keywords).sum().backward()


def _optimizer(trainer):
    """As Trainer.create_optimizer makes it, for one small parameter: those of the model have no memory."""
    import torch

    kind, keywords = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    parameters: Any = [torch.nn.Parameter(torch.zeros(2, 2))]
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        return torch.optim.SGD(parameters, lr=keywords.get("lr", 1.0))  # a factory, which needs the model itself
    if keywords.keys() & {"params", "model", "optimizer_dict"}:
        parameters = next(keywords.pop(name) for name in ("params", "model", "optimizer_dict") if name in keywords)
    return kind(parameters, **keywords)


def parser_findings(run: Run) -> list[Finding]:
    """What transformers, accelerate and DeepSpeed would raise at the ds_config while the engine is built. No process
    group is needed. Nothing is printed, and no state of the libraries changes."""
    findings: list[Finding] = []
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
        _make_schedule(config.get("scheduler"))
    return findings


def fill_auto(config: dict[str, Any], settings: Settings, world_size: int):
    """transformers' HfTrainerDeepSpeedConfig with the Trainer's values filled in, and the arguments that it was given.
    Its `mismatches` name what was written by hand and differs from the run."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = SimpleNamespace(**settings.as_dict(), world_size=world_size)
    arguments.bf16 = settings.precision == "bf16"
    warmup = settings.warmup_steps  # transformers, training_args.py, get_warmup_steps
    arguments.get_warmup_steps = lambda steps: int(warmup) if warmup >= 1 else math.ceil(steps * warmup)
    with without_deepspeed_announcement():  # it announces itself to all; this is only a look
        filled = HfTrainerDeepSpeedConfig(copy.deepcopy(config))
    filled.trainer_config_process(arguments)
    return filled, arguments


def _handed_over(run: Run) -> dict[str, Any]:
    """The mapping that DeepSpeedConfig gets. Raises what the libraries raise on the way: transformers at values that
    contradict the run (trainer_config_finalize), which a run would meet with the model loaded."""
    from accelerate.utils import DeepSpeedPlugin, clear_environment

    settings = run.settings
    raw = {"zero_optimization": {}} | fill_own_autos(run.ds.raw, settings, run.world_size, {}, lambda: (1, 1))
    if settings.max_steps <= 0 and isinstance(raw.get("scheduler"), dict):  # nobody knows the number of steps yet
        written = raw["scheduler"].get("params", {})
        raw["scheduler"]["params"] = {key: "auto" if "num_steps" in key else written[key] for key in written}
    filled, arguments = fill_auto(raw, settings, run.world_size)
    model = SimpleNamespace(config=run.config or SimpleNamespace(hidden_size=HIDDEN_SIZE))
    with without_deepspeed_announcement():
        filled.trainer_config_finalize(arguments, model, settings.max_steps if settings.max_steps > 0 else STEPS)
    with clear_environment():  # the launcher's variables have been read
        layers = run.environment.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")
        plugin = DeepSpeedPlugin(hf_ds_config=filled, transformer_moe_cls_names=layers)
        if layers is not None and bare_model(run) is not None:
            plugin.set_moe_leaf_modules(bare_model(run))
        plugin.set_mixed_precision({"fp32": "no"}.get(settings.precision, settings.precision))
    size = getattr(model.config, "hidden_size", HIDDEN_SIZE)
    plugin.deepspeed_config_process(  # accelerate, accelerator.py, _prepare_deepspeed
        must_match=False,
        **{
            "gradient_clipping": 1.0,
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
            "train_micro_batch_size_per_gpu": settings.per_device_train_batch_size,
            "train_batch_size": 1,
            "zero_optimization.reduce_bucket_size": size * size,
            "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * size * size),
            "zero_optimization.stage3_param_persistence_threshold": 10 * size,
        },
    )
    config = dict(plugin.deepspeed_config)
    config.pop("train_batch_size", None)  # DeepSpeed would compare it with a process group that is not there yet
    return config | {"train_micro_batch_size_per_gpu": settings.per_device_train_batch_size}


def _bind_optimizer(block: Mapping[str, Any] | None) -> None:
    """Raises what Adam or an optimizer of torch does with the names of its parameters. DeepSpeed makes it by its name
    once the model has been loaded (runtime/engine.py, _configure_basic_optimizer)."""
    import torch
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    if not block:
        return
    name, parameters = block["type"], dict(block.get("params") or {})
    if name.lower() in ("adam", "adamw"):
        for engines_own in ("torch_adam", "adam_w_mode", "fp32_optimizer_states"):
            parameters.pop(engines_own, None)
        inspect.signature(FusedAdam).bind([], **parameters)
    elif name.lower() not in DEEPSPEED_OPTIMIZERS:
        inspect.signature(getattr(torch.optim, name)).bind([], **parameters)


def _make_schedule(block: Mapping[str, Any] | None) -> None:
    import torch
    from deepspeed.runtime import lr_schedules

    if block is not None:
        cls = getattr(lr_schedules, block["type"], None) or getattr(torch.optim.lr_scheduler, block["type"])
        cls(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3), **(block.get("params") or {}))
