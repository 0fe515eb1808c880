"""What `zero-recipes rent` writes, as SkyPilot, Kubernetes and bash take it; the image's scripts, without Docker."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.helpers.tiny import ROOT
from zero_recipes.tools import rent
from zero_recipes.tools.arguments import parse_arguments
from zero_recipes.tools.main import main

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
    own = {"name": "TORCH_EXTENSIONS_DIR", "value": "/tmp/torch_extensions"}
    assert own in job["env"], "the volume's kernels may be another processor's, and their lock another node's"
    machines = (2, "H100:8") if gpus == "16" else (1, "H100:2")
    assert (sky["num_nodes"], sky["resources"]["accelerators"]) == machines
    assert documents[0]["data"]["my_recipe.yaml"].strip() == (folder / "my_recipe.yaml").read_text().strip()
    rehearsal = f"zero-recipes rehearse my_recipe.yaml --config_file {STRATEGY[gpus]} --run_name 'a b'"
    assert all(rehearsal in (folder / f"my_recipe.{kind}").read_text() for kind in rent.WRITTEN)
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


# the steps of the Dockerfile that run without Docker; docker/smoke.sh builds the image and trains in it


LOCKED_TORCH = re.search(r"^torch==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)[1]


def entrypoint_in(folder: Path, user: int = 1234, **more: str) -> subprocess.CompletedProcess:
    """The entrypoint with the volume in `folder`. What only root can do writes its arguments instead."""
    volume, binaries = folder / "workspace", folder / "bin"
    binaries.mkdir(exist_ok=True)
    text = (ROOT / "docker" / "entrypoint.sh").read_text().replace("/workspace", str(volume))
    for path in ("/usr/sbin", "/home", "/run"):
        text = text.replace(f"{path}/", f"{binaries if path == '/usr/sbin' else folder}/")
    (folder / "entrypoint.sh").write_text(text)
    stubs = {"id": f"echo {user}", "lscpu": "echo Flags: none", "python": "echo 1", "find": ":"}
    stubs |= dict.fromkeys(("chown", "ssh-keygen", "sshd", "setpriv"), 'echo "${0##*/} $*" >&2')
    for name, line in stubs.items():
        (binaries / name).write_text(f"#!/bin/sh\n{line}\n")
        (binaries / name).chmod(0o755)
    caches = {"HF_HOME": "huggingface", "TORCH_EXTENSIONS_DIR": "torch_extensions", "TRITON_CACHE_DIR": "triton"}
    variables = {name: f"{volume}/cache/{path}" for name, path in caches.items()}
    variables |= {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "HOME": "/nowhere"} | more
    command = ["sh", str(folder / "entrypoint.sh"), "sh", "-c", "echo $HOME"]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def test_another_user_finds_the_folders_and_a_home_or_is_refused(tmp_path):
    (tmp_path / "workspace").mkdir()
    ran = entrypoint_in(tmp_path)
    assert (ran.returncode, ran.stdout) == (0, f"{tmp_path}/workspace/cache\n"), ran.stderr
    cache = tmp_path / "workspace" / "cache"
    assert sorted(path.name for path in cache.iterdir()) == ["huggingface", "torch_extensions", "triton"]
    shutil.rmtree(cache)
    cache.write_text("a file where a folder is needed")
    ran = entrypoint_in(tmp_path)
    assert ran.returncode == 2 and ran.stderr.startswith(f"refused: {cache}/huggingface cannot be written to by user")


def test_sshd_starts_where_a_pod_has_a_public_key(tmp_path):
    assert [line.split()[0] for line in entrypoint_in(tmp_path, user=0).stderr.splitlines()] == ["setpriv"]
    ran = entrypoint_in(tmp_path, user=0, PUBLIC_KEY="ssh-ed25519 AAAA me@here")
    key = tmp_path / "recipes" / ".ssh" / "authorized_keys"
    assert (ran.returncode, key.read_text(), key.stat().st_mode & 0o777) == (0, "ssh-ed25519 AAAA me@here\n", 0o600)
    assert key.parent.stat().st_mode & 0o777 == 0o700
    called = [line.split()[0] for line in ran.stderr.splitlines()]
    assert called == ["chown", "ssh-keygen", "sshd", "setpriv"], "the command runs as recipes, after sshd"


@pytest.mark.parametrize(
    ("base_torch", "variables", "taken"),
    [
        (LOCKED_TORCH, {}, True),
        (f"{LOCKED_TORCH}+cu130", {}, True),
        (f"{LOCKED_TORCH}0", {}, False),
        (None, {}, False),
        (None, {"INSTALL_TORCH": "1"}, True),
    ],
)
def test_the_lock_is_installed_on_the_locked_torch_alone(tmp_path, base_torch, variables, taken):
    for name in ("docker", "scripts", "bin"):
        (tmp_path / name).mkdir()
    for name in ("requirements.lock", "docker/install_lock.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts" / "check_machine.sh").write_text("echo would install; exit 3\n")
    python = tmp_path / "bin" / "python3"
    python.write_text("#!/bin/sh\n" + (f"echo {base_torch}\n" if base_torch else "exit 1\n"))
    python.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = ["sh", "docker/install_lock.sh"]
    ran = subprocess.run(command, cwd=tmp_path, env={"PATH": path} | variables, capture_output=True, text=True)
    assert ran.returncode == (3 if taken else 1)
    assert ("would install" in ran.stdout) == taken == ("refused: " not in ran.stderr)
