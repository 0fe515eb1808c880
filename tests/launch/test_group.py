"""The processes of a run: they meet or say why not, before any weight is loaded; what one fails of, all fail of.

Real processes over gloo; the limits are arguments, and the only wait is for the limit under test.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from zero_recipes.core.process import free_port
from zero_recipes.distributed import group

ROOT = Path(__file__).resolve().parents[2]


def meet(orders: dict[int, dict], world_size: int, extra: dict[int, dict] | None = None) -> dict[int, tuple]:
    """{rank: (exit code, what it printed, what it printed on stderr)} of the ranks in `orders`, on one machine."""
    port, running, ended = free_port(), {}, {}
    for rank, order in orders.items():
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | (extra or {}).get(rank, {})
        given = json.dumps({"rank": rank, "world_size": world_size} | order)
        command = [sys.executable, "-m", "tests.helpers.group_cases", given]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        running[rank] = subprocess.Popen(command, text=True, cwd=ROOT, env=environment, **pipes)
    stays = [rank for rank, order in orders.items() if "stops" in order]
    for rank in sorted(orders, key=lambda rank: rank in stays):  # those that stop go when the others have ended
        out, err = running[rank].communicate(timeout=120)
        ended[rank] = (running[rank].returncode, out, err)
    return ended


def assert_refused(ended: tuple, rank: int, world_size: int, *words: str) -> None:
    code, out, err = ended
    assert code == 2, err
    err = err[err.index("refused: ") :]  # torch's own log of the store may come before it
    assert err.startswith(f"refused: rank {rank} of {world_size} on {socket.gethostname()}"), err
    assert len(err.splitlines()) == 3, err
    assert "GLOO_SOCKET_IFNAME" in err and "127.0.0.1:" in err and "met" not in out
    for word in words:
        assert word in err, (word, err)


def test_ranks_that_reach_each_other_meet_and_training_keeps_its_own_timeout():
    for code, out, err in meet({0: {}, 1: {}, 2: {}}, 3).values():
        assert (code, out, err) == (0, "met 3\n", "")


def test_ranks_that_never_come_are_named():
    (ended,) = meet({0: {"join_seconds": 1}}, 3).values()
    assert_refused(ended, 0, 3, "waited 1 s for 3 ranks", "missing: 1, 2", "Interface: lo 127.0.0.1")
    (ended,) = meet({1: {"join_seconds": 1}}, 2).values()
    assert_refused(ended, 1, 2, "cannot be reached")


def test_a_rank_that_stops_before_the_all_reduce_leaves_nobody_waiting():
    ended = meet({0: {"exchange_seconds": 1}, 1: {"stops": True}}, 2)
    assert_refused(ended[0], 0, 2, "one number was not all-reduced within 1 s")


def test_a_wrong_interface_is_named_by_its_rank():
    """The other one waits inside gloo, where no exception reaches it."""
    ended = meet({0: {"exchange_seconds": 3}, 1: {}}, 2, {1: {"GLOO_SOCKET_IFNAME": "nonexistent"}})
    assert_refused(ended[1], 1, 2, "Interface: nonexistent (GLOO_SOCKET_IFNAME)", "lo 127.0.0.1")
    assert_refused(ended[0], 0, 2, "Interface: lo 127.0.0.1")


def test_a_wrong_sum_is_refused():
    ended = meet({0: {"reduces wrongly": True}, 1: {"reduces wrongly": True}}, 2)
    assert_refused(ended[0], 0, 2, "the all-reduce of ones gave 1 instead of 2")


@pytest.mark.parametrize("backend, variable", [("gloo", "GLOO_SOCKET_IFNAME"), ("nccl", "NCCL_SOCKET_IFNAME")])
def test_the_interface_is_the_requested_one_or_that_of_the_route(monkeypatch, backend, variable):
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv(variable, raising=False)
    assert group.interface(backend) == f"lo 127.0.0.1 (the route to MASTER_ADDR; {variable} is not set)"
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    assert "no route to MASTER_ADDR" in group.interface(backend)
    monkeypatch.setenv(variable, "eth7")
    assert group.interface(backend) == f"eth7 ({variable})"


@pytest.mark.parametrize(
    "fault, on, first, other",
    [
        (None, 0, None, None),
        ("refusal", 0, "Refusal: refused: what [ZR000]", "Refusal: refused: what [ZR000]"),
        ("known", 0, "Diverging: lost", "Diverging: lost"),
        ("unknown", 0, "OSError: no room", "RuntimeError: rank 0, which {}, failed: OSError: no room"),
    ],
)
def test_what_rank_0_fails_of_both_fail_of(two, fault, on, first, other):
    """Once more at the end: the processes still count the same calls."""
    found = two.run("group_cases.shared", fault=fault, on=on)
    doing = {"agree": "works with the others", "once": "plans the run", "rank_0_writes": "saves"}
    doing |= {"once_per_node": "prepares the data of this machine"}
    values = {"agree": "[0, 10]", "once": "0", "once_per_node": "0", "rank_0_writes": "went on"}
    for way, value in values.items():
        assert found[0][way] == (first or value) and found[1][way] == (other or value).format(doing[way]), way
    assert two.run("group_cases.shared", fault=None, on=0) == [values, values]


def test_what_another_rank_refuses_all_refuse(two):
    for found in two.run("group_cases.shared", fault="refusal", on=1):
        assert (
            found["agree"] == "Refusal: refused: what [ZR000]"
            and found["once"] == "0"
            and found["rank_0_writes"] == "went on"
        )


DYING = """
import os, signal
import torch.distributed as dist
from zero_recipes.distributed.group import once

dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
store.wait(["joined"]) if dist.get_rank() == 0 else store.set("joined", "1")  # both are through with joining
once(lambda: os.kill(os.getpid(), signal.SIGKILL), "plans the run")
"""


def test_nobody_waits_for_a_rank_0_that_died():
    port, ranks = free_port(), []
    for rank in (0, 1):
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        ranks.append(subprocess.Popen([sys.executable, "-c", DYING], env=environment, text=True, **pipes))
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL, 1], printed
    assert "rank 0 died, or rank 0, which plans the run, without a message" in printed[1]
