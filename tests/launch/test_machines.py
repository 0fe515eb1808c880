"""Several machines: who is missing is named in time; training on two network namespaces equals one machine.

The namespaces stand for two hosts: each has its own interfaces and routes, a veth pair joins them.
"""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.tiny import ROOT, arguments, write_recipe
from zero_recipes.cli import main as cli
from zero_recipes.core.process import free_port
from zero_recipes.distributed.group import wait_for_hosts

HOSTS = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def namespaces():
    """Names of two joined network namespaces; each one's interface is called as it is."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts on one machine need network namespaces, and there is no `ip` (package iproute2)")
    names = [f"zr{os.getpid()}{side}" for side in "ab"]
    orders = [("netns", "add", name) for name in names]
    orders.append(("link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1], "netns", names[1]))
    for name, address in zip(names, HOSTS, strict=True):
        orders.append(("-n", name, "addr", "add", f"{address}/24", "dev", name))
        orders += [("-n", name, "link", "set", device, "up") for device in (name, "lo")]
    try:
        for order in orders:
            done = ip(*order)
            if done.returncode:
                pytest.skip(f"two hosts on one machine need network namespaces: ip {' '.join(order)}: {done.stderr}")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def on_each(namespaces: list[str], commands: list[list[str]]) -> list[tuple[int, str]]:
    """(exit code, all that was printed) of one command in each namespace, at the same time."""

    def run(name: str, command: list[str]) -> tuple[int, str]:
        environment = os.environ | {"GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", name, sys.executable, "-m", *command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, text=True, cwd=ROOT, env=environment, timeout=400, **pipes)
        return done.returncode, done.stdout

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, namespaces, commands))


@pytest.mark.launch
def test_two_hosts_equal_one(namespaces, two, tmp_path):
    """The same command on each: they meet, and accelerate launches."""
    recipe = write_recipe(tmp_path, bf16=False)
    losses = two.run("train", argv=arguments(recipe, "zero3", tmp_path / "one"))[0]["metrics"]["loss_history"]
    command = ["zero_recipes.cli.main", "train", str(recipe), "--config_file", "zero3.yaml", "--num_processes", "2"]
    command += ["--hosts", ",".join(HOSTS), "--output_dir", str(tmp_path / "out"), "--machine_rank"]
    ended = on_each(namespaces, [[*command, machine] for machine in ("0", "1")])
    assert [code for code, _ in ended] == [0, 0], "\n".join(text[-2000:] for _, text in ended)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (metrics["strategy"], metrics["world_size"], metrics["status"]) == ("zero3", 2, "ok")
    assert metrics["loss_history"] == pytest.approx(losses, rel=1e-6)


@pytest.mark.private
@pytest.mark.launch
def test_the_launcher_alone_names_nobody(namespaces):
    """Fails when torchrun's static rendezvous says who is missing: then zero-recipes meet may go."""
    command = ["torch.distributed.run", "--nnodes", "2", "--node_rank", "0", "--no-python"]
    command += ["--master_addr", HOSTS[0], "--master_port", str(free_port()), "--rdzv_conf", "timeout=1", "true"]
    ((code, said),) = on_each(namespaces[:1], [command])
    assert code == 1 and "1/2 clients joined" in said and HOSTS[1] not in said


def test_machines_meet():
    port, threads = free_port(), ThreadPoolExecutor(2)
    hosts = ["127.0.0.1", "localhost"]
    assert list(threads.map(lambda machine: wait_for_hosts(hosts, machine, port, 60.0), (0, 1))) == [None, None]


@pytest.mark.parametrize("machine, missing", [(0, "within 0.1 s (missing: 1, 2)"), (1, "cannot be reached")])
def test_a_machine_that_never_comes_is_named(capsys, machine, missing):
    argv = ["meet", "--hosts", "127.0.0.1,node-b,node-c", "--machine_rank", str(machine), "--port", str(free_port())]
    assert cli.main([*argv, "--seconds", "0.1"]) == 2
    said = capsys.readouterr().err
    assert missing in said and "0: 127.0.0.1, 1: node-b, 2: node-c" in said and "   fix: Start " in said
