"""Every launcher starts a run for real, once; what it prints is calm."""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trl

from tests.helpers.grid import grid
from tests.helpers.known_bad import found_in
from tests.helpers.tiny import write_recipe
from zero_recipes.checkpoint.verify import verify
from zero_recipes.config.accelerate import launched_environment

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
QUICK = ["--max_steps", "2", "--sample_prompts", "2", "--sample_max_new_tokens", "4", "--eval_strategy", "no"]
QUICK += ["--sample_prompts", "tests/helpers/prompts.jsonl", "--logging_steps", "1"]

pytestmark = pytest.mark.launch


def start(command: list[str], output_dir: Path) -> tuple[str, dict]:
    """(everything printed, metrics.json) of one command that must succeed."""
    ended = subprocess.run(
        [*command, *QUICK, "--output_dir", str(output_dir)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # the deepspeed launcher and plain python set none
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout, json.loads((output_dir / "metrics.json").read_text())


def test_accelerate(tmp_path):
    command = [str(BIN / "accelerate"), "launch", "--config_file", "accelerate_configs/zero3.yaml"]
    recipe, out = write_recipe(tmp_path, save_model=True), tmp_path / "out"
    _, metrics = start([*command, "run_sft.py", str(recipe)], out)
    assert (metrics["status"], metrics["strategy"], metrics["world_size"]) == ("ok", "zero3", 2)
    assert (out / "samples.jsonl").read_text().count("\n") == 2
    assert (out / "model.safetensors").is_file()


@pytest.mark.grid  # what the launch sets: unit/test_ds_parser.py; a run with that: engine/test_ds_configs.py
def test_accelerate_with_zero_written_inline(tmp_path):
    """TRL's own zero3.yaml, which names no ds_config: accelerate's launch hands it over in variables alone."""
    file = Path(trl.__file__).parent / "accelerate_configs" / "zero3.yaml"
    command = [str(BIN / "accelerate"), "launch", "--config_file", str(file), "--num_processes", "2"]
    _, metrics = start([*command, "run_sft.py", "recipes/tiny.yaml"], tmp_path)
    assert (metrics["status"], metrics["strategy"], metrics["world_size"]) == ("ok", "zero3", 2)
    assert verify(tmp_path)["tensors"] > 0


@pytest.mark.grid  # the same launch and file with a run that fails: test_failures.py
def test_accelerate_ddp(tmp_path):
    command = [str(BIN / "accelerate"), "launch", "--config_file", "accelerate_configs/ddp.yaml"]
    _, metrics = start([*command, "run_sft.py", "recipes/tiny.yaml"], tmp_path)
    assert (metrics["strategy"], metrics["world_size"]) == ("ddp", 2)


def test_torchrun_and_calm(tmp_path):
    """torchrun's own log folder keeps the ranks apart: no line from below may repeat within one."""
    command = [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", "29511"]
    command += ["--log-dir", str(tmp_path / "logs"), "--redirects", "3"]
    ds_config = ["--deepspeed", "ds_configs/zero2.json"]
    _, metrics = start([*command, "run_sft.py", "recipes/tiny.yaml", *ds_config], tmp_path / "out")
    assert (metrics["strategy"], metrics["world_size"]) == ("zero2", 2)
    logs = sorted((tmp_path / "logs").rglob("std*.log"))
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
