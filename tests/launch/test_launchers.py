"""Every launcher starts a run for real, once; what it prints is calm."""

from __future__ import annotations

import collections
import json
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trl

from tests.helpers.faults import found_in
from tests.helpers.grid import grid
from tests.helpers.tiny import write_model, write_recipe, write_rows
from zero_recipes.checkpoint.verify import verify
from zero_recipes.cli.sweep import all_strategies
from zero_recipes.config.accelerate import launched_environment
from zero_recipes.core.process import free_port

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
QUICK = ["--max_steps", "2", "--sample_prompts", "2", "--sample_max_new_tokens", "4", "--eval_strategy", "no"]
QUICK += ["--sample_prompts", "tests/helpers/prompts.jsonl", "--logging_steps", "1"]
FIRST_OURS = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}  # commands are written as a user writes them
LINE = "accelerate launch --config_file {} run_sft.py recipes/pythia.yaml"
GPUS_ONLY = ("zero3_qwz", "zero3_qgz", "zero3_plus_plus")  # DeepSpeed's quantizer is a CUDA op

pytestmark = pytest.mark.launch


def launched(command: list[str], output_dir: Path) -> subprocess.CompletedProcess:
    """One command from the repository's folder, to its end; its output is stdout and stderr together."""
    return subprocess.run(
        [*command, *QUICK, "--output_dir", str(output_dir)],
        cwd=ROOT,
        # the deepspeed launcher and plain python set no threads; torchrun's port is 29500, where others may be
        env=os.environ | {"OMP_NUM_THREADS": "1", "PET_MASTER_PORT": str(free_port())} | FIRST_OURS,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=400,
    )


def start(command: list[str], output_dir: Path) -> tuple[str, dict]:
    """(everything printed, metrics.json) of one command that must succeed."""
    ended = launched(command, output_dir)
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout, json.loads((output_dir / "metrics.json").read_text())


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> list[str]:
    """What makes any recipe of recipes/ a job of two tiny steps: another model, other rows."""
    folder = tmp_path_factory.mktemp("small")
    words = ["--model_name_or_path", str(write_model(folder / "model")), "--random_weights", "true"]
    words += ["--dataset_name", str(write_rows(folder / "rows")), "--max_length", "128"]
    return [*words, "--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--warmup_steps", "0"]


@pytest.fixture(scope="module")
def used_by(small, tmp_path_factory) -> tuple[Path, dict]:
    """(output_dir, metrics.json) of the line as it is written everywhere."""
    out = tmp_path_factory.mktemp("used_by") / "out"
    return out, start([*shlex.split(LINE.format("zero3.yaml")), *small], out)[1]


def test_accelerate(used_by):
    out, metrics = used_by
    assert (metrics["status"], metrics["strategy"], metrics["world_size"]) == ("ok", "zero3", 2)
    assert (out / "samples.jsonl").read_text().count("\n") == 2
    assert (out / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def by_torchrun(small, tmp_path_factory) -> tuple[Path, dict]:
    """(folder of what each rank printed, metrics.json) of a recipe that names its ds_config."""
    folder = tmp_path_factory.mktemp("torchrun")
    command = ["torchrun", "--nproc_per_node", "2", "--log-dir", str(folder / "logs"), "--redirects", "3"]
    return folder / "logs", start([*command, "run_sft.py", "recipes/pythia-zero3.yaml", *small], folder / "out")[1]


def test_torchrun_with_the_recipes_ds_config_trains_as_accelerate(used_by, by_torchrun):
    _, metrics = by_torchrun
    assert (metrics["status"], metrics["strategy"], metrics["world_size"]) == ("ok", "zero3", 2)
    for key in ("loss_history", "grad_norm_history"):
        assert len(metrics[key]) == 2 and metrics[key] == used_by[1][key]


@pytest.mark.grid
def test_accelerate_takes_the_recipe_that_names_the_same_ds_config(used_by, small, tmp_path):
    command = shlex.split("accelerate launch --config_file zero3.yaml run_sft.py recipes/pythia-zero3.yaml")
    _, metrics = start([*command, *small], tmp_path / "same")
    assert metrics["strategy"] == "zero3" and metrics["loss_history"] == used_by[1]["loss_history"]
    command[3] = "zero2.yaml"
    other = launched([*command, *small], tmp_path / "other")
    assert other.returncode == 1 and "[ZR201]" in other.stdout and not (tmp_path / "other").exists()
    _, metrics = start([*command, *small, "--deepspeed", "null"], tmp_path / "null")
    assert metrics["strategy"] == "zero2"


ON_CPUS = [name for name in all_strategies(ROOT / "accelerate_configs") if name not in ("zero3", *GPUS_ONLY)]


@pytest.mark.grid  # what each launch sets: unit/test_used_by.py
@pytest.mark.parametrize("strategy", ON_CPUS)
def test_the_used_by_line_trains_under_every_strategy(used_by, small, tmp_path, strategy):
    more = ["--nvme_path", str(tmp_path)] if strategy.endswith("infinity") else []
    more += ["--bf16", "false"] if strategy.endswith("autocast") else []  # it is for fp32 weights (ZR278)
    _, metrics = start(
        [*shlex.split(LINE.format(f"accelerate_configs/{strategy}.yaml")), *small, *more], tmp_path / "out"
    )
    assert (metrics["status"], metrics["strategy"], metrics["world_size"]) == ("ok", strategy, 2)
    assert metrics["loss_history"] == pytest.approx(used_by[1]["loss_history"], rel=2e-2)


@pytest.mark.grid  # what the launch sets: unit/test_ds_parser.py; a run with that: engine/test_ds_configs.py
def test_accelerate_with_zero_written_inline(tmp_path):
    """TRL's own zero3.yaml, which names no ds_config: accelerate's launch hands it over in variables alone."""
    file = Path(trl.__file__).parent / "accelerate_configs" / "zero3.yaml"
    command = [str(BIN / "accelerate"), "launch", "--config_file", str(file), "--num_processes", "2"]
    _, metrics = start([*command, "run_sft.py", "recipes/tiny.yaml"], tmp_path)
    assert (metrics["status"], metrics["strategy"], metrics["world_size"]) == ("ok", "zero3", 2)
    assert verify(tmp_path)["tensors"] > 0


def test_torchrun_is_calm(by_torchrun):
    """torchrun's own log folder keeps the ranks apart: no line from below may repeat within one."""
    logs = sorted(by_torchrun[0].rglob("std*.log"))
    assert len(logs) == 4, logs
    for path in logs:
        repeated = [
            line for line, count in collections.Counter(lines_from_below(path.read_text())).items() if count > 1
        ]
        assert not repeated, f"{path}: {repeated}"
    assert "FutureWarning" not in "".join(path.read_text() for path in logs)


def lines_from_below(text: str) -> list[str]:
    """Lines that libraries printed: not our table of samples, white space or rules."""
    ours = re.compile(r"^\s*$|^[│├└┌┏┡┃╇┳━─┼┴┬ ]|^\s+(exact_match|token_f1|reference_loss) ")
    return [line for line in re.split(r"[\r\n]+", text) if not ours.match(line)]


def test_deepspeed_launcher(tmp_path):
    command = [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", "29512", "run_sft.py"]
    recipe = write_recipe(tmp_path)
    _, metrics = start([*command, str(recipe), "--deepspeed", "ds_configs/zero1.json"], tmp_path / "out")
    assert (metrics["strategy"], metrics["world_size"]) == ("zero1", 2)


@pytest.mark.grid  # the same start: upstream/test_trl_recipes.py, the fetched model
def test_plain_python(tmp_path):
    _, metrics = start([sys.executable, "run_sft.py", str(write_recipe(tmp_path))], tmp_path / "out")
    assert (metrics["strategy"], metrics["world_size"]) == ("single", 1)


@pytest.mark.parametrize("launcher", ["accelerate", grid("deepspeed")])
def test_refusals_end_as_each_launcher_ends(tmp_path, launcher):
    """accelerate returns 1 and prints our message last, in its closing table; deepspeed returns 2."""
    out = tmp_path / "out"
    wrong = ["run_sft.py", "recipes/tiny.yaml", "--max_step", "2", "--output_dir", str(out)]
    command, code = {
        "accelerate": ([str(BIN / "accelerate"), "launch", "--config_file", "accelerate_configs/zero1.yaml"], 1),
        "deepspeed": ([str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", "29513"], 2),
    }[launcher]
    ended = subprocess.run([*command, *wrong], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == code, ended.stderr[-2000:]
    assert "refused: unknown key `max_step`" in ended.stderr
    assert "Loading weights" not in ended.stderr and not out.exists()
    if launcher == "accelerate":
        table = ended.stderr[ended.stderr.rindex("Root Cause") :]
        assert "refused: unknown key `max_step`" in table and "`max_steps`" in table


def test_multi_cpu_starts_one_process(tmp_path):
    found = partial(found_in, write_recipe(tmp_path))
    path = tmp_path / "cpu.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_machines: 1\nnum_processes: 2\n"
        "use_cpu: true\n"
    )
    launched = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path), "--no_python", "env"],
        capture_output=True,
        text=True,
        check=True,
        env={key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "RANK", "WORLD_SIZE")},
    ).stdout
    assert launched.count("ACCELERATE_USE_CPU=") == 1 and "WORLD_SIZE=" not in launched
    real = dict(line.split("=", 1) for line in launched.splitlines() if "=" in line)
    predicted = launched_environment(path, None)
    for environment in (real, predicted):
        assert ("error", "ZR137") in found({}, environment=environment, device="cpu")
    assert found({}, environment=launched_environment(path, 1), device="cpu") == []
    assert found({}, environment=predicted | {"PMI_SIZE": "2"}, device="cpu") == []
