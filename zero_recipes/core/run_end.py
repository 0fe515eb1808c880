"""How a run ends: its exit code, the failures that it knows, and what is printed of them."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from zero_recipes.core.files import write_json
from zero_recipes.core.findings import Refusal, shown
from zero_recipes.core.process import escape_unprintable, leave, rank, wait_for_rank_0

# exit codes
FAILED = 1
REFUSED = 2
PREEMPTED = os.EX_TEMPFAIL  # 75
INTERRUPTED = 128 + signal.SIGINT
UNFINISHED = "the run has not finished"  # in the metrics.json of one that is alive, or was killed
PRINT_SECONDS = 20.0
REFUSAL_FILE = "ZERO_RECIPES_REFUSAL_FILE"  # in the environment: where a refused run says so to who launched it


class RunFailed(Exception):
    """The end of a run on all ranks for a reason that it knows: one message, no traceback."""

    status = "failed"  # in metrics.json
    exit_code = FAILED
    scope = "run"  # who prints it, as of a Finding


class Preempted(RunFailed):
    """The end of a run by a signal; all that it has trained is saved."""

    status = "preempted"
    exit_code = PREEMPTED


class PeerFailed(RuntimeError):
    """The failure of another rank, or its death: never the cause of a run's end. It is one line, no traceback."""


def run_to_end(main: Callable[[list[str]], None], argv: list[str]) -> NoReturn:
    """Run a program, and end this process with its exit code. Why it ends early is printed.

    Args:
        main: the program.
        argv: its command line; with `--traceback` all that is raised is printed whole.
    """
    try:
        main(argv)
    except (Exception, KeyboardInterrupt) as error:
        # the interpreter's own end may wait in NCCL for ranks that are in a collective
        leave(print_ending(error, tracebacks="--traceback" in argv))
    leave(0)


def print_ending(error: BaseException, tracebacks: bool = False) -> int:
    """Print why a run ends, each finding on the ranks of its scope.

    Args:
        error: what ended it: a Refusal, a RunFailed, or anything that was raised.
        tracebacks: whether to print them also for what is known.

    Returns: the exit code of every rank.
    """
    escape_unprintable()
    if isinstance(error, KeyboardInterrupt):
        if rank() == 0:
            print("ended by Ctrl-C", file=sys.stderr, flush=True)
        return INTERRUPTED
    if isinstance(error, Refusal):
        message = str(error)
        mine = [finding for finding in error.findings if _prints(finding.scope)]
        texts = [shown(mine, tracebacks)] if mine else []
    else:
        is_known = isinstance(error, (RunFailed, PeerFailed))
        message = f"{getattr(error, 'status', type(error).__name__)}: {error}"
        texts = []
        if is_known and _prints(getattr(error, "scope", "rank")):
            texts.append(message)
        if tracebacks or not is_known:
            texts.append("".join(traceback.format_exception(error)))
    for text in texts:
        print(text, file=sys.stderr, flush=True)
    _tell_launcher(message)
    refusal_file = os.environ.get(REFUSAL_FILE)
    if refusal_file and isinstance(error, Refusal):
        first = error.findings[0]
        write_json(Path(refusal_file), {"code": first.code, "reason": first.what, "error": message})
    if rank() and (not texts or isinstance(error, PeerFailed)):
        wait_for_rank_0(PRINT_SECONDS)  # a launcher ends all when the first ends, and rank 0 has the message
    if isinstance(error, Refusal):
        return REFUSED
    return getattr(error, "exit_code", FAILED)


def _prints(scope: str) -> bool:
    """Whether this rank prints what is of the scope: "run", "machine" or "rank" (Finding.scope)."""
    if scope == "rank":
        return True
    if scope == "machine":
        return int(os.environ.get("LOCAL_RANK", rank())) == 0
    return rank() == 0


def _tell_launcher(message: str) -> None:
    """accelerate and torchrun turn the exit code into 1, and close with a table that shows what is in this file.

    See torch/distributed/elastic/multiprocessing/errors/error_handler.py. A launcher that finds another rank dead reads
    it at that moment, and ends with a traceback at half a file: it is whole or not there.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # the message is printed; a full disk must not hide it
            write_json(Path(error_file), {"message": {"message": message, "extraInfo": extra}})
