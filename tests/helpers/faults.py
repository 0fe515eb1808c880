"""Recipes with one fault each, and their fixed twins: one table of what is written, and the code that it is refused by.

A case is a folder with recipe.yaml and, where it needs them, ds.json, accelerate.yaml, rows/ and other files; or, where
a rule is about GPUs, keys of a recipe on a device. A code of a library's own refusal is ZR199.
"""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOUND_ROWS = [{"prompt": f"Say {i}.\n", "completion": f"The fish says {i}."} for i in range(8)]
SOUND_DS_CONFIG = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
SOUND_RECIPE = """model_name_or_path: ./model
dataset_name: ./rows
random_weights: true
output_dir: out
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 10
max_length: 64
activation_checkpointing: false
save_strategy: "no"
save_model: false
report_to: none
"""
SOUND = {"recipe": "", "ds": {}, "files": {}, "overrides": (), "without": ()}  # parts of a Side
TWO = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
TWO_NODES = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@dataclass(frozen=True)
class Side:
    """One way of writing it. `recipe`: lines that replace those of the same key, or are added."""

    recipe: str = ""
    without: tuple[str, ...] = ()  # keys taken out of the sound recipe
    overrides: tuple[str, ...] = ()
    ds: str | Mapping[str, Any] | None = None  # text, or keys laid over ds_configs/zero2.json (None takes one out)
    accelerate: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    keys: Mapping[str, Any] | None = None  # of tests/helpers/tiny.py's recipe, for the rules alone
    environment: Mapping[str, str] = field(default_factory=lambda: TWO)
    device: str = "cuda"  # of `keys`

    def write(self, folder: Path) -> list[str]:
        """Write the case into `folder`. Returns the arguments of run_sft.py, relative to it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model").symlink_to(ROOT / "tiny_world" / "base")
        (folder / "rows").mkdir()
        (folder / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SOUND_ROWS))
        replaced = {line.partition(":")[0] for line in self.recipe.splitlines() if not line.startswith(" ")}
        replaced |= {*self.without}
        kept = [line for line in SOUND_RECIPE.splitlines() if line.partition(":")[0] not in replaced]
        if self.ds is not None:
            laid = self.ds
            if not isinstance(laid, str):
                laid = json.dumps({k: v for k, v in (SOUND_DS_CONFIG | dict(laid)).items() if v is not None})
            (folder / "ds.json").write_text(laid)
            if self.accelerate is None and "deepspeed" not in replaced:
                kept.append("deepspeed: ds.json")
        if self.accelerate is not None:
            (folder / "accelerate.yaml").write_text(self.accelerate)
        for name, text in ({"recipe.yaml": "\n".join([*kept, self.recipe])} | self.files).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return ["recipe.yaml", *self.overrides]


@dataclass(frozen=True)
class Fault:
    """A fault, its fixed twin, and the code of the finding about it.

    `names`: what its message must hold.
    """

    name: str
    code: str
    bad: Side
    fixed: Side
    names: str = ""
    level: str = "error"


def findings_of(side: Side, folder: Path, data: bool = True) -> list:
    """Everything that `zero-recipes check` finds, for two processes, with --data where `data`; of `keys` what the rules
    find. `folder` is made anew."""
    from tests.helpers.tiny import write_recipe
    from zero_recipes.core.findings import Refusal

    shutil.rmtree(folder, ignore_errors=True)
    kept = dict(os.environ)
    try:
        if side.keys is None:
            return _found_by_check(side, folder, data)
        folder.mkdir(parents=True)
        return findings_in(write_recipe(folder), dict(side.keys), side.environment, side.device)
    except Refusal as refusal:
        return refusal.findings
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _found_by_check(side: Side, folder: Path, data: bool) -> list:
    from zero_recipes.checks.preflight import preflight
    from zero_recipes.config import recipe as recipes
    from zero_recipes.config.accelerate import launched_environment
    from zero_recipes.tools.check import data_findings

    name, *overrides = side.write(folder)
    with chdir(folder):
        environment = launched_environment(None if side.accelerate is None else Path("accelerate.yaml"), 2)
        run, findings = preflight(Path(name), recipes.read_recipe_file(Path(name)), overrides, environment)
        if data and run is not None and not any(finding.level == "error" for finding in findings):
            findings = [*findings, *data_findings(run)]
    return findings


def findings_in(path: Path, changes: dict, environment: Mapping[str, str] | None = None, device: str = "cuda") -> list:
    """What the rules find in a recipe with changes, on two processes of one node by default."""
    from zero_recipes.checks.adapter_rules import adapter_findings
    from zero_recipes.checks.deepspeed_rules import deepspeed_findings
    from zero_recipes.checks.rules import rule_findings

    run = run_of(path, changes, environment, device)
    return [*rule_findings(run), *adapter_findings(run), *deepspeed_findings(run)]


def run_of(path: Path, changes: dict, environment: Mapping[str, str] | None = None, device: str = "cuda"):
    """The Run of a recipe with changes, on two processes of one node by default."""
    from zero_recipes.config import recipe as recipes
    from zero_recipes.config import strategy as strategies
    from zero_recipes.config.read import parse_recipe
    from zero_recipes.config.run import Run, settings_in_force
    from zero_recipes.model.config import load_config
    from zero_recipes.model.meta import MetaModel, size_of

    environment = environment or TWO
    recipe = parse_recipe(path, recipes.read_recipe_file(path) | changes, [])
    placed = recipe.settings.replace(use_cpu=device == "cpu")
    strategy = strategies.resolve_strategy(placed, environment, size_of)
    settings, _ = settings_in_force(recipe, strategy, device, None)
    return Run(recipe, settings, {}, strategy, device, environment, MetaModel(load_config(settings), settings))


def found_in(path: Path, changes: dict, **launch) -> list[tuple[str, str]]:
    """`findings_in` as [(level, code)]."""
    return [(finding.level, finding.code) for finding in findings_in(path, changes, **launch)]


def ds_config(stage: int, **zero) -> dict:
    config = json.loads((ROOT / "ds_configs" / f"zero{stage}.json").read_text())
    config["zero_optimization"] |= zero
    return config


def fault(
    name: str, code: str, part: str, bad: Any, fixed: Any = None, names: str = "", level: str = "error", **both: Any
) -> Fault:
    """`part`: the field of Side in which the fault is; without `fixed` the other side has it sound. `both`: fields of
    both sides."""
    if fixed is None:
        fixed = SOUND[part]
    return Fault(name, code, Side(**{part: bad}, **both), Side(**{part: fixed}, **both), names, level)


def zero(stage: int, top: Mapping[str, Any] | None = None, **block) -> dict:
    """Keys of a recipe with ds_configs/zeroN.json changed: `top` at its top, `block` in zero_optimization."""
    return {"deepspeed": ds_config(stage, **block) | dict(top or {})}


def schedule(warmup: Any) -> dict[str, Any]:
    params = {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_type": "linear", "warmup_num_steps": warmup}
    return {"scheduler": {"type": "WarmupLR", "params": params}}


CYCLE = {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.001}}}
OF_DECAY = {"warmup_min_lr": 0, "warmup_num_steps": "auto", "warmup_type": "linear", "total_num_steps": "auto"}
DECAY = {"scheduler": {"type": "WarmupDecayLR", "params": OF_DECAY}}
LARGEST = {"params": OF_DECAY | {"warmup_max_lr": "auto"}}
STAGE_3 = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "leaf_module": {"classes": ["GPTNeoXLayer"]}}
DDP = "distributed_type: MULTI_GPU\nnum_processes: 2\n"
ACCELERATE = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
INLINE = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: "
FSDP2 = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
FSDP2 += "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
EVALUATES = {"rows/test.jsonl": json.dumps({"prompt": "Say 9.\n", "completion": "The fish says 9."}) + "\n"}
TWO_EVALUATED, THREE_EVALUATED = (
    {"rows/test.jsonl": "".join(json.dumps(row | {"completion": f"{row['prompt']} It did."}) + "\n" for row in rows)}
    for rows in (SOUND_ROWS[:2], SOUND_ROWS[:3])
)
DROPS = "dataloader_drop_last: true\neval_strategy: steps"
LORA = "use_peft: true\nlora_target_modules: all-linear"
PEFT = {"use_peft": True, "lora_target_modules": "all-linear"}
ADAPTER = {"use_peft": True, "lora_target_modules": ["query_key_value"]}
PARAMETERS = ADAPTER | {"lora_dropout": 0.0}
MISS = {"peft_config": {"peft_type": "MISS"}}
PLUS = {"loraplus_lr_ratio": 16.0}
GAUSSIAN = {"peft_config": {"init_lora_weights": "gaussian"}}
FOUR, EIGHT = {"load_in_4bit": True, **PEFT}, {"load_in_8bit": True, **PEFT}
ON_CPU = {"offload_optimizer": {"device": "cpu"}}
NVME = {"device": "nvme", "nvme_path": str(ROOT)}
TAKEN = {"bucket_sizes": None}  # as transformers fills in "auto"
BY_MODULE = {"leaf_modules": None}
NO_PREFETCH = {"stage3_prefetch_bucket_size": 0}
MASTERS = {"bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True}}
STATES = {"bf16": MASTERS["bf16"] | {"bf16_optimizer_states": True}}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}
FACTORED = {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-3}}, "zero_allow_untested_optimizer": True}
LION = {"optimizer": {"type": "Lion", "params": {"lr": "auto"}}}
WRAPPED = "fsdp: true\nfsdp_config:\n  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  transformer_layer_cls_to_wrap:"
BEST = "load_best_model_at_end: true\nsave_strategy: best\neval_strategy: steps"
KEEPS_BEST = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"}
KEEPS_BEST |= {"save_steps": 2, "eval_steps": 2}
AUTOCAST = {"enabled": True, "dtype": "bfloat16"}
SHARED = {"sequence_parallel_size": 2, "pad_to_multiple_of": 128, "dataloader_drop_last": True, "max_length": 128}


def adapter(**own) -> dict:
    """Keys of a recipe with LoRA on one kind of module, and keys of PEFT's."""
    return ADAPTER | {"peft_config": own}


def autocast(stage: int = 2, bf16: bool = False, **block) -> dict:
    return zero(stage, {"torch_autocast": AUTOCAST | block}) | {"bf16": bf16}


def cast_in(module: str) -> dict:
    return {"torch_autocast": AUTOCAST | {"lower_precision_safe_modules": [module]}, "bf16": None}


FAULTS = [
    # the recipe's text and values
    fault("no YAML", "ZR199", "files", {"recipe.yaml": "max_steps: [1\n"}),
    fault("a tab", "ZR913", "files", {"recipe.yaml": "max_steps: 1\npeft_config:\n\tr: 4\n"}, names="line 3"),
    fault("an empty recipe", "ZR118", "files", {"recipe.yaml": ""}),
    fault("an env block that is no mapping", "ZR119", "recipe", "env: fast"),
    fault("a key that stands twice", "ZR126", "recipe", "max_steps: 5\nmax_steps: 7"),
    fault("a misspelt key", "ZR103", "recipe", "lerning_rate: 1e-4", names="`lerning_rate`"),
    fault("a key of the launcher", "ZR102", "recipe", "num_machines: 2", "num_processes: 2", "`num_machines`"),
    fault("a former key", "ZR101", "recipe", "torch_dtype: bfloat16", names="`torch_dtype`"),
    fault("YAML's no", "ZR106", "recipe", "save_strategy: no"),
    fault("a list for a number", "ZR107", "recipe", "learning_rate: [1e-5]"),
    fault("a time for a rate", "ZR113", "recipe", "learning_rate: 12:34:56", names="is 45296"),
    fault("a key of other scripts", "ZR187", "recipe", "grad_accum_steps: 2", names="`grad_accum_steps`"),
    fault("a count below one", "ZR113", "recipe", "max_length: 0", names="`max_length` in recipe.yaml:12"),
    fault("a choice that is none", "ZR199", "recipe", "optim: adamw_fast", names="SFTConfig"),
    fault("ignoring a code that does not exist", "ZR142", "recipe", "ignore: [ZR999]", "ignore: [ZR608]", "ZR999"),
    fault("ignoring what cannot be ignored", "ZR143", "recipe", "ignore: [ZR206]", "ignore: [ZR608]", "ZR206"),
    fault("an abbreviated key", "ZR103", "overrides", ("--max_step", "3"), names="`max_step`"),
    fault("a value without a key", "ZR120", "overrides", ("--max_steps", "3", "4"), names="'4'"),
    fault("a wrong value", "ZR124", "overrides", ("--max_steps", "many"), names="many"),
    fault("a global batch that does not divide", "ZR121", "recipe", "global_batch_size: 7", "global_batch_size: 8",
          without=("gradient_accumulation_steps",)),
    fault("another global batch than the accumulation's", "ZR122", "recipe", "global_batch_size: 16",
          "global_batch_size: 8"),
    fault("no epoch", "ZR162", "recipe", "num_train_epochs: 0", "num_train_epochs: 0.5", without=("max_steps",)),
    # model, data and output folder
    fault("no model", "ZR401", "without", ("model_name_or_path",)),
    fault("no data", "ZR504", "without", ("dataset_name",)),
    fault("a split that is not there", "ZR507", "recipe", "dataset_train_split: training"),
    fault("a file that is not there", "ZR506", "files", {}, {"a.csv": "prompt,completion\na,b\nc,d\n"},
          recipe="dataset_name: ./a.csv"),
    fault("a CSV file with a header alone", "ZR523", "files", {"a.csv": "prompt,completion\n"},
          {"a.csv": "prompt,completion\na,b\nc,d\n"}, "has a header alone", recipe="dataset_name: ./a.csv"),
    fault("a file of a mixture", "ZR506", "files", {}, {"a.csv": "prompt,completion\na,b\nc,d\n"}, "./a.csv",
          recipe="datasets:\n  - path: ./a.csv", without=("dataset_name",)),
    fault("an evaluation without a split", "ZR507", "recipe", "eval_strategy: steps", names="'test'"),
    fault("rows cut before their answers", "ZR513", "recipe", "max_length: 2"),
    fault("evaluation rows that make no batch", "ZR554", "recipe", f"{DROPS}\nper_device_eval_batch_size: 2",
          f"{DROPS}\nper_device_eval_batch_size: 1", "leaves out 2 of 2", files=TWO_EVALUATED),
    fault("evaluation rows of half a round", "ZR554", "recipe", f"{DROPS}\nper_device_eval_batch_size: 1",
          "eval_strategy: steps", "leaves out 1 of 3", "warning", files=THREE_EVALUATED),
    fault("long rows dropped from a stream", "ZR896", "recipe", "dataset_streaming: true\nlong_rows: drop",
          "dataset_streaming: true"),
    fault("training rows that make no batch", "ZR554", "recipe",
          "dataloader_drop_last: true\nper_device_train_batch_size: 5",
          "dataloader_drop_last: true\nper_device_train_batch_size: 4", "leaves out 8 of 8"),
    fault("padding with the end of text", "ZR502", "recipe", "pad_token: <|endoftext|>"),
    fault("to resume and to overwrite", "ZR703", "overrides",
          ("--resume_from_checkpoint", "true", "--overwrite", "true")),
    fault("a folder that holds an earlier run", "ZR702", "overrides", (), ("--overwrite", "true"), "metrics.json",
          files={"out/metrics.json": '{"status": "ok"}'}),
    # names in the keys of an adapter
    fault("a target that no module has", "ZR446", "keys",
          ADAPTER | {"lora_target_modules": ["query_key_value", "q_proj"]}, ADAPTER, "does not have: q_proj"),
    fault("an alternative that no module has", "ZR446", "keys",
          ADAPTER | {"lora_target_modules": [r".*\.(query_key_value|q_proj)"]},
          ADAPTER | {"lora_target_modules": [r".*\.(query_key_value|dense)"]}, "does not have: q_proj"),
    fault("no target at all", "ZR447", "recipe", f"{LORA.replace('all-linear', '[q_proj]')}",
          f"{LORA.replace('all-linear', '[query_key_value]')}\ndtype: bfloat16", "no module"),
    fault("a module to save that no module is", "ZR446", "keys",
          ADAPTER | {"lora_modules_to_save": ["lm_head", "score"]},
          ADAPTER | {"lora_modules_to_save": ["lm_head"]}, "`lora_modules_to_save` names what the model does not have"),
    fault("a parameter that is none", "ZR446", "keys",
          PARAMETERS | {"lora_target_parameters": ["dense.weight", "w.up"]},
          PARAMETERS | {"lora_target_parameters": ["dense.weight"]}, "w.up"),
    fault("a layer behind the last", "ZR446", "keys", adapter(layers_to_transform=[0, 2]),
          adapter(layers_to_transform=[0, 1]), "does not have: 2"),
    fault("layers of another name", "ZR446", "keys", adapter(layers_to_transform=1, layers_pattern=["layers", "h"]),
          adapter(layers_to_transform=1, layers_pattern="layers"), "`peft_config.layers_pattern`"),
    fault("a rank for no target", "ZR446", "keys", adapter(rank_pattern={"dense": 2}),
          adapter(rank_pattern={"query_key_value": 2}), "`peft_config.rank_pattern`"),
    fault("an alpha that an earlier pattern takes", "ZR446", "keys",
          adapter(alpha_pattern={"query_key_value": 2, r"layers.1.attention.query_key_value": 4}),
          adapter(alpha_pattern={r"layers.1.attention.query_key_value": 4, "query_key_value": 2}), "layers.1"),
    fault("an exclusion of nothing", "ZR446", "keys", adapter(exclude_modules=["q_proj"]),
          adapter(exclude_modules=["layers.0.attention.query_key_value"]), "`peft_config.exclude_modules`"),
    fault("a pattern that excludes nothing", "ZR446", "keys", adapter(exclude_modules=r".*\.q_proj"),
          adapter(exclude_modules=r".*\.0\..*"), "`peft_config.exclude_modules`"),
    fault("a target of OFT", "ZR446", "keys", adapter(peft_type="OFT", target_modules=["dense", "up"]),
          adapter(peft_type="OFT", target_modules=["dense"]), "`peft_config.target_modules`"),
    fault("a token behind the last", "ZR448", "keys", adapter(trainable_token_indices=[1030, 1031]),
          adapter(trainable_token_indices=[1030]), "has 1031, but the embedding has rows 0 to 1030"),
    fault("a token before the first", "ZR448", "keys", adapter(trainable_token_indices={"embed_in": [0, -1]}),
          adapter(trainable_token_indices={"embed_in": [0]})),
    fault("targets of an adapter that is not asked for", "ZR449", "keys", {"lora_target_modules": "all-linear"},
          {"lora_target_modules": "all-linear", "use_peft": False}),
    # what TRL, transformers, PEFT and torch refuse by themselves: one net
    fault("TRL's trainer", "ZR199", "recipe", "router_aux_loss_coef: 0.1", names="building TRL's trainer"),
    fault("transformers' model", "ZR199", "recipe", "attn_implementation: sparkle", names="the model"),
    fault("a package that is not installed", "ZR445", "recipe", "attn_implementation: flash_attention_2",
          "attn_implementation: sdpa"),
    fault("a model that is not there", "ZR444", "overrides", ("--model_name_or_path", "./nowhere"), names="./nowhere"),
    fault("prompts that are not there", "ZR589", "recipe", "sample_prompts: nowhere.jsonl", "sample_prompts: [a]"),
    fault("PEFT's configuration", "ZR199", "recipe", f"{LORA}\nlora_task_type: X", f"{LORA}\ndtype: bfloat16", "LoRA"),
    fault("torch's optimizer", "ZR199", "recipe", "optim_args: sparkle", names="the optimizer"),
    fault("transformers' schedule", "ZR199", "recipe", "lr_scheduler_kwargs: {x: 1}", names="the schedule"),
    fault("torch's data loader", "ZR199", "recipe", "dataloader_persistent_workers: true", names="the data loader"),
    fault("torch.compile", "ZR199", "recipe", "torch_compile: true\ntorch_compile_mode: x", "torch_compile: true",
          "compile"),
    fault("torch's recomputation", "ZR199", "recipe",
          "activation_checkpointing: true\nactivation_checkpointing_kwargs: {x: 1}",
          "activation_checkpointing: true\nactivation_checkpointing_kwargs: {}", "recomputing activations"),
    # ... and DeepSpeed and accelerate of a ds_config
    fault("a value that contradicts the run", "ZR911", "ds", {"train_batch_size": 128}, names="ds.json"),
    fault("a misspelt parameter of Adam", "ZR199", "ds",
          {"optimizer": {"type": "Adam", "params": {"lr": "auto", "b": 1}}}, ADAM),
    fault("a schedule that DeepSpeed does not have", "ZR199", "ds", {"scheduler": {"type": "WarmUpLR"}},
          schedule("auto")),
    fault("a schedule with one rate for both groups of LoRA+", "ZR195", "ds", CYCLE, schedule("auto"), "OneCycle",
          recipe=f"{LORA}\nloraplus_lr_ratio: 16.0\ndtype: bfloat16"),
    fault("a schedule's own largest rate", "ZR213", "ds", DECAY, {"scheduler": DECAY["scheduler"] | LARGEST},
          "warmup_max_lr"),
    # DeepSpeed's configuration
    fault("a ds_config that is not there", "ZR199", "recipe", "deepspeed: zero9.json", "deepspeed: ds.json", ds={}),
    fault("comments in JSON", "ZR199", "ds", '{"zero_optimization": {"stage": 2}} // two'),
    fault("a block that is no mapping", "ZR199", "ds", {"bf16": True}, names="reading ds.json"),
    fault("a stage left to others", "ZR261", "ds", {"zero_optimization": {"stage": "auto"}}, names="'auto'"),
    fault("no zero_optimization", "ZR213", "ds", {"zero_optimization": None}, names="zero_optimization"),
    fault("no accumulation", "ZR213", "ds", json.dumps(SOUND_DS_CONFIG | {"gradient_accumulation_steps": None}),
          {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": None}}, "bf16": None},
          names="gradient_accumulation_steps"),
    fault("a precision that is neither on nor off", "ZR213", "ds", {"bf16": {"enabled": None}}, names="bf16.enabled"),
    fault("an optimizer without a learning rate", "ZR213", "ds", {"optimizer": {"type": "AdamW", "params": None}}, ADAM,
          "lr"),
    fault("no clipping", "ZR213", "ds", {"gradient_clipping": None}, names="gradient_clipping",
          recipe="max_grad_norm: 0.5"),
    fault("no precision at stage 3", "ZR213", "ds", {"zero_optimization": STAGE_3, "bf16": None},
          {"zero_optimization": STAGE_3}, "bf16"),
    fault("a stage 3 that saves nothing", "ZR206", "ds", {"zero_optimization": {"stage": 3}},
          {"zero_optimization": STAGE_3}, recipe="save_model: true"),
    fault("a warm-up longer than the run", "ZR217", "recipe", "warmup_steps: 5\nmax_steps: 4", "warmup_steps: 5",
          "warmup_num_steps 5", ds=schedule(5)),
    fault("a warm-up along a logarithm", "ZR216", "ds",
          {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}, schedule("auto"), level="warning"),
    fault("an unknown block", "ZR220", "ds", {"gradient_cliping": 1.0}, names="gradient_cliping", level="warning"),
    fault("a pipeline", "ZR239", "ds", {"pipeline": {"stages": 2}}),
    fault("leaf modules at stage 2", "ZR220", "keys", zero(2, leaf_module={"classes": ["GPTNeoXMLP"]}),
          zero(3, leaf_module={"classes": ["GPTNeoXMLP"]}), "leaf_module", "warning"),
    fault("bf16 masters at a small learning rate", "ZR294", "keys",
          zero(2, STATES) | {"bf16": True, "learning_rate": 2e-5},
          zero(2, STATES) | {"bf16": True, "learning_rate": 5e-4}, level="warning"),
    fault("small buckets", "ZR860", "keys", zero(2, TAKEN, reduce_bucket_size="auto"), zero(2), "4,096 elements",
          "warning"),
    fault("small prefetches", "ZR860", "keys", zero(3, TAKEN, reduce_bucket_size=5e7), zero(3), "3,686", "warning"),
    fault("a rule of no kind for buckets", "ZR220", "keys", zero(2, {"bucket_sizes": "big"}, reduce_bucket_size=5e7),
          zero(2), "bucket_sizes", "warning"),
    fault("weights gathered module by module", "ZR864", "keys", zero(3, BY_MODULE), zero(3), "GPTNeoXLayer", "warning"),
    fault("hpZ with one group", "ZR224", "keys", zero(3, zero_hpz_partition_size=8), zero(3), level="warning"),
    fault("qwZ at stage 2", "ZR226", "keys", zero(2, zero_quantized_weights=True), zero(2),
          "zero_quantized_weights at stage 2"),
    fault("qgZ on one node", "ZR226", "keys", zero(3, zero_quantized_gradients=True), zero(3), level="warning"),
    fault("NVMe without a folder", "ZR233", "keys",
          zero(3, **NO_PREFETCH, offload_param=NVME | {"nvme_path": str(ROOT / "nowhere")}),
          zero(3, **NO_PREFETCH, offload_param=NVME), "nowhere"),
    fault("NVMe without a name", "ZR233", "keys", zero(3, offload_optimizer=NVME | {"nvme_path": "auto"}),
          zero(3, offload_optimizer=NVME | {"nvme_path": "auto"}) | {"nvme_path": str(ROOT)}),
    fault("NVMe with checkpoints", "ZR230", "keys", zero(3, offload_optimizer=NVME) | {"save_strategy": "epoch"},
          zero(3, offload_optimizer=NVME) | {"save_strategy": "no"}, level="warning"),
    # the launch
    fault("another number of processes", "ZR347", "recipe", "num_processes: 4", "num_processes: 2", "num_processes: 4"),
    fault("two ds_configs", "ZR201", "recipe", "deepspeed: other.json", files={"other.json": "{}"}, ds={},
          accelerate=ACCELERATE),
    fault("an inline stage 3 that saves nothing", "ZR206", "accelerate", f"{INLINE}3\n",
          f"{INLINE}3\n  zero3_save_16bit_model: true\n", recipe="save_model: true"),
    fault("parallelism in an accelerate file", "ZR244", "accelerate",
          f"{ACCELERATE}parallelism_config:\n  parallelism_config_sp_size: 2\n", ACCELERATE, ds={}),
    fault("FP8", "ZR199", "accelerate", f"{DDP}mixed_precision: fp8\n", DDP),
    fault("an accelerate file of another form", "ZR199", "accelerate", "deepspeed_config: zero2\n", ACCELERATE, ds={}),
    fault("leaf modules that the model does not have", "ZR199", "accelerate",
          f"{INLINE}2\n  deepspeed_moe_layer_cls_names: X\n",
          f"{INLINE}2\n  deepspeed_moe_layer_cls_names: GPTNeoXMLP\n"),
    fault("mpirun", "ZR331", "accelerate", f"{DDP}mpirun_config:\n  mpirun_hostfile: hosts\n", DDP),
    fault("machines started by pdsh", "ZR335", "accelerate", f"{INLINE}2\nnum_machines: 2\n",
          f"{INLINE}2\n  deepspeed_multinode_launcher: standard\nnum_machines: 2\n"),
    fault("machines that meet themselves", "ZR336", "accelerate", f"{DDP}num_machines: 2\nmain_process_ip: 127.0.0.1\n",
          f"{DDP}num_machines: 2\nmain_process_ip: 192.0.2.1\n", "127.0.0.1"),
    fault("fp16 by the launcher alone", "ZR339", "accelerate", f"{DDP}mixed_precision: fp16\n", DDP, level="warning"),
    fault("several processes of which one starts", "ZR137", "accelerate", DDP.replace("MULTI_GPU", '"NO"'), DDP,
          level="warning"),
    fault("several processes on CPUs of which one starts", "ZR137", "accelerate",
          DDP.replace("MULTI_GPU", "MULTI_CPU") + "use_cpu: true\n", DDP),
    fault("no kind of launch", "ZR137", "accelerate", DDP.replace("MULTI_GPU", "null"), DDP, level="warning"),
    fault("one process", "ZR138", "keys", zero(2), zero(2, **ON_CPU), level="warning", environment={"WORLD_SIZE": "1"}),
    fault("a module that torch does not have", "ZR199", "ds", cast_in("torch.nn.Linaer"), cast_in("torch.nn.Linear"),
          "reading ds.json", recipe="bf16: false"),
    # FSDP
    fault("FSDP1", "ZR314", "accelerate",
          DDP.replace("MULTI_GPU", "FSDP") + "fsdp_config: {fsdp_backward_prefetch: NO_PREFETCH}\n", FSDP2,
          level="warning"),
    fault("a word of FSDP that accelerate does not know", "ZR368", "accelerate",
          f"{FSDP2}  fsdp_backward_prefetch: AUTO\n", f"{FSDP2}  fsdp_backward_prefetch: BACKWARD_PRE\n",
          "prefetch: AUTO"),
    fault("parameters on the CPU, for a CPU", "ZR375", "accelerate", f"{FSDP2}  fsdp_offload_params: true\n", FSDP2),
    fault("a number for a switch of FSDP", "ZR199", "accelerate", f"{FSDP2}  fsdp_offload_params: 0.0\n", FSDP2,
          "fsdp_config"),
    fault("activations recomputed twice", "ZR320", "accelerate", f"{FSDP2}  fsdp_activation_checkpointing: true\n",
          FSDP2, recipe="activation_checkpointing: true"),
    fault("FSDP1's own words", "ZR312", "recipe", "fsdp: hybrid_shard auto_wrap", "fsdp: [full_shard, auto_wrap]",
          "hybrid"),
    fault("a layer that the model lacks", "ZR199", "recipe", f"{WRAPPED} NoSuchLayer", f"{WRAPPED} GPTNeoXLayer",
          "the layers"),
    fault("a key that FSDP2 does not read", "ZR315", "recipe", "fsdp: true\nfsdp_config: {sharding_strategy: 1}",
          "fsdp: true"),
    fault("FSDP and DeepSpeed", "ZR311", "recipe", "fsdp: true\ndeepspeed: ds.json", "deepspeed: ds.json", ds={}),
    fault("a batch size that FSDP2 seeks", "ZR321", "recipe", "fsdp: true\nauto_find_batch_size: true", "fsdp: true"),
    fault("the best of FSDP models without their states", "ZR322", "recipe",
          f"fsdp: true\nsave_only_model: true\n{BEST}", f"fsdp: true\n{BEST}", files=EVALUATES),
    fault("two FSDP configurations", "ZR310", "accelerate", FSDP2, DDP,
          recipe="fsdp: true\nfsdp_config: {reshard_after_forward: false}"),
    # rows in one sequence
    fault("packs beside each other under sdpa", "ZR464", "keys",
          {"packing": True, "max_length": 2048, "per_device_train_batch_size": 2, "bf16": False},
          {"packing": True, "max_length": 2048, "per_device_train_batch_size": 2, "bf16": True}, "packing", "warning"),
    fault("long rows in one sequence under a mask", "ZR464", "keys",
          {"padding_free": True, "max_length": 1024, "per_device_train_batch_size": 4, "torch_compile": True},
          {"padding_free": True, "max_length": 128, "per_device_train_batch_size": 4, "torch_compile": True},
          "padding_free", "warning"),
    fault("shared sequences, packed", "ZR249", "keys", zero(3) | SHARED | {"packing": True}, zero(3) | SHARED),
    fault("4 bit at stage 3", "ZR416", "keys", FOUR | zero(3), FOUR | zero(2), level="warning"),
    # what stops a run once the weights are loaded
    fault("save_steps", "ZR824", "keys", {"save_strategy": "steps", "save_steps": 0}, {"save_strategy": "epoch"}),
    fault("eval_on_start", "ZR825", "keys", {"eval_on_start": True}, {"eval_on_start": True, "eval_strategy": "steps"}),
    fault("early_stopping", "ZR826", "keys", {"early_stopping_patience": 2},
          KEEPS_BEST | {"early_stopping_patience": 2}),
    fault("best_of_models_only", "ZR2001", "keys", zero(2) | {"save_only_model": True, "load_best_model_at_end": True},
          {"save_only_model": True, "load_best_model_at_end": True}),
    fault("auto_find_batch_size", "ZR2002", "keys", zero(3) | {"auto_find_batch_size": True},
          zero(2) | {"auto_find_batch_size": True}),
    fault("monitor_package", "ZR2003", "keys", zero(2, {"comet": {"enabled": True}}),
          zero(2, {"comet": {"enabled": False}})),
    fault("liger_package", "ZR470", "keys", {"use_liger_kernel": True}, {"use_liger_kernel": False}),
    fault("quantized_without_lora", "ZR473", "keys", {"load_in_8bit": True, "random_weights": False},
          EIGHT | {"random_weights": False}),
    fault("adapter_alone", "ZR450", "keys", {"peft_config": {"r": 4}}, PEFT | {"peft_config": {"r": 4}}),
    fault("adapter_not_tried", "ZR451", "keys", PEFT | {"peft_config": {"peft_type": "BOFT"}},
          PEFT | {"peft_config": {"r": 4}}),
    fault("adapter_not_tried", "ZR451", "keys", PEFT | zero(3) | MISS, PEFT | zero(2) | MISS),
    fault("adapter_not_tried", "ZR451", "keys", PEFT | {"peft_config": {"init_lora_weights": "eva"}}, PEFT | GAUSSIAN),
    fault("adapter_not_tried", "ZR451", "keys", PEFT | {"peft_config": {"init_lora_weights": "pissa"}},
          PEFT | GAUSSIAN),
    fault("loraplus", "ZR452", "keys", PLUS, PEFT | PLUS),
    fault("loraplus", "ZR452", "keys", PEFT | PLUS | {"peft_config": {"peft_type": "OFT"}}, PEFT | PLUS),
    fault("loraplus", "ZR452", "keys", PEFT | PLUS | zero(2, ADAM), PEFT | PLUS | zero(2)),
    fault("eight_bit_fsdp", "ZR477", "keys", EIGHT | {"fsdp": True}, EIGHT | zero(2)),
    fault("fp16_on_cpu", "ZR373", "keys", {"fp16": True, "bf16": False}, {"bf16": True}, device="cpu"),
    fault("activation_offloading", "ZR374", "keys", {"activation_offloading": True}, {"activation_offloading": False},
          device="cpu"),
    fault("quantized_communication_on_cpu", "ZR2004", "keys", zero(3, zero_quantized_weights=True), zero(3),
          device="cpu"),
    fault("quantized_sizes", "ZR2005", "keys", zero(3, zero_quantized_weights=True), zero(3), environment=TWO_NODES),
    fault("hpz_partition", "ZR2006", "keys", zero(3, zero_hpz_partition_size=3), zero(3, zero_hpz_partition_size=2),
          environment=TWO_NODES),
    fault("nvme_prefetch", "ZR2007", "keys", zero(3, offload_param=NVME), zero(3, **NO_PREFETCH, offload_param=NVME)),
    fault("grad_accum_dtype", "ZR2008", "keys", zero(0, {"data_types": {"grad_accum_dtype": "fp32"}}),
          zero(2, {"data_types": {"grad_accum_dtype": "fp32"}})),
    fault("muon", "ZR2009", "keys", zero(3, MUON), zero(3, MUON, reduce_scatter=False)),
    fault("zenflow", "ZR2010", "keys", zero(2, **ON_CPU, zenflow={"topk_ratio": 0.1}), zero(2, **ON_CPU)),
    fault("zenflow", "ZR2010", "keys", zero(3, **ON_CPU, zenflow={"topk_ratio": 0.25}), zero(3, **ON_CPU)),
    fault("data_routing", "ZR2011", "keys",
          zero(2, {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True}}}),
          zero(2, {"data_efficiency": {"enabled": True, "data_routing": {"enabled": False}}})),
    fault("managed_accumulation", "ZR2013", "keys", zero(2, {"managed_gradient_accumulation": False}), zero(2)),
    fault("untested_optimizer", "ZR2012", "keys", zero(2, SGD),
          zero(2, SGD | {"zero_allow_untested_optimizer": True})),
    fault("untested_optimizer", "ZR2012", "keys", zero(1, SGD), zero(0, SGD)),
    fault("factored moments of flat pieces", "ZR270", "keys", zero(1) | {"optim": "adafactor"},
          zero(0) | {"optim": "adafactor"}, "adafactor", "warning"),
    fault("8 bits of flat pieces", "ZR270", "keys", zero(3) | {"optim": "paged_adamw_8bit"}, {"optim": "adamw_8bit"},
          "paged_adamw_8bit", "warning"),
    fault("flat pieces of the ds_config's optimizer", "ZR270", "keys", zero(2, FACTORED) | {"optim": "adafactor"},
          zero(2, ADAM) | {"optim": "adafactor"}, "adafactor", "warning"),
    fault("deprecated_offload", "ZR2014", "keys", zero(2, cpu_offload=True), zero(2, ADAM, cpu_offload=True)),
    fault("no_gradient_norm", "ZR2015", "keys", zero(2, compute_grad_norm=False),
          zero(2, compute_grad_norm=False) | {"max_grad_norm": 0}),
    fault("lion_on_cpu", "ZR2016", "keys", zero(2, LION), zero(2, LION, **ON_CPU), device="cpu"),
    fault("zero_predivide", "ZR2033", "keys", zero(1, {"gradient_predivide_factor": 0}),
          zero(1, {"gradient_predivide_factor": 2})),
    fault("gradient_scaling", "ZR2017", "keys", zero(2, {"prescale_gradients": True}, reduce_scatter=True),
          zero(1, {"prescale_gradients": True})),
    fault("gradient_scaling", "ZR2017", "keys", zero(3, {"gradient_predivide_factor": 2.0}), zero(3)),
    fault("gradient_scaling", "ZR2017", "keys", zero(3, {"gradient_predivide_factor": 2.0}, reduce_scatter=False),
          zero(3, {"prescale_gradients": True}, reduce_scatter=False)),
    fault("bf16_masters", "ZR2018", "keys", zero(2, MASTERS), zero(2, MASTERS, **ON_CPU)),
    fault("bf16_masters", "ZR2018", "keys", zero(3, MASTERS, **ON_CPU) | {"optim": "adagrad"},
          zero(3, MASTERS | ADAM, **ON_CPU)),
    fault("bf16_states", "ZR2019", "keys", zero(2, STATES, **ON_CPU), zero(2, STATES | ADAM, **ON_CPU)),
    fault("autocast_quantized", "ZR2020", "keys",
          autocast(3) | zero(3, {"torch_autocast": AUTOCAST}, zero_quantized_weights=True), autocast(3)),
    fault("liger_loss", "ZR471", "keys",
          {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}},
          {"use_liger_kernel": True, "liger_kernel_config": {"rope": True}}),
    fault("a best model by a metric that no evaluation has", "ZR871", "keys",
          KEEPS_BEST | {"metric_for_best_model": "eval_f1"},
          KEEPS_BEST | {"metric_for_best_model": "eval_mean_token_accuracy"}, "eval_f1"),
    fault("a best model by a metric of another name", "ZR871", "keys", KEEPS_BEST | {"metric_for_best_model": "f1"},
          KEEPS_BEST | {"metric_for_best_model": "loss"}),
    fault("to resume from models alone", "ZR179", "keys",
          {"save_only_model": True, "resume_from_checkpoint": True, "save_strategy": "epoch"},
          {"save_only_model": True, "save_strategy": "epoch"}, level="warning"),
    # what makes a run another one than its recipe says
    fault("hub_strategy", "ZR459", "keys", {"push_to_hub": True, "hub_strategy": "checkpoint"}, {"push_to_hub": False}),
    fault("best_between_saves", "ZR828", "keys", KEEPS_BEST | {"save_steps": 4},
          KEEPS_BEST | {"save_strategy": "best"}),
    fault("early_stopping_threshold", "ZR827", "keys", {"early_stopping_threshold": 0.1}, {}),
    fault("jit_checkpoint", "ZR372", "keys", {"enable_jit_checkpoint": True}, {}),
    fault("even_batches", "ZR369", "keys", {"accelerator_config": {"even_batches": False}}, {}),
    fault("dispatch_batches", "ZR370", "keys", {"accelerator_config": {"dispatch_batches": True}},
          {"accelerator_config": {"dispatch_batches": True, "split_batches": True}}),
    fault("stream_workers", "ZR371", "keys", {"dataset_streaming": True, "dataloader_num_workers": 2},
          {"dataset_streaming": True, "dataloader_num_workers": 1}),
    fault("tokens averaged on each device", "ZR194", "keys", {"average_tokens_across_devices": False}, {},
          level="warning"),
    fault("eval_packing", "ZR829", "keys", {"eval_packing": True, "eval_strategy": "steps"}, {"eval_packing": True}),
    fault("quantized_random", "ZR475", "keys", EIGHT, EIGHT | {"random_weights": False}),
    fault("eight_bit_stage_3", "ZR478", "keys", EIGHT | zero(3), EIGHT | zero(2)),
    fault("four_bit_fsdp", "ZR479", "keys", FOUR | {"fsdp": True},
          FOUR | {"fsdp": True, "bnb_4bit_quant_storage": "bfloat16"}),
    fault("four_bit_storage", "ZR480", "keys", FOUR | zero(2) | {"bnb_4bit_quant_storage": "float16"},
          FOUR | zero(2) | {"bnb_4bit_quant_storage": "bfloat16"}),
    fault("quantized_twice", "ZR476", "keys", FOUR | zero(3, zero_quantized_weights=True), FOUR | zero(3)),
    fault("fp16_stage_0", "ZR2021", "keys", zero(0) | {"fp16": True, "bf16": False},
          zero(1) | {"fp16": True, "bf16": False}),
    fault("hpz_offload", "ZR2022", "keys", zero(3, zero_hpz_partition_size=2, offload_param={"device": "cpu"}),
          zero(3, zero_hpz_partition_size=2, offload_param={"device": "none"}), environment=TWO_NODES),
    fault("nvme_stage", "ZR2023", "keys", zero(2, offload_optimizer=NVME), zero(3, offload_optimizer=NVME)),
    fault("autotp", "ZR2024", "keys", zero(1, {"tensor_parallel": {"autotp_size": "2"}}), zero(1)),
    fault("deepcompile", "ZR2025", "keys", zero(3, {"compile": {"deepcompile": True}}), zero(3)),
    fault("super_offload", "ZR2026", "keys", zero(3, offload_optimizer={"device": "cpu", "super_offload": True}),
          zero(3, **ON_CPU)),
    fault("quantized_frozen", "ZR2027", "keys", zero(3, zero_quantized_nontrainable_weights=True) | PEFT,
          zero(3) | PEFT),
    fault("summed_gradients", "ZR2028", "keys", zero(2, {"gradient_allreduce_op": "SUM"}),
          zero(2, {"gradient_allreduce_op": "mean"})),
    fault("bf16_masters_precision", "ZR2029", "keys", zero(2, STATES) | {"bf16": False}, zero(2, STATES)),
    fault("masters_never_compared", "ZR2030", "keys", zero(3, STATES | ADAM, offload_optimizer=NVME),
          zero(3, ADAM, offload_optimizer=NVME)),
    fault("masters_never_compared", "ZR2030", "keys",
          zero(2, {"fp16": {"enabled": "auto", "fp16_master_weights_and_grads": True}}), zero(2)),
    fault("autocast_16_bit", "ZR2031", "keys", autocast(bf16=True), autocast()),
    fault("autocast_dtype", "ZR2032", "keys", autocast(dtype=None), autocast()),
    fault("autocast_dtype", "ZR2032", "keys", autocast(dtype="fp16"), autocast(dtype="bf16")),
]  # fmt: skip
