"""A run that each launcher really starts; `make cuda-build` does so under torch's CUDA build without a GPU."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import cases
from tests.helpers.group import free_port
from tests.helpers.tiny import ROOT, write_model, write_recipe, write_rows

QUICK = ["--max_steps", "2", "--gradient_accumulation_steps", "1", "--eval_strategy", "no", "--logging_steps", "1"]
SAMPLES = ["--sample_prompts", "tests/helpers/prompts.jsonl", "--sample_max_new_tokens", "2"]
TORCHRUN = "torchrun --nproc_per_node 2 run_sft.py recipes/pythia-zero3.yaml"
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


def small_job(folder: Path) -> list[str]:
    """Another model and other rows make a recipe a job of two tiny steps."""
    small = ["--model_name_or_path", str(write_model(folder / "model")), "--random_weights", "true"]
    small += ["--dataset_name", str(write_rows(folder / "rows")), "--max_length", "128", "--warmup_steps", "0"]
    return [*small, "--per_device_train_batch_size", "2", "--learning_rate", "1e-3"]


def assert_same(found: dict, wanted: dict) -> None:
    for metrics in (found, wanted):
        assert (metrics["strategy"], metrics["world_size"], len(metrics["loss_history"])) == ("zero3", 2, 2)
        assert metrics["device"] == "cpu"
    for key in ("loss_history", "grad_norm_history"):
        assert found[key] == wanted[key]


@pytest.mark.grid  # the same variables as of accelerate, whose launcher it is
def test_torchrun_with_the_recipes_ds_config(two, tmp_path):
    """As the line that is written everywhere."""
    more = [*small_job(tmp_path), *NOTHING_BESIDE]
    by_torchrun = trained(TORCHRUN, *more, out=tmp_path / "a")
    argv = [TORCHRUN.split()[-1], *more, *QUICK, "--output_dir", str(tmp_path / "b")]
    assert_same(by_torchrun, two.run(cases.train, argv=argv)[0]["metrics"])


@pytest.mark.grid
def test_torchrun_with_the_recipes_ds_config_trains_as_accelerate(tmp_path):
    """`zero-recipes train` starts accelerate: test_kills.py, test_group.py, test_wheel.py."""
    small = small_job(tmp_path)
    line = "accelerate launch --config_file zero3.yaml run_sft.py recipes/pythia.yaml"
    by_accelerate = trained(line, *small, *SAMPLES, out=tmp_path / "a")
    assert (tmp_path / "a" / "samples.jsonl").read_text().count("\n") == 2
    assert (tmp_path / "a" / "model.safetensors").is_file()
    assert_same(trained(TORCHRUN, *small, *NOTHING_BESIDE, out=tmp_path / "b"), by_accelerate)


@pytest.mark.grid  # torchrun and accelerate set the same variables
def test_deepspeed_launcher(tmp_path):
    more = [str(write_recipe(tmp_path)), "--deepspeed", "ds_configs/zero1.json"]
    metrics = trained(f"deepspeed --num_gpus 2 --master_port {free_port()} run_sft.py", *more, out=tmp_path / "out")
    assert (metrics["strategy"], metrics["world_size"]) == ("zero1", 2)
