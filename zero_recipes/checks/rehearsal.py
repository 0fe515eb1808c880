"""The libraries' own objects, made of a recipe's values before anything is loaded: what they raise is a finding.

All on the CPU, in one process, without a process group; TRL's trainer has two made-up rows and a model without memory.
"""

import contextlib
import copy
import importlib
import inspect
import math
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from zero_recipes.checks.adapter_rules import module_kinds
from zero_recipes.checks.rules import bare_model, options
from zero_recipes.config.ds_config import DsConfig, ModelSize, fill_own_autos, quiet
from zero_recipes.config.run import Run
from zero_recipes.config.settings import Settings
from zero_recipes.config.trl_arguments import trl_arguments
from zero_recipes.core.findings import Finding, collected, first_line, refusal
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.engine.huggingface import rows_are_cut, single_process_env, without_deepspeed_announcement
from zero_recipes.model import adapter_config, rehearse_model

STEPS = 1000  # of a schedule whose run is measured in epochs: only that it is a number matters
FIRST_STEPS = 5  # of such a schedule, when it is tried
HIDDEN_SIZE = 64  # of a model whose configuration is not at hand: likewise


def trainer_findings(settings: Settings, config, ds_config: Mapping[str, Any], place: str) -> list[Finding]:
    """`config`: the model's, or None; `ds_config`: empty without DeepSpeed; `place`: the recipe's path."""
    findings: list[Finding] = []
    with single_process_env(), tempfile.TemporaryDirectory() as folder, collected(findings):
        rehearsed = settings.replace(**options()["rehearsed"], output_dir=folder)
        trl = trl_arguments(rehearsed, place)
        trainer = _trainer(settings, config, trl.training, trl.model)
        if trainer is not None:
            _rehearse_steps(findings, settings, ds_config, trainer)
    return findings


def _trainer(settings: Settings, config, args, model_args):
    """None without the model's configuration. Raises Refusal."""
    from trl import SFTTrainer, get_quantization_config

    keys = settings.as_dict()
    with library_error_as_finding("reading the keys of LoRA and quantization", keys):
        peft_config = adapter_config(settings)
        get_quantization_config(model_args)
    if config is None:
        return None
    with library_error_as_finding("building the model without memory", keys):
        model = rehearse_model(config, settings)
    _leave_model_in_place(args)
    rows, tokenizer = _made_up()
    evaluation = rows if settings.evaluates else None
    prepares = not (settings.dataset_kwargs or {}).get("skip_prepare_dataset")
    cut = contextlib.nullcontext()
    if settings.streams:
        train = rows.to_iterable_dataset()
    else:
        train = rows
        if prepares:
            cut = rows_are_cut(args)
    with library_error_as_finding("building TRL's trainer", keys), cut, _targets_named(model):
        return SFTTrainer(model, args, None, train, evaluation, tokenizer, peft_config=peft_config)


@contextlib.contextmanager
def _targets_named(model) -> Iterator[None]:
    """PEFT's error over targets that match nothing at all names none that would match."""
    from peft.utils.error import NoMatchingPeftModuleError

    kinds = ", ".join(module_kinds(model))
    try:
        yield
    except NoMatchingPeftModuleError as error:
        raise refusal("ZR447", error=first_line(error), kinds=kinds) from error


def _leave_model_in_place(args) -> None:
    """It has no memory to move, and its precision is that of the run's device, not of this one."""
    from trl import SFTConfig

    for key in ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"):
        setattr(args, key, False)
    args.mixed_precision = "no"
    args.model_init_kwargs = None
    args.__class__ = type("ArgumentsInPlace", (SFTConfig,), {"place_model_on_device": False})


def _made_up():
    """Two rows, and a tokenizer that made them."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"word": 0, "end": 1, "pad": 2}, unk_token="word"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token="pad")
    row = {"input_ids": [0, 0, 1], "labels": [0, 0, 1]}
    return Dataset.from_list([row, row]), tokenizer


def _rehearse_steps(findings: list[Finding], settings: Settings, ds_config: Mapping, trainer) -> None:
    """Each is a finding of its own."""

    def attempt(doing: str, step, *arguments) -> None:
        with collected(findings), library_error_as_finding(doing, settings.as_dict()):
            step(*arguments)

    if "optimizer" not in ds_config:
        attempt(f"making the optimizer (optim: {settings.optim})", _make_optimizer, trainer)
    if trainer.optimizer is not None:
        doing = f"stepping on a piece of ZeRO's (optim: {settings.optim})"
        attempt(doing, _step_on_a_piece, trainer.optimizer, ds_config)
        if settings.fsdp:
            attempt("looking at the optimizer", _refuse_whole_tensors_only, trainer.optimizer, settings)
    if "scheduler" not in ds_config:
        if trainer.optimizer is None:  # DeepSpeed's is not at hand
            trainer.optimizer = _stand_in_optimizer(settings.learning_rate)
        doing = f"making the schedule (lr_scheduler_type: {settings.lr_scheduler_type})"
        attempt(doing, trainer.create_scheduler, _steps(settings))
    attempt("making the data loader", trainer.get_train_dataloader)
    layers = (settings.fsdp_config or {}).get("transformer_layer_cls_to_wrap")
    if layers:
        attempt("finding the layers that fsdp_config names", _find_layers, trainer.model, layers)
    if trainer.args.torch_compile:
        attempt("setting torch.compile up", _set_compiler_up, trainer.args)
    if trainer.args.activation_checkpointing:
        attempt("recomputing activations", _recompute, trainer.args)


def _steps(settings: Settings) -> int:
    return settings.max_steps if settings.max_steps > 0 else STEPS


def _make_optimizer(trainer) -> None:
    """As Trainer.create_optimizer makes it, for one small parameter: those of the model have no memory."""
    import torch

    kind, keywords = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    parameters: Any = [torch.nn.Parameter(torch.zeros(2, 2))]
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        trainer.optimizer = _stand_in_optimizer(keywords.get("lr", 1.0))  # a factory needs the model itself
        return
    for name in ("params", "model", "optimizer_dict"):
        if name in keywords:
            parameters = keywords.pop(name)
            break
    trainer.optimizer = kind(parameters, **keywords)


def _stand_in_optimizer(rate: float):
    """Any optimizer, for a schedule that only reads its learning rate."""
    import torch

    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, 2))], lr=rate)


def _step_on_a_piece(optimizer, ds_config: Mapping) -> None:
    """Step as ZeRO does: its flat pieces take the parameters' place once the optimizer is made.

    An optimizer may have states for the parameters alone. One that is not torch's may be for GPUs alone: it is tried
    where ZeRO keeps the pieces on the CPU.
    """
    import torch

    ds = DsConfig(ds_config)
    is_for_cpus = type(optimizer).__module__.startswith("torch.") or ds.offload_optimizer
    if not ds.stage or not is_for_cpus:
        return
    for group in optimizer.param_groups:
        piece = torch.nn.Parameter(torch.ones(4))
        piece.grad = torch.ones(4)
        group["params"] = [piece]
    optimizer.step()


def _refuse_whole_tensors_only(optimizer, settings: Settings) -> None:
    """bitsandbytes' kernels take no sharded tensor of FSDP2's (DTensor)."""
    if type(optimizer).__module__.startswith("bitsandbytes."):
        raise refusal("ZR197", optim=settings.optimizer_name)


def _find_layers(model, layers: list[str]) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=layers,
    )
    plugin.set_auto_wrap_policy(model)


def _set_compiler_up(args) -> None:
    import torch

    # what comes back is never called
    torch.compile(torch.sin, backend=args.torch_compile_backend, mode=args.torch_compile_mode)


def _recompute(args) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    keywords = {"use_reentrant": False} | (args.activation_checkpointing_kwargs or {})
    keywords.pop("selective", None)  # TRL's own, which it takes out
    result = checkpoint(torch.sin, torch.ones(2, requires_grad=True), **keywords)
    result.sum().backward()


def parser_findings(run: Run) -> list[Finding]:
    """What transformers, accelerate and DeepSpeed would raise at the ds_config while the engine is built."""
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
        _try_schedule(run, config.get("scheduler"))
    return findings


def warmup_of(settings: Settings, steps: int) -> int:
    """As transformers 5.23, training_args.py `get_warmup_steps`."""
    warmup = settings.warmup_steps
    return int(warmup) if warmup >= 1 else math.ceil(steps * warmup)


def fill_auto(config: dict[str, Any], settings: Settings, world_size: int):
    """(transformers' HfTrainerDeepSpeedConfig, filled in, the arguments that it was given)."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = SimpleNamespace(**settings.as_dict())
    arguments.world_size = world_size
    arguments.bf16 = settings.precision == "bf16"
    arguments.get_warmup_steps = partial(warmup_of, settings)
    with without_deepspeed_announcement():  # it announces itself to all; this is only a look
        filled = HfTrainerDeepSpeedConfig(copy.deepcopy(config))
    filled.trainer_config_process(arguments)
    return filled, arguments


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
        filled.trainer_config_finalize(arguments, model, _steps(settings))
    with clear_environment():  # the launcher's variables have been read
        layers = run.environment.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")
        plugin = DeepSpeedPlugin(hf_ds_config=filled, transformer_moe_cls_names=layers)
        if layers is not None and bare_model(run) is not None:
            plugin.set_moe_leaf_modules(bare_model(run))
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
