"""Whether a run fits the checkpoint that it is to go on from; where not, what differs and which command cures it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_recipes.checkpoint import manifest
from zero_recipes.checkpoint.inputs import dispatch_findings, input_findings, missing_state_findings
from zero_recipes.checkpoint.reshard.findings import resharded_findings
from zero_recipes.checkpoint.reshard.load import is_resharded
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core import environment
from zero_recipes.core.findings import Finding, finding, refusal

# what a manifest must say of a run, for another run to be compared with it
FACTS = ("strategy", "zero_stage", "world_size", "micro_batch_size", "gradient_accumulation_steps")

# other values of these are another training: a checkpoint holds what was made with the old ones, Adam's states, the
# scheduler's base rates and the order of the rows among it, and transformers would mix the two silently
DECIDES = ("model_name_or_path", "model_revision", "dtype", "bf16", "fp16", "load_in_4bit", "load_in_8bit")
DECIDES += ("bnb_4bit_quant_storage", "bnb_4bit_quant_type", "use_bnb_nested_quant", "use_peft", "use_dora")
DECIDES += ("use_rslora", "lora_alpha", "lora_dropout", "lora_modules_to_save", "lora_r", "lora_target_modules")
DECIDES += ("lora_target_parameters", "lora_task_type", "seed", "data_seed", "train_sampling_strategy")
DECIDES += ("dataloader_drop_last", "ignore_data_skip", "average_tokens_across_devices", "loss_type")
DECIDES += ("neftune_noise_alpha", "label_smoothing_factor", "optim", "optim_args", "optim_target_modules")
DECIDES += ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm")
DECIDES += ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
# how long the run goes on: may be raised
LENGTH = ("max_steps", "num_train_epochs")
# shown in a warning where they differ: speed or rounding, not what is trained
TOLD = ("attn_implementation", "activation_checkpointing", "gradient_checkpointing", "padding_free", "use_liger_kernel")
TOLD += ("torch_compile", "tf32", "full_determinism", "per_device_train_batch_size", "supervised_logits_only")


def recipe_facts(settings: Settings) -> dict[str, Any]:
    """The part of a recipe that a manifest keeps, as JSON."""
    values = settings.as_dict()
    kept = {key: values[key] for key in (*DECIDES, *LENGTH, *TOLD) if key in values}
    return json.loads(json.dumps(kept, default=lambda value: getattr(value, "value", str(value))))


def fit_findings(checkpoint: str, settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    """What of a run does not fit the checkpoint, before data and weights are loaded.

    A checkpoint without a manifest cannot be compared; whoever names it by its path vouches for it.
    """
    yield from _on_nvme(checkpoint, strategy)
    yield from dispatch_findings(checkpoint, settings, strategy)
    written = manifest.read(Path(checkpoint))
    if written is None:
        yield finding("ZR718", checkpoint=checkpoint)
        yield from missing_state_findings(checkpoint, settings, strategy)
        return
    missing = manifest.missing_facts(written, FACTS)
    if missing:
        yield finding("ZR781", checkpoint=checkpoint, missing=", ".join(missing))
        return
    if is_resharded(checkpoint):
        yield from resharded_findings(settings, strategy)
    else:
        yield from _ranks(checkpoint, written, strategy)
        yield from _global_batch(checkpoint, written, settings, strategy)
    yield from _recipe(checkpoint, written, settings)
    yield from input_findings(checkpoint, written, settings, strategy)
    yield from _versions(checkpoint, written)


def _on_nvme(checkpoint: str, strategy: Strategy) -> Iterator[Finding]:
    if "nvme" in (strategy.offload_optimizer, strategy.offload_param):
        yield finding("ZR719", name=strategy.name, checkpoint=checkpoint)


def _ranks(checkpoint: str, written: Mapping, strategy: Strategy) -> Iterator[Finding]:
    there = (written["zero_stage"], written["world_size"], written["strategy"] == "fsdp2")
    here = (strategy.zero_stage, strategy.world_size, strategy.is_fsdp)
    if there != here:
        back = f"launch {written['strategy']} on {_processes(written['world_size'])} again"
        command = f"zero-recipes reshard {checkpoint} --world_size {strategy.world_size} --stage {strategy.zero_stage}"
        yield finding(
            "ZR720",
            checkpoint=checkpoint,
            strategy=written["strategy"],
            processes=_processes(written["world_size"]),
            name=strategy.name,
            processes_2=_processes(strategy.world_size),
            fix=f"{back[0].upper()}{back[1:]}." if None in (there[0], here[0]) else f"{command}; or {back}.",
        )
    elif written["strategy"] != strategy.name:
        onto_cpu = "_offload" in strategy.name
        yield finding(
            "ZR721",
            checkpoint=checkpoint,
            strategy=written["strategy"],
            name=strategy.name,
            fix="." if onto_cpu else " if that matters.",
            level="error" if onto_cpu else "warning",
        )


def _global_batch(checkpoint: str, written: Mapping, settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    there = written["micro_batch_size"] * written["gradient_accumulation_steps"] * written["world_size"]
    micro, accumulation = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    here = micro * accumulation * strategy.world_size
    if there != here:
        per_pass = micro * strategy.world_size
        fitting = f"--per_device_train_batch_size {micro} --gradient_accumulation_steps {there // per_pass}"
        if there % per_pass:
            fitting = f"a per_device_train_batch_size that divides {there} / {strategy.world_size}"
        yield finding("ZR722", checkpoint=checkpoint, there=there, here=here, fitting=fitting)


def _recipe(checkpoint: str, written: Mapping, settings: Settings) -> Iterator[Finding]:
    then, now = written.get("recipe", {}), recipe_facts(settings)
    other = [key for key in then if key in DECIDES and then[key] != now.get(key)]
    if other:
        yield finding(
            "ZR723",
            checkpoint=checkpoint,
            other=_listed(other, then),
            other_2=_listed(other, now),
            other_3=" ".join(f"--{key} {then[key]}" for key in other),
        )
    told = [key for key in then if key in TOLD and then[key] != now.get(key)]
    longer = [key for key in LENGTH if key in then and then[key] != now[key]]
    if longer and now["lr_scheduler_type"] not in ("constant", "constant_with_warmup"):
        told += longer
    if told:
        schedule = " The schedule is computed anew for the new length, from this step on." if longer else ""
        yield finding(
            "ZR724", checkpoint=checkpoint, told=_listed(told, then), told_2=_listed(told, now), schedule=schedule
        )
    steps = now["max_steps"]
    if 0 < steps < written["step"]:
        yield finding("ZR725", checkpoint=checkpoint, step=written["step"], steps=steps)


def _versions(checkpoint: str, written: Mapping) -> Iterator[Finding]:
    then, now = written.get("versions") or {}, environment.versions()
    other = [name for name in then if then[name] != now.get(name)]
    if other:
        yield finding("ZR726", checkpoint=checkpoint, other=_listed(other, then), other_2=_listed(other, now))


def refuse_other_data(checkpoint: str | None, data_sha256: str | None) -> None:
    """Refuse rows that are not those of the checkpoint. `data_sha256`: data.prepare.Prepared's; None for a stream."""
    written = manifest.read(Path(checkpoint)) if checkpoint else None
    then = data_sha256 if written is None else written.get("data_sha256", data_sha256)
    if then != data_sha256:
        raise refusal("ZR727", checkpoint=checkpoint, short=_short(then), short_2=_short(data_sha256))


def _short(digest: str | None) -> str:
    return "none (streamed)" if digest is None else digest[:12]


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def _listed(keys: list[str], values: Mapping) -> str:
    return ", ".join(f"{key} {values.get(key)}" for key in keys)
