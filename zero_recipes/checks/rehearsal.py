"""A recipe's values put to the libraries' own constructors, before anything is loaded: what they raise is found.

TRL's arguments, PEFT's and bitsandbytes' configurations, the model's class without memory, TRL's trainer around it on
two made-up rows, the optimizer, the schedule and the data loader: all on the CPU, alone, without a process group.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from zero_recipes.config import recipe as recipes
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, Refusal, finding, first_line
from zero_recipes.libs.single_process import single_process_env

STEPS = 1000  # of a schedule whose run is measured in epochs
# checked elsewhere with what they need: launch, device and data; not in force while nothing is written or told
ELSEWHERE = {
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "ddp_backend"), None),
    **dict.fromkeys(("chat_template_path", "eos_token", "pad_token", "completion_only_loss", "dataset_num_proc"), None),
    **dict.fromkeys(("assistant_only_loss", "activation_offloading", "push_to_hub", "full_determinism"), False),
    **dict.fromkeys(("enable_jit_checkpoint", "use_liger_kernel"), False),
    **{"use_cpu": True, "skip_memory_metrics": True, "disable_tqdm": True},
}


def rehearsal_findings(settings: Settings, strategy: Strategy | None, place: str) -> list[Finding]:
    """What the libraries say to the recipe's values. `settings`: the keys in force; `place`: the recipe's path."""
    findings: list[Finding] = []
    with single_process_env(), tempfile.TemporaryDirectory() as folder:
        try:
            elsewhere = ELSEWHERE | {"output_dir": folder}
            if settings.max_length is None:  # refused by name
                elsewhere |= {"packing": False, "eval_packing": False}
            _, args, model_args, _, _ = recipes.instances(settings.replace(**elsewhere), place)
        except Refusal as refusal:
            return refusal.findings
        peft_config = None
        fix = "Change the key that it names."
        with _net(findings, lambda said: finding("ZR180", said=said, fix=fix)):
            from trl import get_peft_config

            peft_config = get_peft_config(model_args)
        what = "bitsandbytes does not take the keys of quantization"
        with _net(findings, lambda said: finding("ZR429", what=what, said=said, fix=fix)):
            from trl import get_quantization_config

            get_quantization_config(model_args)
        if findings:
            return findings
        model = _model(findings, settings, model_args, args)
        if model is not None:
            _rehearse_trainer(findings, settings, strategy, args, model, peft_config)
    return findings


def _model(findings: list[Finding], settings: Settings, model_args, args):
    """The model without memory; None where it cannot be had (the run itself refuses that), or is refused here."""
    from zero_recipes.model import local_config, rehearse_model

    config = local_config(settings)
    if config is None:
        return None
    what, fix = (
        "the model cannot be built as the recipe says",
        "Change dtype, attn_implementation or model_init_kwargs.",
    )
    with _net(findings, lambda said: finding("ZR427", what=what, said=said, fix=fix)):
        return rehearse_model(config, settings, model_args, args)
    return None


def _rehearse_trainer(findings: list[Finding], settings: Settings, strategy, args, model, peft_config) -> None:
    """SFTTrainer, then optimizer, schedule and data loader, as the run will make them."""
    from trl import SFTConfig

    args.bf16 = args.fp16 = args.bf16_full_eval = args.fp16_full_eval = False  # the device's, not the CPU's
    args.mixed_precision = "no"
    args.model_init_kwargs = None
    args.__class__ = type("ArgumentsInPlace", (SFTConfig,), {"place_model_on_device": False})  # it has no memory
    ds_config = strategy.ds_config.raw if strategy is not None and strategy.is_deepspeed else {}
    trainer = None
    fix = "Change the key that it names."
    with _net(findings, lambda said: finding("ZR181", said=said, fix=fix)):
        trainer = _trainer(args, model, peft_config)
    if trainer is None:
        return
    if "optimizer" not in ds_config:
        what, name = f"optim: {settings.optim} cannot be made", "Change optim or optim_args, or install what it names."
        with _net(findings, lambda said: finding("ZR182", what=what, said=said, name=name)):
            trainer.optimizer = _optimizer(trainer)
    if "scheduler" not in ds_config and trainer.optimizer is not None:
        schedule = f"lr_scheduler_type: {settings.lr_scheduler_type} cannot be made"
        kwargs = "Change lr_scheduler_type, lr_scheduler_kwargs or warmup_steps."
        with _net(findings, lambda said: finding("ZR183", schedule=schedule, said=said, kwargs=kwargs)):
            trainer.create_scheduler(settings.max_steps if settings.max_steps > 0 else STEPS)
    with _net(findings, lambda said: finding("ZR184", said=said, fix=fix)):
        trainer.get_train_dataloader()
    if args.torch_compile:
        compiled = "the model cannot be compiled as the recipe says"
        modes = "Change torch_compile_backend or torch_compile_mode."
        with _net(findings, lambda said: finding("ZR186", compiled=compiled, said=said, modes=modes)):
            _compile(args.torch_compile_backend, args.torch_compile_mode)
    if args.activation_checkpointing:
        recomputed = "activations cannot be recomputed as the recipe says"
        keys = "Change activation_checkpointing_kwargs."
        with _net(findings, lambda said: finding("ZR185", recomputed=recomputed, said=said, keys=keys)):
            _recompute(trainer.model, dict(args.activation_checkpointing_kwargs or {}))


def _trainer(args, model, peft_config):
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTTrainer

    from zero_recipes.libs.huggingface import rows_are_cut

    words = Tokenizer(models.WordLevel({"word": 0, "end": 1, "pad": 2}, unk_token="word"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token="pad")
    rows = Dataset.from_list([{"input_ids": [0, 0, 1], "labels": [0, 0, 1]}] * 2)
    evaluation = None if str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "no" else rows
    with rows_are_cut(args):
        return SFTTrainer(model, args, None, rows, evaluation, tokenizer, peft_config=peft_config)


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


def _compile(backend: str, mode: str | None) -> None:
    """A function that is never called, and so never compiled."""
    import torch

    torch.compile(torch.sin, backend=backend, mode=mode)


def _recompute(model, keywords: dict[str, Any]) -> None:
    """One small layer, recomputed with the recipe's keywords."""
    import torch
    from torch.utils.checkpoint import checkpoint

    keywords.pop("selective", None)  # TRL's own, which it takes out
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(keywords))
    checkpoint(torch.sin, torch.ones(2, requires_grad=True), **({"use_reentrant": False} | keywords)).sum().backward()


@contextlib.contextmanager
def _net(findings: list[Finding], as_finding: Callable[[str], Finding]) -> Iterator[None]:
    """Whatever a library raises becomes a finding with its message."""
    try:
        yield
    except Refusal as refusal:
        findings += refusal.findings
    except Exception as error:  # the point of the net
        findings.append(as_finding(f"{type(error).__name__}: {first_line(error)}"))
