"""Before the process group: stale build locks go, live ones stay."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.file_baton import FileBaton

from zero_recipes.config.run import refuse_uneven_gpus
from zero_recipes.core.findings import Refusal
from zero_recipes.distributed import kernels
from zero_recipes.distributed.build_locks import remove_stale_build_locks, stale_build_locks, wait_for_builds

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def locks(tmp_path, monkeypatch) -> Path:
    """A folder of extensions, two of them with a lock: one is older than this process."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, age in (("stale", 1.0), ("live", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text("")
        if age is not None:
            os.utime(tmp_path / name / "lock", (age, age))
    return tmp_path


@contextmanager
def program(name: str, folder: Path, *arguments: str):
    """A process of that name which works in a folder."""
    named = folder.parent / f"bin-of-{folder.name}" / name
    named.parent.mkdir(exist_ok=True)
    shutil.copy("/bin/cat", named)  # waits for its input
    process = subprocess.Popen([str(named), *arguments], cwd=folder, stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait()


def test_a_stale_build_lock_is_removed_and_a_live_one_stays(locks, monkeypatch, capsys):
    """A stale lock hangs every later launch silently (torch/utils/file_baton.py)."""
    monkeypatch.setenv("RANK", "1")
    remove_stale_build_locks()
    assert (locks / "stale" / "lock").exists(), "only one process of a machine removes"
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first of the second machine
    remove_stale_build_locks()
    assert not (locks / "stale" / "lock").exists()
    assert (locks / "live" / "lock").exists(), "it is younger than this process"
    assert "stale" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["c++", "ninja", "cc1plus"])
def test_a_compiler_holds_the_lock_of_the_folder_that_it_works_in_only(locks, name):
    (locks / "stale" / "below").mkdir()
    for folder, holds in ((locks / "stale" / "below", True), (locks / "live", False), (locks, False)):
        with program(name, folder):
            assert stale_build_locks(locks) == ([] if holds else [locks / "stale" / "lock"])
    with program(name, locks, "-", str(locks / "stale" / "main.cpp")):
        assert stale_build_locks(locks) == [], "its command line names the folder"
    with program("someones-shell", locks / "stale"):
        assert stale_build_locks(locks) == [locks / "stale" / "lock"], "it compiles nothing"


def test_who_made_the_lock_holds_it_before_the_first_compiler_starts(locks):
    """As torch makes it: the file stays open until it is removed."""
    baton = FileBaton(str(locks / "new"))
    assert baton.try_acquire()
    os.utime(locks / "new", (1.0, 1.0))
    (locks / "new").rename(locks / "stale" / "lock")
    assert stale_build_locks(locks) == []
    os.close(baton.fd)
    assert stale_build_locks(locks) == [locks / "stale" / "lock"]


def test_waiting_for_a_lock_has_an_end_that_names_it(locks, capsys):
    with open(locks / "live" / "lock"), pytest.raises(Refusal) as caught:
        wait_for_builds({"live", "stale"}, seconds=0)
    assert caught.value.codes == ["ZR626"] and str(os.getpid()) in caught.value.why
    assert str(locks / "live" / "lock") in caught.value.why and f"rm {locks}/live/lock" in caught.value.fix
    with pytest.raises(Refusal, match="ZR626") as caught:
        wait_for_builds({"live"}, seconds=0)
    assert "nobody that can be seen" in caught.value.why
    os.utime(locks / "live" / "lock", (1.0, 1.0))
    wait_for_builds({"live"})  # nobody holds it: it goes
    assert "waiting for another process that compiles live" in capsys.readouterr().out
    assert not (locks / "live" / "lock").exists()


def test_compiling_has_an_end_too(locks, monkeypatch, capfd):
    """The main thread may wait in torch, where no exception reaches it: the process says what it waits for and ends."""
    ended = []
    monkeypatch.setattr(kernels, "SAY_SECONDS", 0)
    monkeypatch.setattr(kernels, "COMPILE_SECONDS", -1)
    done = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (ended.append(code), done.set()))
    kernels._say_that_it_goes_on("stale", 0.0, done)
    assert ended == [2] and "ZR626" in capfd.readouterr().err


def test_more_processes_than_gpus_are_refused(monkeypatch):
    four = SimpleNamespace(world_size=4)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(Refusal, match=r"4 processes .* 2 GPUs .ZR309"):
        refuse_uneven_gpus(four, "cuda", {})
    refuse_uneven_gpus(four, "cuda", {"LOCAL_WORLD_SIZE": "2"})  # two machines
    refuse_uneven_gpus(four, "cpu", {})


def test_one_plain_process_with_several_gpus_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(Refusal, match=r"2 GPUs .*ZR308"):
        refuse_uneven_gpus(SimpleNamespace(world_size=1), "cuda", {})
    refuse_uneven_gpus(SimpleNamespace(world_size=1), "cuda", {"RANK": "0"})
