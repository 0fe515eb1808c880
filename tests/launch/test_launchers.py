"""Every launcher starts a run for real, once; `make cuda-build` does so under torch's CUDA build without a GPU."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.group import free_port
from tests.helpers.tiny import ROOT, write_model, write_recipe, write_rows

QUICK = ["--max_steps", "2", "--gradient_accumulation_steps", "1", "--eval_strategy", "no", "--logging_steps", "1"]
SAMPLES = ["--sample_prompts", "tests/helpers/prompts.jsonl", "--sample_max_new_tokens", "2"]
NOTHING_BESIDE = ["--sample_prompts", "0", "--save_model", "false"]

pytestmark = pytest.mark.launch


def trained(command: str, *more: str, out: Path) -> dict:
    """metrics.json of one command from the repository's folder, as a user writes it."""
    # the deepspeed launcher and plain python set no threads; torchrun's port is 29500, where others may be
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PET_MASTER_PORT": str(free_port())}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    words = [*shlex.split(command), *more, *QUICK, "--output_dir", str(out)]
    ended = subprocess.run(words, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=400)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["status"] == "ok"
    return metrics


def test_torchrun_with_the_recipes_ds_config_trains_as_accelerate(tmp_path):
    """As the line that is written everywhere; another model and other rows make a recipe a job of two tiny steps."""
    small = ["--model_name_or_path", str(write_model(tmp_path / "model")), "--random_weights", "true"]
    small += ["--dataset_name", str(write_rows(tmp_path / "rows")), "--max_length", "128", "--warmup_steps", "0"]
    small += ["--per_device_train_batch_size", "2", "--learning_rate", "1e-3"]
    line = "accelerate launch --config_file zero3.yaml run_sft.py recipes/pythia.yaml"
    by_accelerate = trained(line, *small, *SAMPLES, out=tmp_path / "a")
    assert (tmp_path / "a" / "samples.jsonl").read_text().count("\n") == 2
    assert (tmp_path / "a" / "model.safetensors").is_file()
    line = "torchrun --nproc_per_node 2 run_sft.py recipes/pythia-zero3.yaml"
    by_torchrun = trained(line, *small, *NOTHING_BESIDE, out=tmp_path / "b")
    for metrics in (by_accelerate, by_torchrun):
        assert (metrics["strategy"], metrics["world_size"], len(metrics["loss_history"])) == ("zero3", 2, 2)
        assert metrics["device"] == "cpu"
    for key in ("loss_history", "grad_norm_history"):
        assert by_torchrun[key] == by_accelerate[key]


def test_deepspeed_launcher(tmp_path):
    more = [str(write_recipe(tmp_path)), "--deepspeed", "ds_configs/zero1.json"]
    metrics = trained(f"deepspeed --num_gpus 2 --master_port {free_port()} run_sft.py", *more, out=tmp_path / "out")
    assert (metrics["strategy"], metrics["world_size"]) == ("zero1", 2)
