"""What a failing rank leaves behind, without any collective: failure.rankN.json; and how the files become one row."""

import contextlib
import json
import re
import signal
import time
import traceback
from pathlib import Path
from typing import Any, Literal

from zero_recipes.core.files import encodable, write_text
from zero_recipes.core.process import rank
from zero_recipes.engine.errors import is_echo, is_out_of_memory
from zero_recipes.metrics import schema

REFUSAL = "refusal.json"  # of a run that is launched with REFUSAL_FILE; read once


class RankFailure(schema.Part):
    """The content of one failure.rankN.json: how one rank has failed."""

    rank: int  # that wrote it
    status: Literal["oom", "diverged", "failed"]
    phase: str  # the innermost that the error left: a key of phase_seconds
    error: str  # type and message of the exception
    largest_memory: dict[str, int]  # bytes by part, the largest first
    traceback: str = ""
    is_echo: bool = False  # of another rank's failure or end
    time: float  # when it was written, in seconds since 1970


def not_begun(name: str, strategy: str, **known: Any) -> schema.Metrics:
    """The row of metrics.json of a run that has not come to its first step. `known`: other fields."""
    return schema.Metrics(schema=schema.SCHEMA, status="running", name=name, strategy=strategy, **known)


def write_failure(
    output_dir: Path, phase: str, error: BaseException, states: dict[str, int], save_status: str | None = None
) -> RankFailure:
    """Write failure.rankN.json, and return what it says.

    `states`: this rank's model-state bytes, by part. `save_status`: what is known of the model's save.
    """
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
    """The rank failure that ended the run, or None where no rank has left any.

    Out of memory comes before others, and what a dead rank makes its peers say comes last.
    Raises ContractError where a failure.rankN.json is damaged.
    """
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
    """The row of metrics.json of a run that left none, or left it unfinished.

    `exit_code`: the launcher's; `log`: its output. A killed rank writes no file: then its signal is the cause.
    Raises ContractError where a file of the run is damaged.
    """
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
