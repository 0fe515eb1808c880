"""`zero-recipes rent`: what SkyPilot, Kubernetes and bash say to its files, and the command in them."""

import os
import subprocess

import pytest
import yaml

from tests.helpers.tiny import ROOT
from zero_recipes.cli.arguments import parse_arguments
from zero_recipes.cli.main import main

STRATEGY = {"2": "zero3.yaml", "16": "zero2.yaml"}  # what fits Pythia-6.9B, by formulas
STUBS = {  # of a cluster: what was called is in `called`
    "srun": 'shift; echo srun >>called; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then printf "node-a\\nnode-b\\n"; else echo "$@" >>called; fi',
    "zero-recipes": 'echo "$@" >>called; exit 75',
}


@pytest.fixture(params=["2", "16"])
def rented(request, tmp_path, monkeypatch):
    """Of one machine, and of two."""
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "my_recipe.yaml"
    recipe.write_text((ROOT / "recipes" / "pythia.yaml").read_text())
    words = ["my_recipe.yaml", "--quick", "--gpus", request.param, "--gpu", "h100-80gb"]
    assert main(["rent", *words, "--run_name", "a b"]) == 0
    return tmp_path, request.param


def test_rented_files_are_valid_and_start_the_plans_choice(rented):
    folder, gpus = rented
    documents = [*yaml.safe_load_all((folder / "my_recipe.k8s.yaml").read_text())]
    job = documents[-1]["spec"]["template"]["spec"]["containers"][0]
    sky = yaml.safe_load((folder / "my_recipe.sky.yaml").read_text())
    assert documents[0]["data"]["my_recipe.yaml"].strip() == (folder / "my_recipe.yaml").read_text().strip()
    for script in (job["args"][0], sky["run"]):
        shell = f"zero-recipes() {{ printf '%s\\n' \"$@\"; }}; {script.replace('exec ', '')}"
        shell = f"HOSTS=a,b JOB_COMPLETION_INDEX=1 SKYPILOT_NODE_RANK=1 SKYPILOT_NODE_IPS=$'a\\nb'; {shell}"
        words = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
        started = parse_arguments(words)
        assert (started.num_processes, started.config_file.name) == (int(gpus), STRATEGY[gpus]), words
        assert (started.hosts, started.machine_rank) == ((["a", "b"], 1) if gpus == "16" else (None, 0))
        assert started.overrides[:2] == ["--run_name", "a b"] and "--output_dir" in started.overrides
    for document in documents:
        kubernetes_validate = pytest.importorskip("kubernetes_validate")
        kubernetes_validate.validate(document, "1.34", strict=True)


def test_skypilot_reads_its_file(rented):
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(rented[0] / "my_recipe.sky.yaml"))
    [resources] = task.resources
    assert (task.num_nodes, resources.accelerators) == ((2, {"H100": 8}) if rented[1] == "16" else (1, {"H100": 2}))


def test_a_slurm_job_that_saved_on_a_signal_is_queued_again(rented):
    folder, gpus = rented
    for name, script in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "my_recipe.sbatch", "--seed", "1"], env=os.environ | own | {"SLURM_NODEID": "1"})
    start, train, requeue = (folder / "called").read_text().splitlines()
    assert (done.returncode, start, requeue) == (75, "srun", "requeue 7") and train.endswith("--seed 1")
    assert ("--hosts node-a,node-b --machine_rank 1" in train) == (gpus == "16")
