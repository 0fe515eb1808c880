"""The processes of a run: they meet or say why not, before any weight is loaded; what one fails of, all fail of.

Real processes over gloo; the limits are arguments, and the only wait is for the limit under test.
"""

import json
import signal
import socket

import pytest

from tests.helpers.two_ranks import ranks


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
        ("unknown", "OSError: no room", "RuntimeError: rank 0, which {}, failed: OSError: no room"),
    ],
)
def test_what_rank_0_fails_of_both_fail_of(two, fault, first, other):
    """Once more at the end: the processes still count the same calls."""
    found = two.run("group_cases.shared", fault=fault, on=0)
    doing = {"agree": "works with the others", "once": "plans the run", "rank_0_writes": "saves"}
    doing |= {"once_per_node": "prepares the data of this machine"}
    for way, what in doing.items():
        assert (found[0][way], found[1][way]) == (first, other.format(what)), way
    values = {"agree": "[0, 10]", "once": "0", "once_per_node": "0", "rank_0_writes": "went on"}
    assert two.run("group_cases.shared", fault=None, on=0) == [values, values]


def test_what_another_rank_refuses_all_refuse(two):
    for found in two.run("group_cases.shared", fault="refusal", on=1):
        assert (found["agree"], found["once"]) == ("Refusal: refused: what [ZR000]", "0")


def test_nobody_waits_for_a_rank_0_that_died(meet):
    ended = meet({0: {"dies": True}, 1: {"dies": False}}, 2)
    assert [code for code, _ in ended] == [-signal.SIGKILL, 1], ended
    assert "rank 0 died, or rank 0, which plans the run, without a message" in ended[1][1]
