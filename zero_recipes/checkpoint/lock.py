"""One run at a time in an output folder: every process of a run holds its lock until it ends, however it ends.

The lock is flock(2) on a file in the folder. The kernel drops it with the process, so none is ever stale; and workers
whose launcher was killed still hold theirs. Between machines it is as good as their file system: NFS hands flock on,
Lustre only where it is mounted with `flock`, and a mounted object store mostly has none: then two machines do not see
each other's runs, and a file system that says so is reported.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from zero_recipes.core.findings import Refusal, refusal
from zero_recipes.core.process import rank
from zero_recipes.distributed.agree import agree

LOCK = ".zero-recipes.lock"
PATIENCE_SECONDS = 1.0  # others look into the lock for a moment, and the workers of a run that ends need one
POLL_SECONDS = 0.02
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


def refuse_in_use(output_dir: Path) -> None:
    """Refuse a folder in which a run is alive. Touches nothing."""
    try:
        handle = os.open(output_dir / LOCK, os.O_RDWR)
    except OSError:  # no run, or a folder that is not ours to write: `hold_output_dir` says that
        return
    try:
        if not _locked(handle, fcntl.LOCK_EX):
            raise _in_use(output_dir)
    finally:
        os.close(handle)


@contextmanager
def hold_output_dir(output_dir: Path) -> Iterator[None]:
    """Hold the folder for this run. Every rank enters (collective).

    The file, and the folder where it is new, are there only while they are needed: a run that is refused leaves
    nothing. Raises Refusal on every rank where another run is alive, or the folder cannot be written.
    """
    handles: list[int] = []
    made: list[Path] = []
    try:
        if rank() == 0:
            made = [path for path in (output_dir, *output_dir.absolute().parents) if not path.exists()]
        agree(partial(_take, output_dir, fcntl.LOCK_EX, handles) if rank() == 0 else lambda: None)
        holders = agree(partial(_take, output_dir, fcntl.LOCK_SH, handles) if rank() else _holder)
        if rank() == 0:
            with suppress(OSError):  # a full disk: then nobody is named, and held it is all the same
                os.truncate(handles[0], 0)
                os.pwrite(handles[0], json.dumps(holders).encode(), 0)
        yield
    except Refusal:
        _remove(output_dir, handles, made)
        raise
    else:
        _remove(output_dir, handles, [])
    finally:
        for handle in handles:
            os.close(handle)


def _take(output_dir: Path, kind: int, handles: list[int]) -> dict[str, Any]:
    """Lock the file, which is appended to `handles`. The first rank takes it alone, which proves that no other run is
    alive, and then shares it with the others."""
    while True:
        handle = _open(output_dir)
        if not (_locked(handle, kind) and _locked(handle, fcntl.LOCK_SH)):
            os.close(handle)
            raise _in_use(output_dir)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(output_dir / LOCK)):
                handles.append(handle)
                return _holder()
        os.close(handle)  # a run that has just ended took the file away


def _open(output_dir: Path) -> int:
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        return os.open(output_dir / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
    except OSError as error:
        raise refusal("ZR748", output_dir=output_dir, strerror=error.strerror, filename=error.filename) from None


def _locked(handle: int, kind: int) -> bool:
    """Whether the lock could be had; True also where the file system has none, which rank 0 says."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            if rank() == 0 and kind == fcntl.LOCK_EX:
                print("output_dir lies on a file system without locks: another run in it is not seen", flush=True)
            return True


def _holder() -> dict[str, Any]:
    """This process, so that a later start can name it."""
    started = psutil.Process().create_time()
    return {"rank": rank(), "host": socket.gethostname(), "pid": os.getpid(), "started": started}


def _in_use(output_dir: Path) -> Refusal:
    holders = _living_holders(output_dir)
    here = [str(holder["pid"]) for holder in holders if holder["host"] == socket.gethostname()]
    named = "; ".join(f"rank {holder['rank']}: process {holder['pid']} on {holder['host']}" for holder in holders)
    return refusal(
        "ZR747",
        output_dir=output_dir,
        output_dir_2=output_dir / LOCK,
        named=named or "which ones, the file does not say",
        fix=f": kill {' '.join(here)}." if here else ", on the machine where they are.",
    )


def _living_holders(output_dir: Path) -> list[dict[str, Any]]:
    """As the lock file names them: all of other machines, and of this one those that are alive."""
    try:
        read = json.loads((output_dir / LOCK).read_bytes())
        holders = [{key: holder[key] for key in ("rank", "host", "pid", "started")} for holder in read]
        return [holder for holder in holders if holder["host"] != socket.gethostname() or _lives(holder)]
    except (OSError, ValueError, TypeError, KeyError):  # not written yet
        return []


def _lives(holder: dict[str, Any]) -> bool:
    try:
        return abs(psutil.Process(holder["pid"]).create_time() - holder["started"]) < 1
    except psutil.Error:
        return False


def _remove(output_dir: Path, handles: list[int], made: list[Path]) -> None:
    """Take the file away while it is held, and the folders that were made for it where they are still empty."""
    if rank() or not handles:
        return
    (output_dir / LOCK).unlink(missing_ok=True)
    with suppress(OSError):
        for folder in made:
            folder.rmdir()
