"""scripts/slurm.sh by SLURM itself: its daemons on two network namespaces that stand for two machines.

Needs root and Debian's packages slurm-wlm and munge; skipped elsewhere. The cluster believes in 64 cores and eight GPUs
a machine, so that the script's own requests are granted; a job here asks for one GPU a machine and trains on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.tiny import ROOT, write_recipe
from tests.launch.conftest import HOSTS

pytestmark = [pytest.mark.grid, pytest.mark.launch]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "nsenter", "unshare")
CONF = """
ClusterName=zero
SlurmctldHost={names[0]}({hosts[0]})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
NodeName={names[0]} NodeAddr={hosts[0]} CPUs=64 Gres=gpu:8
NodeName={names[1]} NodeAddr={hosts[1]} CPUs=64 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES State=UP
"""
TIMEOUT = 60


class Cluster:
    """Two machines under SLURM, of which the first is the controller too."""

    def __init__(self, names: list[str], folder: Path):
        self.names, self.folder, self.daemons = names, folder, []
        for made in ("state", *names):
            (folder / made).mkdir()
        hosts = [f"{host} {name}" for host, name in zip(HOSTS, names, strict=True)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]) + "\n")
        for gpu in range(8):
            (folder / f"gpu{gpu}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        (folder / "slurm.conf").write_text(CONF.format(names=names, hosts=HOSTS, folder=folder))
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def start(self) -> None:
        munge = [f"--{what}={self.folder}/munge.{what.split('-')[0]}" for what in ("socket", "key-file", "pid-file")]
        munge += [f"--log-file={self.folder}/munge.log", f"--seed-file={self.folder}/munge.seed"]
        self._daemon(["munged", "--foreground", "--force", *munge])
        self._until(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._daemon(self._on(self.names[0], "slurmctld", "-D"))
        for name in self.names:
            self._daemon(self._on(name, "slurmd", "-D", "-N", name))
        self._until(lambda: self.run("sinfo", "--noheader", "--format=%t %D").stdout.strip() == "idle 2", "the nodes")

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"SLURM_CONF": f"{self.folder}/slurm.conf"} | variables
        command = self._on(self.names[0], *command)
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)

    def stop(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(TIMEOUT)

    def _on(self, name: str, *command: str) -> list[str]:
        """The command on that machine: its network, its name, and the names of both."""
        become = f'mount --bind {self.folder}/hosts /etc/hosts && hostname {name} && exec "$@"'
        return ["nsenter", f"--net=/run/netns/{name}", "unshare", "-u", "-m", "sh", "-c", become, "sh", *command]

    def _daemon(self, command: list[str]) -> None:
        environment = os.environ | {"SLURM_CONF": f"{self.folder}/slurm.conf"}
        with open(self.folder / "daemons.log", "a") as log:
            self.daemons.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    def _until(self, ready, what: str) -> None:
        for _ in range(TIMEOUT * 5):
            if ready():
                return
            time.sleep(0.2)  # other processes' doing, which tells nobody
        logs = [path.read_text()[-1000:] for path in sorted(self.folder.glob("*.log"))]
        pytest.skip(f"SLURM's daemons do not come up on this machine ({what}): " + "\n".join(logs))


@pytest.fixture(scope="module")
def cluster(namespaces, tmp_path_factory):
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        pytest.skip(f"no SLURM to run the script by: {', '.join(absent)} not installed (slurm-wlm, munge)")
    cluster = Cluster(namespaces, tmp_path_factory.mktemp("slurm"))
    cluster.folder.chmod(0o755)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def submit(cluster: Cluster, *arguments: str) -> tuple[int, str]:
    """(the job's exit code, its log) of scripts/slurm.sh with the interpreter of these tests."""
    log = cluster.folder / "job.log"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = cluster.run("sbatch", "--wait", f"--output={log}", *arguments, PATH=path, OMP_NUM_THREADS="1")
    return ended.returncode, log.read_text()


def test_the_script_trains_on_both_machines_as_one_does(cluster, two, tmp_path):
    recipe = write_recipe(tmp_path, bf16=False)
    argv = [str(recipe), "--output_dir", str(tmp_path / "one"), "--deepspeed", "ds_configs/zero3.json"]
    losses = two.run("train", argv=argv)[0]["metrics"]["loss_history"]
    script = ["--gpus-per-node=1", "--cpus-per-task=1", "scripts/slurm.sh", str(recipe)]
    code, said = submit(cluster, *script, "--output_dir", str(tmp_path / "out"))
    assert code == 0, said
    first, second = cluster.names
    assert f"2 machines have met: {first}, {second}" in said
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (metrics["strategy"], metrics["world_size"], metrics["network"]["machines"]) == ("zero3", 2, 2)
    assert metrics["loss_history"] == pytest.approx(losses, rel=1e-6)


def test_a_refusal_ends_the_job_on_both_machines(cluster, tmp_path):
    recipe = write_recipe(tmp_path, model_name_or_path="./nowhere")
    code, said = submit(cluster, "--gpus-per-node=1", "--cpus-per-task=1", "scripts/slurm.sh", str(recipe))
    assert code != 0 and "refused: the model ./nowhere cannot be found" in said, said


def test_a_job_without_gpus_is_told_so(cluster, tmp_path):
    code, said = submit(cluster, "--gpus-per-node=0", "--cpus-per-task=1", "scripts/slurm.sh", "recipes/tiny.yaml")
    assert code != 0 and "this job asked for none: sbatch --gpus-per-node N" in said, said
