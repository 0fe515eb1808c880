"""TRL's trainer, made of a recipe's values before anything is loaded: what it raises is a finding.

On the CPU, in one process, without a process group, with two made-up rows and a model without weights.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from zero_recipes.checks.adapter_names import module_kinds
from zero_recipes.checks.adapter_targets import refused_targets
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.run import Run
from zero_recipes.config.settings import Settings
from zero_recipes.config.trl_arguments import trl_arguments
from zero_recipes.core.findings import Finding, Refusal, collected, first_line, refusal
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.engine.huggingface import (
    attention_kernel,
    has_flash_package,
    rows_are_cut,
    single_process_env,
)
from zero_recipes.model.config import adapter_config
from zero_recipes.model.meta import MetaModel
from zero_recipes.model.towers import spare_towers

STEPS = 1000  # of a schedule whose run is measured in epochs: only that it is a number matters
# What the arguments have here instead of the recipe's values: these keys are checked with what they need (the launch,
# the device, the data), or have no effect while nothing is written.
CHECKED_ELSEWHERE = {
    "deepspeed": None,
    "fsdp": None,
    "fsdp_config": None,
    "parallelism_config": None,
    "ddp_backend": None,
    "chat_template_path": None,
    "eos_token": None,
    "pad_token": None,
    "completion_only_loss": None,
    "dataset_num_proc": None,
    "assistant_only_loss": False,
    "activation_offloading": False,
    "push_to_hub": False,
    "full_determinism": False,
    "enable_jit_checkpoint": False,
    "use_liger_kernel": False,
    "use_cpu": True,
    "skip_memory_metrics": True,
    "disable_tqdm": True,
}


def trainer_findings(run: Run) -> list[Finding]:
    """What the libraries raise at the recipe's values while they make a trainer, its optimizer and its schedule."""
    settings = run.settings
    if run.gpu is not None:  # TF32 and flash attention are judged by the card, not by this machine
        settings = settings.replace(tf32=None, attn_implementation="sdpa")
    findings: list[Finding] = []
    with single_process_env(), tempfile.TemporaryDirectory() as folder, collected(findings):
        arguments = trl_arguments(settings.replace(**CHECKED_ELSEWHERE, output_dir=folder), run.recipe.path)
        trainer = _trainer(settings, run.meta, arguments.training, arguments.model)
        if trainer is not None:
            _try_its_parts(findings, settings, run.ds.raw, trainer)
    return findings


def _trainer(settings: Settings, meta: MetaModel | None, args, model_args):
    """TRL's trainer. None without the model's configuration. Raises Refusal."""
    from trl import SFTTrainer, get_quantization_config

    keys = settings.as_dict()
    with library_error_as_finding("reading the keys of LoRA and quantization", keys):
        peft_config = adapter_config(settings)
        get_quantization_config(model_args)
    if meta is None:
        return None
    with library_error_as_finding("building the model without memory", keys):
        try:
            model = meta.copy()
        except ImportError as error:
            requested = settings.attn_implementation
            if attention_kernel(requested) is None or has_flash_package(requested):
                raise
            raise refusal("ZR445", requested=requested, error=first_line(error)) from error
    peft_config = spare_towers(peft_config, model)
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
    with library_error_as_finding("building TRL's trainer", keys), cut, _targets_named(meta, settings):
        return SFTTrainer(model, args, None, train, evaluation, tokenizer, peft_config=peft_config)


@contextlib.contextmanager
def _targets_named(meta: MetaModel, settings: Settings) -> Iterator[None]:
    """PEFT's errors over targets name none that would do: those that match nothing, and those that it refuses."""
    from peft.utils.error import NoMatchingPeftModuleError

    try:
        yield
    except NoMatchingPeftModuleError as error:
        kinds = ", ".join(module_kinds(meta.copy()))
        raise refusal("ZR447", error=first_line(error), kinds=kinds) from error
    except ValueError as error:
        refused = list(refused_targets(meta.copy(), settings)) if settings.use_peft else []
        if refused:
            raise Refusal(refused) from error
        raise


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


def _try_its_parts(findings: list[Finding], settings: Settings, ds_config: Mapping, trainer) -> None:
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
