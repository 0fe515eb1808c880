"""Plain TRL recipes run unchanged: `trl sft` YAML with messages, LoRA, streaming."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.grid import grid
from tests.helpers.tiny import named, write_model, write_recipe, write_rows
from zero_recipes.checkpoint.verify import verify
from zero_recipes.core.findings import Refusal, table
from zero_recipes.model import refuse_missing_attention

ROOT = Path(__file__).resolve().parents[2]
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|endoftext|>{% endfor %}assistant: "


def trl_recipe(folder: Path, rows: list[dict], **keys) -> Path:
    """A YAML as for `trl sft --config`: none of our own keys."""
    data = folder / "rows"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "env": {"TOKENIZERS_PARALLELISM": "false"},
        "model_name_or_path": str(ROOT / "tiny_world" / "base"),
        "dataset_name": str(data),
        "output_dir": str(folder / "out"),
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    path = folder / "trl.yaml"
    path.write_text(yaml.safe_dump(recipe | keys))
    return path


@pytest.mark.parametrize("strategy", [grid("zero2"), "zero3"])
def test_lora_on_prompt_and_completion(two, tmp_path, strategy):
    rows = [{"prompt": f"Number {i} is", "completion": f" {i + 1}."} for i in range(20)]
    lora = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["query_key_value", "dense"]}
    path = trl_recipe(tmp_path, rows, **lora, deepspeed=f"ds_configs/{strategy}.json")
    metrics = two.run("train", argv=[str(path)])[0]["metrics"]
    assert 0 < metrics["trainable_parameters"] < metrics["parameters"] / 10
    folder = tmp_path / "out"
    assert verify(folder)["parameters"] == metrics["trainable_parameters"], "the adapter is not complete"
    with safe_open(folder / "adapter_model.safetensors", "pt") as adapter:
        b = [adapter.get_tensor(name) for name in adapter.keys() if "lora_B" in name]  # noqa: SIM118
    assert len(b) == 8 and all(tensor.abs().max() > 0 for tensor in b), "LoRA's B starts at zero and must have moved"


@pytest.mark.parametrize("strategy", [grid("zero2"), "zero3", "fsdp2"])
def test_the_lora_recipe_makes_a_whole_adapter(two, tmp_path, strategy):
    """recipes/pythia-lora.yaml on a small model of the same kind: every matrix of the adapter, trained, loads again."""
    model, rows = write_model(tmp_path / "model"), write_rows(tmp_path / "rows")
    argv = ["recipes/pythia-lora.yaml", "--model_name_or_path", str(model), "--dataset_name", str(rows)]
    argv += ["--random_weights", "true", "--max_steps", "2", "--sample_prompts", "0", "--max_length", "64"]
    argv += ["--activation_checkpointing", "false", "--warmup_steps", "0"]
    metrics = two.run("train", argv=[*argv, "--output_dir", str(tmp_path / "out"), *named(strategy)])[0]["metrics"]
    hidden, intermediate = 64, 101  # tests/helpers/tiny.py; two layers, rank 16, A and B of four matrices each
    wanted = 2 * 16 * ((hidden + 3 * hidden) + 2 * hidden + 2 * (hidden + intermediate))
    assert (metrics["strategy"], metrics["trainable_parameters"]) == (strategy, wanted)
    assert verify(tmp_path / "out")["parameters"] == wanted, "the adapter is not complete"
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(adapter) == 16 and all(t.abs().max() > 0 for t in adapter.values()), "B begins at zero and must move"
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "out")).state_dict()
    assert all(torch.equal(loaded[name.replace(".weight", ".default.weight")], t) for name, t in adapter.items())


def test_messages_with_samples_through_the_chat_template(one, tmp_path):
    model = tmp_path / "chat"
    shutil.copytree(ROOT / "tiny_world" / "base", model)
    (model / "chat_template.jinja").write_text(CHAT)
    rows = [
        {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": str(i)}]}
        for i in range(9)
    ]
    path = trl_recipe(tmp_path, rows, model_name_or_path=str(model), eval_strategy="steps", dataset_test_split="train")
    one.run("train", argv=[str(path), "--sample_prompts", "2", "--sample_max_new_tokens", "3"])
    first = json.loads((tmp_path / "out" / "samples.jsonl").read_text().splitlines()[0])
    assert first["prompt"] == "user: Say 0<|endoftext|>assistant: " and first["reference"] == "0"


def test_text_rows_streamed(one, tmp_path):
    path = trl_recipe(tmp_path, [{"text": f"The fish number {i} hums."} for i in range(20)], dataset_streaming=True)
    metrics = one.run("train", argv=[str(path)])[0]["metrics"]
    assert len(metrics["loss_history"]) == 3 and metrics["tokens"]["supervised"] > 0


@pytest.mark.private
def test_loading_by_class_is_still_needed(two, tmp_path):
    """Fails when transformers renames on resume: then remove patches.load_weights_by_class."""
    assert two.run("names_lost_on_resume", folder=str(tmp_path / "saved"))[0] == ["lm_head.weight"]


def test_flash_attention_is_refused_where_it_cannot_run():
    with pytest.raises(Refusal, match="on a CPU"):
        refuse_missing_attention("flash_attention_2", "cpu")
    with pytest.raises(Refusal, match="flash_attn"):
        refuse_missing_attention("flash_attention_2", "cuda")
    refuse_missing_attention("sdpa", "cpu")


def hub_cache(home: Path, name: str) -> None:
    """What huggingface_hub leaves after a download of `name`."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    shutil.copytree(ROOT / "tiny_world" / "base", folder / "snapshots" / "abc123")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc123")


# one process for the three: the hub's folder is read when its library is imported
THREE = """
import contextlib, io, json, sys
import run_sft
from zero_recipes.cli import main as cli
from zero_recipes.core.findings import Refusal, print_refusal

def ended(command):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = command()
        except Refusal as refusal:
            code = print_refusal(refusal)
    return code, out.getvalue(), err.getvalue()

commands = [lambda: run_sft.main(json.loads(sys.argv[1]))]
commands += [lambda name=name: cli.main(["fetch", f"recipes/{name}.yaml"]) for name in ("tiny", "pythia")]
print(json.dumps([ended(command) for command in commands]))
"""


def test_a_fetched_model_is_found_offline_and_an_absent_one_refused(tmp_path):
    hub_cache(tmp_path / "home", "someone/fetched")
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}

    def run(*command: str) -> subprocess.CompletedProcess:
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)

    argv = [str(write_recipe(tmp_path, random_weights=False, max_steps=1)), "--output_dir", str(tmp_path / "out")]
    found = run(sys.executable, "run_sft.py", *argv, "--model_name_or_path", "someone/fetched")
    assert found.returncode == 0, found.stderr[-2000:]
    argv += ["--model_name_or_path", "someone/absent", "--overwrite", "true"]
    three = run(sys.executable, "-c", THREE, json.dumps(argv))
    assert three.returncode == 0, three.stderr[-2000:]
    (absent, _, absent_said), (local, local_said, _), (offline, _, offline_said) = json.loads(
        three.stdout.splitlines()[-1]
    )
    assert absent == 2 and "refused: the model someone/absent" in absent_said
    assert "zero-recipes fetch" in absent_said
    assert local == 0 and "./tiny_world/base: 2.38 MB" in local_said
    assert offline == 2 and "refused: the model EleutherAI/pythia-6.9b-deduped" in offline_said


def test_a_model_folder_without_weights_is_refused(one, tmp_path):
    recipe = write_recipe(tmp_path, random_weights=False, max_steps=1)
    (refused,) = one.run("refusal_of", argv=[str(recipe), "--output_dir", str(tmp_path / "out")])
    assert refused.endswith("no weights can be read [ZR407]") and "random_weights: true" in table()["ZR407"]["fix"]
