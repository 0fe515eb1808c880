"""One process at a time writes into a folder: a run or a tool.

The kernel drops its lock with the process: none is ever stale.
"""

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from zero_recipes.core.findings import Refusal, refusal

LOCK = ".zero-recipes.lock"
LOCK_SECONDS = 1.0  # another start's `refuse_in_use` holds the lock for a moment
UNNAMED_TRIES = 10  # a holder writes its name just after it has locked, and may be halted in between
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
# in the environment of what a run starts: the folder that the run holds, also for it
HELD = "ZERO_RECIPES_HELD_FOLDER"


@contextmanager
def held(folder: Path, writer: str, waits_for: str | None = None) -> Iterator[None]:
    """Hold a folder for a tool, and make it where there is none. A tool that is refused leaves no empty folder.

    It does nothing where the process that started this one holds the folder.

    Args:
        writer: the tool's name, for others.
        waits_for: a writer whose end is waited for; others refuse.

    Raises Refusal.
    """
    if os.environ.get(HELD) == str(folder.resolve()):
        yield
        return
    lock = take(folder, writer, waits_for)
    try:
        yield
    except Refusal:
        give_back(lock, folder)
        with suppress(OSError):
            folder.rmdir()
        raise
    finally:
        give_back(lock, folder)


def take(folder: Path, writer: str, waits_for: str | None = None) -> FileLock:
    """Lock a folder for `writer`. Raises Refusal where it cannot be written, or another process writes into it."""
    lock = FileLock(folder / LOCK, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        waited_for = None
        unnamed = 0
        while not _try(lock, folder):
            holder = _holder(folder)
            if waits_for is None:
                raise _in_use(folder, holder)
            if not holder and unnamed < UNNAMED_TRIES:
                unnamed += 1
                continue
            if holder.get("writer") != waits_for:
                raise _in_use(folder, holder)
            if holder != waited_for:
                print(f"waiting for {_described(holder)}", flush=True)
                waited_for = holder
    except OSError as error:
        raise refusal("ZR748", output_dir=folder, reason=f"{error.strerror}: {error.filename}") from None
    if lock.is_locked:
        note = {"writer": writer, "process": os.getpid(), "host": socket.gethostname()}
        with suppress(OSError):  # on a full disk the lock counts without it
            (folder / LOCK).write_text(json.dumps(note))
    return lock


def give_back(lock: FileLock, folder: Path) -> None:
    """Unlock a folder that `take` has locked."""
    if lock.is_locked:
        (folder / LOCK).unlink(missing_ok=True)  # while it is locked: nobody else has this file
        lock.release()


def refuse_in_use(folder: Path) -> None:
    """Raise a Refusal where another process writes into the folder. Nothing is touched."""
    if not (folder / LOCK).is_file():
        return
    lock = FileLock(folder / LOCK, fallback_to_soft=False)
    with suppress(PermissionError):  # a folder of another user: `take` refuses it
        if not _try(lock, folder):
            raise _in_use(folder, _holder(folder))
    lock.release()


def _try(lock: FileLock, folder: Path) -> bool:
    """Whether nobody else holds it, as far as the file system knows."""
    if lock.is_locked:
        return True
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"{folder} is on a file system without locks, so other runs in it are not detected", flush=True)
    return True


def _in_use(folder: Path, holder: dict[str, str | int]) -> Refusal:
    return refusal("ZR747", folder=folder, lock=folder / LOCK, holder=_described(holder))


def _holder(folder: Path) -> dict[str, str | int]:
    """What the process that holds the folder has written: empty where it has not yet, or is an older version."""
    try:
        found = json.loads((folder / LOCK).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _described(holder: dict[str, str | int]) -> str:
    if not {"writer", "process", "host"} <= holder.keys():
        return "another process"
    return "{writer} (process {process} on {host})".format_map(holder)
