"""Configurations from elsewhere run or are refused, and what is shown is what the engine gets; our recipes train."""

import json
import math
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from tests.helpers import cases
from tests.helpers.seeded import grid
from tests.helpers.tiny import ROOT, named, write_recipe
from tests.helpers.two_ranks import set_by_launch
from zero_recipes.checks.deepspeed_objects import _handed_over, resolved_ds_config
from zero_recipes.checks.preflight import preflight
from zero_recipes.config import recipe as recipes
from zero_recipes.tools.plan.job import known_models
from zero_recipes.tools.rehearse.small import with_fewer_layers
from zero_recipes.tools.verify import verify

BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size")


@pytest.mark.parametrize(
    "stage, keys",
    [
        (3, {"gradient_accumulation_steps": 3, "max_grad_norm": 0.7}),
        grid(2, {"max_steps": -1, "num_train_epochs": 0.2, "gradient_accumulation_steps": 2, "warmup_steps": 2}),
    ],
)
def test_show_and_the_resolved_recipe_say_what_deepspeed_really_gets(two, tmp_path, stage, keys):
    """They and the engine's own configuration agree on every value that was "auto", a scheduler's steps included.

    The resolved recipe, sizes by hand and all, runs again: DeepSpeed 0.19.8 would fail on them at stage 3 on a CPU if
    its process group were not there first (launch.start_process_group).
    """
    config = json.loads(Path(f"ds_configs/zero{stage}.json").read_text())
    if stage == 2:
        rates = {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}
        steps = {"warmup_num_steps": "auto", "total_num_steps": "auto"}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": rates | steps | {"warmup_type": "linear"}}
    path = write_recipe(tmp_path, deepspeed=config, **keys)
    out = ["--output_dir", str(tmp_path / "o")]
    run, findings = preflight(path, recipes.read_recipe_file(path), out, {"WORLD_SIZE": "2"})
    assert findings == []
    shown = resolved_ds_config(run, 240)
    real = two.run(cases.engine_config, argv=[str(path), *out])[0]
    assert '"auto"' not in json.dumps(shown)
    for key, value in shown.items():
        assert real[key] == value, key
    if stage == 3:
        # the parser of `check` gets it too, but for what needs a process group or accelerate's own optimizer
        asked = _handed_over(run)
        assert asked.pop("steps_per_print") == float("inf") and real.pop("steps_per_print") in ("inf", float("inf"))
        own = {"train_batch_size": 12, "zero_allow_untested_optimizer": True}
        assert asked | own == real | {key: own[key] for key in own if key in real}
    resolved = tmp_path / "o" / "recipe.resolved.yaml"
    assert yaml.safe_load(resolved.read_text())["deepspeed"] == shown
    again = two.run(cases.train, argv=[str(resolved), "--output_dir", str(tmp_path / "p")])[0]
    first = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert again["stage"] == stage and again["metrics"]["loss_history"] == first["loss_history"]
    sized = {key: 6_250_000 for key in BUCKETS if key in config["zero_optimization"]}
    assert len(sized) == stage - 1 and sized.items() <= real["zero_optimization"].items()  # a small model's on CPUs
    config["zero_optimization"] |= dict.fromkeys(sized, 50_000)  # smaller than the model
    config.pop("bucket_sizes")
    small = ["--deepspeed", json.dumps(config), "--output_dir", str(tmp_path / "q")]
    losses = two.run(cases.train, argv=[str(path), *small])[0]["metrics"]["loss_history"]
    assert losses == pytest.approx(first["loss_history"], rel=1e-6)


# accelerate files in the form of those that TRL ships and `accelerate config` writes: (text, strategy, processes)
LAUNCHED = {
    "zero3": ("distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"
              "  offload_optimizer_device: cpu\n  zero3_init_flag: true\n  zero3_save_16bit_model: true\n"
              "  zero_stage: 3\n", "zero3_offload", 2),
    "fsdp2": ("distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
              "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_cpu_ram_efficient_loading: true\n"
              "  fsdp_reshard_after_forward: true\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n", "fsdp2", 2),
    "single_gpu": ("distributed_type: 'NO'\nmixed_precision: 'bf16'\nuse_cpu: false\n", "single", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ["zero3", grid("fsdp2"), grid("single_gpu")])
def test_accelerate_files_brought_along_run_with_what_the_launch_sets(one, two, tmp_path, name):
    text, strategy, processes = LAUNCHED[name]
    file, path = tmp_path / "a.yaml", write_recipe(tmp_path, save_model=True, save_strategy="steps", save_steps=2)
    file.write_text(f"compute_environment: LOCAL_MACHINE\nnum_machines: 1\nnum_processes: 8\n{text}")
    argv, environment = [str(path), "--output_dir", str(tmp_path / "out")], set_by_launch(file, 2)
    ended = (one if processes == 1 else two).run(cases.train, argv=argv, environment=environment)
    metrics = ended[0]["metrics"]
    assert (metrics["status"], metrics["strategy"]) == ("ok", strategy) and verify(tmp_path / "out")["tensors"] == 28
    assert list((tmp_path / "out").glob("checkpoint-2/*.safetensors")), "checkpoints hold a model too"


# the recipes on conversations: each trains a small model of its own class, with every key but sizes and steps


RECIPES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "recipes").glob("*.yaml"))}
NAMES = [name for name, recipe in RECIPES.items() if recipe.get("assistant_only_loss")]


# all weights, LoRA, 4 bits, experts, a composite model, layers of several kinds
IN_EVERY_RUN = (
    "qwen3-4b",
    "llama-3.2-3b-lora",
    "qwen3-8b-qlora",
    "gpt-oss-20b-lora",
    "gemma-4-e4b-lora",
    "nemotron-3-nano-lora",
)


def recipes_of_conversations() -> list:
    """In every run one of each kind; in the grid the others."""
    return [name if name in IN_EVERY_RUN else grid(name) for name in NAMES]


SMALL = {"vocab_size": 1031, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 4}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
SMALL_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL_TOWER |= {"image_size": 56, "patch_size": 14, "num_key_value_heads": 2, "head_dim": 16}
SMALL_TOWER |= {"mm_embed_dim": 64, "mm_posemb_size": 16, "output_proj_dims": 64}
SMALL_EAR = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32}
# of some architectures, whose other parts have sizes of their own
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
FEW_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
OWN_SIZES = {
    "gemma4": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 1031, "num_kv_shared_layers": 0},
    "glm4_moe_lite": FEW_EXPERTS
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_head_dim": 32, "v_head_dim": 16}
    | {"num_key_value_heads": 4},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "shared_intermediate_size": 64}
    | {"num_experts_per_tok": 2},
    "nemotron_h": FEW_EXPERTS
    | {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2}
    | {"moe_shared_expert_intermediate_size": 32},
    "qwen3_5": DELTA,
    "qwen3_5_moe": DELTA | FEW_EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
}
QUICK = {"max_steps": 2, "max_length": 128, "global_batch_size": 2, "eval_strategy": "no", "save_strategy": "no"}
QUICK |= {"sample_max_new_tokens": 2, "warmup_steps": 0}
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    row = {"messages": [{"role": "user", "content": "Say moss."}, {"role": "assistant", "content": "Moss, and moss."}]}
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 64)
    return folder


def small_config(name: str) -> PretrainedConfig:
    """Of a model in the package, with two layers."""
    config = with_fewer_layers(AutoConfig.for_model(**known_models()[name]["config"]), 2).config
    text = config.get_text_config()
    sizes = SMALL | OWN_SIZES.get(config.model_type, {})
    if getattr(text, "num_local_experts", None) == 0:  # Granite 4.0-H-Micro: dense, of a class that takes experts
        sizes |= {"num_local_experts": 0, "num_experts_per_tok": 0}
    for key, value in sizes.items():
        setattr(text, key, value)
    if text.is_heterogeneous:
        wide = [number for number, kind in enumerate(text.layer_types) if kind == "full_attention"]
        text.per_layer_config = {number: {"head_dim": 32} for number in wide}
    if text is not config:
        config.mm_tokens_per_image = 4
        for key, value in SMALL_TOWER.items():
            setattr(config.vision_config, key, value)
        for key, value in SMALL_EAR.items():
            if hasattr(config, "audio_config"):
                setattr(config.audio_config, key, value)
    return config


@pytest.mark.parametrize("name", recipes_of_conversations())
def test_a_recipe_trains_a_small_model_of_its_class(one, two, rows, tmp_path, name):
    recipe = RECIPES[name]
    if recipe.get("load_in_4bit"):
        pytest.importorskip("bitsandbytes")
    config = small_config(recipe["model_name_or_path"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    is_full, alone = not recipe.get("use_peft"), recipe.get("load_in_4bit")
    strategy = "single" if alone else "zero3" if is_full else "zero2"
    keys = {"model_name_or_path": tmp_path / "model", "output_dir": tmp_path / "out"} | QUICK
    if "datasets" in recipe:
        keys["datasets"] = json.dumps([{"path": str(rows), "split": "train"}])
    else:
        keys |= {"dataset_name": rows, "dataset_config": "null"}
    options = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    argv = [f"recipes/{name}.yaml", *options, *named(strategy)]
    metrics = (one if alone else two).run(cases.train, argv=argv)[0]["metrics"]
    assert (metrics["status"], metrics["strategy"]) == ("ok", strategy)
    assert len(metrics["loss_history"]) == 2 and all(math.isfinite(loss) for loss in metrics["loss_history"])
    assert 0 < metrics["tokens"]["supervised"] < metrics["tokens"]["non_padding"]
    assert (metrics["trainable_parameters"] == metrics["parameters"]) == is_full
    saved = "model.safetensors" if is_full else "adapter_model.safetensors"
    assert (tmp_path / "out" / saved).is_file()
    assert (tmp_path / "out" / "samples.jsonl").read_text().count("\n") == 2
