"""What a failing rank leaves behind, without any collective: failure.rankN.json; and how the files become one row."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import time
import traceback
from pathlib import Path
from typing import Any, Literal

from zero_recipes.core.files import encodable, package_yaml, write_text
from zero_recipes.core.process import rank
from zero_recipes.core.run_end import PeerFailed
from zero_recipes.metrics import schema

REFUSAL = "refusal.json"  # of a run that is launched with REFUSAL_FILE; read once
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_BYTES = 2**20  # free of a disk that is full: a write of many bytes fills it to the last block
# in messages of libraries whose errors are no OSError
WRITES_OF_TORCH = ("PytorchStreamWriter failed writing", "unexpected pos ")
WRITES = (*WRITES_OF_TORCH, "I/O error: ")
ECHOES = package_yaml("zero_recipes.engine", "tables.yaml")["echoes"]


class RankFailure(schema.Part):
    """One failure.rankN.json."""

    rank: int  # that wrote it
    status: Literal["oom", "diverged", "failed"]
    phase: str  # the innermost that the error left: a key of phase_seconds
    error: str  # type and message of the exception
    largest_memory: dict[str, int]  # bytes by part, the largest first
    traceback: str = ""
    is_echo: bool = False  # of another rank's failure or end
    time: float  # when it was written, in seconds since 1970


def not_begun(name: str, strategy: str, **known: Any) -> schema.Metrics:
    """The row of a run that has not come to its first step. `known`: other fields."""
    return schema.Metrics(schema=schema.SCHEMA, status="running", name=name, strategy=strategy, **known)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory was short, on the accelerator (cuBLAS's own words too) or on the host."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return re.search("out of memory|t allocate memory|status_alloc_failed", str(error).lower()) is not None


def is_unwritten(error: BaseException | None) -> bool:
    """Whether an exception, or what it was raised from, says that a file could not be written."""
    if error is None:
        return False
    if isinstance(error, OSError) or any(words in str(error) for words in WRITES):
        return True
    return is_unwritten(error.__cause__ or error.__context__)


def is_disk_full(error: BaseException | None, folder: Path) -> bool:
    """Whether an exception, or what it was raised from, says that the disk of `folder` was full.

    torch's writer in C++ (2.13, caffe2/serialize/inline_container.cc) does not say why: then it is what the disk says.
    """
    if error is None:
        return False
    text = str(error)
    if getattr(error, "errno", None) in FULL or any(os.strerror(number) in text for number in FULL):
        return True
    if any(words in text for words in WRITES_OF_TORCH) and shutil.disk_usage(folder).free < FULL_BYTES:
        return True
    return is_disk_full(error.__cause__ or error.__context__, folder)


def is_echo(error: BaseException | None) -> bool:
    """Whether an exception, or what it was raised from, says that another rank has failed or ended."""
    if error is None:
        return False
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, PeerFailed) or any(words in message for words in ECHOES):
        return True
    return is_echo(error.__cause__)


def write_failure(
    output_dir: Path, phase: str, error: BaseException, states: dict[str, int], save_status: str | None = None
) -> RankFailure:
    """Write and return failure.rankN.json. `states`: this rank's model-state bytes; `save_status`: of the model."""
    import torch

    memory = {what: size for what, size in states.items() if size}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        others = torch.cuda.max_memory_allocated()
        for part in ("params", "grads", "optimizer"):
            others -= states.get(part, 0)
        if others > 0:
            memory["activations, buckets and gathered parameters (the rest of the peak)"] = others
    largest_first = sorted(memory.items(), key=lambda item: -item[1])
    status = getattr(error, "status", "failed")
    if is_out_of_memory(error):
        status = "oom"
    message = f"{type(error).__name__}: {error}".strip()
    if save_status:
        message += f" ({save_status})"
    failure = RankFailure(
        rank=rank(),
        status=status,
        phase=phase,
        error=encodable(message),
        largest_memory=dict(largest_first),
        traceback=encodable("".join(traceback.format_exception(error))),
        is_echo=is_echo(error),
        time=time.time(),
    )
    with contextlib.suppress(OSError):  # a full disk may be the very failure
        write_text(output_dir / f"failure.rank{rank()}.json", failure.model_dump_json(indent=2) + "\n")
    return failure


def cause_of(output_dir: Path) -> RankFailure | None:
    """The failure that came first: out of memory before others, and what a dead rank makes its peers say after all.
    Raises ContractError where a failure.rankN.json is damaged."""
    paths = sorted(output_dir.glob("failure.rank*.json"))
    found = [schema.read_part(RankFailure, path) for path in paths]

    def order(failure: RankFailure) -> tuple[bool, bool, float]:
        """Clocks of machines differ: the time alone does not tell what a peer's end causes from the cause."""
        return failure.status != "oom", failure.is_echo, failure.time

    return min(found, key=order, default=None)


def keep_failure(output_dir: Path, own: RankFailure, losses: list[float], begun: schema.Metrics, resumes: bool) -> None:
    """Put what ended the run into metrics.json, on any rank, without a collective.

    The rank whose failure is the cause comes first and knows the losses; rank 0, which its launcher may stop before it
    speaks, has written who the run is; `begun` is the row where it has not. A row of status ok belongs to an earlier
    run: unless this one `resumes` it, it stays.
    """
    path = output_dir / schema.FILE
    cause = own
    row = begun
    with contextlib.suppress(schema.ContractError):
        cause = cause_of(output_dir) or own
        if path.is_file():
            row = schema.Metrics.read(path)
    if row.status == "ok" and not resumes:
        return
    history = max(losses, row.loss_history or [], key=len)
    _by(cause, row.model_copy(update={"loss_history": history})).write(path)


def failed_row(output_dir: Path, strategy: str, exit_code: int, log: str) -> schema.Metrics:
    """The row of a run that left none or left it unfinished. `exit_code` is the launcher's; `log` its output. A killed
    rank writes no file: then its signal is the cause. Raises ContractError where a file of the run is damaged."""
    path = output_dir / schema.FILE
    row = schema.Metrics.read(path) if path.is_file() else not_begun(strategy, strategy)
    if row.status == "preempted":
        return row
    refusal = output_dir / REFUSAL
    if refusal.is_file():
        said = json.loads(refusal.read_text())
        refusal.unlink()
        return _ended(row, "refused", said["error"], phase="startup", code=said["code"], reason=said["reason"])
    cause = cause_of(output_dir)
    killed_by = signal_in(exit_code, log)
    if killed_by is not None and (cause is None or cause.status != "oom"):
        error = f"a process was killed by {killed_by}"
        if killed_by == "SIGKILL":
            error += ", as the kernel does when host memory runs out"
        return _ended(row, "failed", error, phase="train" if cause is None else cause.phase, signal=killed_by)
    if cause is not None:
        return _by(cause, row)
    error = f"exit code {exit_code}"
    said = log.strip()
    if said:
        error += f": {said.splitlines()[-1].strip()}"
    return _ended(row, "failed", error, phase="unknown")


def signal_in(exit_code: int, log: str) -> str | None:
    """The signal that ended a worker, from the launcher's exit code or torchrun's closing table ("exitcode: -9")."""
    known = set(signal.Signals)
    if exit_code < 0:
        return signal.Signals(-exit_code).name if -exit_code in known else None
    printed = map(int, re.findall(r"exitcode\s*:\s*-(\d+)", log))
    for number in printed:
        if number in known and number != signal.SIGTERM:  # with SIGTERM the launcher has ended the others
            return signal.Signals(number).name
    return None


def _by(cause: RankFailure, row: schema.Metrics) -> schema.Metrics:
    known = cause.model_dump(include={"phase", "rank", "is_echo", "largest_memory"})
    return _ended(row, cause.status, cause.error, **known)


def _ended(row: schema.Metrics, status: str, error: str, **known: Any) -> schema.Metrics:
    """`known`: of its Failure."""
    return row.model_copy(update={"status": status, "error": error, "failure": schema.Failure(**known)})
