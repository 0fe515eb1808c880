"""The wheel, installed into an empty environment, trains from an empty folder, without this repository."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("zero_recipes", "recipes", "ds_configs", "accelerate_configs", "tiny_world")
# of a recipe of one's own: a fetched model, rows that the package brings, a ds_config by its name alone
MINE = {"model_name_or_path": "someone/fetched", "dataset_name": "tiny_world", "dataset_format": "alpaca"}
MINE |= {"max_steps": 2}
MINE |= {"deepspeed": "zero2.json", "bf16": True, "max_length": 128, "report_to": "none", "save_strategy": "no"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The commands of an environment that has the libraries of this one, and of zero-recipes the wheel alone."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / "sources" / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "run_sft.py"):
        shutil.copy(ROOT / name, folder / "sources")
    venv.create(folder / "venv")
    there = folder / "venv" / "lib" / Path(sysconfig.get_path("purelib")).relative_to(Path(sys.prefix, "lib"))
    (there / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--quiet"]
    isolated = [] if int(setuptools.__version__.split(".")[0]) < 77 else ["--no-build-isolation"]
    subprocess.run([*pip, "wheel", "--no-deps", *isolated, "--wheel-dir", folder, folder / "sources"], check=True)
    (wheel,) = folder.glob("zero_recipes-*.whl")
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    shutil.rmtree(folder / "sources")
    return python.parent


def ran(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": f"{installed}:{os.environ['PATH']}"}
    environment |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(["zero-recipes", *words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.launch
def test_two_steps_of_a_fetched_model_under_zero2_from_an_empty_folder(installed, tmp_path):
    cached = tmp_path / "home" / "hub" / "models--someone--fetched"  # as huggingface_hub leaves it after a download
    shutil.copytree(ROOT / "tiny_world" / "base", cached / "snapshots" / "abc123")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc123")
    (tmp_path / "mine.yaml").write_text(json.dumps(MINE))
    more = ("--config_file", "zero2.yaml", "--num_processes", "1", "--sample_prompts", "0")
    ended = ran(installed, tmp_path, "train", "mine.yaml", *more)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    metrics = json.loads((tmp_path / "output" / "mine" / "metrics.json").read_text())
    assert (metrics["strategy"], metrics["world_size"], len(metrics["loss_history"])) == ("zero2", 1, 2)
    assert metrics["model"] == "someone/fetched"

    assert "next: zero-recipes ask output/mine" in ended.stdout

    opened = ran(installed, tmp_path, "atlas", "--output", "atlas.html", "--no_browser")
    assert opened.returncode == 0, opened.stderr
    page = (tmp_path / "atlas.html").read_text()
    assert "function planOf(" in page and '"qwen3-8b":{"name":"Qwen/Qwen3-8B"' in page

    begun = ran(installed, tmp_path, "init", "here")
    assert begun.returncode == 0 and "cd here && zero-recipes train" in begun.stdout
    names = {path.name for path in (tmp_path / "here").iterdir()}
    copied = {"recipes", "ds_configs", "accelerate_configs", "tiny_world", "run_sft.py"}
    assert names == copied | {"my-data.yaml", "ddp.yaml", "zero1.yaml", "zero2.yaml", "zero3.yaml"}
    config = (tmp_path / "here" / "ds_configs" / "zero2.json").read_text()
    assert json.loads(config)["zero_optimization"]["stage"] == 2
    (tmp_path / "here" / "recipes" / "tiny.yaml").write_text("seed: 1")
    again = ran(installed, tmp_path, "init", "here")
    assert again.returncode == 2 and "ZR880" in again.stderr
    assert (tmp_path / "here" / "recipes" / "tiny.yaml").read_text() == "seed: 1"
