"""What a failing rank leaves behind, without any collective: failure.rankN.json; and how the files become one row."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_recipes.core.process import rank

CURES = {
    "model": [
        "launch stage 3 (accelerate_configs/zero3.yaml), which loads each weight in parts",
        "dtype: bfloat16 (half the host memory while loading)",
    ],
    "train": [
        "activation_checkpointing: true",
        "a smaller per_device_train_batch_size with a larger gradient_accumulation_steps",
        "the next ZeRO stage (accelerate_configs/zero2.yaml, zero3.yaml)",
        "offload to the CPU (accelerate_configs/zero2_offload.yaml, zero3_offload.yaml)",
        "more processes (--num_processes), or use_peft: true",
    ],
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory was short, on the accelerator or on the host."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "out of memory" in str(error).lower() or "can't allocate memory" in str(error).lower()


def write_failure(output_dir: Path, phase: str, error: BaseException, states: dict[str, int]) -> dict[str, Any]:
    """Write failure.rankN.json for this rank and return its content. `states`: model-state bytes of this rank."""
    import torch

    memory = [{"what": what, "bytes": size} for what, size in states.items() if size]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        allocated = torch.cuda.max_memory_allocated()
        others = allocated - sum(states.get(part, 0) for part in ("params", "grads", "optimizer"))
        if others > 0:
            memory.append(
                {"what": "activations, buckets and gathered parameters (the rest of the peak)", "bytes": others}
            )
    document = {
        "rank": rank(),
        "status": "oom" if is_out_of_memory(error) else "failed",
        "phase": phase,
        "error": f"{type(error).__name__}: {error}".strip(),
        "largest_memory": sorted(memory, key=lambda entry: -entry["bytes"]),
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
    }
    with if_the_disk_takes_it():
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / f"failure.rank{rank()}.json").write_text(json.dumps(document, indent=2) + "\n")
    return document


@contextlib.contextmanager
def if_the_disk_takes_it() -> Iterator[None]:
    """Say that a file could not be written, and go on: a full disk may be the very failure that is reported."""
    try:
        yield
    except OSError as error:
        print(f"what is known of the failure could not be written: {error}", file=sys.stderr, flush=True)


def cause_of(output_dir: Path) -> dict[str, Any] | None:
    """The failure that came first: out of memory before others, for a dead rank makes its peers fail after it."""
    found = [json.loads(path.read_text()) for path in sorted(output_dir.glob("failure.rank*.json"))]
    return min(found, key=lambda f: (f["status"] != "oom", f["time"]), default=None)


def failed_row(output_dir: Path, strategy: str, exit_code: int, log: str) -> dict[str, Any]:
    """metrics.json's content for a run that left none or left it unfinished: status, phase, consumers, cures.

    `exit_code` is the launcher's; `log` its output. A killed rank writes no file: then its signal is the cause.
    """
    path = output_dir / "metrics.json"
    row = json.loads(path.read_text()) if path.is_file() else {"schema": 1, "name": strategy, "strategy": strategy}
    cause, killed_by = cause_of(output_dir), signal_in(exit_code, log)
    # a launcher that sees another rank end first stops rank 0 before it speaks; the closing table then has the message
    said = (line for line in log.splitlines() if line.strip().startswith(("refused: ", "traceback : refused: ")))
    refused = next(said, None)
    if refused is not None and cause is None:
        return row | {"status": "refused", "error": _paragraph(log, refused)}
    if killed_by is not None and (cause is None or cause["status"] != "oom"):
        error = f"a process was killed by {killed_by}"
        if killed_by == "SIGKILL":
            error += ", which is what the kernel does when the host's memory is short"
        phase = "train" if cause is None else cause["phase"]
        return row | {"status": "failed", "error": error, "failure": _details(phase, cause, signal_name=killed_by)}
    if cause is None:
        last = [line for line in log.splitlines() if line.strip()][-1:]
        error = f"exit code {exit_code}" + (f": {last[0].strip()}" if last else "")
        return row | {"status": "failed", "error": error, "failure": _details("unknown", None)}
    return row | {"status": cause["status"], "error": cause["error"], "failure": _details(cause["phase"], cause)}


def signal_in(exit_code: int, log: str) -> str | None:
    """The signal that ended a worker, from the launcher's exit code or torchrun's closing table ("exitcode: -9")."""
    if exit_code < 0:
        return signal.Signals(-exit_code).name
    for line in log.splitlines():
        if "exitcode" in line and "-" in line.partition("exitcode")[2]:
            digits = line.partition("exitcode")[2].partition("-")[2].split()[0].strip("():,")
            if digits.isdigit() and int(digits) != signal.SIGTERM:  # SIGTERM is the launcher ending the others
                return signal.Signals(int(digits)).name
    return None


def _details(phase: str, cause: dict[str, Any] | None, signal_name: str | None = None) -> dict[str, Any]:
    return {
        "phase": phase,
        "rank": None if cause is None or signal_name else cause["rank"],
        "largest_memory": [] if cause is None else cause["largest_memory"],
        "cures": CURES.get(phase, CURES["train"])
        if signal_name == "SIGKILL" or (cause or {}).get("status") == "oom"
        else [],
        "signal": signal_name,
    }


def _paragraph(log: str, first: str) -> str:
    lines = log.splitlines()
    start = lines.index(first)
    return " ".join(line.strip() for line in lines[start : start + 3]).removeprefix("traceback : ")
