"""Of this process, without importing torch: its rank, its siblings, its phases, and its end."""

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import psutil

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# in the environment of forked ranks: the process id of rank 0. /proc shows them with their parent's variables
RANK_0 = "ZERO_RECIPES_RANK_0"
END_SECONDS = 60.0  # for threads and exit handlers of libraries, once a run is over
# words of the command lines of what starts the ranks of a run
LAUNCHERS = {
    "zero-recipes",
    "zero_recipes.tools.main",
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed.launcher.launch",
}
PHASES = ("startup", "data", "model", "train", "eval", "save")
# of a machine that is taken back (SLURM sends the second), and Ctrl-C
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
AGAIN = b"\nCtrl-C: the run ends after this step, and saves. Press it again to end at once.\n"


def rank() -> int:
    """The rank that the launcher gave this process (RANK); 0 in a single process."""
    return int(os.environ.get("RANK", 0))


def escape_unprintable() -> None:
    """From now on, print what the terminal's encoding lacks as escapes, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print a text on rank 0 only."""
    if rank() == 0:
        print(text, flush=True)


def local_world_size(environment: Mapping[str, str], world_size: int) -> int:
    """Count the processes of this job on this machine; all of them where the launcher does not say.

    torchrun sets LOCAL_WORLD_SIZE, the deepspeed launcher LOCAL_SIZE (DeepSpeed 0.19.8, launcher/launch.py).
    """
    return int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world_size)


def age() -> float:
    """Count the seconds since this process was started, to a hundredth (proc(5): starttime counts from boot)."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


@contextlib.contextmanager
def imported_for_good() -> Iterator[None]:
    """Keep Python's garbage collector from what is imported inside: it takes a quarter of the imports' time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Restore os.environ afterwards: the same object, with the same variables.

    datasets 5.2 (arrow_dataset.py, `map` with num_proc) replaces it by a copy, with TOKENIZERS_PARALLELISM=false.
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


_signals: list[int] = []  # of STOPPING, that have come


def remember_signals(remembered: bool) -> None:
    """Choose whether the signals in STOPPING are remembered from now on (`signalled`), or end this process."""
    _signals.clear()
    for number in STOPPING:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, _remember if remembered else usual)


def _remember(number: int, _) -> None:
    """Raises KeyboardInterrupt after a Ctrl-C: launchers hand on a second one as SIGTERM."""
    if signal.SIGINT in _signals:
        raise KeyboardInterrupt
    _signals.append(number)
    if number == signal.SIGINT and rank() == 0:
        os.write(sys.stderr.fileno(), AGAIN)  # `print` may be what is interrupted


def signalled() -> bool:
    """Whether a signal in STOPPING has come since `remember_signals`."""
    return bool(_signals)


def kill_with_children(process: psutil.Process) -> None:
    """Kill a process and all that it has started. Nothing happens where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.suspend()  # or it could start another meanwhile
        for member in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def end_with_parent() -> None:
    """Have this process killed from now on when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_launcher() -> None:
    """Have this process killed from now on when the launcher that started it ends, however it ends.

    Else a rank would train on after a SIGKILL of its launcher, and hold the folder.
    Nothing happens where another program started it: a shell may end before what it started (nohup, ssh).
    """
    parent = os.getppid()
    try:
        words = psutil.Process(parent).cmdline()
    except psutil.Error:  # of another user, or it has ended
        return
    if LAUNCHERS.isdisjoint(Path(word).name for word in words):
        return
    end_with_parent()
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(128 + signal.SIGKILL)


_forks_end: list[bool] = []  # not empty inside `forks_end_with_parent`
os.register_at_fork(after_in_child=lambda: _forks_end and end_with_parent())


@contextlib.contextmanager
def forks_end_with_parent() -> Iterator[None]:
    """Have processes that the main thread forks inside end when this one does, however it ends.

    Workers of the datasets library would keep its connections open, and other ranks waiting.
    """
    _forks_end.append(True)
    try:
        yield
    finally:
        _forks_end.pop()


def wait_for_rank_0(seconds: float) -> None:
    """Wait for the end of rank 0 where the same launcher has started it beside this process.

    `seconds`: at most.
    """
    forked_rank_0 = os.environ.get(RANK_0)
    beside = []
    for process in psutil.Process(os.getppid()).children():
        with contextlib.suppress(psutil.Error):
            is_rank_0 = process.environ().get("RANK") == "0"
            if forked_rank_0 is not None:
                is_rank_0 = str(process.pid) == forked_rank_0
            if is_rank_0:
                beside.append(process)
    psutil.wait_procs(beside, timeout=seconds)


def leave(code: int) -> NoReturn:
    """End this process with its threads joined, its exit handlers run and its output written, but at once after that.

    Not by the interpreter's own end: gloo's threads live as long as anything in Python refers to their group
    (DistributedDataParallel does), and one that asks for the lock of an ending interpreter aborts it: "terminate called
    without an active exception", exit code -6 after a run that went well. torch.compile's idle workers would be waited
    for up to 300 s (torch 2.13, _inductor/compile_worker/subproc_pool.py): all of it has END_SECONDS.
    """
    _leaves_with.append(code)
    timer = threading.Timer(END_SECONDS, _end_at_once)
    timer.daemon = True
    timer.start()
    sys.exit(code)


_leaves_with: list[int] = []  # the exit code, once `leave` was called


@atexit.register
def _end_at_once() -> None:
    """The exit handler that runs last: the first that is registered, for this module is imported before the others."""
    if _leaves_with:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_leaves_with[0])


class PhaseClock:
    """Count the seconds that a run spends in each of PHASES.

    What is outside of all phases counts as "startup" in a run, which began `before` seconds ago.
    """

    def __init__(self, before: float | None = None) -> None:
        self.failed: str | None = None  # the innermost phase that an error has left
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._mark = time.perf_counter() - (before or 0.0)
        self._outside = None if before is None else PHASES[0]
        self._stack: list[str] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside for the phase `name`, one of PHASES. A phase within another takes its time."""
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

    def count_outside_as(self, name: str | None) -> None:
        """Choose the phase that time outside of all phases counts for from now on; None: for none."""
        self.book()
        self._outside = name

    def book(self) -> None:
        """Count the time up to this moment."""
        now = time.perf_counter()
        name = self._stack[-1] if self._stack else self._outside
        if name is not None:
            self.seconds[name] += now - self._mark
        self._mark = now
