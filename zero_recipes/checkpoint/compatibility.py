"""Whether a run fits the checkpoint that it resumes from.

A checkpoint holds what was made with its run's values: Adam's states, the scheduler's base rates, the rows' order.
transformers and DeepSpeed silently mix them with other values.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.trainer_pt_utils import AcceleratorConfig

from zero_recipes.checkpoint.save import STATE, is_resharded, read_manifest, read_states_index
from zero_recipes.checkpoint.saved_model import ADAPTER, Entry, NotWhole, entries_of
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, downgraded, finding, first_line, ignored_codes, raise_errors
from zero_recipes.model.build import built_or_none
from zero_recipes.model.config import adapter_config, config_of_file
from zero_recipes.model.load import report_of_folder
from zero_recipes.model.towers import has_text_part, spare_towers

# Keys of a recipe that are compared with the run that resumes. With other values of these it is another training ...
DECIDES = (
    "model_name_or_path",
    "model_revision",
    "dtype",
    "bf16",
    "fp16",
    "load_in_4bit",
    "load_in_8bit",
    "bnb_4bit_quant_storage",
    "bnb_4bit_quant_type",
    "use_bnb_nested_quant",
    "use_peft",
    "use_dora",
    "use_rslora",
    "lora_alpha",
    "lora_dropout",
    "lora_modules_to_save",
    "lora_r",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_task_type",
    "peft_config",
    "loraplus_lr_ratio",
    "seed",
    "data_seed",
    "train_sampling_strategy",
    "dataloader_drop_last",
    "ignore_data_skip",
    "average_tokens_across_devices",
    "loss_type",
    "neftune_noise_alpha",
    "label_smoothing_factor",
    "optim",
    "optim_args",
    "optim_target_modules",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
)
# ... these may be raised ...
LENGTH = ("max_steps", "num_train_epochs")
# ... and these change the speed or the rounding: a warning
ROUNDING = (
    "attn_implementation",
    "activation_checkpointing",
    "gradient_checkpointing",
    "padding_free",
    "use_liger_kernel",
    "torch_compile",
    "tf32",
    "full_determinism",
    "per_device_train_batch_size",
    "supervised_logits_only",
    "cudnn_attention",
)
BLOCKS = ("optimizer", "scheduler", "gradient_clipping")  # of a ds_config: they replace the recipe's keys


def recipe_facts(settings: Settings, strategy: Strategy) -> dict[str, Any]:
    """What a manifest keeps for comparison with another run, as JSON."""
    values = settings.as_dict()
    facts = {key: values[key] for key in (*DECIDES, *LENGTH, *ROUNDING) if key in values}
    for block in BLOCKS:
        facts[f"the ds_config's {block}"] = strategy.ds.raw.get(block)
    facts["accelerator_config"] = _accelerator_config(settings)
    return json.loads(json.dumps(facts, default=lambda value: getattr(value, "value", str(value))))


def fit_findings(
    checkpoint: str, settings: Settings, strategy: Strategy, config: PretrainedConfig | None = None
) -> Iterator[Finding]:
    """What a checkpoint and the run that would resume from it do not have in common.

    Without a manifest (another program's checkpoint) there are no values to compare, and the weights are.
    `config`: of the model; None where it is not at hand.
    """
    if strategy.ds.on_nvme:
        yield finding("ZR719", name=strategy.name, checkpoint=checkpoint)
    dispatches = _accelerator_config(settings)["dispatch_batches"]
    if dispatches and strategy.world_size > 1 and not settings.streams:  # TRL turns it off for a stream
        yield finding("ZR771", world_size=strategy.world_size, checkpoint=checkpoint)
    written = read_manifest(Path(checkpoint))
    if written is None:
        yield finding("ZR718", checkpoint=checkpoint)
        yield from _missing_states(Path(checkpoint), strategy)
        if config is None:
            return
        how = _other_weights(Path(checkpoint), settings, config)
        if how is not None:
            yield finding("ZR756", checkpoint=checkpoint, how=how)
        return
    old_world = written["world_size"]
    if is_resharded(checkpoint):
        old_world = read_states_index(checkpoint)["source"]["world_size"]
    else:
        yield from _ranks(checkpoint, written, strategy)
    if is_resharded(checkpoint) or needs_reshard(written, strategy):
        yield from _resharded(checkpoint, settings, strategy)
    keys = " and ".join(_order_by_world(settings))
    world_size = strategy.world_size
    if keys and world_size != old_world:
        yield finding("ZR714", key=keys, checkpoint=checkpoint, world_size=world_size, old_world=old_world)
    there = written["micro_batch_size"] * written["gradient_accumulation_steps"] * written["world_size"]
    here = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * world_size
    if there != here:
        yield finding("ZR722", checkpoint=checkpoint, there=there, here=here)
    yield from _recipe(checkpoint, written.get("recipe", {}), recipe_facts(settings, strategy))
    yield from _model_config(checkpoint, written.get("model_config"), settings)
    if config is not None and has_text_part(config) and not written.get("leaves_towers"):
        yield from _with_towers(Path(checkpoint), settings, config)


def refuse_misfit(
    checkpoint: str, settings: Settings, strategy: Strategy, config: PretrainedConfig | None = None
) -> None:
    """Raise the errors among `fit_findings` that the recipe does not ignore, as a Refusal."""
    findings = list(fit_findings(checkpoint, settings, strategy, config))
    raise_errors(downgraded(findings, ignored_codes(settings.ignore)))


def _order_by_world(settings: Settings) -> Iterator[str]:
    """Settings under which the rows' order depends on the number of processes."""
    order = str(settings.train_sampling_strategy)
    if order in ("group_by_length", "batch_rebalance"):
        yield f"train_sampling_strategy: {order}"
    if settings.dataloader_drop_last:
        yield "dataloader_drop_last: true"


def refuse_other_data(
    checkpoint: str | None, settings: Settings, data_sha256: str, evaluation_sha256: str | None
) -> None:
    """Refuse to resume on other rows: other training rows, or other evaluation rows where both runs have some.

    `checkpoint`: None where the run starts fresh. The hashes are of this run's rows. Raises Refusal.
    """
    if checkpoint is None:
        return
    written = read_manifest(Path(checkpoint)) or {}
    findings = []
    then = written.get("data_sha256")
    if then and then != data_sha256:
        findings.append(finding("ZR727", checkpoint=checkpoint, old=then, new=data_sha256))
    then = written.get("evaluation_sha256")
    if then and evaluation_sha256 and then != evaluation_sha256:
        findings.append(finding("ZR759", checkpoint=checkpoint, old=then, new=evaluation_sha256))
    raise_errors(downgraded(findings, ignored_codes(settings.ignore)))


def _model_config(checkpoint: str, then: Mapping[str, Any] | None, settings: Settings) -> Iterator[Finding]:
    """Keys of the model's configuration that have changed. `then`: None in a manifest of an earlier version."""
    if not then:
        return
    now = config_of_file(settings)
    if now is None:
        return
    changed = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
    if changed:
        name = settings.model_name_or_path
        about = {"then": _listed(changed[:5], then), "now": _listed(changed[:5], now)}
        yield finding("ZR758", checkpoint=checkpoint, name=name, **about)


def _with_towers(folder: Path, settings: Settings, config: PretrainedConfig) -> Iterator[Finding]:
    """An earlier version trained all of a composite model, or loaded its text part alone."""
    how = "It trains other parameters."
    if settings.use_peft:
        how = _other_weights(folder, settings, config)  # an adapter that the recipe keeps out of the towers fits
    if how is not None:
        yield finding("ZR492", checkpoint=folder, how=how)


def _other_weights(folder: Path, settings: Settings, config: PretrainedConfig) -> str | None:
    """Why a resume could not load another program's weights into this run's model, by names and shapes; else None."""
    try:
        entries = entries_of(folder)
    except NotWhole as error:
        return str(error)
    if not entries or any(0 in entry.shape for entry in entries.values()):
        return None  # pickles, which are not opened, or stage 3, where DeepSpeed's files have the weights
    has_adapter = (folder / ADAPTER).is_file()
    if has_adapter and not settings.use_peft:
        return "It holds an adapter, and this run trains the model itself."
    if settings.use_peft and not has_adapter:
        return "It holds a whole model, and this run trains an adapter."
    if has_adapter:
        return _other_adapter(folder, entries, settings, config)
    if settings.clones_tokenizer:  # TRL adds the other tokenizer's tokens to the model
        return None
    return _other_model(folder, settings, config)


def _other_model(folder: Path, settings: Settings, config: PretrainedConfig) -> str | None:
    try:
        report = report_of_folder(folder, config, settings.trust_remote_code)
    except Exception:  # a model's own code may raise anything: making TRL's trainer reports that
        return None
    for kind in ("mismatched_keys", "missing_keys", "unexpected_keys"):
        if report[kind]:
            keys = sorted(key if isinstance(key, str) else key[0] for key in report[kind])
            return f"{kind.replace('_', ' ').capitalize()}: {_first(keys)}."
    return None


# of an adapter_config.json: with other values the same tensors mean another adapter
_OF_ADAPTERS = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")


def _other_adapter(
    folder: Path, entries: Mapping[str, Entry], settings: Settings, config: PretrainedConfig
) -> str | None:
    from peft import get_peft_model, get_peft_model_state_dict

    base = built_or_none(config, settings.trust_remote_code)
    if base is None:
        return None
    names_of_base = {f"base_model.model.{name}" for name in base.state_dict()}
    adapter = spare_towers(adapter_config(settings), base)
    own = json.loads(json.dumps(adapter.to_dict(), default=lambda value: getattr(value, "value", str(value))))
    try:
        saved = dict(json.loads((folder / "adapter_config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        return f"Its adapter_config.json cannot be read: {first_line(error)}"
    differing = [key for key in _OF_ADAPTERS if key in saved and key in own and saved[key] != own[key]]
    if differing:
        return f"Its adapter has {_listed(differing, saved)}; this run's has {_listed(differing, own)}."
    try:
        with torch.device("meta"):
            made = get_peft_model_state_dict(get_peft_model(base, adapter), save_embedding_layers=False)
    except Exception:  # peft looks each value up in tables of its own: making TRL's trainer reports that
        return None
    missing = sorted(made.keys() - entries.keys())
    unexpected = sorted(entries.keys() - made.keys() - names_of_base)  # PEFT saves resized embeddings too
    mismatched = sorted(name for name in made.keys() & entries.keys() if tuple(made[name].shape) != entries[name].shape)
    for kind, keys in (("Mismatched", mismatched), ("Missing", missing), ("Unexpected", unexpected)):
        if keys:
            return f"{kind} keys: {_first(keys)}."
    return None


def _first(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _missing_states(folder: Path, strategy: Strategy) -> Iterator[Finding]:
    """Files that are missing, without which a resume would go on with fresh states.

    transformers 5.23, trainer.py `_load_optimizer_and_scheduler` loads neither where one is missing.
    DeepSpeed 0.19.8, runtime/engine.py `load_checkpoint` keeps the fresh optimizer.
    """
    wanted = {}
    if strategy.ds.raw.get("scheduler") is None:  # DeepSpeed's schedules have no such file
        wanted["scheduler.pt"] = 1
    if strategy.zero_stage:
        wanted["global_step*/*_optim_states.pt"] = strategy.world_size
    elif strategy.is_deepspeed:
        wanted["global_step*/*_model_states.pt"] = 1
    else:
        wanted["optimizer*"] = 1
    missing = [pattern for pattern, count in wanted.items() if len(list(folder.glob(pattern))) < count]
    if missing:
        yield finding("ZR769", checkpoint=folder, missing=", ".join(missing))


def needs_reshard(written: Mapping | None, strategy: Strategy) -> bool:
    """Whether `zero-recipes reshard` has to spread a checkpoint over these processes. `written`: its manifest."""
    if written is None or not strategy.zero_stage or written.get("strategy") != strategy.name:
        return False
    return written["world_size"] != strategy.world_size


def _ranks(checkpoint: str, written: Mapping, strategy: Strategy) -> Iterator[Finding]:
    old = written["strategy"]
    new = strategy.name
    old_world = written["world_size"]
    world_size = strategy.world_size
    there = (written["zero_stage"], old_world, old == "fsdp2")
    here = (strategy.zero_stage, world_size, strategy.is_fsdp)
    if needs_reshard(written, strategy):
        yield finding("ZR882", checkpoint=checkpoint, old=old_world, world_size=world_size)
    elif {old, new} <= {"ddp", "single"} or old == new == "fsdp2":
        if there != here:
            yield finding("ZR884", checkpoint=checkpoint, old=old_world, world_size=world_size)
    elif there != here:
        yield finding(
            "ZR720",
            checkpoint=checkpoint,
            old=f"{old} on {old_world}",
            new=f"{new} on {world_size}",
            world_size=world_size,
        )
    elif old != new:
        level = "error" if "_offload" in new else "warning"
        yield finding("ZR721", checkpoint=checkpoint, strategy=old, name=new, level=level)


def _recipe(checkpoint: str, then: Mapping, now: Mapping) -> Iterator[Finding]:
    by_length = now["lr_scheduler_type"] not in ("constant", "constant_with_warmup")
    deciding = []
    rounding = []
    for key, value in then.items():
        if value == now.get(key):
            continue
        if key not in (*LENGTH, *ROUNDING):
            deciding.append(key)
        elif key in ROUNDING or by_length:
            rounding.append(key)
    if deciding:
        yield finding("ZR723", checkpoint=checkpoint, then=_listed(deciding, then), now=_listed(deciding, now))
    if rounding:
        yield finding("ZR724", checkpoint=checkpoint, then=_listed(rounding, then), now=_listed(rounding, now))


def _listed(keys: list[str], values: Mapping) -> str:
    return ", ".join(f"{key} {values.get(key)}" for key in keys)


def _resharded(checkpoint: str, settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    """Settings under which a resharded checkpoint would go on as another run."""
    if strategy.zero_stage not in (1, 2, 3):
        yield finding("ZR712", name=strategy.name, checkpoint=checkpoint)
        return
    config = strategy.ds_config
    key = None
    if strategy.zero_stage != 3 and config.zero.get("round_robin_gradients"):
        key = "round_robin_gradients"
    elif strategy.zero_stage == 1 and config.grad_accum_dtype is not None:
        key = "data_types.grad_accum_dtype at stage 1"
    if key is not None:
        yield finding("ZR715", key=key, checkpoint=checkpoint)
    if config.bf16_masters and is_resharded(checkpoint) and read_states_index(checkpoint)["states"] == "fp32":
        yield finding("ZR289", checkpoint=checkpoint, zero_stage=strategy.zero_stage)
    best = json.loads((Path(checkpoint) / STATE).read_text()).get("best_model_checkpoint")
    if settings.load_best_model_at_end and best is not None:
        yield finding("ZR717", best=best)


def _accelerator_config(settings: Settings) -> dict[str, Any]:
    """All values of accelerator_config, defaults included, but `non_blocking`, which is speed."""
    own = settings.accelerator_config or {}
    if isinstance(own, str):
        own = {"file": own}
    values = AcceleratorConfig().to_dict() | own
    values.pop("non_blocking", None)
    return values
