"""One run at a time in an output folder, also where only orphaned workers are left of the other one."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import random
import socket
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from zero_recipes.checkpoint import lock
from zero_recipes.checkpoint.lock import LOCK, hold_output_dir, refuse_in_use
from zero_recipes.core.findings import Finding, Refusal

FORK = multiprocessing.get_context("fork")


def be_rank(folder: Path, rank: int, parent: Connection) -> None:
    os.environ["RANK"] = str(rank)
    with lock.hold_output_dir(folder):
        parent.send("held")
        parent.recv()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.05)
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def processes():
    """Starts a process that holds a folder as one rank of a run, until it is told to end: (process, end it)."""
    with ExitStack() as started:

        def start(folder: Path, rank: int) -> tuple[BaseProcess, Callable[[], None]]:
            ours, theirs = FORK.Pipe()
            process = FORK.Process(target=be_rank, args=(folder, rank, theirs))
            process.start()
            started.callback(process.kill)
            assert ours.recv() == "held"
            return process, lambda: (ours.send("end"), process.join())

        yield start


def refusal_of(folder: Path) -> Refusal | None:
    try:
        refuse_in_use(folder)
    except Refusal as refusal:
        return refusal
    return None


def test_a_second_start_is_refused_and_names_the_first(tmp_path, processes):
    out = tmp_path / "out"
    first, _ = processes(out, 0)
    for start in (lambda: refuse_in_use(out), lambda: hold_output_dir(out).__enter__()):
        with pytest.raises(Refusal, match=r"another run is alive in .*ZR747") as caught:
            start()
        assert f"rank 0: process {first.pid} on " in caught.value.why and f"kill {first.pid}" in caught.value.fix
        assert sorted(path.name for path in out.iterdir()) == [LOCK], "something was touched"
    first.kill()
    first.join()
    assert refusal_of(out) is None, "the lock of a killed run is not stale"
    with hold_output_dir(out):
        assert json.loads((out / LOCK).read_text())[0]["pid"] == os.getpid()
    assert refusal_of(out) is None and not (out / LOCK).exists()


def test_an_orphaned_worker_keeps_the_folder(tmp_path, processes):
    """Rank 0 is killed, rank 1 lives on: it still writes into the folder."""
    out = tmp_path / "out"
    (first, _), (_, end_worker) = processes(out, 0), processes(out, 1)
    first.kill()
    first.join()
    assert "ZR747" in str(refusal_of(out))
    with pytest.raises(Refusal, match="ZR747"):
        hold_output_dir(out).__enter__()
    assert f"process {first.pid}" not in refusal_of(out).why, "it is gone"
    end_worker()
    assert refusal_of(out) is None


def test_a_refused_run_leaves_no_folder_and_a_failed_one_its_own(tmp_path):
    with pytest.raises(Refusal), hold_output_dir(tmp_path / "a" / "b" / "c"):
        raise Refusal([Finding("ZR000", "", "", "")])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    with pytest.raises(Refusal), hold_output_dir(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "somebody's").touch()
        raise Refusal([Finding("ZR000", "", "", "")])
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["somebody's"]


def test_a_look_into_the_lock_disturbs_nobody(tmp_path):
    """Every rank of a start looks, and so does `check`: as often as they like beside a run that begins."""
    with ExitStack() as runs:
        for number in range(3):
            refuse_in_use(tmp_path / str(number))
            runs.enter_context(hold_output_dir(tmp_path / str(number)))
            assert refusal_of(tmp_path / str(number)) is not None


def test_a_file_that_was_taken_away_is_not_the_lock(tmp_path, monkeypatch):
    """The run before ends between this one's open and its flock: its file is gone, and the next start makes another."""
    real, taken = fcntl.flock, []

    def flock(handle: int, kind: int) -> None:
        if not taken:
            taken.append(os.unlink(tmp_path / LOCK))
        real(handle, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    with hold_output_dir(tmp_path):
        assert refusal_of(tmp_path) is not None
    assert taken


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys):
    def flock(handle: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert refusal_of(tmp_path) is None
    with hold_output_dir(tmp_path):
        assert "without locks: another run in it is not seen" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Refusal, match=r"cannot be written.*ZR748"):
        hold_output_dir(tmp_path / "file" / "out").__enter__()


@pytest.mark.parametrize("seed", range(10))
def test_whatever_stands_in_the_lock_file_a_refusal_is_one(tmp_path, seed):
    draw = random.Random(seed)
    holder = {
        "rank": draw.choice([0, None, "0"]),
        "host": draw.choice(["here", 3]),
        "pid": draw.choice([-1, "x", 10**12]),
    }
    holder = {key: holder[key] for key in draw.sample(sorted(holder), draw.randint(1, 3))}
    named = json.dumps([holder | {"host": socket.gethostname(), "started": "x"}])
    texts = ["", "null", "[", "[1]", "{}", "\xff\x00", json.dumps([holder]), named]
    with hold_output_dir(tmp_path):
        (tmp_path / LOCK).write_bytes(draw.choice(texts).encode("latin-1"))
        assert refusal_of(tmp_path).codes == ["ZR747"]
