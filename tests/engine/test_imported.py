"""A recipe that was imported passes all checks and trains: a tiny model of the family, one step on a CPU."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, Qwen2Config

from tests.helpers import cases
from tests.helpers.seeded import grid
from tests.helpers.tiny import ROOT, llama_config
from zero_recipes.config.accelerate import launched_environment
from zero_recipes.config.recipe import read_recipe_file
from zero_recipes.tools import main as cli

CHAT = {"conversations": [{"from": "human", "value": "Say 1."}, {"from": "gpt", "value": "The red fish hums."}]}
ALPACA = {"instruction": "Say 1.", "input": "now", "output": "Word 1."}
# what a GPU has, and what makes a run of one step
ON_CPU = ["--attn_implementation", "sdpa", "--use_liger_kernel", "false", "--optim", "adamw_torch", "--max_steps", "1"]
ON_CPU += ["--warmup_steps", "0"]
AXOLOTL_LORA = "lora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n"
AXOLOTL_FORMAT = """
base_model: MODEL
model_type: MistralForCausalLM
tokenizer_type: LlamaTokenizer
datasets:
  - path: rows.jsonl
    ds_type: json
    type:
      system_prompt: ""
      field_instruction: q
      field_output: a
      format: "[INST] {instruction} [/INST]"
      no_input_format: "[INST] {instruction} [/INST]"
val_set_size: 0
adapter: lora
lora_modules_to_save: [embed_tokens, lm_head]
sequence_len: 128
micro_batch_size: 2
optimizer: adamw_torch
lr_scheduler: linear
learning_rate: 1e-4
flash_attention: true
save_safetensors: true
neftune_noise_alpha: 5
"""
AXOLOTL_QLORA = """
base_model: MODEL
load_in_4bit: true
datasets:
  - path: rows.jsonl
    type: alpaca
val_set_size: 0.1
adapter: qlora
sequence_len: 128
sample_packing: true
eval_sample_packing: true
micro_batch_size: 2
optimizer: adamw_8bit
learning_rate: 0.0002
gradient_checkpointing: true
flash_attention: true
eval_steps: 1
save_steps: 2
early_stopping_patience: 3
special_tokens: {pad_token: "<|padding|>"}
"""
FACTORY = "model_name_or_path: MODEL\nstage: sft\ndo_train: true\ndataset: mine\ndataset_dir: .\nbf16: true\n"
FACTORY_LORA = """
finetuning_type: lora
lora_target: all
template: llama3
cutoff_len: 128
max_samples: 20
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.1
val_size: 0.1
eval_strategy: steps
eval_steps: 500
"""
FACTORY_FULL = """
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
template: qwen
cutoff_len: 128
packing: true
neat_packing: true
flash_attn: fa2
enable_liger_kernel: true
learning_rate: 1.0e-5
warmup_steps: 20
neftune_noise_alpha: 5
"""
# (the other trainer's file, a row, the model's configuration, keys in force)
FILES = {
    "axolotl's format": (AXOLOTL_FORMAT + AXOLOTL_LORA, {"q": "Say 1.", "a": "Word 1."}, MistralConfig, {}),
    "axolotl's qlora": (AXOLOTL_QLORA + AXOLOTL_LORA, ALPACA, type(llama_config()), {"save_steps": 1}),
    "LLaMA-Factory's lora": (FACTORY + FACTORY_LORA, ALPACA, type(llama_config()), {}),
    "LLaMA-Factory's packing": (FACTORY + FACTORY_FULL, CHAT, Qwen2Config, {"accelerate_config": "zero3.yaml"}),
}


@pytest.mark.parametrize("name", [name if name == "axolotl's format" else grid(name) for name in FILES])
def test_an_imported_recipe_trains(one, tmp_path, monkeypatch, capsys, name):
    theirs, row, family, wanted = FILES[name]
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    tokenizer.add_tokens(["<|eot_id|>", "<|im_end|>"], special_tokens=True)
    tokenizer.save_pretrained("model")
    config = family(**llama_config(vocab_size=len(tokenizer)).to_diff_dict() | {"model_type": family.model_type})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained("model")
    lines = [json.dumps(row) + "\n"] * 40
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    columns = {"formatting": "sharegpt", "columns": {"messages": "conversations"}} if row is CHAT else {}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.jsonl"} | columns}))
    (tmp_path / "theirs.yml").write_text(
        theirs.replace("MODEL", str(tmp_path / "model")).replace("path: rows", f"path: {tmp_path}/rows")
    )

    assert cli.main(["import", "theirs.yml", "--output", str(tmp_path / "mine.yaml")]) == 0
    recipe = read_recipe_file(tmp_path / "mine.yaml")
    assert wanted.items() <= recipe.items()
    file = recipe.get("accelerate_config")
    environment = {}
    if file is not None:
        assert f"zero-recipes train {tmp_path / 'mine.yaml'} --config_file {file}" in capsys.readouterr().out
        environment = launched_environment(ROOT / "accelerate_configs" / file, 1)
    argv = [str(tmp_path / "mine.yaml"), "--output_dir", str(tmp_path / "out"), *ON_CPU]
    monkeypatch.chdir(ROOT)
    metrics = one.run(cases.train, argv=argv, environment=environment)[0]["metrics"]
    assert metrics["status"] == "ok" and len(metrics["loss_history"]) == 1
    assert 6 < metrics["loss_history"][0] < 8
    assert metrics["strategy"] == ("zero3" if file else "single")
