"""Processes that cannot meet say so before any weight is loaded: rank, machine, interface, who is missing, exit code 2.

Real processes over gloo; the limits are arguments, and the only wait is for the limit under test.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from torch import distributed

from tests.helpers.grid import grid
from tests.helpers.tiny import write_recipe
from tests.helpers.two_ranks import two_ranks
from zero_recipes.core.process import free_port
from zero_recipes.distributed import rendezvous

ROOT = Path(__file__).resolve().parents[2]


def meet(orders: dict[int, dict], world_size: int, extra: dict[int, dict] | None = None) -> dict[int, tuple]:
    """{rank: (exit code, what it printed, what it said on stderr)} of the ranks in `orders`, on one machine."""
    port = free_port()
    running = {}
    for rank, order in orders.items():
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | (extra or {}).get(rank, {})
        running[rank] = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.helpers.meeting",
                json.dumps({"rank": rank, "world_size": world_size} | order),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
    ended = {}
    stays = [rank for rank, order in orders.items() if "stops" in order]
    for rank in sorted(orders, key=lambda rank: rank in stays):  # those that stop go when the others have ended
        out, err = running[rank].communicate(timeout=120)
        ended[rank] = (running[rank].returncode, out, err)
    return ended


def assert_refused(ended: tuple, rank: int, world_size: int, *words: str) -> None:
    code, out, err = ended
    assert code == 2, err
    err = err[err.index("refused: ") :]  # torch's own log of the store may stand before it
    assert err.startswith(f"refused: rank {rank} of {world_size} on {socket.gethostname()}"), err
    assert len(err.splitlines()) == 3, err
    assert "    why: " in err and "   fix: " in err and "GLOO_SOCKET_IFNAME" in err and "127.0.0.1:" in err
    assert "met" not in out and "Traceback" not in err
    for word in words:
        assert word in err, (word, err)


def test_ranks_that_reach_each_other_meet_and_training_keeps_its_own_timeout():
    for code, out, err in meet({0: {}, 1: {}, 2: {}}, 3).values():
        assert (code, out, err) == (0, "met 3\n", "")


def test_the_keeper_of_the_store_stays_until_each_rank_has_read_its_status():
    """Else a rank that reads late finds the store gone and refuses a meeting that went well."""
    store = distributed.HashStore()
    ranks = [threading.Thread(target=rendezvous._watch, args=(store, "gloo", rank, 2, 60)) for rank in range(2)]
    store.set(rendezvous._key("status", 0), "")
    ranks[0].start()
    ranks[1].start()
    assert ranks[0].is_alive()
    store.set(rendezvous._key("status", 1), "")
    for rank in ranks:
        rank.join(5)
        assert not rank.is_alive()


def test_a_rank_that_never_comes_is_named():
    (ended,) = meet({0: {"join_seconds": 1}}, 3).values()
    assert_refused(ended, 0, 3, "waited 1 s in vain", "ranks 1, 2 have not come", "Interface: lo 127.0.0.1")


def test_a_rank_that_stops_before_the_all_reduce_is_named_with_its_machine():
    ended = meet({0: {"exchange_seconds": 1}, 1: {"stops": "before the all-reduce"}}, 2)
    assert_refused(
        ended[0], 0, 2, f"rank 1 on {socket.gethostname()} has not come to it", "could not all-reduce one number in 1 s"
    )


def test_a_wrong_interface_is_named_by_its_rank_and_by_the_one_that_waits_for_it():
    """The peer sits inside gloo: only its watch can end it, and it does not wait for its limit."""
    ended = meet({0: {}, 1: {}}, 2, {1: {"GLOO_SOCKET_IFNAME": "nonexistent"}})
    assert_refused(ended[1], 1, 2, "Interface: nonexistent (GLOO_SOCKET_IFNAME)", "lo 127.0.0.1")
    assert_refused(ended[0], 0, 2, f"rank 1 on {socket.gethostname()}:", "nonexistent", "Interface: lo 127.0.0.1")


def test_a_meeting_point_that_nobody_keeps():
    (ended,) = meet({1: {"join_seconds": 1}}, 2).values()
    assert_refused(ended, 1, 2, "cannot reach the meeting point within 1 s")


def test_a_wrong_sum_is_refused():
    (ended,) = meet({0: {"reduces wrongly": True}}, 1).values()
    assert ended[0] == 0  # a world of one: the sum of ones is 1, reduced or not
    ended = meet({0: {"reduces wrongly": True}, 1: {"reduces wrongly": True}}, 2)
    assert_refused(ended[0], 0, 2, "the all-reduce of ones gave 1 instead of 2")


@pytest.mark.parametrize("backend, variable", [("gloo", "GLOO_SOCKET_IFNAME"), ("nccl", "NCCL_SOCKET_IFNAME")])
def test_the_interface_is_the_one_asked_for_or_that_of_the_route(monkeypatch, backend, variable):
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv(variable, raising=False)
    assert rendezvous.interface(backend) == f"lo 127.0.0.1 (the route to MASTER_ADDR; {variable} is not set)"
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    assert "no route to MASTER_ADDR" in rendezvous.interface(backend)
    monkeypatch.setenv(variable, "eth7")
    assert rendezvous.interface(backend) == f"eth7 ({variable})"
    assert "lo" in psutil.net_if_addrs()


def test_a_run_that_cannot_meet_ends_before_its_weights(tmp_path):
    """run_sft.py whole: ranks that no launcher watches, the second on an interface that is not there."""
    recipe = write_recipe(tmp_path)
    ranks = two_ranks(
        [str(recipe), "--output_dir", str(tmp_path / "out")], tmp_path, by_rank={1: {"GLOO_SOCKET_IFNAME": "nowhere"}}
    )
    for rank, ended in enumerate(ranks):
        assert_refused((ended.returncode, ended.stdout, ended.stderr), rank, 2, "nowhere", "rank 1 on")
    assert not (tmp_path / "out").exists()


DYING = """
import os, signal, sys
import torch.distributed as dist
from zero_recipes.distributed.once_per_node import once_per_node

dist.init_process_group("gloo")
rank, dies = int(os.environ["RANK"]), int(sys.argv[1])
once_per_node(lambda: os.kill(os.getpid(), signal.SIGKILL) if rank == dies else "rows")
sys.stdin.read()  # rank 0 holds the store until the others have ended
"""


@pytest.mark.parametrize("dies", [1, grid(0)])
def test_nobody_waits_for_a_process_that_died(dies):
    """Three ranks on two machines (0 | 1 and 2). Where rank 1 dies, rank 2 says so; rank 0 takes the store with it."""
    port, ranks = free_port(), []
    for rank, local_rank in ((0, 0), (1, 0), (2, 1)):
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "3"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", DYING, str(dies)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        ranks.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    if dies == 1:
        said = ranks[2].communicate(timeout=120)[0]
        assert "rank 1, which prepares the data of this machine, died without a message" in said
        assert ranks[2].returncode == 1
    ended = [rank.communicate(timeout=120)[0] for rank in ranks if rank.stdout and not rank.stdout.closed]
    assert ranks[dies].returncode == -signal.SIGKILL, ended
    if dies == 1:
        assert ranks[0].returncode == 0
