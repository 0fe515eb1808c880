"""Of this process, without importing torch: its rank, its siblings, its phases, a port that is free, and its end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from sys import _current_frames  # Python documents it, and there is no other way to another thread's frames
from types import FrameType
from typing import NoReturn

import psutil

PR_SET_PDEATHSIG = 1  # linux/prctl.h
IDLE_SECONDS = 3.0  # a worker without work for so long is not waited for any more
_leaves_with: list[int] = []  # the exit code, once `leave` was called
_forks_end: list[bool] = []  # not empty inside `forks_end_with_parent`


def rank() -> int:
    """The launcher's RANK; 0 in a single process."""
    return int(os.environ.get("RANK", 0))


def local_world_size(environment: Mapping[str, str], world_size: int) -> int:
    """Processes of this job on this machine. torchrun says it in LOCAL_WORLD_SIZE, the deepspeed launcher in LOCAL_SIZE
    (DeepSpeed 0.19.8, launcher/launch.py); without either all are here."""
    return int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world_size)


def age() -> float:
    """Seconds since this process was started, to a hundredth (proc(5): starttime counts from boot); 0 off Linux."""
    if sys.platform != "linux":
        return 0.0
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


@contextlib.contextmanager
def imported_for_good() -> Iterator[None]:
    """What is imported inside stays: Python's garbage collector goes through none of it, now or later.

    It starts again after every so many new objects, and modules are made of many: a quarter of the time that torch,
    transformers, TRL and DeepSpeed take to import is its, and 0.3 s whenever it goes through all of them later.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """os.environ is the same object afterwards, with the same variables.

    datasets 5.2 (arrow_dataset.py, `map` with num_proc) replaces it by a copy and leaves TOKENIZERS_PARALLELISM=false
    in the process's environment.
    """
    kept, before = os.environ, dict(os.environ)
    try:
        yield
    finally:
        os.environ = kept  # noqa: B003 - the very object
        for name in kept.keys() - before.keys():
            del kept[name]
        for name, value in before.items():
            if kept.get(name) != value:  # never empty: threads may read it
                kept[name] = value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def lives(pid: int) -> bool:
    """Whether a process of this machine is running, and not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_with_children(process: psutil.Process) -> None:
    """Kill a process and all that it has started; nothing where it has ended."""
    try:
        process.suspend()  # or it could start another meanwhile
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def end_with_parent() -> None:
    """From now on this process is killed when its parent ends, however that ends. On Linux; nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def forks_end_with_parent() -> Iterator[None]:
    """Processes that the main thread forks inside end when this one does, however it ends: workers of the datasets
    library would keep its connections open, and other ranks waiting."""
    _forks_end.append(True)
    try:
        yield
    finally:
        _forks_end.pop()


os.register_at_fork(after_in_child=lambda: _forks_end and end_with_parent())


def wait_for_rank_0(seconds: float) -> None:
    """Until rank 0 has ended, where it is a process beside this one (of the same launcher), or the time is over."""
    beside = [process.pid for process in psutil.Process(os.getppid()).children() if _is_rank_0_of_this_job(process)]
    deadline = time.monotonic() + seconds
    while any(map(lives, beside)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_rank_0_of_this_job(process: psutil.Process) -> bool:
    try:
        environment = process.environ()
    except psutil.Error:
        return False
    return environment.get("RANK") == "0" and environment.get("MASTER_PORT") == os.environ.get("MASTER_PORT")


def leave(code: int) -> NoReturn:
    """End this process with its threads joined, its exit handlers run and its output written, but at once after that.

    Not by the interpreter's own end: gloo's threads live as long as anything in Python refers to their group
    (DistributedDataParallel does, even after destroy_process_group). One that asks for the lock of an ending
    interpreter is unwound by pthread_exit (CPython ceval_gil.h, take_gil), and where a C++ frame forbids that, the
    process aborts: "terminate called without an active exception", exit code -6 after a run that went well.
    """
    _leaves_with.append(code)
    threading.Thread(target=_end_where_nothing_is_left, daemon=True).start()
    sys.exit(code)


def _end_where_nothing_is_left() -> None:
    """End this process if its end waits for nothing but workers without work, for IDLE_SECONDS on end.

    torch.compile leaves such workers: threads of an executor, which the interpreter joins, and a process that compiles
    (torch 2.13, _inductor/compile_worker/subproc_pool.py `shutdown` gives it 300 s). A thread that works, and an exit
    handler that uploads, are waited for as long as they take.
    """
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < IDLE_SECONDS:
        time.sleep(IDLE_SECONDS / 20)
        if not _only_idle_workers_are_left():
            idle_since = time.monotonic()
    _end_at_once()


def _only_idle_workers_are_left() -> bool:
    frames = _current_frames()
    main = threading.main_thread()
    joined = [frames[t.ident] for t in threading.enumerate() if not t.daemon and t is not main and t.ident in frames]
    if not all(_is_in(frame, "concurrent/futures/thread.py", "_worker") for frame in joined):  # deeper inside: it works
        return False
    stack = [frame for frame, _ in traceback.walk_stack(frames[main.ident])]
    joins = any(_is_in(frame, "threading.py", "_shutdown") for frame in stack)
    stops_compile_workers = any(_is_in(frame, "compile_worker/subproc_pool.py", "shutdown") for frame in stack)
    return (joins and bool(joined)) or stops_compile_workers


def _is_in(frame: FrameType, file: str, function: str) -> bool:
    return frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file)


@atexit.register
def _end_at_once() -> None:
    """The exit handler that runs last: the first that is registered, for this module is imported before the others."""
    if _leaves_with:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_leaves_with[0])


# phases

PHASES = ("startup", "data", "model", "train", "eval", "save")


class PhaseClock:
    """Seconds per phase: `seconds` has all of PHASES, and they sum up to the age of the process when `book` is called.

    A phase inside another (evaluation inside training) is taken out of the outer one; outside of all it is "startup".
    `before`: seconds that have passed already.
    """

    def __init__(self, before: float = 0.0) -> None:
        self.failed: str | None = None  # the innermost phase that an error has left
        self._had_a_run = False
        self._start(time.perf_counter() - before)

    def _start(self, at: float) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._mark = at
        self._stack = [PHASES[0]]

    @property
    def current(self) -> str:
        return self._stack[-1]

    def begin_run(self) -> None:
        """In a process that has had a run the clock begins anew."""
        if self._had_a_run:
            self._start(time.perf_counter())
        self._had_a_run, self.failed = True, None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """`name`: of PHASES."""
        self.book()
        self._stack.append(name)
        try:
            yield
        except BaseException:
            self.failed = self.failed or name
            raise
        finally:
            self.book()
            self._stack.pop()

    def switch(self, name: str) -> None:
        """From now on the innermost phase is another."""
        self.book()
        self._stack[-1] = name

    def book(self) -> None:
        """Count up to this moment."""
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._mark
        self._mark = now


CLOCK = PhaseClock(age())  # of this process
