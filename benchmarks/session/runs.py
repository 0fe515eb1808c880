"""Runs of a session: started side by side where the card has room, ended when their time is up, each a row on disk.

A row is written as soon as its run has ended, whatever became of it. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.session.cases import Case
from benchmarks.session.inputs import ROOT, write_recipe
from zero_recipes.core.files import without_nan
from zero_recipes.core.process import free_port, kill_with_children
from zero_recipes.metrics.failure import failed_row
from zero_recipes.metrics.schema import FILE, Metrics

SCRIPT = "benchmarks/session/run.py"
SIDE_BY_SIDE = "benchmarks/session/side_by_side.py"
PATIENCE = 3  # times the expected duration, then the run is ended
LAST_LINES = 60
KEPT_TRACE = "trace.json.gz"


@dataclass
class Running:
    """A run that has been started."""

    case: Case
    child: subprocess.Popen
    folder: Path
    started: float
    bytes: int
    alone: bool = True  # nothing else was on the card meanwhile


@dataclass
class Session:
    """Where and until when: `deadline` by time.time(); `plans`: {slug: prediction}, of --plans."""

    out: Path
    work: Path
    deadline: float
    plans: dict[str, Any]
    rehearse: bool = False

    def write(self, part: int, row: dict[str, Any]) -> None:
        """Append a row to the part's file; it is on the disk when this returns."""
        with open(self.out / f"part{part}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(without_nan({"part": part, "rehearsal": self.rehearse} | row)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def done(self, part: int) -> set[str]:
        """Cases of a part that an earlier call with the same `out` has measured."""
        path = self.out / f"part{part}.jsonl"
        rows = map(json.loads, path.read_text().splitlines()) if path.is_file() else []
        return {row["case"] for row in rows if row.get("status") == "ok"}

    def planned_bytes(self, case: Case) -> int:
        """What the plan says the run may take of the card; 0 where there is no plan."""
        plan = self.plans.get(case.slug)
        return 0 if plan is None else plan["reserved_bytes"]["high"]

    def run_all(self, cases: Sequence[Case], at_once: int, card: int) -> None:
        """Run all, at most `at_once` side by side within nine tenths of `card` bytes, or one alone."""
        waiting, running = list(cases), []
        while waiting or running:
            for one in list(running):
                if one.child.poll() is not None or self._too_long(one):
                    running.remove(one)
                    self._end(one)
            held = sum(one.bytes for one in running)
            if waiting and (not running or (len(running) < at_once and held + self._bytes(waiting[0]) < 0.9 * card)):
                started = self._start(waiting.pop(0), bool(running))
                if started is not None:
                    for one in running:
                        one.alone = False
                    running.append(started)
            else:
                time.sleep(0.2)

    def _bytes(self, case: Case) -> int:
        return self.planned_bytes(case) or 1 << 62  # unknown: alone

    def _start(self, case: Case, beside_others: bool) -> Running | None:
        reason = self._cannot(case)
        if reason:
            self.write(case.part, _about(case) | {"status": "skipped", "error": reason})
            return None
        folder = self.work / case.slug / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = command_of(case, write_recipe(case, self.work, self.rehearse), folder)
        with open(folder.parent / "log.txt", "w") as log:
            log.write(" ".join(command) + "\n")
            log.flush()
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "4"} | os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        print(f"{case.slug}: started", flush=True)
        return Running(case, child, folder, time.time(), self._bytes(case), not beside_others)

    def _cannot(self, case: Case) -> str | None:
        """Why a run is not started; None where it is."""
        left = self.deadline - time.time()
        if left < case.seconds and not self.rehearse:
            return f"{max(left, 0):.0f} s are left, it takes about {case.seconds}"
        if left < 20:
            return f"{max(left, 0):.0f} s are left"
        if self.rehearse:
            return None
        plan, memory = self.plans.get(case.slug), psutil.virtual_memory().available
        needed = 0 if plan is None else max(plan["host_bytes"]["load"], plan["host_bytes"]["training"])
        if needed > memory:
            return f"it needs {needed:,} bytes of host memory by the plan, {memory:,} are available"
        return None

    def _too_long(self, one: Running) -> bool:
        if time.time() < min(self.deadline, one.started + PATIENCE * one.case.seconds):
            return False
        kill_with_children(psutil.Process(one.child.pid))  # torchrun's workers lead groups of their own
        one.child.wait()
        return True

    def _end(self, one: Running) -> None:
        """Write the row of a run that has ended, and free its disk."""
        seconds = time.time() - one.started
        log = (one.folder.parent / "log.txt").read_text(errors="replace").splitlines()
        row = _about(one.case) | {"seconds": round(seconds, 1), "alone": one.alone, "command": log[0]}
        row["planned"] = self.plans.get(one.case.slug)
        try:
            row |= _outcome(one, "\n".join(log[-400:]))
        except Exception as error:  # a row that cannot be read must not end the session
            row |= {"status": "failed", "error": f"no row could be read: {error!r}"}
        if row["status"] != "ok":
            row["log"] = log[-LAST_LINES:]
        trace = one.folder / KEPT_TRACE
        if trace.is_file():
            shutil.copy(trace, self.out / KEPT_TRACE)
        self.write(one.case.part, row)
        shutil.rmtree(one.folder, ignore_errors=True)
        shutil.rmtree(self.work / "swap", ignore_errors=True)
        print(f"{one.case.slug}: {row['status']} after {seconds:.0f} s {row.get('error') or ''}"[:300], flush=True)


def command_of(case: Case, recipe: Path, folder: Path) -> list[str]:
    """The command line of one run."""
    if "--side_by_side" in case.options:
        return [sys.executable, SIDE_BY_SIDE, case.strategy, str(recipe), str(folder)]
    script = [SCRIPT, *case.options, str(recipe), "--output_dir", str(folder)]
    if case.strategy == "single":
        return [sys.executable, *script]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launch += [f"accelerate_configs/{case.strategy}.yaml", "--num_processes", "1"]
    return [*launch, "--main_process_port", str(free_port()), *script]


def _about(case: Case) -> dict[str, Any]:
    named = {"case": case.slug, "name": case.name, "model": case.model, "strategy": case.strategy}
    return named | {"keys": case.keys, "options": list(case.options)}


def _outcome(one: Running, log: str) -> dict[str, Any]:
    """{"status", "error", "metrics", "beside", "samples"}: what the run has left."""
    code, folder = one.child.returncode, one.folder
    found: dict[str, Any] = {}
    beside, samples = folder / "beside.json", folder / "samples.jsonl"
    if beside.is_file():
        found["beside"] = json.loads(beside.read_text())
    if samples.is_file():
        found["samples"] = _scores([json.loads(line) for line in samples.read_text().splitlines()])
    if "--without_metrics" in one.case.options and code == 0:
        return found | {"status": "ok", "error": None}
    if code:
        failed_row(folder, one.case.strategy, code, log).write(folder / FILE)
    metrics = Metrics.read(folder / FILE)
    carried = json.loads(metrics.model_dump_json(by_alias=True, exclude_unset=True))
    error = "ended: its time was up" if code == -signal.SIGKILL else metrics.error
    return found | {"status": metrics.status, "error": error, "metrics": carried}


def _scores(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of the scores before and after, over all prompts."""
    return {
        key: {name: sum(sample[key][name] for sample in samples) / len(samples) for name in samples[0][key]}
        for key in ("scores_before", "scores_after")
        if samples and samples[0].get(key)
    }
