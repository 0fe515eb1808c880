"""The processes of a run meet or say why not, before any weight is loaded; what one fails of, all fail of.

Real processes over gloo; the limits are arguments, and the only wait is for the limit under test. Two network
namespaces, joined by a veth pair, stand for two hosts: each has its own interfaces and routes.
"""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers import cases, group_cases
from tests.helpers.group import free_port
from tests.helpers.tiny import ROOT, arguments, write_recipe
from tests.helpers.tools import refusal_of
from tests.helpers.two_ranks import ranks
from zero_recipes.engine.group import wait_for_hosts


@pytest.fixture
def meet(tmp_path):
    """A function: (exit code, all that was printed) of the ranks in `orders`; the last has `extra` variables."""

    def run(orders: dict[int, dict], world_size: int, extra: dict[str, str] | None = None) -> list[tuple[int, str]]:
        argvs = {rank: [json.dumps(order)] for rank, order in orders.items()}
        ended = ranks("tests/helpers/group_cases.py", argvs, world_size, tmp_path, {max(orders): extra or {}})
        return [(rank.returncode, rank.stdout + rank.stderr) for rank in ended]

    return run


def assert_refused(ended: tuple[int, str], rank: int, world_size: int, *words: str) -> None:
    code, text = ended
    assert code == 2, text
    text = text[text.index("refused: ") :]  # torch's own log of the store may come before it
    assert text.startswith(f"refused: rank {rank} of {world_size} on {socket.gethostname()}"), text
    assert all(word in text for word in ("GLOO_SOCKET_IFNAME: ", "127.0.0.1:", *words)) and "met" not in text, text


def test_ranks_that_reach_each_other_meet_and_training_keeps_its_own_timeout(meet):
    assert meet({0: {}, 1: {}, 2: {}}, 3) == [(0, "met 3\n")] * 3


def test_ranks_that_never_come_are_named(meet):
    (ended,) = meet({0: {"join_seconds": 1}}, 3)
    assert_refused(ended, 0, 3, "waited 1 s for 3 ranks", "missing: 1, 2")
    (ended,) = meet({1: {"join_seconds": 1}}, 2)
    assert_refused(ended, 1, 2, "cannot be reached")


def test_a_wrong_interface_is_named_by_its_rank(meet):
    """The other one waits inside gloo, where no exception reaches it."""
    ended = meet({0: {"exchange_seconds": 3}, 1: {}}, 2, {"GLOO_SOCKET_IFNAME": "nonexistent"})
    assert_refused(ended[1], 1, 2, "GLOO_SOCKET_IFNAME: nonexistent")
    assert_refused(ended[0], 0, 2, "one number was not all-reduced within 3 s", "GLOO_SOCKET_IFNAME: not set")


def test_a_wrong_sum_is_refused(meet):
    ended = meet({0: {"reduces wrongly": True}, 1: {"reduces wrongly": True}}, 2)
    assert_refused(ended[0], 0, 2, "the all-reduce of ones gave 1 instead of 2")


@pytest.mark.parametrize(
    "fault, first, other",
    [
        ("refusal", "Refusal: refused: what [ZR000]", "Refusal: refused: what [ZR000]"),
        ("known", "Diverging: lost", "Diverging: lost"),
        ("unknown", "OSError: no room", "PeerFailed: rank 0, which {}, failed: OSError: no room"),
    ],
)
def test_what_rank_0_fails_of_both_fail_of(two, fault, first, other):
    """Once more at the end: the processes still count the same calls."""
    found = two.run(group_cases.shared, fault=fault, on=0)
    doing = {"agree": "works with the others", "once": "plans the run", "rank_0_writes": "saves"}
    doing |= {"once_per_node": "prepares the data of this machine"}
    for way, what in doing.items():
        assert (found[0][way], found[1][way]) == (first, other.format(what)), way
    values = {"agree": "[0, 10]", "once": "0", "once_per_node": "0", "rank_0_writes": "went on"}
    assert two.run(group_cases.shared, fault=None, on=0) == [values, values]


def test_what_another_rank_refuses_all_refuse(two):
    for found in two.run(group_cases.shared, fault="refusal", on=1):
        assert (found["agree"], found["once"]) == ("Refusal: refused: what [ZR000]", "0")


@pytest.mark.parametrize(
    "faults, first, other",
    [
        (["known", "refusal"], "Diverging: lost", "Diverging: lost"),
        (["refusal", "known"], "Refusal: refused: what [ZR000]", "Refusal: refused: what [ZR000]"),
        (["unknown", "refusal"], "OSError: no room", "PeerFailed: rank 0, which works with the others, failed: "),
    ],
)
def test_of_two_failures_all_ranks_end_with_the_first_ranks(two, faults, first, other):
    """Not each with its own: two messages, and two exit codes, of one run."""
    found = two.run(group_cases.failing_on_both, faults=faults)
    assert found[0] == first and found[1].startswith(other)


@pytest.mark.parametrize("call, on, first_call", [("agree", 1, 10_000), ("once", 0, 20_000)])
def test_a_call_that_one_rank_skips_is_named_with_the_one_it_makes(two, call, on, first_call):
    """The others would wait for the skipped one."""
    found = two.run(group_cases.skipped, call=call, on=on, first_call=first_call)
    doing = {"agree": "works with the others", "once": "reads the rows"}[call]
    calls = f"{doing} (skipped.<locals>.rows)", "plans the run (skipped.<locals>.plan)"
    other = 1 - on
    wanted = f"RuntimeError: call {first_call} is {calls[0]} on rank {other}, and {calls[1]} on rank {on}"
    assert found[other] == wanted
    if on == 1:  # rank 0 plans the run itself, and waits for nobody
        assert found[on] == f"RuntimeError: call {first_call} is {calls[1]} on rank 1, and {calls[0]} on rank 0"


@pytest.mark.parametrize("on", [0, 1])
def test_weights_that_one_rank_alone_has_lost_end_the_run_on_all(two, on):
    """The others would wait for it in the next collective."""
    assert two.run(group_cases.has_nonfinite_weights, on=on) == [True, True]
    assert two.run(group_cases.has_nonfinite_weights, on=2) == [False, False]


def test_all_ranks_judge_a_step_by_the_norm_of_the_worst(two):
    for bad in (math.inf, -math.inf):
        for norms in ([1.0, bad], [bad, 1.0]):
            found = two.run(group_cases.figures_of_a_step, losses=[2.0, 4.0], norms=norms)
            assert found == [[3.0, bad]] * 2
    (_, norm), _ = two.run(group_cases.figures_of_a_step, losses=[2.0, 4.0], norms=[1.0, math.nan])
    assert math.isnan(norm)


@pytest.mark.parametrize("fuller", [0, 1])
def test_all_ranks_log_the_memory_of_the_fullest_and_the_tokens_of_all(two, fuller):
    peaks = [{"allocated": None, "rss": 5}] * 2
    peaks[fuller] = {"allocated": 9, "rss": 1}  # of a GPU its own memory counts
    found = two.run(group_cases.logged, peaks=peaks, tokens=[[10, 6], [30, 2]])
    sent = {"communication_bytes_per_step": 7}
    first = {"tokens_per_second": 20, "peak_memory_bytes": 9, "planned_peak_memory_bytes": 77} | sent
    second = {"tokens_per_second": 4, "peak_memory_bytes": 9} | sent
    assert found == [[first, second]] * 2


def test_nobody_waits_for_a_rank_0_that_died(meet):
    ended = meet({0: {"dies": True}, 1: {"dies": False}}, 2)
    assert [code for code, _ in ended] == [-signal.SIGKILL, 1], ended
    assert "rank 0 died, or rank 0, which plans the run, without a message" in ended[1][1]


# several machines


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


@pytest.fixture
def one_host(two, tmp_path):
    """(a recipe, its losses under stage 3 on one host)."""
    recipe = write_recipe(tmp_path, bf16=False)
    metrics = two.run(cases.train, argv=arguments(recipe, "zero3", tmp_path / "one"))[0]["metrics"]
    return recipe, metrics["loss_history"]


def assert_equal_on_two_hosts(out: Path, losses: list[float]) -> None:
    metrics = json.loads((out / "metrics.json").read_text())
    assert (metrics["strategy"], metrics["world_size"], metrics["status"]) == ("zero3", 2, "ok")
    assert metrics["loss_history"] == pytest.approx(losses, rel=1e-6)


@pytest.mark.launch
def test_a_rank_on_each_of_two_hosts_trains_as_two_on_one(namespaces, one_host, tmp_path):
    recipe, losses = one_host
    argv = arguments(recipe, "zero3", tmp_path / "out")
    environments = {}
    for rank, name in enumerate(namespaces):
        environments[rank] = {"NETWORK": name, "GLOO_SOCKET_IFNAME": name, "MASTER_ADDR": HOSTS[0]}
        environments[rank] |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
    ended = ranks("run_sft.py", {0: argv, 1: argv}, 2, tmp_path, environments)
    assert [rank.returncode for rank in ended] == [0, 0], ended
    assert_equal_on_two_hosts(tmp_path / "out", losses)


@pytest.mark.grid
@pytest.mark.launch
def test_two_hosts_equal_one(namespaces, one_host, tmp_path):
    """The same command on each: they meet, and accelerate launches."""
    recipe, losses = one_host
    command = ["zero_recipes.tools.main", "train", str(recipe), "--config_file", "zero3.yaml", "--num_processes", "2"]
    command += ["--hosts", ",".join(HOSTS), "--output_dir", str(tmp_path / "out"), "--machine_rank"]
    ended = on_each(namespaces, [[*command, machine] for machine in ("0", "1")])
    assert [code for code, _ in ended] == [0, 0], "\n".join(text[-2000:] for _, text in ended)
    assert_equal_on_two_hosts(tmp_path / "out", losses)


@pytest.mark.private
@pytest.mark.launch
def test_the_launcher_alone_names_nobody(namespaces):
    """Fails when torchrun's static rendezvous says who is missing: then `wait_for_hosts` may go."""
    command = ["torch.distributed.run", "--nnodes", "2", "--node_rank", "0", "--no-python"]
    command += ["--master_addr", HOSTS[0], "--master_port", str(free_port()), "--rdzv_conf", "timeout=1", "true"]
    ((code, said),) = on_each(namespaces[:1], [command])
    assert code == 1 and "1/2 clients joined" in said and HOSTS[1] not in said


def test_machines_meet():
    port, threads = free_port(), ThreadPoolExecutor(2)
    hosts = ["127.0.0.1", "localhost"]
    assert list(threads.map(lambda machine: wait_for_hosts(hosts, machine, port, 60.0), (0, 1))) == [None, None]


@pytest.mark.parametrize("machine, missing", [(0, "within 0.1 s (missing: 1, 2)"), (1, "cannot be reached")])
def test_a_machine_that_never_comes_is_named(machine, missing):
    said = str(refusal_of(wait_for_hosts, ["127.0.0.1", "node-b", "node-c"], machine, free_port(), 0.1))
    assert missing in said and "0: 127.0.0.1, 1: node-b, 2: node-c" in said and "   fix: Run the same " in said
