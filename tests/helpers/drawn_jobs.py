"""Jobs drawn at random: a recipe, a strategy and a number of processes, for comparisons with plain torch."""

import json
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from tests.helpers.tiny import llama_config, write_recipe, write_rows

AUTO_BATCH = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
ADAM = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
COSINE = {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
OPTIMIZERS = [
    {"optim": "adamw_torch"},
    {"optim": "adamw_torch_fused", "adam_beta1": 0.8, "adam_epsilon": 1e-6},
    {"optim": "sgd", "learning_rate": 5e-3},
    {"optim": "rmsprop"},
    {"optim": "adagrad", "learning_rate": 5e-3},
    {"optim": "lion_32bit"},
    {"optim": "ademamix"},
    {"optim": "paged_adamw_32bit"},
]
SCHEDULES = [
    {"lr_scheduler_type": "linear"},
    {"lr_scheduler_type": "constant"},
    {"lr_scheduler_type": "cosine"},
    {"lr_scheduler_type": "constant_with_warmup"},
    {"lr_scheduler_type": "inverse_sqrt"},
    {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-6}},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.3}},
    {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2}},
]
LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]}
ADAPTERS = [
    {},
    {},
    {},
    LORA,
    LORA | {"use_dora": True},
    LORA | {"use_rslora": True, "lora_alpha": 32},
    LORA | {"loraplus_lr_ratio": 16.0},
    LORA | {"lora_modules_to_save": ["lm_head"]},
    LORA | {"lora_target_modules": ".*[.](o_proj|dense)", "loraplus_lr_ratio": 4.0},
    LORA | {"peft_config": {"layers_to_transform": [1]}},
    LORA | {"peft_config": {"bias": "lora_only"}},
]
JOINED = [{}, {}, {"packing": True}, {"padding_free": True}, {"packing": True, "packing_strategy": "wrapped"}]
FORMS = ("alpaca", "text", "messages")


def ds_config(stage: int, **blocks: Any) -> dict[str, Any]:
    """A DeepSpeed configuration with "auto" for what the recipe says. `blocks` are put over it."""
    zero = {"stage": stage} | blocks.pop("zero", {})
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return AUTO_BATCH | {"bf16": {"enabled": "auto"}, "zero_optimization": zero} | blocks


ON_CPU = {"offload_optimizer": {"device": "cpu"}}
DS_CONFIGS = [
    *[ds_config(stage) for stage in (0, 1, 2, 3)],
    ds_config(2, zero=ON_CPU),
    ds_config(3, zero=ON_CPU | {"offload_param": {"device": "cpu"}}),
    ds_config(2, optimizer={"type": "AdamW", "params": ADAM | {"torch_adam": True}}),
    ds_config(3, optimizer={"type": "Adam", "params": ADAM | {"torch_adam": True, "adam_w_mode": False}}),
    ds_config(2, zero=ON_CPU, optimizer={"type": "Adam", "params": ADAM}),
    ds_config(2, scheduler={"type": "WarmupLR", "params": WARMUP}),
    ds_config(3, scheduler={"type": "WarmupDecayLR", "params": WARMUP | {"total_num_steps": "auto"}}),
    ds_config(2, scheduler={"type": "WarmupCosineLR", "params": COSINE}),
    ds_config(
        1, optimizer={"type": "SGD", "params": {"lr": "auto", "momentum": 0.9}}, zero_allow_untested_optimizer=True
    ),
    ds_config(3, optimizer={"type": "Adagrad", "params": {"lr": "auto"}}),
    ds_config(1, gradient_clipping=0.2),
    ds_config(3, zero={"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}),
]
PLACES = [None, None, "fsdp2", "fsdp2", *DS_CONFIGS]


@st.composite
def jobs(draw) -> dict[str, Any]:
    """{"recipe": keys, "deepspeed": a configuration or None, "fsdp": bool, "ranks", "model", "tied", "form"}."""
    place = draw(st.sampled_from(PLACES))
    ranks = draw(st.sampled_from([2, 2, 2, 1]))
    recipe: dict[str, Any] = {
        "learning_rate": 1e-3,
        "per_device_train_batch_size": draw(st.sampled_from([1, 2, 3])),
        "gradient_accumulation_steps": draw(st.sampled_from([1, 1, 2, 3])),
        "max_grad_norm": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "warmup_steps": draw(st.sampled_from([0, 1, 1])),
        "label_smoothing_factor": draw(st.sampled_from([0.0, 0.0, 0.0, 0.1])),
        "activation_checkpointing": draw(st.booleans()),
        "train_sampling_strategy": draw(st.sampled_from(["random", "random", "group_by_length", "sequential"])),
        "seed": draw(st.integers(0, 5)),
    }
    for choices in (OPTIMIZERS, SCHEDULES, ADAPTERS, JOINED):
        recipe |= draw(st.sampled_from(choices))
    form = draw(st.sampled_from(FORMS))
    if form == "alpaca" and draw(st.booleans()):
        recipe["completion_only_loss"] = False
    return {
        "recipe": recipe,
        "deepspeed": place if isinstance(place, dict) else None,
        "fsdp": place == "fsdp2" and ranks == 2,
        "ranks": ranks,
        "model": draw(st.sampled_from(["llama", "llama", "gpt_neox"])),
        "tied": draw(st.booleans()),
        "form": form,
    }


def write_job(folder: Path, job: dict[str, Any]) -> list[str]:
    """The words of run_sft.py for a drawn job. `folder` holds models and rows already (`write_parts`)."""
    out = folder / "out"
    recipe = job["recipe"] | {
        "model_name_or_path": str(folder / f"{job['model']}-{job['tied']}"),
        "dataset_name": str(folder / job["form"]),
        "dataset_format": "alpaca" if job["form"] == "alpaca" else None,
        "random_weights": False,
        "bf16": False,
        "dtype": "float32",
        "max_steps": 5,
        "max_length": 96,
    }
    if job["form"] == "messages":
        recipe["chat_template_path"] = str(folder / "template.jinja")
    path = write_recipe(folder, **recipe)
    words = [str(path), "--output_dir", str(out), "--overwrite", "true"]
    if job["deepspeed"] is not None:
        (folder / "ds.json").write_text(json.dumps(job["deepspeed"]))
        words += ["--deepspeed", str(folder / "ds.json")]
    if job["fsdp"]:
        words += ["--fsdp", "true"]
    return words


def write_parts(folder: Path) -> None:
    """Models with weights, and the rows of each form."""
    write_recipe(folder)  # its model folder has the tokenizer
    for tied in (False, True):
        torch.manual_seed(0)
        sizes = {"vocab_size": 1031, "hidden_size": 64, "intermediate_size": 101, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0}
        sizes |= {"pad_token_id": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": tied}
        neox = GPTNeoXConfig(**sizes)
        for name, config in (("llama", llama_config(tie_word_embeddings=tied)), ("gpt_neox", neox)):
            model = folder / f"{name}-{tied}"
            AutoModelForCausalLM.from_config(config).save_pretrained(model)
            for file in (folder / "model").glob("tokenizer*"):
                (model / file.name).write_bytes(file.read_bytes())
    rows = write_rows(folder / "alpaca", count=60)
    lines = [json.loads(line) for line in (rows / "train.jsonl").read_text().splitlines()]
    texts = [{"text": f"{row['instruction']} {row['output']}"} for row in lines]
    turns = []
    for row in lines:
        user = {"role": "user", "content": row["instruction"]}
        turns.append({"messages": [user, {"role": "assistant", "content": row["output"]}]})
    for name, made in (("text", texts), ("messages", turns)):
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    (folder / "template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|endoftext|>{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
